"""Corpora -> tokenizer and shards: XLM-R's ids, equal in `transformers`, the same for any number of processes."""

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from infoxlm_core import manifests
from infoxlm_core.config import TokenizationConfig
from infoxlm_core.data.encoding import sentence_id
from infoxlm_core.data.shards import open_shards
from infoxlm_core.errors import CorpusTooSmall, InputError, TokenizerMismatch
from infoxlm_core.model.huggingface.tokenizers import MODEL
from infoxlm_core.stages import tokenization
from infoxlm_core.stages.tokenization import tokenize
from tests.toys.corpus import tokenized, write_corpus
from tests.toys.text import messages


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    german = messages(0)
    odd = [
        "  two  spaces\u00a0here ",
        "<b>%(name)s</b> & <s>old</s>",
        "Ⅷ ﬁne ½ ①",
        "emoji 🙂 here",
        "nananana na nan anan",
    ]
    return write_corpus(
        tmp_path_factory.mktemp("corpus"),
        {"de": [b for _, b in german[:300]], "en": [a for a, _ in german[:300]] + odd * 3},
        {"en-de": german[:200]},
    )


@pytest.fixture(scope="module")
def shards(corpus, tmp_path_factory) -> Path:
    return tokenized(TokenizationConfig(vocabulary_size=100, processes=1), corpus, tmp_path_factory.mktemp("made"))


def test_ids_follow_the_layout_of_xlm_r(shards):
    tokenizer = AutoTokenizer.from_pretrained(shards / "tokenizer")

    assert tokenizer.convert_tokens_to_ids(["<s>", "<pad>", "</s>", "<unk>", "<mask>"]) == [0, 1, 2, 3, 99]
    assert len(tokenizer) == 100
    ids = tokenizer("Open the file", "now")["input_ids"]
    assert ids[0] == 0 and ids[-1] == 2 and ids.count(2) == 3  # <s> a </s> </s> b </s>
    assert tokenizer.decode(tokenizer("Öffne der Datei")["input_ids"], skip_special_tokens=True) == "Öffne der Datei"


def test_shards_hold_the_ids_that_transformers_gives(shards, corpus):
    tokenizer = AutoTokenizer.from_pretrained(shards / "tokenizer")
    opened = open_shards(shards)
    texts = pq.read_table(corpus / "mono/de/toy.parquet")["text"].to_pylist()
    (table,) = opened.mono["de"]

    for row, text in enumerate(texts):
        stored = table.tokens[table.offsets[row] : table.offsets[row + 1]].tolist()
        assert stored == [*tokenizer(text, add_special_tokens=False)["input_ids"], 2]
    (pairs,) = opened.pairs["en-de"]
    assert len(pairs) == 200 and len(set(pairs.sentence_ids.tolist())) == 200
    assert pairs.sentence_ids.view("uint64")[0] == sentence_id(messages(0)[0][0])


@pytest.mark.slow
def test_the_shards_do_not_depend_on_the_number_of_processes(shards, corpus, tmp_path):
    again = tokenized(TokenizationConfig(vocabulary_size=100, processes=3), corpus, tmp_path)

    digests = [manifests.read(path, "shards", "tokenize_corpus")["digest"] for path in (shards, again)]
    assert digests[0] == digests[1]


def test_a_given_model_is_used_as_it_is(shards, corpus, tmp_path):
    model = shards / "tokenizer/sentencepiece.bpe.model"

    again = tokenized(TokenizationConfig(processes=1, model=str(model)), corpus, tmp_path)

    assert (again / "tokenizer/sentencepiece.bpe.model").read_bytes() == model.read_bytes()
    assert manifests.load(again)["facts"]["vocabulary_size"] == 100
    with pytest.raises(TokenizerMismatch, match=r"gives 100 ids, tokenization\.vocabulary_size says 99"):
        tokenize(TokenizationConfig(vocabulary_size=99, model=str(model)), corpus, tmp_path / "x")


def test_to_compare_tokenizers_no_more_of_a_file_is_read_than_the_sentences_compared(shards, corpus, monkeypatch):
    read, chunks = [], tokenization._chunks
    monkeypatch.setattr(tokenization, "CHUNK", 10)
    monkeypatch.setattr(tokenization, "COMPARED", 25)
    monkeypatch.setattr(tokenization, "_chunks", lambda path: (read.append(len(part)) or part for part in chunks(path)))

    model = (shards / "tokenizer" / MODEL).read_bytes()
    tokenization._compare_tokenizers(shards / "tokenizer", model, corpus, max_different_share=0.0)

    assert sum(read) == 2 * 30  # three chunks of German, three of English, of 300 sentences each


def test_the_vocabulary_is_trained_on_the_same_sentences_however_many_are_read_at_once(shards, corpus, monkeypatch):
    monkeypatch.setattr(tokenization, "CHUNK", 7)

    model = tokenization._train_model(TokenizationConfig(vocabulary_size=100), corpus)

    assert model == (shards / "tokenizer" / MODEL).read_bytes()


@pytest.mark.parametrize(
    ("sizes", "counts"),
    [
        ([100_000, 20_000, 3_000], [42_949, 26_501, 15_000]),  # 51, 31 and 18 %, as alpha says: the last 5 times
        ([100_000, 20_000, 10], [71_429, 44_074, 50]),  # 10 sentences do not reduce the text of the others
        ([2_000_000, 1_000_000], [551_800, 448_200]),
        ([7], [7]),
    ],
)
def test_small_languages_are_repeated_until_their_share_is_that_of_alpha(sizes, counts):
    config = TokenizationConfig(vocabulary_size=100, alpha=0.3)

    assert tokenization._count_sentences(np.array(sizes), config).tolist() == counts


def test_every_sentence_of_a_small_language_is_repeated_equally_often(tmp_path):
    english, german = ([text for text, _ in messages(0)][:40], [text for _, text in messages(0)][:4])
    corpus = write_corpus(tmp_path, {"en": english, "de": german}, {})

    drawn = Counter(tokenization._draw_sentences(TokenizationConfig(vocabulary_size=100, alpha=0.0), corpus))

    assert {drawn[text] for text in german} == {5}
    assert sum(drawn[text] for text in english) == 20 and max(drawn[text] for text in english) == 1


def test_meaning_ignores_case_and_width_and_space():
    assert sentence_id("Save  CHANGES") == sentence_id("save changes") != sentence_id("save change")


def test_shards_say_of_which_test_sets_their_text_was_kept_free(shards, corpus, tmp_path):
    assert "reserved" not in manifests.load(shards)["facts"]
    known = shutil.copytree(corpus, tmp_path / "corpus")
    manifests.write(known, "corpus", {"reserved": ["ab", "cd"]})
    given = TokenizationConfig(vocabulary_size=100, processes=1, model=str(shards / "tokenizer" / MODEL))

    assert tokenize(given, known, tmp_path / "out")["reserved"] == ["ab", "cd"]


def test_bad_input_is_refused(corpus, tmp_path):
    with pytest.raises(InputError, match="run prepare_corpus first"):
        tokenize(TokenizationConfig(), tmp_path, tmp_path / "out")
    with pytest.raises(CorpusTooSmall, match=r"at most \d+ are possible"):
        tokenize(TokenizationConfig(vocabulary_size=5000), corpus, tmp_path / "out")
    with pytest.raises(
        CorpusTooSmall, match=r"alone need (\d+)\): raise tokenization.vocabulary_size to \1 or more"
    ) as said:
        tokenize(TokenizationConfig(vocabulary_size=10), corpus, tmp_path / "out")
    assert "Increase" not in str(said.value) and "lower tokenization.vocabulary_size" not in str(said.value)
    with pytest.raises(InputError, match="not a SentencePiece model"):
        tokenize(TokenizationConfig(model=str(corpus / "manifest.json")), corpus, tmp_path / "out2")
