"""The systems that can be pre-trained, one file or folder each; `table` has them by name.

Nothing is imported here: a learner and a plan need less than those parts of a system that read and write models.
"""
