"""The settings that `infoxlm adapt` derives from files of translations, and the whole command on a toy encoder."""

import pytest
from transformers import CLIPConfig

from components.adapters.mlflow.model_registry import Registration
from infoxlm_core import run_file
from infoxlm_core.config import CorpusSource, PreparationConfig
from infoxlm_core.errors import ConfigError, CorpusTooSmall, InputError, NotPromoted
from infoxlm_core.tasks.retrieval import files
from pipelines import adaptation
from pipelines.cli.app import CONFIGS
from tests.toys.text import messages, write_catalogs

TEMPLATE = CONFIGS / "adapt.yaml"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("memory.tmx", {"name": "memory", "format": "tmx"}),
        ("a b/Über Memory.xliff.gz", {"name": "ber-Memory", "format": "xliff"}),
        ("de-en.tsv.zst", {"name": "de-en", "format": "tsv", "languages": ["de", "en"]}),
        ("memory.tsv", {"name": "memory", "format": "tsv", "languages": ["en", "de"]}),
        ("weblate-5.14.3-py3-none-any.whl", {"name": "weblate-5", "format": "gettext"}),
    ],
)
def test_the_name_of_a_file_tells_its_format(path, expected):
    assert adaptation.describe_corpus(path, ["en", "de"]) == {**expected, "path": path}


@pytest.mark.parametrize(
    ("path", "languages", "problem"),
    [
        ("memory.docx", ["en", "de"], "memory.docx: its name does not tell the format"),
        ("memory.tsv", ["en", "de", "fr"], "The languages of the columns of memory.tsv are unknown"),
    ],
)
def test_a_file_of_an_unknown_format_or_language_is_refused(path, languages, problem):
    with pytest.raises(InputError, match=problem):
        adaptation.describe_corpus(path, languages)


def test_steps_are_two_passes_over_the_pairs_within_limits(tmp_path):
    folder = write_catalogs(tmp_path, {"memory": 60}) / "memory"
    corpora = [adaptation.describe_corpus(str(folder), ["en", "de", "fr"])]
    preparation = PreparationConfig.parse({"languages": ["en", "de", "fr"], "corpora": corpora})

    assert adaptation.count_pairs(preparation, tmp_path, 1000) == 120
    assert adaptation.count_pairs(preparation, tmp_path, 100) == 100
    assert adaptation.choose_steps(6400, 64) == {"steps": 200, "warmup_steps": 20}
    assert adaptation.choose_steps(10, 64)["steps"] == adaptation.FEWEST_STEPS
    assert adaptation.choose_steps(10**9, 64)["steps"] == adaptation.MAX_STEPS


def test_a_small_memory_holds_out_a_larger_share_so_that_the_gate_can_decide():
    assert [adaptation.choose_held_out_share(count) for count in (10_000, 2_000, 1_000, 400)] == [0.05, 0.05, 0.1, 0.25]
    with pytest.raises(CorpusTooSmall, match=r"about 399 messages\. Give at least 400"):
        adaptation.choose_held_out_share(399)


def test_a_start_that_cannot_be_trained_is_refused_before_the_translations_are_counted(tmp_path):
    start = tmp_path / "start"
    CLIPConfig().save_pretrained(start)
    (start / "model.safetensors").touch()  # no weights are read

    with pytest.raises(InputError, match="model_type is 'clip', not one of"):
        adaptation.plan(str(start), [str(tmp_path / "missing.tmx")], ["en", "de"], "guard", None, tmp_path)


def test_the_default_guard_is_a_set_of_aligned_messages(tmp_path, monkeypatch):
    catalogs = write_catalogs(tmp_path, {"django": 60}) / "django"
    corpus = CorpusSource(name="django", format="gettext", path=str(catalogs))
    monkeypatch.setattr(adaptation, "GUARD_CORPUS", corpus)
    folder = tmp_path / "guard"

    adaptation.write_default_guard(folder, ["en", "de", "fr", "th"], tmp_path)

    aligned = files.read_aligned(folder, "en")
    assert set(aligned) == {"de", "fr"}
    english, german = aligned["de"]
    assert dict(messages(0))[english[7]] == german[7]
    with pytest.raises(InputError, match=r"no messages in en, th\. Give a set with --guard"):
        adaptation.write_default_guard(tmp_path / "other", ["en", "th"], tmp_path)


def test_a_config_with_other_settings_is_not_replaced(tmp_path):
    path = tmp_path / "adapt.yaml"
    changes = {"pretraining.model.start": "encoder", "evaluation.guard": {"data": "guard"}}

    written = adaptation.write_config(path, TEMPLATE, changes, ["pretraining.seed=2"])

    assert run_file.load(path) == written
    assert written.pretraining.seed == 2 and written.pretraining.model.start == "encoder"
    assert adaptation.write_config(path, TEMPLATE, changes, ["pretraining.seed=2"]) == written
    text = path.read_text()
    with pytest.raises(ConfigError, match=r"adapt\.yaml exists with other settings"):
        adaptation.write_config(path, TEMPLATE, changes, ["pretraining.seed=3"])
    assert path.read_text() == text


def test_only_a_champion_is_exported(tmp_path, monkeypatch):
    summary = "retrieval/served 0.5\nversion     models:/mine/3 is candidate: not better\nreport      here"
    verdict = Registration(3, ("candidate",), champion=False, reason="guard/mean -0.0200")
    monkeypatch.setattr(adaptation.model_registry, "read_registration", lambda *_: verdict)

    with pytest.raises(NotPromoted, match=r"models:/mine/3 is not exported: guard/mean -0\.0200"):
        adaptation.find_champion(summary, tmp_path)
