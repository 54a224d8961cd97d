"""A table of hand-written attacks on the readers of user files.

Each row is (target of tests/fuzz, name, content or a change of the valid content, expected error, words of its message).
The error is None where the input is odd but valid.
"""

# ruff: noqa: E501 - a table: one row a line

import bz2
import gzip
import io
import json
import struct
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load, save
from torch import Tensor

from infoxlm_core.errors import (
    ConfigError,
    CorpusTooSmall,
    EncodingError,
    InputError,
    ParallelMismatch,
)

NESTED = b"[" * 100_000
SENTENCE = "Dies ist ein ganz normaler deutscher Satz über das Wetter.\n".encode()


class Attack(NamedTuple):
    """One row of the table."""

    target: str
    name: str
    content: bytes | Callable[[bytes], bytes]
    error: type[Exception] | None
    word: str = ""


def put(**values: Any) -> Callable[[bytes], bytes]:
    """Return a change that sets fields of a JSON object; None deletes the field."""

    def change(content: bytes) -> bytes:
        fields = json.loads(content) | values
        deleted = {name for name, value in values.items() if value is None}
        return json.dumps({name: value for name, value in fields.items() if name not in deleted}).encode()

    return change


def text(old: str, new: str) -> Callable[[bytes], bytes]:
    """Return a change that replaces the first `old`."""
    return lambda content: content.replace(old.encode(), new.encode(), 1)


def flipped(index: int) -> Callable[[bytes], bytes]:
    """Return a change that flips one bit of the byte at this index."""
    return lambda content: content[:index] + bytes([content[index] ^ 4]) + content[index + 1 :]


def stored(change: Callable[[Tensor], Tensor]) -> Callable[[bytes], bytes]:
    """Return a change of the tensors in a safetensors file."""
    return lambda content: save({name: change(tensor) for name, tensor in load(content).items()}, {"format": "pt"})


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def parquet(schema: Any = None, **columns: Any) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns, schema), buffer)
    return buffer.getvalue()


def archive(names: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as zip_file:
        for name, content in names.items():
            zip_file.writestr(name, content)
    return buffer.getvalue()


def tmx(body: str, head: str = "") -> bytes:
    return f'<?xml version="1.0"?>{head}<tmx version="1.4"><body>{body}</body></tmx>'.encode()


def unit(german: str) -> str:
    return f'<tu><tuv xml:lang="en"><seg>A dog</seg></tuv><tuv xml:lang="de"><seg>{german}</seg></tuv></tu>'


PO = b'msgid ""\nmsgstr "Content-Type: text/plain; charset=%s\\nPlural-Forms: nplurals=2; plural=%s;\\n"\n\n'
PAIR = b'msgid "Save the page"\nmsgstr "Speichere die Seite"\n'


def po(charset: bytes = b"utf-8", plural: bytes = b"n != 1", messages: bytes = PAIR) -> bytes:
    return PO % (charset, plural) + messages


def labelled(*rows: str, head: str = "text,label,language,split") -> bytes:
    valid_rows = [
        f"good text {n},{'ab'[n % 2]},{'en' if n % 4 < 2 else 'de'},{'test' if n % 5 == 4 else 'train'}"
        for n in range(40)
    ]
    return "\n".join([head, *valid_rows, *rows, ""]).encode()


def dictionary(value: str, rows: int) -> Any:
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([value]))


CORPORA = [
    ("text", "only newlines", b"\n" * 1000, None),
    ("text", "NUL bytes, U+2028, right-to-left override", "a\0b\nc\u2028d\n\u202eabc\n".encode(), None),
    ("text", "a line of 10 MB", b"a" * 10_000_000 + b"\n" + SENTENCE, None),
    ("text", "UTF-16", SENTENCE.decode().encode("utf-16"), None),
    ("text", "empty", b"", CorpusTooSmall, "is empty"),
    ("gz", "truncated", lambda content: content[:-20], InputError, ""),
    ("gz", "no gz", SENTENCE, InputError, "is damaged"),
    ("gz", "a bomb of 1000:1", gzip.compress(b"a" * 50_000_000), InputError, "DecompressionLimit"),
    ("bz2", "a bomb", bz2.compress(b"a" * 50_000_000), InputError, "DecompressionLimit"),
    ("bz2", "no bz2", SENTENCE, InputError, "is damaged"),
    ("xz", "truncated", cut, InputError, ""),
    ("zst", "no zst", b"\x28\xb5\x2f\xfd" + b"\xff" * 100, InputError, "is damaged"),
    ("lz4", "no lz4", SENTENCE, InputError, "is damaged"),
    ("tsv", "one column", SENTENCE * 50, None),
    ("moses", "a line more", lambda content: content + SENTENCE, ParallelMismatch, "different numbers of lines"),
    ("moses", "CR as line ends", lambda content: content.replace(b"\n", b"\r"), ParallelMismatch, "different numbers"),
    ("tmx", "3,000 nested <hi>", tmx(unit("<hi>" * 3000 + "x" + "</hi>" * 3000)), InputError, "no valid TMX"),
    ("tmx", "20,000 nested elements", tmx("<a>" * 20_000 + "</a>" * 20_000 + unit("Hund")), None),
    ("tmx", "<tu> is the root", b"<tu><tuv/></tu>", InputError, "no valid TMX"),
    ("tmx", "external entity", tmx(unit("&x;"), '<!DOCTYPE t [<!ENTITY x SYSTEM "file:///etc/passwd">]>'), InputError, "Entities"),
    ("tmx", "billion laughs", tmx(unit("&b;"), '<!DOCTYPE t [<!ENTITY a "ha"><!ENTITY b "&a;&a;">]>'), InputError, "Entities"),
    ("tmx", "an external DTD", tmx("", '<!DOCTYPE t [<!ENTITY % p SYSTEM "http://127.0.0.1:9/p"> %p;]>'), InputError, "Entities"),
    ("tmx", "encoding punycode", b'<?xml version="1.0" encoding="punycode"?><tmx>\x80</tmx>', InputError, "no valid TMX"),
    ("tmx", "encoding says UTF-16", b'<?xml version="1.0" encoding="utf-16"?><tmx/>', InputError, "no valid TMX"),
    ("tmx", "HTML", b"<html><br></html>", InputError, "no valid TMX"),
    ("tmx", "a NUL byte", tmx(unit("a\0b")), InputError, "no valid TMX"),
    ("tmx", "cut", cut, InputError, "no valid TMX"),
    ("xliff", "billion laughs", b'<!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b "&a;&a;">]><xliff>&b;</xliff>', InputError, "Entities"),
    ("xliff", "3,000 nested <g>", b"<xliff><trans-unit><source>" + b"<g>" * 3000 + b"</g>" * 3000 + b"</source><target/></trans-unit></xliff>", InputError, "no valid XLIFF"),
    ("xliff", "<unit> is the root", b"<unit><segment/></unit>", InputError, "no valid XLIFF"),
    ("xliff", "cut", cut, InputError, "no valid XLIFF"),
    ("jsonl", "1,000,000 nested lists", b"[" * 1_000_000, InputError, "cannot be read"),
    ("jsonl", "a number of 1,000,000 digits", b'{"en": ' + b"9" * 1_000_000 + b"}", InputError, "cannot be read"),
    ("jsonl", "a line of 10 MB", b'{"en": "' + b"a" * 10_000_000 + b'"}', InputError, "is too long"),
    ("jsonl", "invalid UTF-8", b'{"en": "\xff"}', EncodingError, "not UTF-8"),
    ("jsonl", "cut", cut, InputError, "cannot be read"),
    ("po", "the path of another file", b"/etc/hostname", InputError, "not a readable gettext catalog"),
    ("po", "the path of /dev/zero", b"/dev/zero", InputError, "not a readable gettext catalog"),
    ("po", "a plural that calls", po(plural=b"__import__('os').system('x')"), InputError, "plural"),
    ("po", "a plural of powers", po(plural=b"*".join([b"9999999"] * 300)), InputError, "plural"),
    ("po", "a plural of brackets", po(plural=b"(" * 5000), InputError, "plural"),
    ("po", "charset rot13", po(b"rot13"), InputError, "not a readable gettext catalog"),
    ("po", "unknown charset", po(b"klingon"), None),
    ("po", "invalid UTF-8", po(messages=b'msgid "a"\nmsgstr "\xff"\n'), InputError, "not a readable gettext catalog"),
    ("mo", "the path of another file", b"/etc/hostname", InputError, "not a readable gettext catalog"),
    ("mo", "2^31 strings", struct.pack("<7I", 0x950412DE, 0, 2**31, 28, 28, 0, 28), InputError, "not a readable"),
    ("mo", "offsets beyond the end", struct.pack("<7I", 0x950412DE, 0, 1, 2**31, 2**31, 0, 28), InputError, "not a readable"),
    ("mo", "lengths of 4 GB", struct.pack("<11I", 0x950412DE, 0, 1, 28, 36, 0, 0, 2**32 - 1, 0, 2**32 - 1, 0), InputError, "not a readable"),
    ("mo", "another magic", flipped(0), InputError, "not a readable"),
    ("mo", "cut", cut, InputError, "not a readable"),
    ("wheel", "no zip", SENTENCE, InputError, "not a directory, wheel or zip"),
    ("wheel", "cut", cut, InputError, "not a directory, wheel or zip"),
    ("wheel", "no catalogs", archive({"p/__init__.py": b""}), InputError, "contains no catalog"),
    ("wheel", "zip slip", archive({"../../de/LC_MESSAGES/x.po": po()}), None),
    ("wheel", "a bomb", archive({"p/de/LC_MESSAGES/x.po": b"\0" * 30_000_000}), InputError, "DecompressionLimit"),
    ("wheel", "a flipped bit in a member", flipped(60), InputError, ""),
    ("wheel", "the path of another file", archive({"p/de/LC_MESSAGES/x.po": b"/etc/hostname"}), InputError, "gettext catalog"),
    ("parquet", "no language", parquet(x=["a"]), InputError, "no column for en, de"),
    ("parquet", "integers", parquet(en=[1], de=[2]), InputError, "not text"),
    ("parquet", "binary", parquet(en=[b"\xff"], de=[b"a"]), InputError, "not text"),
    ("parquet", "lists", parquet(en=[["a"]], de=[["b"]]), InputError, "not text"),
    ("parquet", "structs", parquet(en=[{"a": "b"}], de=[{"a": "b"}]), InputError, "not text"),
    ("parquet", "timestamps", parquet(en=pa.array([1], pa.timestamp("s")), de=["a"]), InputError, "not text"),
    ("parquet", "all null", parquet(en=[None, None], de=[None, None]), None),
    ("parquet", "no rows", parquet(en=pa.array([], pa.string()), de=pa.array([], pa.string())), None),
    ("parquet", "a dictionary bomb", parquet(en=dictionary("a" * 1_000_000, 2000), de=dictionary("b", 2000)), None),
    ("parquet", "invalid UTF-8", parquet(en=pa.array([b"\xff"]).view(pa.string()), de=["a"]), InputError, ": write it again"),
    ("parquet", "cut", cut, InputError, ": write it again"),
    ("parquet", "a CSV", b"en,de\na,b\n", InputError, ": write it again"),
    ("parquet", "a flipped bit", flipped(40), InputError, ""),
]  # fmt: skip

TASKS = [
    ("labelled-csv", "a column twice", labelled(head="text,text,language,split"), InputError, "occurs twice"),
    ("labelled-csv", "a missing column", labelled(head="text,foo,language,split"), InputError, "no column 'label'"),
    ("labelled-csv", "empty", b"", InputError, "0 fields"),
    ("labelled-csv", "an empty text", labelled(",a,en,train"), InputError, "text is empty"),
    ("labelled-csv", "a text of blanks", labelled("  ,a,en,train"), InputError, "text is empty"),
    ("labelled-csv", "the header again", labelled("text,label,language,split"), InputError, "split is 'split'"),
    ("labelled-csv", "a ragged row", labelled("a,b"), InputError, "2 fields, but the first row has 4"),
    ("labelled-csv", "an open quote", labelled('"a,b,en,train'), InputError, "Quote the text"),
    ("labelled-csv", "a field of 200 kB", labelled("x" * 200_000 + ",a,en,train"), InputError, "Quote the text"),
    ("labelled-csv", "UTF-16", labelled().decode().encode("utf-16"), InputError, "Save it as UTF-8"),
    ("labelled-csv", "semicolons", labelled().replace(b",", b";"), InputError, "fields"),
    ("labelled-csv", "split Train", labelled("x,a,en,Train"), InputError, "split is 'Train'"),
    ("labelled-csv", "labels that are names and numbers", labelled("x,entailment,en,train", "y,0,en,train"), InputError, "others numbers"),
    *(
        ("labelled-csv", f"language {code[:20]}", labelled(f"x,a,{code},train"), InputError, "is not a language code")
        for code in ("<script>", "=HYPERLINK(1)", "../../x", "$\\frac{", "d;e", "..", "mean", "a" * 300, "a|b")
    ),
    ("labelled-tsv", "invalid UTF-8", b"text\tlabel\n\xff\ta\n", InputError, "Save it as UTF-8"),
    ("labelled-parquet", "binary text", parquet(text=[b"\xff"], label=["a"], language=["en"]), InputError, "no column 'text'"),
    ("labelled-parquet", "invalid UTF-8", parquet(text=pa.array([b"\xff"]).view(pa.string()), label=["a"], language=["en"]), InputError, "save it as UTF-8"),
    ("labelled-parquet", "lists as labels", parquet(text=["a"], label=[["x"]], language=["en"]), InputError, "no column 'label'"),
    ("labelled-parquet", "no label", parquet(text=["a"], label=[float("nan")], language=["en"]), InputError, "label is empty"),
    ("labelled-parquet", "garbage", b"PAR1 garbage", InputError, "not readable"),
    ("labelled-parquet", "empty", b"", InputError, "not readable"),
    *(
        ("squad", f"a file that is {content[:20]!r}", content, InputError, "Give SQuAD's JSON format")
        for content in (b"", b"[]", b"{}", b"5", b"null", NESTED, b'{"data": {}}', b"\xff\xfe{", b'{"data": [5]}')
    ),
    ("squad", "no question", b'{"data": []}', InputError, "no question"),
    ("squad", "a question without answers", text('"answers"', '"x"'), InputError, "answers: Field required"),
    ("squad", "a blank paragraph", text('"context": "', '"context": " ", "x": "'), InputError, "empty paragraph"),
    ("squad", "half a character", text('"version"', '"\\ud800"'), InputError, "JSON"),
    ("squad", "an answer that is null", text('"answer_start": ', '"answer_start": null, "x": '), InputError, "answer_start"),
    ("squad", "an offset NaN", text('"answer_start": ', '"answer_start": NaN, "x": '), InputError, "answer_start"),
    ("squad", "an offset of 0.5", text('"answer_start": ', '"answer_start": 0.5, "x": '), InputError, "answer_start"),
    ("squad", "an empty answer", text('"text": "', '"text": " ", "x": "'), InputError, "empty answer"),
    ("squad", "text behind the end", lambda content: content + b"x", InputError, "JSON"),
    ("aligned", "three columns", b"a\tb\tc\n", InputError, "not two sentences"),
    ("aligned", "an empty line", b"a\tb\n\n", InputError, "is empty"),
    ("aligned", "a line of 1 MB", b"a" * 1_100_000 + b"\tb\n", InputError, "too long"),
    ("aligned", "UTF-16", "a\tb\n".encode("utf-16"), EncodingError, "not UTF-8"),
    ("aligned-lines", "a line less", lambda content: content[: content.rindex(b"\n", 0, -1) + 1], ParallelMismatch, "lines"),
    ("held-out", "nulls", parquet(source=["a", None], target=["b", "c"]), InputError, "has no source or no target text"),
    ("held-out", "blanks", parquet(source=["a", " "], target=["b", "c"]), InputError, "has no source or no target text"),
    ("held-out", "integers", parquet(source=[1], target=[2]), InputError, "not text"),
    ("held-out", "invalid UTF-8", parquet(source=pa.array([b"\xff"]).view(pa.string()), target=["a"]), InputError, "cannot be read"),
    ("held-out", "another column", parquet(x=["a"], target=["b"]), InputError, "columns source and target"),
    ("entities", "no tab", b"Berlin B-LOC\n", InputError, "is not a word, a tab"),
    ("entities", "a tag without B or I", b"we\tO\nanna\tPER\n", InputError, "train-en.tsv:2: 'anna\\tPER' is not a word"),
    ("entities", "three columns", b"we\tO\tO\n", InputError, "train-en.tsv:1: "),
    ("entities", "no tags, as in XTREME's hidden tests", b"we\n", InputError, "'we' is not a word"),
    ("entities", "invalid UTF-8", b"\xff\tO\n", EncodingError, "not UTF-8"),
]  # fmt: skip


def yaml(line: str) -> Callable[[bytes], bytes]:
    """Return a change that appends a line to a config."""
    return lambda content: content + f"\n{line}\n".encode()


CONFIGS = [
    *(
        ("run-config", f"a file that is {content[:16]!r}", content, ConfigError, word)
        for content, word in (
            (b"", "must contain a mapping"), (b"# nothing", "must contain a mapping"), (b"[1]", "must contain a mapping"),
            (b"5", "must contain a mapping"),
            (b"\xff\xfe\x00", "not UTF-8"), (b"a:\n\t- b", "cannot start any token"), (b"[" * 1500, ""), (b"{a: " * 1500, ""),
            (b"x" * 300_000, "more than"), (b"a: &x 1\nb: *x", "anchors"), (b"<<: {a: 1}", ""), (b"a: 1\n---\nb: 2", ""),
            (b"a: !!python/object/apply:os.system [id]", "tag"), (b"a: !!binary aGVsbG8=", ""), (b"a: 1\na: 2", "occurs twice"),
            (b"".join(b"k%d: 1\n" % n for n in range(15_000)), "Field required"), (b"a: " + b"9" * 5000, ""),
        )
    ),
    *(
        ("override", change, change.encode(), ConfigError, word)
        for change, word in (
            ("pretraining", "write section.name=value"), ("preparation.corpora.0.name=x", "not a section"),
            ("num_workers.x=1", "not a section"), ("=1", ""), ("pretraining..a=1", "unknown name"), ("a=[1", ""),
            ("a=!!python/object/apply:os.getcwd []", "tag"), ("a=" + "[" * 1500, ""), ("a=&x 1", "anchors"),
            ("num_workers=1000000", "must not exceed"), ("num_workers=true", "valid integer"),
            ("pretraining.optimization.steps=1:30", "valid integer"), ("pretraining.optimization.steps=-1", "greater than 0"),
            ("pretraining.optimization.steps=.nan", ""),
            ("pretraining.optimization.learning_rate=.inf", "finite"),
            ("pretraining.optimization.learning_rate=1e309", "finite"),
            ("pretraining.objectives.mlm=1e300", "3.4e38"),
            ("pretraining.contrast.queue_size=0", "greater than 0"),
            ("pretraining.contrast.temperature=0", "greater than 0"), ("pretraining.contrast.momentum=1.5", "less than or equal"),
            ("pretraining.objectives.mask_ratio=1.0000001", "less than or equal"), ("pretraining.model.heads=7", "multiple"),
            ("preparation.languages=[en, en, de]", ""),
            ("registration.name=o'brien", "match pattern"), ('registration.name="a\\n"', "match pattern"),
            ("registration.gate={retrieval/served: .nan}", "finite"), ("registration.gate={retrieval/served: 5}", ""),
            ("registration.gate={foo/bar: 0.1}", ""),
        )
    ),
    ("override", "0400 is four hundred", b"pretraining.optimization.steps=0400", None),
    ("cluster-config", "an image by tag", text("@sha256:", ":"), ConfigError, "not an image by digest"),
    ("cluster-config", "a list", b"[]", ConfigError, "must contain a mapping"),
    ("suite-config", "a list", b"[]", ConfigError, "must contain a mapping"),
    ("suite-config", "no task", b"models: {a: b}\ntasks: {}", ConfigError, "tasks"),
    ("variants", "a list", b"[]", ConfigError, "expected a mapping"),
    ("variants", "a variant that is 5", b"a: 5", ConfigError, "not a mapping of overrides"),
]  # fmt: skip

ODD_JSON = (b"", b"{", b"[]", b"{}", b"5", b"null", b'"x"', NESTED, b"\xff\xfe", b"\0" * 300, b'{"a": 1}')


MODELS = [
    *(
        (target, f"a file that is {content[:12]!r}", content, InputError, "")
        for target in ("model-config", "model-start", "tokenizer")
        for content in ODD_JSON
    ),
    *(
        (target, f"{name}: {value!r:.20}", put(**{name: value}), InputError, "")
        for target in ("model-config", "model-start")
        for name, value in (
            ("hidden_size", -5), ("hidden_size", "32"), ("hidden_size", 2**40), ("num_attention_heads", 0),
            ("num_attention_heads", 7), ("num_hidden_layers", 10**9), ("num_hidden_layers", -1), ("vocab_size", 10**12),
            ("vocab_size", None), ("max_position_embeddings", "x"), ("type_vocab_size", [1]), ("pad_token_id", "x"),
            ("model_type", "evil"), ("model_type", 5), ("auto_map", {"AutoModel": "x.Evil"}), ("infoxlm", 5),
            ("infoxlm", {"layer": 1}), ("infoxlm", []), ("layer_norm_eps", float("nan")), ("layer_norm_eps", -1.0),
            ("layer_norm_eps", 1e300),
        )
    ),
    ("model-config", "a dropout of NaN", put(hidden_dropout_prob=float("nan")), InputError, ""),
    ("model-config", "an unknown activation", put(hidden_act="evil"), InputError, ""),
    ("model-config", "architectures os.system", put(architectures=["os.system"]), None),
    *(
        (target, name, stored(change), InputError, word)
        for target in ("model-weights", "start-weights", "projection", "start-projection")
        for name, change, word in (
            ("whole numbers", lambda tensor: tensor.to(torch.int64), "stored as I64"),
            ("8 bits", lambda tensor: tensor.to(torch.float8_e4m3fn), "stored as F8_E4M3"),
            ("NaN", lambda tensor: tensor * torch.nan, "contains NaN"),
        )
    ),
    *(
        (target, name, content, InputError, "")
        for target in ("model-weights", "start-weights", "projection", "start-projection")
        for name, content in (
            ("empty", b""), ("cut", cut), ("a header of 2^63", b"\xff" * 7 + b"\x7f{}"), ("garbage", b"x" * 500),
            ("a header of 100 MB", struct.pack("<Q", 100_000_000) + b"{}"), ("a pickle", b"\x80\x04cos\nsystem\n."),
            ("another tensor", struct.pack("<Q", 58) + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}    ' + bytes(4)),
        )
    ),
    ("projection", "another shape", save({"projection": torch.eye(3)}), InputError, "(3, 3), not (16, 16)"),
    ("tokenizer", "a regex that backtracks", put(pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}), None),
    ("tokenizer-config", "auto_map", put(auto_map={"AutoTokenizer": ["x.Evil", None]}), InputError, "auto_map"),
    ("tokenizer-config", "a chat template that imports", put(chat_template="{{ ''.__class__.__import__('os') }}"), None),
    ("tokenizer-config", "no padding token", put(pad_token=None), InputError, ""),
    *(
        ("sentencepiece", name, content, InputError, "")
        for name, content in (("empty", b""), ("garbage", b"x" * 500), ("cut", cut))
    ),
    ("fairseq", "a pickle that calls", b"\x80\x04cos\nsystem\n(S'id'\ntR.", InputError, "without running code"),
    ("fairseq", "cut", cut, InputError, "without running code"),
]  # fmt: skip

ATTACKS = [Attack(*row) for row in (*CORPORA, *TASKS, *CONFIGS, *MODELS)]
