"""Corpora become shards with the ids of XLM-R, equal in `transformers` and for any number of processes."""

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
from infoxlm_core.model.huggingface.any_encoder import find_default_prefix
from infoxlm_core.model.huggingface.tokenizers import MODEL
from infoxlm_core.stages import tokenization
from infoxlm_core.stages.tokenization import tokenize
from tests.toys.corpus import tokenized, write_corpus
from tests.toys.text import messages

UNUSUAL_LINES = [
    "Сохранить изменения", "保存并关闭", "変更を保存する", "تغییرات را ذخیره کنید", "שמור שינויים", "परिवर्तन सहेजें",
    "บันทึกการเปลี่ยนแปลง", "변경 사항을 저장", "Đã lưu các thay đổi", "naïve ﬁne Ⅷ", "x</s>y <mask> [SEP] [MASK]",
    "🙂 100 %",
]  # fmt: skip


def read_row(table: Table, row: int) -> list[int]:
    return table.tokens[table.offsets[row] : table.offsets[row + 1]].tolist()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    german = messages(0)
    unusual = [
        "  two  spaces\u00a0here ",
        "<b>%(name)s</b> & <s>old</s>",
        "Ⅷ ﬁne ½ ①",
        "emoji 🙂 here",
        "nananana na nan anan",
    ]
    sentences = {"de": [b for _, b in german[:300]], "en": [a for a, _ in german[:300]] + unusual * 3}
    return write_corpus(tmp_path_factory.mktemp("corpus"), sentences, {"en-de": german[:200]})


@pytest.fixture(scope="module")
def shards(corpus, tmp_path_factory) -> Path:
    return tokenized(TokenizationConfig(vocabulary_size=100, processes=1), corpus, tmp_path_factory.mktemp("shards"))


def test_ids_follow_the_layout_of_xlm_r(shards):
    tokenizer = AutoTokenizer.from_pretrained(shards / "tokenizer")

    assert tokenizer.convert_tokens_to_ids(["<s>", "<pad>", "</s>", "<unk>", "<mask>"]) == [0, 1, 2, 3, 99]
    assert len(tokenizer) == 100
    ids = tokenizer("Open the file", "now")["input_ids"]
    assert ids[0] == 0 and ids[-1] == 2 and ids.count(2) == 3  # <s> a </s> </s> b </s>
    assert tokenizer.decode(tokenizer("Öffne der Datei")["input_ids"], skip_special_tokens=True) == "Öffne der Datei"


def test_shards_contain_the_ids_of_transformers(shards, corpus):
    tokenizer = AutoTokenizer.from_pretrained(shards / "tokenizer")
    opened_shards = open_shards(shards)
    texts = pq.read_table(corpus / "mono/de/toy.parquet")["text"].to_pylist()

    table = opened_shards.mono["de"][0].read_text()
    pairs = opened_shards.pairs["en-de"][0].read_pairs()

    for row, text in enumerate(texts):
        assert read_row(table, row) == [*tokenizer(text, add_special_tokens=False)["input_ids"], 2]
    assert len(pairs) == len(set(pairs.sentence_ids.tolist())) == 200
    assert pairs.sentence_ids.view("uint64")[0] == sentence_id(messages(0)[0][0])


def test_sentence_id_ignores_case_and_spaces():
    assert sentence_id("Save  CHANGES") == sentence_id("save changes") != sentence_id("save change")


@pytest.mark.slow
def test_shards_do_not_depend_on_the_number_of_processes(shards, corpus, tmp_path):
    repeated = tokenized(TokenizationConfig(vocabulary_size=100, processes=3), corpus, tmp_path)

    assert manifests.load(repeated)["digest"] == manifests.load(shards)["digest"]


def test_given_sentencepiece_model_is_used_unchanged(shards, corpus, tmp_path):
    model = shards / "tokenizer" / MODEL
    assert "reserved" not in manifests.load(shards)["facts"]
    known_corpus = shutil.copytree(corpus, tmp_path / "corpus")
    manifests.write(known_corpus, "corpus", {"reserved": ["ab", "cd"]})

    facts = tokenize(TokenizationConfig(processes=1, model=str(model)), known_corpus, tmp_path / "shards")

    assert (tmp_path / "shards/tokenizer" / MODEL).read_bytes() == model.read_bytes()
    assert facts["vocabulary_size"] == 100
    assert facts["reserved"] == ["ab", "cd"]  # files of test sets whose sentences are not in the text
    with pytest.raises(TokenizerMismatch, match=r"gives 100 ids, tokenization\.vocabulary_size says 99"):
        tokenize(TokenizationConfig(vocabulary_size=99, model=str(model)), corpus, tmp_path / "x")


def write_foreign_tokenizer(kind: str, directory: Path) -> Path:
    """Write the tokenizer of an XLM-R or a BERT as transformers saves it, with a truncation that its users undo."""
    texts = [text for pair in messages(0) for text in pair] + UNUSUAL_LINES * 20
    if kind == "xlmr":
        model = io.BytesIO()
        SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=model, vocab_size=200, minloglevel=2)
        proto = sentencepiece_pb2.ModelProto.FromString(model.getvalue())
        pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
        pieces += [(piece.piece, piece.score) for piece in proto.pieces[3:]] + [("<mask>", 0.0)]
        character_map = proto.normalizer_spec.precompiled_charsmap
        XLMRobertaTokenizer(vocab=pieces, _spm_precompiled_charsmap=character_map).save_pretrained(directory)
        (directory / MODEL).write_bytes(model.getvalue())
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


@pytest.mark.parametrize(("kind", "special_ids"), [("xlmr", (0, 2, 1, 3)), ("bert", (3, 4, 0, 2))])
@pytest.mark.parametrize("prefix", ["", "query: "])
def test_tokenizer_of_another_model_gives_the_same_ids_in_training_and_export(tmp_path, kind, special_ids, prefix):
    source = write_foreign_tokenizer(kind, tmp_path / "start")
    tokenizer = AutoTokenizer.from_pretrained(source)
    size = len(tokenizer)
    texts = [text for pair in messages(0)[:20] for text in pair] + UNUSUAL_LINES
    sentences = {"de": [*texts, "\u200b"]}  # a text without tokens is dropped
    corpus = write_corpus(tmp_path / "corpus", sentences, {"de-en": list(zip(texts, texts, strict=True))})
    config = TokenizationConfig(vocabulary_size=size, model=str(source), processes=1, prefix=prefix)

    shards = open_shards(tokenized(config, corpus, tmp_path / "shards"))
    encoder = EncoderSize(vocabulary=size, layers=1, hidden=8, ffn=8, heads=1, positions=40)
    model = InfoXLM(encoder, 1, "mean", True)
    pretrained.export(model, shards.directory / "tokenizer", tmp_path / "export", prefix=shards.prefix)

    vocabulary = shards.vocabulary
    assert (vocabulary.begin, vocabulary.end, vocabulary.pad, vocabulary.unk) == special_ids
    assert vocabulary.mask == tokenizer.mask_token_id
    assert vocabulary.is_xlm_r == (kind == "xlmr")
    table = shards.mono["de"][0].read_text()
    pairs = shards.pairs["de-en"][0].read_pairs()
    assert len(table) == len(pairs) == len(texts)
    exported_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    for row, text in enumerate(texts):
        stored_ids = read_row(table, row)
        assert stored_ids == [*read_row(pairs.source, row), vocabulary.end]
        if not any(token in text for token in tokenizer.all_special_tokens):
            assert exported_tokenizer(prefix + text)["input_ids"] == [vocabulary.begin, *stored_ids]
        else:  # transformers reads a written special token as the token, which the text of a user does not mean
            assert {vocabulary.begin, vocabulary.end, vocabulary.mask}.isdisjoint(stored_ids[:-1])
    assert find_default_prefix(SimpleNamespace(config=AutoConfig.from_pretrained(tmp_path / "export"))) == prefix
    for path in source.iterdir():
        if path.name != "tokenizer_config.json":
            assert (tmp_path / "export" / path.name).read_bytes() == path.read_bytes()


def test_tokenizer_json_without_other_files_is_sufficient(tmp_path):
    source = write_foreign_tokenizer("bert", tmp_path / "start")
    size = len(AutoTokenizer.from_pretrained(source))
    lone_file = shutil.copy(source / "tokenizer.json", tmp_path / "bert.json")
    corpus = write_corpus(tmp_path / "corpus", {"de": UNUSUAL_LINES}, {})
    config = TokenizationConfig(vocabulary_size=size, model=str(lone_file), processes=1)

    shards = tokenized(config, corpus, tmp_path / "shards")

    vocabulary = open_shards(shards).vocabulary
    special_ids = (vocabulary.begin, vocabulary.end, vocabulary.pad, vocabulary.unk, vocabulary.mask)
    assert special_ids == (3, 4, 0, 2, 5)
    assert AutoTokenizer.from_pretrained(shards / "tokenizer")("Open")["input_ids"] == [3, size - 2, 4]
    with pytest.raises(ConfigError, match=r"prefix contains the special token \[SEP\]: remove it"):
        tokenize(config.model_copy(update={"prefix": "a[SEP]"}), corpus, tmp_path / "x")


@pytest.mark.parametrize(
    ("rows", "counts"),
    [
        ([100_000, 20_000, 3_000], [42_949, 26_501, 15_000]),  # 51, 31 and 18 %, as alpha says: the last 5 times
        ([100_000, 20_000, 10], [71_429, 44_074, 50]),  # 10 sentences do not reduce the text of the others
        ([2_000_000, 1_000_000], [551_800, 448_200]),
        ([7], [7]),
    ],
)
def test_small_languages_are_repeated_until_their_share_is_that_of_alpha(rows, counts):
    config = TokenizationConfig(vocabulary_size=100, alpha=0.3)

    assert tokenization._choose_sentence_counts(np.array(rows), config).tolist() == counts


def test_every_sentence_of_a_small_language_is_repeated_equally_often(tmp_path):
    english = [text for text, _ in messages(0)][:40]
    german = [text for _, text in messages(0)][:4]
    corpus = write_corpus(tmp_path, {"en": english, "de": german}, {})

    drawn = Counter(tokenization._draw_sentences(TokenizationConfig(vocabulary_size=100, alpha=0.0), corpus))

    assert [drawn[text] for text in german] == [5, 5, 5, 5]
    assert sorted(drawn[text] for text in english) == [0] * 20 + [1] * 20


@pytest.mark.parametrize(
    ("fields", "error_class", "message"),
    [
        ({"vocabulary_size": 5000}, CorpusTooSmall, r"at most \d+ are possible\): lower tokenization.vocabulary_size"),
        (
            {"vocabulary_size": 10},
            CorpusTooSmall,
            r"alone need (\d+)\): raise tokenization.vocabulary_size to \1 or more, or lower tokenization.character_",
        ),
        ({"model": "manifest.json"}, InputError, r"tokenizer.json cannot be read \(.*: copy its files again"),
        ({"model": "mono/de/toy.parquet"}, InputError, r"toy.parquet: not a SentencePiece model .*: set tokenization"),
        ({"model": "mono"}, InputError, "has neither tokenizer.json nor sentencepiece.bpe.model: give a model"),
    ],
)
def test_unusable_tokenizer_or_vocabulary_size_is_refused(corpus, tmp_path, fields, error_class, message):
    if "model" in fields:
        fields = {"model": str(corpus / fields["model"])}

    with pytest.raises(error_class, match=message):
        tokenize(TokenizationConfig(**fields), corpus, tmp_path / "out")


def test_folder_that_is_no_prepared_corpus_is_refused(tmp_path):
    with pytest.raises(InputError, match="run prepare_corpus first"):
        tokenize(TokenizationConfig(), tmp_path, tmp_path / "out")
