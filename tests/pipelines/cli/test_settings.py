"""`infoxlm config` explains a section, and the page in docs/ is what it prints."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from infoxlm_core.config import StageConfig, describe
from pipelines.cli import app, settings

ROOT = Path(__file__).parents[3]


def test_the_page_of_all_fields_is_current_else_make_compile():
    printed = CliRunner().invoke(app, ["config", "--markdown"])

    assert printed.stdout == (ROOT / "docs/configuration.md").read_text(encoding="utf-8")


def test_a_section_is_explained_without_its_neighbours():
    printed = CliRunner().invoke(app, ["config", "pretraining.contrast"]).stdout.splitlines()

    assert "pretraining.contrast.momentum: 0.999  (number, >= 0, <= 1)" in printed
    assert all(line.startswith(("pretraining.contrast.", "    ")) for line in printed)


def test_help_explains_the_command_and_with_a_section_the_section():
    help_ = CliRunner().invoke(app, ["config", "--help"]).stdout
    explained = CliRunner().invoke(app, ["config", "--help", "registration"]).stdout

    assert "Usage" in help_
    assert "registration.gate" not in help_
    assert explained == CliRunner().invoke(app, ["config", "registration"]).stdout
    assert "registration.gate: {}  (mapping of text to number, > -1, < 1)" in explained


@pytest.mark.parametrize("section", ["pretrain", ""])
def test_a_section_that_does_not_exist_is_refused(section):
    printed = CliRunner().invoke(app, ["config", section])

    assert printed.exit_code == 2
    assert f"There is no section '{section}'" in printed.output


@pytest.mark.parametrize("kind", settings.KINDS.values(), ids=lambda kind: kind.__name__)
def test_every_name_of_the_page_can_be_explained(kind: type[StageConfig]):
    assert all(one.meaning for one in describe.list_settings(kind))
