"""The decorators of components. What a component does while it runs is in runtime.py."""

import functools

from kfp import dsl

IMAGE = "infoxlm-pipeline-python:0.1.0"
"""The one image of all stages, on this machine, where it is but a name; on a cluster it is a parameter, by digest."""

stage = functools.partial(dsl.component, base_image=IMAGE, install_kfp_package=False)
"""The function becomes a KFP component that runs in our image and installs nothing at run time."""

launching_stage = functools.partial(
    stage,
    task_config_passthroughs=[
        dsl.TaskConfigPassthrough(field=field, apply_to_task=True)
        for field in (dsl.TaskConfigField.ENV, dsl.TaskConfigField.RESOURCES)  # KFP wants all that a pipeline may set
    ],
)
"""A stage that may start a RayJob, whose pods get the environment of the step from its parameter `task_config`."""
