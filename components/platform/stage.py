"""Decorators for components. The module `stage_run` contains the functions that a running component calls."""

import functools

from kfp import dsl

IMAGE = "infoxlm-pipeline-python:0.1.0"
"""Default image of all stages. Local runs do not pull it. On a cluster, a parameter names the image by digest."""

stage = functools.partial(dsl.component, base_image=IMAGE, install_kfp_package=False)
"""Decorator that makes a function a KFP component. The component runs in our image and installs no packages."""

_FIELDS = (dsl.TaskConfigField.ENV, dsl.TaskConfigField.RESOURCES)  # KFP requires every field that a pipeline may set
_PASSTHROUGHS = [dsl.TaskConfigPassthrough(field=field, apply_to_task=True) for field in _FIELDS]

launching_stage = functools.partial(stage, task_config_passthroughs=_PASSTHROUGHS)
"""Decorator for a stage that may start a RayJob. Its parameter `task_config` has the environment for the job's pods."""
