"""The settings that `infoxlm adapt` derives from an encoder and from files of translations."""

import pytest
from transformers import CLIPConfig

from components.adapters.mlflow.model_registry import Registration
from infoxlm_core import run_file
from infoxlm_core.config import CorpusSource, PreparationConfig
from infoxlm_core.errors import ConfigError, CorpusTooSmall, InputError, NotPromoted
from infoxlm_core.tasks.retrieval import files
from pipelines import adaptation
from pipelines.cli.app import CONFIGS
from tests.toys.models import save_model
from tests.toys.text import messages, write_catalogs

TEMPLATE = CONFIGS / "adapt.yaml"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("memory.tmx", {"name": "memory", "format": "tmx"}),
        ("a b/Über Memory.xliff.gz", {"name": "ber-Memory", "format": "xliff"}),
        ("de-en.tsv.zst", {"name": "de-en", "format": "tsv", "languages": ["de", "en"]}),
        ("memory.tsv", {"name": "memory", "format": "tsv", "languages": ["en", "de"]}),
        ("our-tm.tsv", {"name": "our-tm", "format": "tsv", "languages": ["en", "de"]}),
        ("de-en-2.tsv", {"name": "de-en-2", "format": "tsv", "languages": ["de", "en"]}),
        ("weblate-5.14.3-py3-none-any.whl", {"name": "weblate-5", "format": "gettext"}),
    ],
)
def test_format_and_languages_are_inferred_from_the_name_of_a_file(path, expected):
    assert adaptation.make_corpus_config(path, ["en", "de"]) == {**expected, "path": path}


def test_name_of_a_file_states_every_language_of_the_run():
    assert adaptation.make_corpus_config("ceb-en.tsv", ["en", "ceb"])["languages"] == ["ceb", "en"]


@pytest.mark.parametrize(
    ("path", "languages", "message"),
    [
        ("memory.docx", ["en", "de"], "memory.docx: the format of its translations is unknown"),
        ("memory.tsv", ["en", "de", "fr"], "The languages of the columns of memory.tsv are unknown"),
    ],
)
def test_file_of_unknown_format_or_languages_is_refused(path, languages, message):
    with pytest.raises(InputError, match=message):
        adaptation.make_corpus_config(path, languages)


def test_pairs_and_messages_are_counted_until_both_limits_are_reached(tmp_path):
    folder = write_catalogs(tmp_path, {"memory": 60}) / "memory"  # 60 messages in two languages
    (tmp_path / "en-de.tsv").write_text("\n".join(f"Message {number}\tNachricht {number}" for number in range(30)))
    languages = ["en", "de", "fr"]
    corpora = [adaptation.make_corpus_config(str(path), languages) for path in (folder, tmp_path / "en-de.tsv")]
    preparation = PreparationConfig.parse({"languages": languages, "corpora": corpora})

    def count(pair_limit: int, message_limit: int) -> adaptation.TextCounts:
        return adaptation.count_text(preparation, tmp_path, pair_limit, message_limit)

    assert count(1000, 1000) == (150, 90)
    assert count(100, 10) == (100, 60)
    assert count(1, 70) == (130, 70)


def test_number_of_steps_is_two_passes_over_the_pairs_within_limits():
    assert adaptation.choose_steps(6400, 64) == 200
    assert adaptation.choose_steps(10, 64) == adaptation.MIN_STEPS
    assert adaptation.choose_steps(10**9, 64) == adaptation.MAX_STEPS


@pytest.mark.parametrize(("message_count", "share"), [(10_000, 0.05), (2_000, 0.05), (1_000, 0.1), (400, 0.25)])
def test_at_least_a_hundred_messages_are_held_out(message_count, share):
    assert adaptation.choose_held_out_share(message_count) == share


def test_too_few_messages_are_refused():
    with pytest.raises(CorpusTooSmall, match=r"about 399 messages\. Give at least 400"):
        adaptation.choose_held_out_share(399)


def test_translations_without_the_first_language_are_refused_by_its_name(tmp_path):
    start = save_model(tmp_path / "start")
    memory = tmp_path / "memory.jsonl"
    memory.write_text('{"de": "Datei speichern", "fr": "Enregistrer le fichier"}\n', encoding="utf-8")

    with pytest.raises(CorpusTooSmall, match=r"no translation pair has a side in en, .* in de or fr\."):
        adaptation.plan_settings(str(start), [str(memory)], ["en", "de", "fr"], "guard", None, tmp_path)


def test_unsupported_start_is_refused_before_the_translations_are_read(tmp_path):
    start = tmp_path / "start"
    CLIPConfig().save_pretrained(start)
    (start / "model.safetensors").touch()  # the weights are not read

    with pytest.raises(InputError, match="model_type is 'clip', not one of"):
        adaptation.plan_settings(str(start), [str(tmp_path / "missing.tmx")], ["en", "de"], "guard", None, tmp_path)


def test_default_guard_has_aligned_messages_of_the_known_languages(tmp_path, monkeypatch):
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


def test_existing_config_is_reused_and_never_overwritten(tmp_path):
    path = tmp_path / "adapt.yaml"
    changes = {"pretraining.model.start": "encoder", "evaluation.guard": {"data": "guard"}}

    config = adaptation.write_config(path, TEMPLATE, changes, ["pretraining.seed=2"])

    assert run_file.load(path) == config
    assert (config.pretraining.seed, config.pretraining.model.start) == (2, "encoder")
    assert adaptation.write_config(path, TEMPLATE, changes, ["pretraining.seed=2"]) == config
    text = path.read_text()
    with pytest.raises(ConfigError, match=r"adapt\.yaml exists with other settings"):
        adaptation.write_config(path, TEMPLATE, changes, ["pretraining.seed=3"])
    assert path.read_text() == text


def test_candidate_that_is_not_champion_was_not_promoted(tmp_path, monkeypatch):
    summary = "retrieval/served 0.5\nversion     models:/mine/3 is candidate: not better\nreport      here"
    registration = Registration(3, ("candidate",), champion=False, reason="guard/mean -0.0200")
    monkeypatch.setattr(adaptation.model_registry, "read_registration", lambda *_: registration)

    with pytest.raises(NotPromoted, match=r"models:/mine/3 was not promoted: guard/mean -0\.0200"):
        adaptation.find_promoted_model(summary, tmp_path)
