"""`infoxlm config` describes the sections of the YAML files."""

import pytest

from infoxlm_core.config import StageConfig, describe
from pipelines.cli import settings
from pipelines.cli.app import CONFIGS
from tests.pipelines.commands import assert_refused, invoke


def test_committed_page_of_all_settings_is_current():
    page = invoke("config", "--markdown").stdout

    assert page == (CONFIGS.parent / "docs/configuration.md").read_text(encoding="utf-8"), "run `make compile`"


def test_section_is_described_without_other_sections():
    lines = invoke("config", "pretraining.contrast").stdout.splitlines()

    assert "pretraining.contrast.momentum: 0.999  (number, >= 0, <= 1)" in lines
    assert all(line.startswith(("pretraining.contrast.", "    ")) for line in lines)


def test_help_with_a_section_describes_the_section():
    help_text = invoke("config", "--help").stdout
    help_of_section = invoke("config", "--help", "registration").stdout

    assert "Usage" in help_text
    assert "registration.gate" not in help_text
    assert help_of_section == invoke("config", "registration").stdout
    assert "registration.gate: {}  (mapping of text to number, > -1, < 1)" in help_of_section


@pytest.mark.parametrize("section", ["pretrain", ""])
def test_unknown_section_is_refused(section):
    assert_refused(invoke("config", section), f"There is no section '{section}'")


@pytest.mark.parametrize("kind", settings.KINDS.values(), ids=lambda kind: kind.__name__)
def test_every_setting_has_a_description(kind: type[StageConfig]):
    assert all(setting.meaning for setting in describe.list_settings(kind))
