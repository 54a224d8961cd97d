"""Measure how fast pre-training reads text from S3: `python -m benchmarks.stream` needs four minutes and 5 GB of disk.

The benchmark opens shards of 10^9 tokens, draws the first batch from a local S3 server, and compares training from a
directory with training from the server. A proxy in front of the server delays each request by 20 ms.
"""

import multiprocessing
import os
import shutil
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa

from components.adapters import storage
from infoxlm_core import manifests
from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.samples import Sampler
from infoxlm_core.data.shards import open_shards
from infoxlm_core.data.vocabulary import EOS, FIRST_PIECE, Vocabulary
from infoxlm_core.data.writing import BLOCK_TOKENS, PART_TOKENS, make_column, write_table
from infoxlm_core.stages.pretraining import pretrain
from infoxlm_core.training import tracker
from tests.servers import s3
from tests.servers.s3_faults import Kind, faulty

URI = "s3://models/shards"
VOCABULARY = 1000
STEPS = 80
ROUNDS = 3


def make_config(window: int) -> PretrainingConfig:
    """Make the config of a small training run on MLM. A step draws its text from `window` bytes of the shards."""
    values = {
        "model": {"layers": 3, "hidden": 128, "ffn": 512, "heads": 2, "max_tokens": BLOCK_TOKENS},
        "contrast": {"layer": 1},
        "objectives": {"mlm": 1, "tlm": 0, "xlco": 0},
        "batches": {"global_batch_size": 8, "virtual_shards": 4, "micro_batch_size": 8, "window": window},
        "optimization": {"steps": STEPS, "warmup_steps": 2},
        "log_every": 1,
    }
    return PretrainingConfig.parse(values)


def write_shards(directory: Path, part_tokens: int, parts: int) -> Path:
    """Write shards of random text in several parts, and return their directory."""
    rng = np.random.default_rng(1)
    chunks = []
    for _ in range(parts):
        lengths = rng.integers(10, 50, part_tokens // 29)  # 29 tokens on average
        ids = rng.integers(FIRST_PIECE, VOCABULARY - 1, lengths.sum())
        ids[lengths.cumsum() - 1] = EOS
        chunks.append(pa.table({"text": make_column(ids, lengths)}))
    table = write_table(directory, "mono/en/random", chunks, part_tokens=part_tokens)
    facts = {"tables": {"mono/en/random": table}, "block_tokens": BLOCK_TOKENS, "corpus": "c", "tokenizer": "t"}
    manifests.write(directory, "shards", facts | Vocabulary.xlm_r(VOCABULARY).as_facts())
    return directory


def upload(shards: Path) -> None:
    """Copy the files of shards to S3. A cache has the manifest, so it is not copied."""
    for name in manifests.load(shards)["files"]:
        storage.open(URI).put(name, (shards / name).read_bytes())


def make_cache(shards: Path, cache: Path) -> Path:
    """Make a cache directory that contains only the manifest of uploaded shards, without their parts."""
    cache.mkdir()
    shutil.copy(shards / manifests.NAME, cache)
    return cache


def train(shards: Path, run: Path, source: storage.Store | None = None) -> tuple[list[str], float]:
    """Train, and print the speed and the share of waiting. Return all losses and the tokens per second."""
    # The smallest window moves through all parts, so the training keeps reading from S3.
    pretrain(make_config(window=1), shards, run / "model", run, shards_source=source)
    metrics = [values for _, values in tracker.read(run / tracker.METRICS)]
    late_metrics = metrics[STEPS // 2 :]  # early figures, averaged over ten seconds, include the start-up
    speed = statistics.median(values["tokens_per_second"] for values in late_metrics)
    waiting = statistics.mean(values["data_wait"] for values in late_metrics)
    print(f"{'S3' if source else 'local'}: {speed:.0f} tokens/s, data_wait {waiting:.4f}")
    return [values["loss/mlm"].hex() for values in metrics], speed  # hexadecimal floats are exact


def train_alone(shards: Path, run: Path, source: storage.Store | None = None) -> tuple[list[str], float]:
    """Train in a new process, so that the training and the proxy do not compete for Python's lock."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        return executor.submit(train, shards, run, source).result()


def main(directory: Path) -> None:
    """Measure the time to open shards, the first batch, and whole training runs. Print the results."""
    shards = write_shards(directory / "billion", PART_TOKENS, parts=960)  # 960 × 2^20 tokens
    start = time.monotonic()
    Sampler(open_shards(shards), make_config(window=10**9))
    print(f"open 10^9 tokens: {time.monotonic() - start:.2f} s")

    with s3.serve(directory) as url, faulty(url) as proxy:
        os.environ |= s3.environment(url)
        s3.bucket(url, "models")
        measure_first_batch(directory)
        # With six sequences per part, a step of eight sequences uses as many parts as a step of the config `base`.
        shards = write_shards(directory / "small", 6 * BLOCK_TOKENS, parts=1000)
        upload(shards)
        os.environ["AWS_ENDPOINT_URL"] = proxy.url
        answer = proxy.next

        def answer_late(method: str, target: str) -> Kind | None:
            time.sleep(0.02)  # simulate a distant server
            return answer(method, target)

        proxy.next = answer_late  # type: ignore[method-assign]
        compare_training_speed(shards, directory)


def measure_first_batch(directory: Path) -> None:
    """Measure the time until the first batch from large shards on S3."""
    shards = write_shards(directory / "large", PART_TOKENS, parts=100)
    upload(shards)
    cache = make_cache(shards, directory / "cache")
    start = time.monotonic()
    Sampler(open_shards(cache, storage.open(URI)), make_config(window=128_000_000)).draw(0, range(4))
    print(f"first batch of 400 MB on S3, window of 128 MB: {time.monotonic() - start:.2f} s")


def compare_training_speed(shards: Path, directory: Path) -> None:
    """Train from a directory and from S3 in turn, check that the losses are equal, and print the speed ratio."""
    ratios = []
    for number in range(ROUNDS):
        local_losses, local_speed = train_alone(shards, directory / f"local{number}")
        cache = make_cache(shards, directory / f"cache{number}")
        remote_losses, remote_speed = train_alone(cache, directory / f"remote{number}", storage.open(URI))
        assert remote_losses == local_losses
        ratios.append(remote_speed / local_speed)
    print(f"S3 with 20 ms against local: {statistics.median(ratios):.3f} (median of {ROUNDS})")


if __name__ == "__main__":
    with TemporaryDirectory() as name:
        main(Path(name))
