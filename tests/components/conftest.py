"""A real MLflow server for the tests of the adapters, and a real encoder small enough for them."""

import contextlib
import multiprocessing
import os
import shutil
import signal
import string
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.servers.processes import free_port
from tests.servers.tracking import running_mlflow


def open_run(store: Path, run: str = "r1") -> str:
    """Open the MLflow run of a pipeline run."""
    from components.adapters.mlflow import runs as mlflow_runs

    return mlflow_runs.open_run("tests", "demo", {"infoxlm.run": run, "stage": "pretrain"}, store)


def history(run_id: str, key: str) -> list[tuple[int, float]]:
    """Points of a metric, as MLflow has them."""
    from mlflow import MlflowClient

    return [(point.step, point.value) for point in MlflowClient().get_metric_history(run_id, key)]


def two_processes() -> ProcessPoolExecutor:
    """Two processes that have imported all they need and begin their first task at the same time."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(2, spawn, initializer=_at_the_door, initargs=(spawn.Barrier(2),))


def _at_the_door(both) -> None:
    import mlflow.transformers
    import transformers

    assert mlflow.transformers and transformers.pipeline
    both.wait(timeout=60)


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory) -> Iterator[str]:
    """URI of a server that all tests of the session share."""
    port = free_port()
    with running_mlflow(tmp_path_factory.mktemp("mlflow"), port):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory) -> Path:
    """MLflow's tables in a SQLite file, made once: that takes seconds."""
    directory = tmp_path_factory.mktemp("empty")
    make = "import sys, pathlib, components.adapters.mlflow.runs as m; m.connect(pathlib.Path(sys.argv[1]))"
    environment = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    subprocess.run([sys.executable, "-c", make, directory], check=True, env=environment)
    return directory / "mlflow.db"


@pytest.fixture
def store(clean_environment, empty_database, tmp_path) -> Path:
    """A local store, with no tracking server configured."""
    (tmp_path / "store").mkdir()
    shutil.copy(empty_database, tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def on_server(clean_environment, mlflow_server, monkeypatch) -> str:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    return mlflow_server


@pytest.fixture(scope="session")
def tiny_encoders(tmp_path_factory) -> dict[str, Path]:
    """Two Hugging Face directories, `first` and `second`: XLM-R of 2 layers x 32 with random weights, 31 words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, XLMRobertaConfig, XLMRobertaForMaskedLM

    words = ["<s>", "<pad>", "</s>", "<unk>", *string.ascii_lowercase, "<mask>"]
    model = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, mask_token="<mask>", cls_token="<s>", sep_token="</s>", **special
    )
    config = XLMRobertaConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=66,
    )  # fmt: skip
    encoders = {}
    for seed, name in enumerate(("first", "second")):
        torch.manual_seed(seed)
        directory = tmp_path_factory.mktemp(name)
        XLMRobertaForMaskedLM(config).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        encoders[name] = directory
    return encoders


def kill_first_worker(run: Path) -> list[str]:
    """Kill the first worker of a training once it has saved at step 10; the list then holds its process id."""
    killed: list[str] = []

    def kill() -> None:
        while not (run / "step=0000000010/manifest.json").exists():
            time.sleep(0.01)
        for process in Path("/proc").iterdir():
            if not process.name.isdigit() or int(process.name) == os.getpid() or killed:
                continue
            with contextlib.suppress(OSError):
                # whoever holds the lock of this very run is its first worker
                if any(file.readlink() == run / "lock" for file in (process / "fd").iterdir()):
                    os.kill(int(process.name), signal.SIGKILL)
                    killed.append(process.name)

    threading.Thread(target=kill, daemon=True).start()
    return killed


def upload(bucket, directory: Path, prefix: str) -> None:
    """Upload all files below a directory."""
    for path in directory.rglob("*"):
        if path.is_file():
            name = f"{prefix}/{path.relative_to(directory)}"
            bucket.upload_file(str(path), name, ExtraArgs={"ChecksumAlgorithm": "SHA256"})


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    """Ray on this machine with four workers, for all tests of the session."""
    import ray

    from components.adapters.ray import train as ray_train

    ray_train.start(4)
    yield
    ray.shutdown()
