"""The decorators of components. `stage_run` has the functions that a component calls while it runs."""

import functools

from kfp import dsl

IMAGE = "infoxlm-pipeline-python:0.1.0"
"""Image of all stages in local runs, which do not pull it; on a cluster the image is a parameter, with its digest."""

stage = functools.partial(dsl.component, base_image=IMAGE, install_kfp_package=False)
"""Decorator that makes a function a KFP component, which runs in our image and installs nothing at run time."""

_FIELDS = (dsl.TaskConfigField.ENV, dsl.TaskConfigField.RESOURCES)  # KFP requires every field that a pipeline may set
_PASSTHROUGHS = [dsl.TaskConfigPassthrough(field=field, apply_to_task=True) for field in _FIELDS]

launching_stage = functools.partial(stage, task_config_passthroughs=_PASSTHROUGHS)
"""Decorator of a stage that may start a RayJob. Its parameter `task_config` has the environment for the job's pods."""
