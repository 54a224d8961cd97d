"""Preparation and tokenization on real Ray workers write the bytes that one process writes, whatever happens."""

import functools
import itertools
import os
from pathlib import Path

import pyarrow as pa
import pytest
from kfp import dsl

from components.adapters import storage
from components.adapters.ray import tasks
from components.platform import artifacts, stage_work
from components.platform.stage_work import Work
from components.prepare_corpus import prepare_corpus
from components.tokenize_corpus import tokenize_corpus
from infoxlm_core import manifests
from infoxlm_core.config import PreparationConfig, TokenizationConfig
from infoxlm_core.corpora.parallel import AHEAD, ParallelMap, in_process
from infoxlm_core.errors import InputError, WorkerLost
from infoxlm_core.stages import preparation, tokenization
from tests.components.conftest import upload
from tests.helpers import deadly
from tests.toys.text import messages, write_catalogs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
RUSSIAN = [f"Откройте {a} страницу в {b}" for a in ("новую", "старую", "большую") for b in ("архиве", "окне", "сети")]
CHINESE = [f"请打开{a}中的{b}文件" for a in ("档案", "窗口", "网络", "历史") for b in ("新", "旧", "大", "小")]
SPOILT = [("", "leer"), ("Same text", "Same text"), ("Short", "Ein viel zu langer Text für ein Wort"), messages(0)[0]]


def write_text(folder: Path) -> Path:
    """Catalogs of two programs, a table of pairs, one of them kept for evaluation, and text of single languages."""
    write_catalogs(folder, {"first": 300, "second": 150})
    pairs = [*messages(0)[:150], *SPOILT, *((a.upper(), f"{b}!") for a, b in messages(0)[150:200])]
    (folder / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs))
    (folder / "kept.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in messages(0)[60:90]))
    (folder / "ru.txt").write_bytes("".join(f"{a}\n" for a in RUSSIAN * 2).encode() + b"\xd0 broken\n" * 3)
    (folder / "zh.txt").write_text("".join(f"{a}\n" for a in CHINESE))
    return folder


def preparation_config(folder: Path | str) -> PreparationConfig:
    table = {"format": "tsv", "languages": ("en", "de")}
    return PreparationConfig.parse({
        "languages": ("en", "de", "fr", "ru", "zh"),
        "corpora": [
            *({"name": name, "format": "gettext", "path": f"{folder}/{name}"} for name in ("first", "second")),
            *({"name": name, "path": f"{folder}/{name}.tsv", **table} for name in ("pairs", "kept")),
            *({"name": n, "format": "text", "path": f"{folder}/{n}.txt", "languages": (n,)} for n in ("ru", "zh")),
        ],
        "held_out": ("kept",), "labelled_share": 0.1, "cleaning": {"max_invalid_utf8": 0.5},
    })  # fmt: skip


TOKENIZATION = TokenizationConfig(vocabulary_size=160, character_coverage=1.0, processes=1)


def contents(folder: Path) -> dict[str, str]:
    """Name and SHA-256 of every file below a folder."""
    return {str(path.relative_to(folder)): manifests.file_sha256(path) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def made_here(tmp_path_factory) -> Path:
    """Text, and the corpus and shards that this process makes of it, with chunks of the usual size."""
    base = tmp_path_factory.mktemp("here")
    write_text(base / "text")
    make(base, base / "text")
    return base


def make(base: Path, text: Path, spread: ParallelMap = in_process, work: Path | None = None) -> None:
    files = deadly.DeadlyFolder(str(work or base / "work"))
    report = preparation.prepare(preparation_config(text), base / "corpus", files, spread)
    manifests.write(base / "corpus", "corpus", preparation.facts(report))
    facts = tokenization.tokenize(TOKENIZATION, base / "corpus", base / "shards", spread)
    manifests.write(base / "shards", "shards", facts)


def test_workers_killed_in_three_phases_and_in_tokenization_change_no_byte(ray_here, made_here, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenization, "CHUNK", 100)  # so that toy text is many chunks
    (tmp_path / "deadly").mkdir()
    with tasks.workers(2) as spread:

        def kill_once(work, items):
            if getattr(work, "func", work).__name__ == "encode_chunk":
                marker = tmp_path / "deadly/killed-in-encode"
                work = functools.partial(deadly.die_once, work=work, chosen=messages(0)[100][0], marker=marker)
            return spread(work, items)

        make(tmp_path, made_here / "text", kill_once, tmp_path / "deadly/work")

    markers = (tmp_path / "deadly").glob("killed-in-*")
    victims = {path.name.removeprefix("killed-in-"): int(path.read_text()) for path in markers}
    assert victims.keys() == {"clean-000000", "reduce-000000", "write-000000", "encode"}
    assert os.getpid() not in victims.values()
    for kind in ("corpus", "shards"):
        assert contents(tmp_path / kind) == contents(made_here / kind)
    names = contents(tmp_path)
    for name in ("pairs/en-fr/second.parquet", "mono/zh/zh.parquet", "held_out/en-de/kept.parquet", "labelled.parquet"):
        assert f"corpus/{name}" in names
    assert {f"shards/{table}/000000.safetensors" for table in ("mono/ru/ru", "pairs/en-de/first")} <= names.keys()


def numbers(count: int) -> list[pa.Table]:
    return [pa.table({"number": pa.array([number] * (number % 3), pa.int64())}) for number in range(count)]


def test_chunks_come_back_in_order_even_empty_ones_are_read_as_they_are_needed_and_our_errors_are_themselves(ray_here):
    read = itertools.count()
    with tasks.workers(2) as spread:
        found = list(spread(deadly.add_process, iter(numbers(40))))
        results = spread(deadly.add_process, (table for table in numbers(200) if next(read) >= 0))
        next(results)
        ahead = next(read)  # so that memory does not grow with the corpus
        results.close()
        with pytest.raises(InputError, match=r"^x\.tsv:7: no such thing: mend it$"):
            list(spread(deadly.refuse, numbers(3)))

    assert ahead <= 2 * (AHEAD + 1)
    assert [table["number"].to_pylist() for table in found] == [table["number"].to_pylist() for table in numbers(40)]
    assert os.getpid() not in {who for table in found for who in table["who"].to_pylist()}


def test_a_chunk_that_kills_every_worker_ends_the_stage(ray_here):
    with tasks.workers(1) as spread, pytest.raises(WorkerLost, match="run again"):
        list(spread(deadly.die, numbers(1)))


def test_no_workers_means_here():
    with tasks.workers(0) as spread:
        assert spread is None


def test_workers_of_a_cluster_share_only_a_bucket(bucket, made_here, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "a cluster")
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "cache"))
    upload(bucket, made_here / "text", "text")
    config = preparation_config("s3://models/text").model_dump(mode="json", exclude_none=True)
    work = Work("prepare_corpus", "s3://models/store", "corpus", "0123456789abcdef", config, 0, {})

    stage_work.TEXT_STAGES["prepare_corpus"](work, None, tmp_path / "out")

    expected = {name: digest for name, digest in contents(made_here / "corpus").items() if name != manifests.NAME}
    assert contents(tmp_path / "out") == expected
    stage_work.delete_intermediate_files(work)
    assert storage.open("s3://models/store").entries() == []


def test_the_components_take_corpora_from_s3_and_know_them_again_by_content(
    ray_here, made_here, bucket, store, tmp_path
):
    upload(bucket, made_here / "text", "text")
    config = preparation_config("s3://models/text").model_dump(mode="json", exclude_none=True)
    kinds = {"corpus": dsl.Dataset, "shards": dsl.Dataset, "metrics": dsl.Metrics}
    outputs = {name: kind(name=name, uri=str(tmp_path / name)) for name, kind in kinds.items()}
    corpus, shards, metrics = outputs.values()

    prepare_corpus.python_func(config, str(store), corpus, metrics, num_workers=1)
    tokenize_corpus.python_func(TOKENIZATION.model_dump(mode="json", exclude_none=True), str(store), corpus, shards,
                                metrics, num_workers=1)  # fmt: skip

    made = {name: manifests.load(artifacts.resolve(outputs[name])[0])["digest"] for name in ("corpus", "shards")}
    assert made == {name: manifests.load(made_here / name)["digest"] for name in made}
    prepare_corpus.python_func(config, str(store), corpus, metrics)
    assert len(list((store / "corpus").glob("[!.]*"))) == 1
    assert not list((store / "preparing").iterdir())

    bucket.put_object(Key="text/zh.txt", Body="请打开网络中的新窗口\n".encode())
    prepare_corpus.python_func(config, str(store), corpus, metrics)
    assert len(list((store / "corpus").glob("[!.]*"))) == 2
