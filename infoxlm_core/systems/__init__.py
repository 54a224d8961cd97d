"""The pre-training systems, one file or directory each; `table` lists them by name.

This file imports nothing, so that importing a learner or a plan does not load the code that reads and writes models.
"""
