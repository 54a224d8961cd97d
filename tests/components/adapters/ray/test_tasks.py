"""Preparation and tokenization on Ray workers write the same bytes as in one process, even if workers die."""

import functools
import itertools
import os
from pathlib import Path

import pyarrow as pa
import pytest
from kfp import dsl

from components.adapters import storage
from components.adapters.ray import tasks
from components.platform import artifacts, builds
from components.platform.builds import BuildSpec
from components.prepare_corpus import prepare_corpus
from components.tokenize_corpus import tokenize_corpus
from infoxlm_core import manifests
from infoxlm_core.config import PreparationConfig, TokenizationConfig
from infoxlm_core.corpora.parallel import AHEAD, ParallelMap, map_in_process
from infoxlm_core.errors import InputError, WorkerLost
from infoxlm_core.stages import preparation, tokenization
from tests.components.conftest import upload
from tests.helpers import deadly
from tests.toys.text import messages, write_catalogs

pytestmark = pytest.mark.slow
RUSSIAN = [f"Откройте {a} страницу в {b}" for a in ("новую", "старую", "большую") for b in ("архиве", "окне", "сети")]
CHINESE = [f"请打开{a}中的{b}文件" for a in ("档案", "窗口", "网络", "历史") for b in ("新", "旧", "大", "小")]
BAD_PAIRS = [
    ("", "leer"),
    ("Same text", "Same text"),
    ("Short", "Ein viel zu langer Text für ein Wort"),
    messages(0)[0],
]


def write_text(folder: Path) -> Path:
    """Write catalogs of two programs, a table of pairs, a held-out part of it, and text of single languages."""
    write_catalogs(folder, {"first": 300, "second": 150})
    shouted_pairs = [(english.upper(), f"{german}!") for english, german in messages(0)[150:200]]
    pairs = [*messages(0)[:150], *BAD_PAIRS, *shouted_pairs]
    (folder / "pairs.tsv").write_text("".join(f"{english}\t{german}\n" for english, german in pairs))
    (folder / "held.tsv").write_text("".join(f"{english}\t{german}\n" for english, german in messages(0)[60:90]))
    (folder / "ru.txt").write_bytes("".join(f"{line}\n" for line in RUSSIAN * 2).encode() + b"\xd0 broken\n" * 3)
    (folder / "zh.txt").write_text("".join(f"{line}\n" for line in CHINESE))
    return folder


def preparation_config(folder: Path | str) -> PreparationConfig:
    table = {"format": "tsv", "languages": ("en", "de")}
    return PreparationConfig.parse(
        {
            "languages": ("en", "de", "fr", "ru", "zh"),
            "corpora": [
                *({"name": name, "format": "gettext", "path": f"{folder}/{name}"} for name in ("first", "second")),
                *({"name": name, "path": f"{folder}/{name}.tsv", **table} for name in ("pairs", "held")),
                *(
                    {"name": language, "format": "text", "path": f"{folder}/{language}.txt", "languages": (language,)}
                    for language in ("ru", "zh")
                ),
            ],
            "held_out": ("held",),
            "labelled_share": 0.1,
            "cleaning": {"max_invalid_utf8": 0.5},
        }
    )


TOKENIZATION = TokenizationConfig(vocabulary_size=160, character_coverage=1.0, processes=1)


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder, by name."""
    return {str(path.relative_to(folder)): manifests.file_sha256(path) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> Path:
    """Return a folder with text, and the corpus and shards that this process makes of it."""
    base = tmp_path_factory.mktemp("expected")
    write_text(base / "text")
    make_corpus_and_shards(base, base / "text", map_in_process, base / "work")
    return base


def make_corpus_and_shards(base: Path, text: Path, parallel_map: ParallelMap, work: Path) -> None:
    files = deadly.DeadlyFolder(str(work))
    report = preparation.prepare(preparation_config(text), base / "corpus", files, parallel_map)
    manifests.write(base / "corpus", "corpus", preparation.build_facts(report))
    facts = tokenization.tokenize(TOKENIZATION, base / "corpus", base / "shards", parallel_map)
    manifests.write(base / "shards", "shards", facts)


def test_workers_killed_in_every_phase_change_no_byte(ray_here, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenization, "CHUNK", 100)  # so that toy text has many chunks
    (tmp_path / "deadly").mkdir()
    with tasks.start_workers(2) as parallel_map:

        def kill_one_encoder(work, items):
            if getattr(work, "func", work).__name__ == "encode_chunk":
                marker = tmp_path / "deadly/killed-in-encode"
                work = functools.partial(deadly.die_once, function=work, chosen=messages(0)[100][0], marker=marker)
            return parallel_map(work, items)

        make_corpus_and_shards(tmp_path, expected / "text", kill_one_encoder, tmp_path / "deadly/work")

    killed_process_ids = {}
    for marker in (tmp_path / "deadly").glob("killed-in-*"):
        killed_process_ids[marker.name.removeprefix("killed-in-")] = int(marker.read_text())
    assert killed_process_ids.keys() == {"clean_part-000000", "find_duplicates-000000", "write_tables-000000", "encode"}
    assert os.getpid() not in killed_process_ids.values()
    assert digests(tmp_path / "corpus") == digests(expected / "corpus")
    assert digests(tmp_path / "shards") == digests(expected / "shards")
    corpus_files = {"pairs/en-fr/second.parquet", "mono/zh/zh.parquet", "held_out/en-de/held.parquet"}
    assert corpus_files | {"labelled.parquet"} <= digests(tmp_path / "corpus").keys()
    shard_files = {f"{table}/000000.safetensors" for table in ("mono/ru/ru", "pairs/en-de/first")}
    assert shard_files <= digests(tmp_path / "shards").keys()


def number_tables(count: int) -> list[pa.Table]:
    """Return tables of 0 to 2 equal rows, whose values are the positions of the tables."""
    return [pa.table({"number": pa.array([number] * (number % 3), pa.int64())}) for number in range(count)]


def test_results_have_the_order_of_the_chunks_and_errors_keep_their_class(ray_here):
    with tasks.start_workers(2) as parallel_map:
        results = list(parallel_map(deadly.add_process, iter(number_tables(40))))
        with pytest.raises(InputError, match=r"^x\.tsv:7: no such thing: mend it$"):
            list(parallel_map(deadly.refuse, number_tables(3)))

    numbers = [table["number"].to_pylist() for table in results]
    assert numbers == [table["number"].to_pylist() for table in number_tables(40)]
    assert os.getpid() not in pa.concat_tables(results)["who"].to_pylist()


def test_chunks_are_read_only_shortly_before_they_are_processed(ray_here):
    read_count = itertools.count()
    with tasks.start_workers(2) as parallel_map:
        results = parallel_map(deadly.add_process, (table for table in number_tables(200) if next(read_count) >= 0))
        next(results)
        results.close()

    assert next(read_count) <= 2 * (AHEAD + 1)


def test_a_chunk_that_kills_every_worker_ends_the_stage(ray_here):
    with tasks.start_workers(1) as parallel_map, pytest.raises(WorkerLost, match="run again"):
        list(parallel_map(deadly.die, number_tables(1)))


def test_workers_of_a_cluster_share_files_only_through_the_bucket(bucket, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "a cluster")
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "cache"))
    upload(bucket, expected / "text", "text")
    config = preparation_config("s3://models/text").model_dump(mode="json", exclude_none=True)
    spec = BuildSpec("prepare_corpus", "s3://models/store", "corpus", "0123456789abcdef", config, 0, {})

    builds.TEXT_STAGES["prepare_corpus"](spec, None, tmp_path / "out")

    expected_digests = digests(expected / "corpus")
    del expected_digests[manifests.NAME]
    assert digests(tmp_path / "out") == expected_digests
    builds.delete_intermediate_files(spec)
    assert storage.open("s3://models/store").entries() == []


def test_components_reuse_results_until_the_content_of_a_corpus_changes(ray_here, expected, bucket, store, tmp_path):
    def count_corpora() -> int:
        return len(list((store / "corpus").glob("[!.]*")))

    upload(bucket, expected / "text", "text")
    config = preparation_config("s3://models/text").model_dump(mode="json", exclude_none=True)
    tokenization_config = TOKENIZATION.model_dump(mode="json", exclude_none=True)
    corpus = dsl.Dataset(name="corpus", uri=str(tmp_path / "corpus"))
    shards = dsl.Dataset(name="shards", uri=str(tmp_path / "shards"))
    metrics = dsl.Metrics(name="metrics", uri=str(tmp_path / "metrics"))

    prepare_corpus.python_func(config, str(store), corpus, metrics, num_workers=1)
    tokenize_corpus.python_func(tokenization_config, str(store), corpus, shards, metrics, num_workers=1)

    for output, name in ((corpus, "corpus"), (shards, "shards")):
        directory, *_ = artifacts.resolve(output)
        assert manifests.load(directory)["digest"] == manifests.load(expected / name)["digest"]
    prepare_corpus.python_func(config, str(store), corpus, metrics)
    assert count_corpora() == 1
    assert not list((store / "preparing").iterdir())

    bucket.put_object(Key="text/zh.txt", Body="请打开网络中的新窗口\n".encode())
    prepare_corpus.python_func(config, str(store), corpus, metrics)
    assert count_corpora() == 2
