"""A YAML file is read as YAML 1.2 and strictly; so are the values of `--set`."""

import pytest
import yaml

from infoxlm_core import run_file
from infoxlm_core.errors import ConfigError


def read(text: str) -> object:
    return yaml.load(text, Loader=run_file.StrictLoader)


@pytest.mark.parametrize("word", ["no", "No", "NO", "yes", "on", "off", "y", "n", "1:30", "2026-11-22", "1_000", "="])
def test_a_word_is_a_word(word):
    assert read(f"[en, {word}]") == ["en", word]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True), ("False", False), ("~", None), ("null", None), ("", None), ("0400", 400), ("0o17", 15),
        ("0x1F", 31), ("-12", -12), ("+3", 3), ("1e-6", 1e-6), ("5.0e-6", 5e-6), (".5", 0.5), ("1.", 1.0),
        ("-.inf", float("-inf")), ('"true"', "true"), ("'400'", "400"),
    ],
)  # fmt: skip
def test_a_value_is_that_of_the_core_schema(text, value):
    found = read(text)

    assert (type(found), found) == (type(value), value)


def test_norwegian_is_a_language_of_a_run(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "preparation:\n  languages: [en, no]\n  corpora: [{name: a, format: tsv, path: a.tsv, languages: [en, no]}]\n"
    )

    found = run_file.load(path, ["pretraining.contrast.false_negatives=off", "preparation.pivot=no"])

    assert found.preparation.languages == ("en", "no")
    assert found.preparation.corpora[0].languages == ("en", "no")
    assert found.pretraining.contrast.false_negatives == "off"
    assert found.preparation.pivot == "no"


@pytest.mark.item("B14", "S11")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2\na: 3", "line 3: 'a' occurs twice"),
        ("x: {no: 1, no: 2}", "line 1: 'no' occurs twice"),
        ("a: &b 1\nc: *b", "line 1: anchors and aliases are not allowed"),
        ("a: 1\nb: &c {}", "line 2: anchors and aliases are not allowed"),
    ],
)
def test_what_may_surprise_is_refused(text, said):
    with pytest.raises(ConfigError, match=said):
        read(text)


def test_a_merge_key_and_a_key_that_is_a_list_are_no_way_in():
    assert read("<<: {a: 1}") == {"<<": {"a": 1}}
    with pytest.raises(yaml.YAMLError, match="unhashable"):
        read("? [a]\n: 1")


def test_the_keys_of_a_mapping_are_not_compared_each_with_each():
    compared = []

    class Key(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            compared.append(other)
            return str.__eq__(self, other)

    class Loader(run_file.StrictLoader):
        pass

    Loader.add_constructor("tag:yaml.org,2002:str", lambda loader, node: Key(loader.construct_scalar(node)))

    found = yaml.load("\n".join(f"k{number}: 1" for number in range(2_000)), Loader=Loader)

    assert len(found) == 2_000
    assert len(compared) < 20_000  # a dictionary compares keys of one hash; each with each would be 4,000,000


SECTIONS = {
    "preparation": {
        "languages": ["en", "de"],
        "corpora": [{"name": "a", "format": "tsv", "path": "a.tsv", "languages": ["en", "de"]}],
        "held_out_share": 0.1,
    },
    "pretraining": {"optimization": {"steps": 900, "warmup_steps": 90}},
    "finetuning": {},
}


def test_an_override_changes_its_field_and_no_other_and_one_that_says_the_same_changes_nothing():
    plain = run_file.override_sections(SECTIONS, {})
    changed = run_file.override_sections(SECTIONS, {"pretraining.optimization.steps": 2000.0})
    same = run_file.override_sections(SECTIONS, {"finetuning.optimization": plain["finetuning"]["optimization"]})

    assert set(plain) == set(SECTIONS) and plain == same
    assert changed["pretraining"]["optimization"].pop("steps") == 2000
    assert plain["pretraining"]["optimization"].pop("steps") == 900
    assert changed == plain


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"pretraining.optimization.stepz": 1}, "pretraining.optimization.stepz: unknown name; known are .*steps"),
        (
            {"steps": 1},
            "'steps' is not a field of a section: write SECTION.NAME; sections are preparation, pretraining",
        ),
        ({"num_workers": 2}, "'num_workers' is not a field of a section"),
        ({"pretraining.optimization.steps.x": 1}, "pretraining.optimization.steps is not a section"),
        ({"pretraining.optimization.steps": "many"}, "pretraining.optimization.steps: .* not 'many'"),
        ({"pretraining.batches.virtual_shards": 1}, r"num_workers \(2\) must not exceed"),
    ],
)
def test_a_wrong_override_is_named_with_what_there_is(overrides, said):
    with pytest.raises(ConfigError, match=said):
        run_file.override_sections(SECTIONS, overrides, num_workers=2)


def test_a_gate_on_the_guard_needs_a_guard():
    gated = SECTIONS | {"registration": {"gate": {"guard/mean": -0.005}}}

    with pytest.raises(ConfigError, match=r"registration\.gate names guard/mean: set evaluation\.guard, or remove"):
        run_file.RunConfig.parse(gated)
    run_file.RunConfig.parse(gated | {"evaluation": {"guard": {"data": "tatoeba", "languages": ["fi"]}}})


TWO_CORPORA = [{"name": name, "format": "tmx", "path": f"{name}.tmx"} for name in "ab"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"preparation.held_out_share": 0}, "preparation: no translation pairs are held out"),
        (
            {"preparation.corpora": [{"name": "a", "format": "text", "path": "a.txt", "languages": ["en"]}]},
            "preparation: no translation pairs are held out",
        ),
        (
            {"registration.gate": {"classification/mean": -0.01}},
            "registration: the gate needs classification/mean, but the run has no labelled text",
        ),
        (  # one corpus is one label
            {"registration.metric": "classification/de", "preparation.labelled_share": 0.1},
            "registration: the gate needs classification/de, but the run has no labelled text",
        ),
        (
            {"preparation.labelled_share": 0.1, "finetuning.data": "labelled.tsv"},
            r"preparation\.labelled_share \(0\.1\) sets messages aside .* fewer than two training corpora of pairs",
        ),
        (
            {
                "preparation.labelled_share": 0.1,
                "preparation.corpora": TWO_CORPORA,
                "finetuning.train_languages": ["fr", "sw"],
            },
            r"finetuning.train_languages \(fr, sw\) has no language of the labelled text.*\(en, de\)",
        ),
    ],
)
def test_a_run_that_cannot_end_is_refused_before_anything_is_prepared(overrides, message):
    sections = SECTIONS | {"registration": {}}
    run_file.override_sections(sections, {})

    with pytest.raises(ConfigError, match=message):
        run_file.override_sections(sections, overrides)


def test_a_gate_on_classification_is_accepted_if_the_run_has_labelled_text():
    sections = SECTIONS | {"registration": {"metric": "classification/mean"}}

    run_file.override_sections(sections, {"finetuning.data": "labelled.tsv"})
    run_file.override_sections(sections, {"preparation.labelled_share": 0.1, "preparation.corpora": TWO_CORPORA})


def test_without_a_tokenizer_of_its_own_a_run_uses_that_of_its_start_also_if_an_override_names_it():
    start = {"pretraining.model.start": "org/encoder"}
    sections = SECTIONS | {"tokenization": {}}

    def model(overrides: dict) -> str | None:
        return run_file.override_sections(sections, overrides)["tokenization"].get("model")

    assert model({}) is None
    assert model(start) == "org/encoder"
    assert model(start | {"tokenization.model": "other.model"}) == "other.model"
    assert model(start | {"pretraining.system": "bert", "pretraining.objectives": {"tlm": 0, "xlco": 0}}) is None


def test_variants_that_start_from_different_models_need_one_tokenizer():
    trials = [
        {"trial": {"variant": name, "seed": 3}, "pretraining": {"model": {"start": name}, "seed": 3}} for name in "ab"
    ]
    sections = SECTIONS | {"tokenization": {}}

    with pytest.raises(ConfigError, match=r"tokenization\.model: the variants start from models with their own"):
        run_file.override_trials(sections, trials, {})
    assert len(run_file.override_trials(sections, trials, {"tokenization.model": "c"})) == 2


def test_an_override_reaches_every_trial_and_leaves_its_seed_and_what_makes_it_a_variant():
    trials = [
        {"trial": {"variant": name, "seed": 3, "what": ""}, "pretraining": {"objectives": {"xlco": weight}, "seed": 3}}
        for name, weight in (("full", 1.0), ("-XLCO", 0.0))
    ]

    first, second = run_file.override_trials(SECTIONS, trials, {"pretraining.optimization.steps": 77_000})

    assert first["trial"] == trials[0]["trial"] and first["pretraining"]["seed"] == 3
    assert first["pretraining"]["optimization"]["steps"] == second["pretraining"]["optimization"]["steps"] == 77_000
    assert second["pretraining"]["objectives"] == {"xlco": 0.0}
    for name in ("pretraining.objectives.xlco", "pretraining.objectives"):
        with pytest.raises(ConfigError, match=f"'{name}': the variants differ in it: change `trials`"):
            run_file.override_trials(SECTIONS, trials, {name: 0.5})
    for name in ("pretraining.seed", "finetuning.seed", "translation.seed"):
        with pytest.raises(ConfigError, match=f"'{name}': each trial has its own seed"):
            run_file.override_trials(SECTIONS, trials, {name: 1})


def test_an_override_of_a_translation_setting_in_which_variants_differ_is_refused():
    trials = []
    for weights in ("random", "pretrained"):
        translation = {"languages": ["en", "de"], "encoder": weights}
        trials.append({"trial": {"variant": weights, "seed": 1}, "pretraining": {}, "translation": translation})

    with pytest.raises(ConfigError, match=r"'translation\.encoder': the variants differ in it"):
        run_file.override_trials(SECTIONS, trials, {"translation.encoder": "embeddings"})
