"""The whole DAG by URL alone: S3, and MLflow with accounts on PostgreSQL; nothing else is changed.

It takes as long as the run in directories that it is compared with: most of it is a fresh process for every step.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.commands import only
from tests.servers import postgres, s3
from tests.servers.tracking import USER, LockedMlflow

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STORE = "s3://infoxlm/store"
CANARY = b"canary-of-"  # every secret of these servers begins with it


@dataclass(frozen=True)
class ByUrl:
    """What came of the run."""

    output: str
    cache: Path
    objects: dict[str, bytes]
    """By their keys."""


def environment(mlflow: LockedMlflow, s3_server: str, **more: str) -> dict[str, str]:
    """Of this process, but with these servers and no others."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "AWS_"))}
    return {**kept, "OMP_NUM_THREADS": "1", **mlflow.environment(), **s3.environment(s3_server, "canary"), **more}


@pytest.fixture(scope="module")
def by_url(finished, locked_server, s3_server, tmp_path_factory) -> ByUrl:
    """The run of `finished`, on another machine that shares nothing with it but text and config."""
    cache = tmp_path_factory.mktemp("cache")
    command = [Path(sys.executable).with_name("infoxlm"), "run", finished.parent / "toy.yaml", "--store", STORE]
    known = environment(locked_server, s3_server, INFOXLM_CACHE=str(cache))

    done = subprocess.run(command, env=known, capture_output=True, text=True, timeout=800, cwd=cache)

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    bucket = s3.bucket(s3_server, "infoxlm")
    objects = {item.key: item.get()["Body"].read() for item in bucket.objects.all()}
    return ByUrl(done.stdout + done.stderr, cache, objects)


def test_artifacts_and_scores_are_those_of_directories(finished, by_url, record_property):
    made = {str(path.relative_to(finished)): path for path in finished.glob("*/*/manifest.json")}
    sent = {key.removeprefix("store/"): body for key, body in by_url.objects.items() if key.endswith("/manifest.json")}
    sent = {key: body for key, body in sent.items() if key.count("/") == 2}

    assert set(sent) == set(made) and len(made) >= 6  # named by their inputs
    for name, path in made.items():
        here, there = json.loads(path.read_bytes()), json.loads(sent[name])
        assert {file: entry["sha256"] for file, entry in there["files"].items() if not _has_times(file)} == {
            file: entry["sha256"] for file, entry in here["files"].items() if not _has_times(file)
        }, name
    (scores,) = [json.loads(body)["facts"] for key, body in sent.items() if key.startswith("scores/")]
    assert scores == json.loads(only(finished, "scores/*/manifest.json").read_bytes())["facts"]
    record_property("figure", f"{len(made)} artifacts with the digests of directories on S3")


def _has_times(file: str) -> bool:
    return file.endswith(("metrics.jsonl", "report.html", ".png"))


def test_all_is_in_the_bucket_and_nothing_waits_to_be_finished(by_url, s3_server):
    import boto3

    key = {"aws_access_key_id": "k", "aws_secret_access_key": s3.KEYS["k"], "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=s3_server, **key)

    assert [key for key in by_url.objects if key.startswith("store/pretrained/") and key.endswith("model.safetensors")]
    assert [key for key in by_url.objects if key.startswith("mlflow/") and key.endswith("evaluation/report.html")]
    assert [key for key in by_url.objects if key.startswith("mlflow/") and key.endswith("model.safetensors")]
    assert not client.list_multipart_uploads(Bucket="infoxlm").get("Uploads")
    assert not list(by_url.cache.rglob("*.db"))


STRANGER = """
import sys, mlflow, torch
from transformers import AutoModel, AutoTokenizer
encoder = mlflow.artifacts.download_artifacts("models:/toy@champion", dst_path=sys.argv[1]) + "/model"
model, tokenizer = AutoModel.from_pretrained(encoder).eval(), AutoTokenizer.from_pretrained(encoder)
torch.save(model(**tokenizer("Open the old table now", return_tensors="pt")).last_hidden_state.detach(), sys.argv[2])
"""


def test_a_stranger_loads_the_champion_with_an_account_and_plain_transformers(
    finished, by_url, locked_server, s3_server, tmp_path
):
    import torch
    from transformers import AutoModel, AutoTokenizer

    known = environment(locked_server, s3_server)
    known = {name: value for name, value in known.items() if not name.startswith("AWS_")}  # MLflow's server reads S3
    (tmp_path / "model").mkdir()
    command = [sys.executable, "-c", STRANGER, str(tmp_path / "model"), str(tmp_path / "states.pt")]
    subprocess.run(command, env=known, check=True, cwd=tmp_path, timeout=300)

    encoder = only(finished, "pretrained/*/encoder")
    batch = AutoTokenizer.from_pretrained(encoder)("Open the old table now", return_tensors="pt")
    expected = AutoModel.from_pretrained(encoder).eval()(**batch).last_hidden_state
    torch.testing.assert_close(torch.load(tmp_path / "states.pt", weights_only=True), expected.detach())


@pytest.mark.item("S07")
def test_no_secret_is_left_anywhere(by_url, database, locked_server, s3_server):
    assert CANARY in " ".join(environment(locked_server, s3_server).values()).encode()
    left = {f"s3://infoxlm/{key}": body for key, body in by_url.objects.items()}
    left |= {str(path): path.read_bytes() for path in by_url.cache.rglob("*") if path.is_file()}
    left |= {"what it printed": by_url.output.encode(), "MLflow's log": locked_server.log.read_bytes()}
    left |= {f"table {name}": text.encode() for name, text in postgres.dump(database).items()}

    assert len(left) > 100 and USER[0] in postgres.dump(database)["users"]
    assert not [name for name, content in left.items() if CANARY in content]
