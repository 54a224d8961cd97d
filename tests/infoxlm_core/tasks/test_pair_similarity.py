"""`cleaning.similarity` drops training pairs whose sides have unlike vectors."""

import functools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch

from infoxlm_core.config import PreparationConfig
from infoxlm_core.corpora.parallel import in_process
from infoxlm_core.stages import preparation
from infoxlm_core.tasks.embedding import embed_sentences
from tests.helpers.files import Folder
from tests.toys.exports import save_encoder
from tests.toys.text import messages

PAIRS = messages(0)[:60]


def write_pairs(path: Path, pairs: list[tuple[str, str]]) -> dict:
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    return {"name": path.stem, "format": "tsv", "path": str(path), "languages": ["en", "de"]}


def read_pairs(folder: Path) -> list[tuple[str, str]]:
    return [tuple(row.values()) for row in pq.read_table(folder / "out/pairs/en-de/web.parquet").to_pylist()]


def replace_encoder(config: PreparationConfig, encoder: str) -> PreparationConfig:
    if not config.cleaning.similarity:  # a task that only reads text
        return config
    similarity = config.cleaning.similarity.model_copy(update={"encoder": encoder})
    return config.model_copy(update={"cleaning": config.cleaning.model_copy(update={"similarity": similarity})})


def test_pairs_below_the_minimum_are_dropped_alike_by_any_number_of_workers(tmp_path):
    encoder = save_encoder(tmp_path / "encoder", "e5")
    vectors = [embed_sentences(encoder, texts) for texts in zip(*PAIRS, strict=True)]
    cosines = torch.cosine_similarity(*vectors).numpy()
    lowest = np.sort(cosines)[:22]
    assert lowest[21] - lowest[20] > 1e-5  # so that rounding does not decide
    similarity = {"encoder": str(encoder), "minimum": float(lowest[20] + lowest[21]) / 2}
    config = PreparationConfig.parse({
        "languages": ["en", "de"], "held_out": ["test"], "cleaning": {"similarity": similarity},
        "corpora": [write_pairs(tmp_path / "web.tsv", PAIRS), write_pairs(tmp_path / "test.tsv", messages(0)[200:240])],
    })  # fmt: skip

    files = Folder(str(tmp_path / "here/work"))
    report = preparation.prepare(config, tmp_path / "here/out", files, in_process)
    files = Folder(str(tmp_path / "workers/work"))
    stored = replace_encoder(config, "s3://models/toy")
    localise = functools.partial(replace_encoder, encoder=str(encoder))  # as workers that fetch the encoder
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        report_of_workers = preparation.prepare(stored, tmp_path / "workers/out", files, pool.map, localise)

    expected = [pair for pair, cosine in zip(PAIRS, cosines, strict=True) if cosine > similarity["minimum"]]
    assert read_pairs(tmp_path / "here") == expected
    assert report["totals"]["pairs"] == {"kept": 39, "not_similar": 21, "read": 60}
    assert report["totals"]["held_out"] == {"kept": 40, "read": 40}  # the encoder does not choose the test
    assert report_of_workers == report
    for name in ("pairs/en-de/web.parquet", "mono/de/web.parquet", "held_out/en-de/test.parquet"):
        assert (tmp_path / "here/out" / name).read_bytes() == (tmp_path / "workers/out" / name).read_bytes()
