"""Corpora -> tokenizer and shards: XLM-R's ids, equal in `transformers`, the same for any number of processes."""

import io
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
from sentencepiece import SentencePieceTrainer
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, BertTokenizer, XLMRobertaTokenizer
from transformers.utils import sentencepiece_model_pb2_new as sentencepiece_pb2

from infoxlm_core import manifests
from infoxlm_core.config import TokenizationConfig
from infoxlm_core.data.encoding import sentence_id
from infoxlm_core.data.shards import Table, open_shards
from infoxlm_core.errors import ConfigError, CorpusTooSmall, InputError, TokenizerMismatch
from infoxlm_core.model.encoder import EncoderSize
from infoxlm_core.model.heads import InfoXLM
from infoxlm_core.model.huggingface import pretrained
from infoxlm_core.model.huggingface.any_encoder import served_prefix
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
    table = opened.mono["de"][0].read_text()

    for row, text in enumerate(texts):
        stored = table.tokens[table.offsets[row] : table.offsets[row + 1]].tolist()
        assert stored == [*tokenizer(text, add_special_tokens=False)["input_ids"], 2]
    pairs = opened.pairs["en-de"][0].read_pairs()
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


LINES = [
    "Сохранить изменения", "保存并关闭", "変更を保存する", "تغییرات را ذخیره کنید", "שמור שינויים", "परिवर्तन सहेजें",
    "บันทึกการเปลี่ยนแปลง", "변경 사항을 저장", "Đã lưu các thay đổi", "naïve ﬁne Ⅷ", "x</s>y <mask> [SEP] [MASK]",
    "🙂 100 %",
]  # fmt: skip


def write_foreign_tokenizer(kind: str, directory: Path) -> Path:
    """Write the tokenizer of an XLM-R or a BERT as transformers saves it, with a truncation that its users undo."""
    texts = [text for pair in messages(0) for text in pair] + LINES * 20
    if kind == "xlmr":
        trained = io.BytesIO()
        SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=trained, vocab_size=200, minloglevel=2)
        proto = sentencepiece_pb2.ModelProto.FromString(trained.getvalue())
        pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
        pieces += [(piece.piece, piece.score) for piece in proto.pieces[3:]] + [("<mask>", 0.0)]
        character_map = proto.normalizer_spec.precompiled_charsmap
        XLMRobertaTokenizer(vocab=pieces, _spm_precompiled_charsmap=character_map).save_pretrained(directory)
        (directory / "sentencepiece.bpe.model").write_bytes(trained.getvalue())
    else:
        letters = sorted(set("".join(texts)) - {" "})
        pieces = ["[PAD]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters)]
        vocabulary = {piece: number for number, piece in enumerate([*pieces, "Open", "##ffne"])}
        BertTokenizer(vocab=vocabulary, do_lower_case=False).save_pretrained(directory)
        (directory / "vocab.txt").write_text("\n".join(vocabulary))
    fast = Tokenizer.from_file(str(directory / "tokenizer.json"))
    fast.enable_truncation(4)
    fast.save(str(directory / "tokenizer.json"))
    return directory


def row_of(table: Table, row: int) -> list[int]:
    return table.tokens[table.offsets[row] : table.offsets[row + 1]].tolist()


@pytest.mark.parametrize(("kind", "special"), [("xlmr", (0, 2, 1, 3)), ("bert", (3, 4, 0, 2))])
@pytest.mark.parametrize("prefix", ["", "query: "])
def test_the_tokenizer_of_a_model_gives_the_same_ids_in_training_and_in_the_export(tmp_path, kind, special, prefix):
    source = write_foreign_tokenizer(kind, tmp_path / "start")
    tokenizer = AutoTokenizer.from_pretrained(source)
    texts = [text for pair in messages(0)[:20] for text in pair] + LINES
    corpus = write_corpus(
        tmp_path / "corpus", {"de": [*texts, "\u200b"]}, {"de-en": list(zip(texts, texts, strict=True))}
    )
    size = len(tokenizer)
    config = TokenizationConfig(vocabulary_size=size, model=str(source), processes=1, prefix=prefix)

    shards = open_shards(tokenized(config, corpus, tmp_path / "shards"))
    vocabulary = shards.vocabulary
    encoder = EncoderSize(vocabulary=size, layers=1, hidden=8, ffn=8, heads=1, positions=40)
    model = InfoXLM(encoder, 1, "mean", True)
    pretrained.export(model, shards.directory / "tokenizer", tmp_path / "export", prefix=shards.prefix)

    assert (vocabulary.begin, vocabulary.end, vocabulary.pad, vocabulary.unk) == special
    assert vocabulary.mask == tokenizer.mask_token_id and vocabulary.is_xlm_r == (kind == "xlmr")
    table, pairs = shards.mono["de"][0].read_text(), shards.pairs["de-en"][0].read_pairs()
    assert len(table) == len(texts) and len(pairs) == len(texts)  # a text without tokens is dropped
    exported = AutoTokenizer.from_pretrained(tmp_path / "export")
    for row, text in enumerate(texts):
        stored, side = row_of(table, row), row_of(pairs.source, row)
        assert stored == [*side, vocabulary.end]
        if not any(token in text for token in tokenizer.all_special_tokens):
            assert exported(prefix + text)["input_ids"] == [vocabulary.begin, *stored]
        else:  # transformers reads it as the special token, which the text of a user does not mean
            assert {vocabulary.begin, vocabulary.end, vocabulary.mask}.isdisjoint(stored[:-1])
    assert served_prefix(SimpleNamespace(config=AutoConfig.from_pretrained(tmp_path / "export"))) == prefix
    for path in source.iterdir():
        if path.name != "tokenizer_config.json":
            assert (tmp_path / "export" / path.name).read_bytes() == path.read_bytes()


def test_a_tokenizer_json_alone_is_enough(tmp_path):
    source = write_foreign_tokenizer("bert", tmp_path / "start") / "tokenizer.json"
    corpus = write_corpus(tmp_path / "corpus", {"de": LINES}, {})
    size = len(AutoTokenizer.from_pretrained(source.parent))
    config = TokenizationConfig(vocabulary_size=size, model=str(source), processes=1)

    alone = shutil.copy(source, tmp_path / "bert.json")
    shards = tokenized(config.model_copy(update={"model": str(alone)}), corpus, tmp_path / "alone")

    expected = open_shards(tokenized(config, corpus, tmp_path / "with settings"))
    assert open_shards(shards).vocabulary == expected.vocabulary
    assert AutoTokenizer.from_pretrained(shards / "tokenizer")("Open")["input_ids"] == [3, size - 2, 4]
    with pytest.raises(ConfigError, match=r"prefix contains the special token \[SEP\]: remove it"):
        tokenize(config.model_copy(update={"prefix": "a[SEP]"}), corpus, tmp_path / "x")
    with pytest.raises(InputError, match=r"has neither tokenizer.json nor sentencepiece.bpe.model: give a model"):
        tokenize(config.model_copy(update={"model": str(corpus)}), corpus, tmp_path / "y")


def test_to_compare_tokenizers_no_more_of_a_file_is_read_than_the_sentences_compared(shards, corpus, monkeypatch):
    read, chunks = [], tokenization._iterate_chunks
    monkeypatch.setattr(tokenization, "CHUNK", 10)
    monkeypatch.setattr(tokenization, "COMPARED_SENTENCES", 25)
    monkeypatch.setattr(
        tokenization, "_iterate_chunks", lambda path: (read.append(len(part)) or part for part in chunks(path))
    )

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

    assert tokenization._choose_sentence_counts(np.array(sizes), config).tolist() == counts


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
    with pytest.raises(InputError, match=r"tokenizer.json cannot be read \(.*: copy its files again"):
        tokenize(TokenizationConfig(model=str(corpus / "manifest.json")), corpus, tmp_path / "out2")
    with pytest.raises(
        InputError, match=r"toy.parquet: not a SentencePiece model .*: set tokenization.model to one, or"
    ):
        tokenize(TokenizationConfig(model=str(corpus / "mono/de/toy.parquet")), corpus, tmp_path / "out3")
