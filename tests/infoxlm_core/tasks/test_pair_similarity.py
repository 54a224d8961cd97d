"""`cleaning.similarity` drops training pairs whose two sides have dissimilar vectors."""

import functools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch

from infoxlm_core.config import PreparationConfig
from infoxlm_core.corpora.parallel import map_in_process
from infoxlm_core.stages import preparation
from infoxlm_core.tasks.embedding import embed_sentences
from tests.helpers.files import Folder
from tests.toys.exports import save_encoder
from tests.toys.text import messages

PAIRS = messages(0)[:60]
OUTPUTS = ("pairs/en-de/web.parquet", "mono/de/web.parquet", "held_out/en-de/test.parquet")


def write_pairs(path: Path, pairs: list[tuple[str, str]]) -> dict:
    """Write a corpus of pairs, and return its entry in the config."""
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    return {"name": path.stem, "format": "tsv", "path": str(path), "languages": ["en", "de"]}


def replace_encoder(config: PreparationConfig, encoder: str) -> PreparationConfig:
    if not config.cleaning.similarity:  # the config of a job that only reads text
        return config
    similarity = config.cleaning.similarity.model_copy(update={"encoder": encoder})
    return config.model_copy(update={"cleaning": config.cleaning.model_copy(update={"similarity": similarity})})


def test_pairs_below_the_minimum_are_dropped_with_any_number_of_workers(tmp_path):
    encoder = save_encoder(tmp_path / "encoder", "e5")
    sources, targets = zip(*PAIRS, strict=True)
    cosines = torch.cosine_similarity(embed_sentences(encoder, sources), embed_sentences(encoder, targets)).numpy()
    # The toy tokenizer is trained anew and varies. The minimum is in the widest gap, so that rounding does not decide.
    sorted_cosines = np.sort(cosines)
    dropped_count = 16 + int(np.diff(sorted_cosines)[15:30].argmax())
    below, above = sorted_cosines[dropped_count - 1 : dropped_count + 1]
    assert above - below > 1e-5
    minimum = float(below + above) / 2
    config = PreparationConfig.parse({
        "languages": ["en", "de"], "held_out": ["test"],
        "cleaning": {"similarity": {"encoder": str(encoder), "minimum": minimum}},
        "corpora": [write_pairs(tmp_path / "web.tsv", PAIRS), write_pairs(tmp_path / "test.tsv", messages(0)[200:240])],
    })  # fmt: skip

    report = preparation.prepare(config, tmp_path / "local", Folder(str(tmp_path / "local-work")), map_in_process)
    remote_config = replace_encoder(config, "s3://models/toy")
    localise = functools.partial(replace_encoder, encoder=str(encoder))  # as workers that fetch the encoder
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        files = Folder(str(tmp_path / "workers-work"))
        report_of_workers = preparation.prepare(remote_config, tmp_path / "workers", files, pool.map, localise)

    rows = pq.read_table(tmp_path / "local/pairs/en-de/web.parquet").to_pylist()
    expected_pairs = [pair for pair, cosine in zip(PAIRS, cosines, strict=True) if cosine > minimum]
    assert [tuple(row.values()) for row in rows] == expected_pairs
    assert report["totals"]["pairs"] == {
        "kept": len(PAIRS) - dropped_count, "not_similar": dropped_count, "read": len(PAIRS)
    }  # fmt: skip
    assert report["totals"]["held_out"] == {"kept": 40, "read": 40}  # the encoder does not choose the test
    assert report_of_workers == report
    for name in OUTPUTS:
        assert (tmp_path / "local" / name).read_bytes() == (tmp_path / "workers" / name).read_bytes()
