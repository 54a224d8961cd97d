"""The decorator of every component. What a component does while it runs is in runtime.py."""

import functools

from kfp import dsl

IMAGE = "infoxlm-pipeline-python:0.1.0"
"""The one image of all stages; a cluster overrides it by digest."""

stage = functools.partial(dsl.component, base_image=IMAGE, install_kfp_package=False)
"""The function becomes a KFP component that runs in our image and installs nothing at run time."""
