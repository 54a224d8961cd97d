"""Fine-tuning on any table of labelled text: learns, resumes, refuses bad rows by name."""

from pathlib import Path

import pandas as pd
import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from infoxlm_core.config import FinetuningConfig, TokenizationConfig
from infoxlm_core.data.shards import open_shards
from infoxlm_core.errors import ConfigError, InputError
from infoxlm_core.finetuning import Finetuning, _lay_out, finetune, read_labelled
from infoxlm_core.model import pretrained
from infoxlm_core.model.encoder import initialise
from infoxlm_core.model.heads import Classifier
from infoxlm_core.pretraining import build
from infoxlm_core.training import distributed, loop, tracker
from tests.conftest import tiny_config
from tests.core.test_tokenization import run, write_corpus
from tests.toy_text import messages


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("encoder")
    german = messages(0)
    corpus = write_corpus(
        base / "corpus", {"de": [b for _, b in german], "en": [a for a, _ in german]}, {"en-de": german}
    )
    shards = open_shards(run(TokenizationConfig(vocabulary_size=96, processes=1), corpus, base / "shards"))
    pretrained.export(build(tiny_config(), shards), base / "shards/tokenizer", base / "model")
    return base / "model"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Does a message open or delete something? In English and German, a tenth kept for the test."""
    rows = [
        {"text": text, "label": english.split()[0], "language": language, "split": "train" if number % 10 else "test"}
        for number, (english, german) in enumerate(messages(0)) for language, text in (("en", english), ("de", german))
        if english.split()[0] in ("Open", "Delete")
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("data") / "verbs.tsv"
    pd.DataFrame(rows).to_csv(path, sep="\t", index=False)
    return path


def config(data: Path, **changes) -> FinetuningConfig:
    optimization = {"steps": 60, "learning_rate": 0.01, "warmup_steps": 5, "weight_decay": 0.0}
    return FinetuningConfig.parse(
        {"data": str(data), "max_tokens": 30, "optimization": optimization, "checkpoints": {"every": 20},
         "log_every": 1} | changes
    )  # fmt: skip


def test_it_learns_the_labels_and_exports_for_transformers(encoder, data, tmp_path):
    finetune(config(data), encoder, None, tmp_path / "out", tmp_path / "run")

    curve = tracker.read(tmp_path / "run" / loop.METRICS)
    assert sum(values["train/accuracy"] for _, values in curve[-5:]) / 5 > 0.95
    test = pd.read_parquet(tmp_path / "out/test.parquet")
    assert set(test["language"]) == {"en", "de"} and len(test) == 48 * 2
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    english = test[test["language"] == "en"]
    chosen = model(**tokenizer(english["text"].tolist(), padding=True, return_tensors="pt")).logits.argmax(1)
    accuracy = (
        pd.Series([model.config.id2label[i] for i in chosen.tolist()]) == english["label"].reset_index(drop=True)
    ).mean()
    assert accuracy > 0.9


def test_a_resumed_run_equals_an_undisturbed_one(encoder, data, tmp_path):
    settings = config(data)
    short = config(data, checkpoints={"every": 10})
    finetune(settings, encoder, None, tmp_path / "a/out", tmp_path / "a/run")
    finetune(short, encoder, None, tmp_path / "b/out", tmp_path / "b/run")
    for step in (50, 60):
        (tmp_path / f"b/run/step={step:010d}/manifest.json").unlink()

    finetune(settings, encoder, None, tmp_path / "b/out2", tmp_path / "b/run")

    losses = [
        [values["loss/classification"].hex() for _, values in tracker.read(tmp_path / x / "run" / loop.METRICS)]
        for x in "ab"
    ]
    assert losses[0] == losses[1]


def test_the_loss_does_not_depend_on_the_workers_or_the_micro_batch_dropout_included(encoder, data, monkeypatch):
    table = read_labelled(config(data), None)
    train = table[table["split"] == "train"]

    def total(workers: int, micro: int) -> float:
        settings = config(data, micro_batch_size=micro, head_dropout=0.3)
        model = Classifier(pretrained.load_encoder(encoder), 2, 0.3)
        initialise(model.dense, 1), initialise(model.output, 1)
        learner = Finetuning(settings, model, _lay_out(train, encoder, 30), (train["label"] == "Open").to_numpy())
        monkeypatch.setattr(distributed, "world_size", lambda: workers)
        loss = 0.0
        for rank in range(workers):
            monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
            loss += sum(
                learner.losses(batch, {"classification": 1.0})[1]["classification"].item()
                for batch in learner.batches(5)
            )
        return loss

    expected = total(1, 32)
    assert total(2, 32) == pytest.approx(expected, rel=1e-5) and total(4, 3) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ConfigError, match=r"33 workers must not exceed finetuning\.batch_size \(32\)"):
        total(33, 32)


def test_without_a_split_column_a_tenth_is_set_aside(data):
    table = pd.read_csv(data, sep="\t").drop(columns="split")
    table.to_csv(data.with_name("nosplit.csv"), index=False)

    splits = read_labelled(config(data.with_name("nosplit.csv")), None)["split"]

    assert 0.05 < (splits == "test").mean() < 0.15


def test_a_pair_is_laid_out_as_xlm_r_does_and_the_longer_side_is_cut(encoder):
    table = pd.DataFrame({"text": ["Open the file now"], "text_pair": ["of"]}, dtype="string")
    tokenizer = AutoTokenizer.from_pretrained(encoder)

    whole, cut = _lay_out(table, encoder, 64), _lay_out(table, encoder, 10)

    assert whole.flat.tolist() == tokenizer("Open the file now", "of")["input_ids"]
    assert cut.lengths[0] == 10 and cut.flat[-1] == 2 and (cut.flat == 2).sum() == 3


def test_two_text_columns_are_trained_as_pairs(encoder, data, tmp_path):
    table = pd.read_csv(data, sep="\t")
    table["other"] = table["text"]
    table.to_csv(tmp_path / "pairs.csv", index=False)
    settings = config(tmp_path / "pairs.csv", text_pair="other", optimization={"steps": 2, "warmup_steps": 1})

    finetune(settings, encoder, None, tmp_path / "out", tmp_path / "run")

    assert set(pd.read_parquet(tmp_path / "out/test.parquet").columns) == {"text", "text_pair", "label", "language"}


@pytest.mark.parametrize(
    ("content", "changes", "said"),
    [
        ("text,label\na,b\n", {}, r"x\.csv: no column 'language' \(finetuning\.language\); there are text, label"),
        ("text,label,language\na,b,en\n ,b,en\n", {}, r"x\.csv:3: text is empty"),
        ("text,label,language\na,b,en\n", {}, "need=2 labels"),
        ("text,label,language\nhello, world,b,en\n", {}, r"x\.csv:2: 4 fields, the header has 3: quote the text"),
        ("text,label,language,split\na,b,en,dev\n", {}, r"x\.csv:2: split is 'dev': use train or test"),
        ("text,label,language\na,b,de\nc,d,de\n", {}, "set finetuning.train_languages"),
        ("text,label,language\na,b,en\nc,d,en\n", {"text_pair": "hypothesis"}, "no column 'hypothesis'"),
    ],
)
def test_bad_tables_are_refused_in_one_line(encoder, tmp_path, content, changes, said):
    (tmp_path / "x.csv").write_text(content)

    with pytest.raises(InputError, match=said):
        finetune(config(tmp_path / "x.csv", **changes), encoder, None, tmp_path / "out", tmp_path / "run")
    assert not (tmp_path / "out").exists()


def test_missing_data_says_what_to_set(tmp_path):
    with pytest.raises(InputError, match=r"set preparation\.labelled_share above 0 or finetuning\.data"):
        read_labelled(FinetuningConfig(), tmp_path)
    with pytest.raises(InputError, match="give labelled text as"):
        read_labelled(FinetuningConfig(data="x.json"), None)


def test_a_latin_1_file_is_refused(tmp_path):
    (tmp_path / "x.csv").write_bytes("text,label,language\nÖl,b,en\n".encode("latin-1"))

    with pytest.raises(InputError, match="save it as UTF-8"):
        read_labelled(config(tmp_path / "x.csv"), None)
