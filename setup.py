"""Package the YAML files of configs/ as `pipelines.configs`; pyproject.toml has everything else.

A link `pipelines/configs` would do the same, but setuptools-scm lists a link as a file, and the build then fails.
"""

from setuptools import find_namespace_packages, setup

setup(
    packages=[*find_namespace_packages(include=["infoxlm_core*", "components*", "pipelines*"]), "pipelines.configs"],
    package_dir={"pipelines.configs": "configs"},
)
