"""Run files and overrides are read strictly as YAML 1.2, and contradictory settings are refused."""

import pytest
import yaml

from infoxlm_core import run_file
from infoxlm_core.errors import ConfigError

SECTIONS = {
    "preparation": {
        "languages": ["en", "de"],
        "corpora": [{"name": "a", "format": "tsv", "path": "a.tsv", "languages": ["en", "de"]}],
        "held_out_share": 0.1,
    },
    "pretraining": {"optimization": {"steps": 900, "warmup_steps": 90}},
    "finetuning": {},
}
TRANSLATOR = SECTIONS | {
    "pretraining": {"system": "xlm", "objectives": {"tlm": 0, "xlco": 0}},
    "translation": {"languages": ["en", "de"]},
    "registration": {},
}
TWO_CORPORA = [{"name": name, "format": "tmx", "path": f"{name}.tmx"} for name in "ab"]


def read(text: str) -> object:
    return yaml.load(text, Loader=run_file.StrictLoader)


@pytest.mark.parametrize("word", ["no", "No", "NO", "yes", "on", "off", "y", "n", "1:30", "2026-11-22", "1_000", "="])
def test_words_that_yaml_1_1_converts_stay_text(word):
    assert read(f"[en, {word}]") == ["en", word]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True), ("False", False), ("~", None), ("null", None), ("", None), ("0400", 400), ("0o17", 15),
        ("0x1F", 31), ("-12", -12), ("+3", 3), ("1e-6", 1e-6), ("5.0e-6", 5e-6), (".5", 0.5), ("1.", 1.0),
        ("-.inf", float("-inf")), ('"true"', "true"), ("'400'", "400"),
    ],
)  # fmt: skip
def test_values_are_those_of_the_core_schema_of_yaml_1_2(text, value):
    parsed_value = read(text)

    assert (type(parsed_value), parsed_value) == (type(value), value)


def test_run_file_and_overrides_may_contain_the_language_code_of_norwegian(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "preparation:\n  languages: [en, no]\n  corpora: [{name: a, format: tsv, path: a.tsv, languages: [en, no]}]\n"
    )

    config = run_file.load(path, ["pretraining.contrast.false_negatives=off", "preparation.pivot=no"])

    assert config.preparation.languages == config.preparation.corpora[0].languages == ("en", "no")
    assert config.pretraining.contrast.false_negatives == "off"
    assert config.preparation.pivot == "no"


@pytest.mark.item("B14", "S11")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "line 3: 'a' occurs twice"),
        ("x: {no: 1, no: 2}", "line 1: 'no' occurs twice"),
        ("a: &b 1\nc: *b", "line 1: anchors and aliases are not allowed"),
        ("a: 1\nb: &c {}", "line 2: anchors and aliases are not allowed"),
        ("a: 1\nb: !!bool maybe", "line 2: tags such as !!str are not allowed"),
        ("a: !!set {en, de}", "line 1: tags such as !!str are not allowed"),
        ("!mine [a]", "line 1: tags such as !!str are not allowed"),
    ],
)
def test_repeated_keys_anchors_and_tags_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        read(text)


def test_merge_keys_are_not_merged_and_lists_are_no_keys():
    assert read("<<: {a: 1}") == {"<<": {"a": 1}}
    with pytest.raises(yaml.YAMLError, match="unhashable"):
        read("? [a]\n: 1")


def test_repeated_keys_are_detected_in_linear_time():
    comparisons = []

    class CountingKey(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            comparisons.append(other)
            return str.__eq__(self, other)

    class CountingLoader(run_file.StrictLoader):
        pass

    def construct_key(loader: yaml.Loader, node: yaml.ScalarNode) -> CountingKey:
        return CountingKey(loader.construct_scalar(node))

    CountingLoader.add_constructor("tag:yaml.org,2002:str", construct_key)

    mapping = yaml.load("\n".join(f"k{number}: 1" for number in range(2_000)), Loader=CountingLoader)

    assert len(mapping) == 2_000
    assert len(comparisons) < 20_000  # comparing each key with all others takes 4,000,000


def test_override_changes_only_its_field():
    original = run_file.override_sections(SECTIONS, {})
    changed = run_file.override_sections(SECTIONS, {"pretraining.optimization.steps": 2000.0})
    same_values = {"finetuning.optimization": original["finetuning"]["optimization"]}

    assert run_file.override_sections(SECTIONS, same_values) == original
    assert original.keys() == SECTIONS.keys()
    assert changed["pretraining"]["optimization"].pop("steps") == 2000
    assert original["pretraining"]["optimization"].pop("steps") == 900
    assert changed == original


@pytest.mark.parametrize("value", ["[", "[" * 2_000, "9" * 5_000, "&a 1"])
def test_override_whose_value_is_no_yaml_is_named_in_one_line(value):
    with pytest.raises(ConfigError, match=r"^override 'pretraining\.seed': .") as refusal:
        run_file.apply_override({}, f"pretraining.seed={value}")

    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"pretraining.optimization.stepz": 1}, "pretraining.optimization.stepz: unknown name; known are .*steps"),
        ({"num_workers": 2}, "not a field of a section: write SECTION.NAME; sections are preparation, pretraining"),
        ({"pretraining.optimization.steps.x": 1}, "pretraining.optimization.steps is not a section"),
        ({"pretraining.optimization.steps": "many"}, "pretraining.optimization.steps: .* not 'many'"),
        ({"pretraining.batches.virtual_shards": 1}, r"num_workers \(2\) must not exceed"),
    ],
)
def test_wrong_override_is_refused_with_the_valid_names(overrides, message):
    with pytest.raises(ConfigError, match=message):
        run_file.override_sections(SECTIONS, overrides, num_workers=2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"preparation.held_out_share": 0}, "preparation: no translation pairs are held out"),
        (
            {"preparation.corpora": [{"name": "a", "format": "text", "path": "a.txt", "languages": ["en"]}]},
            "preparation: no translation pairs are held out",
        ),
        ({"registration.gate": {"guard/mean": -0.005}}, r"registration\.gate names guard/mean: set evaluation\.guard"),
        (
            {"registration.gate": {"classification/mean": -0.01}},
            "registration: the gate needs classification/mean, but the run has no labeled text",
        ),
        (  # one corpus is one label
            {"registration.metric": "classification/de", "preparation.labelled_share": 0.1},
            "registration: the gate needs classification/de, but the run has no labeled text",
        ),
        (
            {"preparation.labelled_share": 0.1, "finetuning.data": "labelled.tsv"},
            r"preparation\.labelled_share \(0\.1\) sets aside messages .* fewer than two training corpora of pairs",
        ),
        (
            {
                "preparation.labelled_share": 0.1,
                "preparation.corpora": TWO_CORPORA,
                "finetuning.train_languages": ["fr", "sw"],
            },
            r"finetuning.train_languages \(fr, sw\) has no language of the labeled text.*\(en, de\)",
        ),
    ],
)
def test_run_that_lacks_text_for_a_later_step_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        run_file.override_sections(SECTIONS | {"registration": {}, "evaluation": {}}, overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        {"registration.gate": {"guard/mean": -0.005}, "evaluation.guard": {"data": "tatoeba", "languages": ["fi"]}},
        {"registration.metric": "classification/mean", "finetuning.data": "labelled.tsv"},
        {
            "registration.metric": "classification/mean",
            "preparation.labelled_share": 0.1,
            "preparation.corpora": TWO_CORPORA,
        },
    ],
)
def test_gate_whose_metrics_are_measured_is_accepted(overrides):
    run_file.override_sections(SECTIONS | {"registration": {}, "evaluation": {}}, overrides)


def test_translator_is_compared_by_its_only_metric_unless_the_file_names_another():
    sections = run_file.override_sections(TRANSLATOR, {"registration.gate": {"translation/mean": 0.01}})

    registration = sections["registration"]
    assert registration["metric"] == "translation/mean"
    assert registration["gate"] == {"translation/mean": 0.01}


@pytest.mark.parametrize(
    ("sections", "overrides", "message"),
    [
        (TRANSLATOR, {"registration.metric": "retrieval/served"}, "the gate needs retrieval/served, but a translator"),
        (TRANSLATOR, {"registration.gate": {"translation/de": 0}}, "the gate needs translation/de, but a translator"),
        (TRANSLATOR, {"registration.against": "start"}, "a translator has no start to compare with"),
        (
            SECTIONS | {"registration": {}},
            {"registration.metric": "translation/mean"},
            "the gate needs translation/mean, which only a translator has",
        ),
    ],
)
def test_gate_that_the_evaluation_of_the_run_cannot_serve_is_refused(sections, overrides, message):
    with pytest.raises(ConfigError, match=message):
        run_file.override_sections(sections, overrides)


@pytest.mark.parametrize(
    ("overrides", "tokenizer"),
    [
        ({}, None),
        ({"pretraining.model.start": "org/encoder"}, "org/encoder"),
        ({"pretraining.model.start": "org/encoder", "tokenization.model": "other.model"}, "other.model"),
        (
            {
                "pretraining.model.start": "org/encoder",
                "pretraining.system": "bert",
                "pretraining.objectives": {"tlm": 0, "xlco": 0},
            },
            None,
        ),
    ],
)
def test_run_without_its_own_tokenizer_uses_that_of_its_start(overrides, tokenizer):
    sections = run_file.override_sections(SECTIONS | {"tokenization": {}}, overrides)

    assert sections["tokenization"].get("model") == tokenizer


def test_variants_that_start_from_different_models_need_one_tokenizer():
    trials = [
        {"trial": {"variant": name, "seed": 3}, "pretraining": {"model": {"start": name}, "seed": 3}} for name in "ab"
    ]
    sections = SECTIONS | {"tokenization": {}}

    with pytest.raises(ConfigError, match=r"tokenization\.model: the variants start from models with their own"):
        run_file.override_all_trials(sections, trials, {})
    assert len(run_file.override_all_trials(sections, trials, {"tokenization.model": "c"})) == 2


@pytest.mark.parametrize("change", [{"languages": ["en", "fr"]}, {"validation_pairs": 7}])
def test_translators_with_different_test_sentences_are_not_compared(change):
    trials = []
    for changes in ({}, change):
        trials.append(
            {
                "trial": {"variant": "a", "seed": 1},
                "pretraining": TRANSLATOR["pretraining"],
                "translation": TRANSLATOR["translation"] | changes,
            }
        )
    sections = {"preparation": SECTIONS["preparation"] | {"languages": ["en", "de", "fr"]}}

    with pytest.raises(ConfigError, match="they would translate different test sentences"):
        run_file.override_all_trials(sections, trials, {})


def test_override_reaches_every_trial_and_keeps_its_seed_and_variant():
    trials = [
        {"trial": {"variant": name, "seed": 3, "what": ""}, "pretraining": {"objectives": {"xlco": weight}, "seed": 3}}
        for name, weight in (("full", 1.0), ("-XLCO", 0.0))
    ]

    changed_trials = run_file.override_all_trials(SECTIONS, trials, {"pretraining.optimization.steps": 77_000})

    assert [trial["trial"] for trial in changed_trials] == [trial["trial"] for trial in trials]
    assert [trial["pretraining"]["seed"] for trial in changed_trials] == [3, 3]
    assert [trial["pretraining"]["optimization"]["steps"] for trial in changed_trials] == [77_000, 77_000]
    assert changed_trials[1]["pretraining"]["objectives"] == {"xlco": 0.0}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pretraining.objectives.xlco", "the variants differ in this field: change `trials`"),
        ("pretraining.objectives", "the variants differ in this field: change `trials`"),
        ("translation.encoder", "the variants differ in this field: change `trials`"),
        ("pretraining.seed", "each trial has its own seed"),
        ("finetuning.seed", "each trial has its own seed"),
        ("translation.seed", "each trial has its own seed"),
    ],
)
def test_override_of_a_field_in_which_trials_differ_is_refused(name, message):
    trials = []
    for weight, encoder in ((1.0, "random"), (0.0, "pretrained")):
        pretraining = {"objectives": {"xlco": weight}, "seed": 3}
        translation = {"languages": ["en", "de"], "encoder": encoder}
        trials.append({"trial": {}, "pretraining": pretraining, "translation": translation})

    with pytest.raises(ConfigError, match=f"'{name}': {message}"):
        run_file.override_all_trials(SECTIONS, trials, {name: 1})
