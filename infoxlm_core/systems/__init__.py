"""The systems that can be pre-trained, in one file or folder each; `table` lists them by name.

Nothing is imported here, so that importing a learner or a plan does not load the code that reads and writes models.
"""
