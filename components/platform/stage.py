"""The decorators of components. What a component does while it runs is in runtime.py."""

import functools

from kfp import dsl

IMAGE = "infoxlm-pipeline-python:0.1.0"
"""The one image of all stages, on this machine, where it is but a name; on a cluster it is a parameter, by digest."""

stage = functools.partial(dsl.component, base_image=IMAGE, install_kfp_package=False)
"""The function becomes a KFP component that runs in our image and installs nothing at run time."""

training_stage = functools.partial(
    stage,
    task_config_passthroughs=[
        dsl.TaskConfigField.RESOURCES,
        dsl.TaskConfigField.KUBERNETES_TOLERATIONS,
        dsl.TaskConfigField.KUBERNETES_NODE_SELECTOR,
        dsl.TaskConfigPassthrough(field=dsl.TaskConfigField.ENV, apply_to_task=True),
    ],
)
"""One that trains: its GPUs, and where they are, go to the workers of a RayJob, not to the step, which only watches."""

data_stage = functools.partial(
    stage,
    task_config_passthroughs=[
        dsl.TaskConfigPassthrough(field=dsl.TaskConfigField.RESOURCES, apply_to_task=True),
        dsl.TaskConfigPassthrough(field=dsl.TaskConfigField.ENV, apply_to_task=True),
    ],
)
"""One that works on text: with its own cores and memory, or, when asked to, on pods of a RayJob that have the same."""
