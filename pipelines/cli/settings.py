"""The command `infoxlm config`: describe the settings of YAML files."""

from typing import Annotated

import typer

from components.settings.cluster import ClusterFile
from infoxlm_core.config import StageConfig, describe
from infoxlm_core.errors import InputError
from infoxlm_core.results.suite_config import SuiteConfig
from infoxlm_core.run_file import RunConfig
from infoxlm_core.tasks import TASKS
from pipelines.cli.app import command

SECTIONS = [field.annotation for field in RunConfig.model_fields.values()]
KINDS: dict[str, type[StageConfig]] = {
    "run": RunConfig,
    "suite": SuiteConfig,
    # Settings that are also a section of a run, such as `finetuning`, are already described there.
    **{name: task.settings for name, task in TASKS.items() if task.settings not in SECTIONS},
    "cluster": ClusterFile,
}
PAGE_HEADER = """# Settings of the YAML files

This page is for users who write or change a YAML file. It lists all settings with their values, defaults and meaning.
To print one section, run for example `infoxlm config pretraining.contrast`. To override a setting, pass its name to
`--set`. In a name, `[]` stands for each item of a list, and `NAME` stands for a name that you choose. Files are read
as YAML 1.2.

`make compile` generates this page from the docstrings under the fields.

"""


@command(name="config", add_help_option=False)  # typer's own --help would ignore SECTION
def config_(
    context: typer.Context,
    section: Annotated[
        str | None,
        typer.Argument(help=f"Section of a run, such as pretraining.contrast, or one of {', '.join(KINDS)}."),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print all settings in the format of docs/configuration.md.")
    ] = False,
    help_: Annotated[
        bool, typer.Option("--help", help="Show this message. With a section, describe the section.")
    ] = False,
) -> None:
    """Describe the settings of a YAML file: name, default, valid values and meaning. Default section: run."""
    if help_ and section is None:
        typer.echo(context.get_help())
        return
    if markdown:
        typer.echo(PAGE_HEADER + describe.format_tables(KINDS), nl=False)  # the tables end with a line feed
        return
    if section is None:
        section = "run"
    settings = list(describe.list_settings(KINDS[section])) if section in KINDS else _list_section(section)
    if not settings:
        raise InputError(f"There is no section {section!r}. Give a section of a run, or one of {', '.join(KINDS)}.")
    typer.echo(describe.format_settings(settings))


def _list_section(section: str) -> list[describe.Setting]:
    """Return the settings of a run's section, including nested settings and list items."""
    prefixes = (f"{section}.", f"{section}[].")
    # The dot after each name prevents pretraining.model from matching pretraining.model_size.
    return [setting for setting in describe.list_settings(RunConfig) if f"{setting.name}.".startswith(prefixes)]
