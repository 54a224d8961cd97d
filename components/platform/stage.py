"""The decorators of components. What a component does while it runs is in runtime.py."""

import functools

from kfp import dsl

IMAGE = "infoxlm-pipeline-python:0.1.0"
"""Image of all stages in local runs, which do not pull it; on a cluster the image is a parameter, with its digest."""

stage = functools.partial(dsl.component, base_image=IMAGE, install_kfp_package=False)
"""Decorator that makes a function a KFP component, which runs in our image and installs nothing at run time."""

launching_stage = functools.partial(
    stage,
    task_config_passthroughs=[
        dsl.TaskConfigPassthrough(field=field, apply_to_task=True)
        for field in (
            dsl.TaskConfigField.ENV,
            dsl.TaskConfigField.RESOURCES,
        )  # KFP requires every field that a pipeline may set
    ],
)
"""Decorator of a stage that may start a RayJob. Its parameter `task_config` has the environment for the job's pods."""
