"""The whole DAG on S3 and on MLflow with accounts and PostgreSQL, which only URLs select."""

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

pytestmark = pytest.mark.slow
STORE = "s3://infoxlm/store"
CANARY = b"canary-of-"
"""Every secret of these servers begins with this."""


@dataclass(frozen=True)
class ByUrl:
    """The results of the run: what it printed, its cache, and the content of the bucket by key."""

    output: str
    cache: Path
    objects: dict[str, bytes]


def environment(mlflow: LockedMlflow, s3_server: str, **more: str) -> dict[str, str]:
    """Return the environment of this process with these servers and no others."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "AWS_"))}
    return {**inherited, "OMP_NUM_THREADS": "1", **mlflow.environment(), **s3.environment(s3_server, "canary"), **more}


@pytest.fixture(scope="module")
def by_url(finished, locked_server, s3_server, tmp_path_factory) -> ByUrl:
    """Run the config of `finished` on servers, with no other file in common but the text."""
    cache = tmp_path_factory.mktemp("cache")
    command = [Path(sys.executable).with_name("infoxlm"), "run", finished.parent / "toy.yaml", "--store", STORE]
    variables = environment(locked_server, s3_server, INFOXLM_CACHE=str(cache))

    done = subprocess.run(command, env=variables, capture_output=True, text=True, cwd=cache)

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    bucket = s3.bucket(s3_server, "infoxlm")
    objects = {item.key: item.get()["Body"].read() for item in bucket.objects.all()}
    return ByUrl(done.stdout + done.stderr, cache, objects)


def test_artifacts_and_scores_are_those_of_directories(finished, by_url, record_property):
    local = {str(path.relative_to(finished)): path.read_bytes() for path in finished.glob("*/*/manifest.json")}
    objects = {key.removeprefix("store/"): body for key, body in by_url.objects.items()}
    remote = {key: body for key, body in objects.items() if key.endswith("/manifest.json") and key.count("/") == 2}

    assert set(remote) == set(local) and len(local) >= 6  # their names are digests of their inputs
    for name in local:
        assert digests(remote[name]) == digests(local[name]), name
    (scores,) = [json.loads(body)["facts"] for key, body in remote.items() if key.startswith("scores/")]
    assert scores == json.loads(only(finished, "scores/*/manifest.json").read_bytes())["facts"]
    record_property("figure", f"{len(local)} artifacts with the digests of directories on S3")


def digests(manifest: bytes) -> dict[str, str]:
    """Return the digests of an artifact's files, without those that contain times."""
    entries = json.loads(manifest)["files"].items()
    return {name: entry["sha256"] for name, entry in entries if not name.endswith(("metrics.jsonl", ".html", ".png"))}


def test_everything_is_in_the_bucket_and_no_upload_is_unfinished(by_url, s3_server):
    import boto3

    key = {"aws_access_key_id": "k", "aws_secret_access_key": s3.KEYS["k"], "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=s3_server, **key)

    assert [key for key in by_url.objects if key.startswith("store/pretrained/") and key.endswith("model.safetensors")]
    assert [key for key in by_url.objects if key.startswith("mlflow/") and key.endswith("evaluation/report.html")]
    assert [key for key in by_url.objects if key.startswith("mlflow/") and key.endswith("model.safetensors")]
    assert not client.list_multipart_uploads(Bucket="infoxlm").get("Uploads")
    assert not list(by_url.cache.rglob("*.db"))


CLIENT = """
import sys, mlflow, torch
from transformers import AutoModel, AutoTokenizer
encoder = mlflow.artifacts.download_artifacts("models:/toy@champion", dst_path=sys.argv[1]) + "/model"
model, tokenizer = AutoModel.from_pretrained(encoder).eval(), AutoTokenizer.from_pretrained(encoder)
torch.save(model(**tokenizer("Open the old table now", return_tensors="pt")).last_hidden_state.detach(), sys.argv[2])
"""


def test_plain_transformers_loads_the_champion_with_an_account_of_mlflow_alone(
    finished, by_url, locked_server, s3_server, tmp_path
):
    import torch
    from transformers import AutoModel, AutoTokenizer

    variables = environment(locked_server, s3_server)
    variables = {name: value for name, value in variables.items() if not name.startswith("AWS_")}  # MLflow reads S3
    (tmp_path / "model").mkdir()
    command = [sys.executable, "-c", CLIENT, str(tmp_path / "model"), str(tmp_path / "states.pt")]
    subprocess.run(command, env=variables, check=True, cwd=tmp_path)

    encoder = only(finished, "pretrained/*/encoder")
    batch = AutoTokenizer.from_pretrained(encoder)("Open the old table now", return_tensors="pt")
    expected = AutoModel.from_pretrained(encoder).eval()(**batch).last_hidden_state
    torch.testing.assert_close(torch.load(tmp_path / "states.pt", weights_only=True), expected.detach())


@pytest.mark.item("S07")
def test_no_secret_is_stored_or_printed(by_url, database, locked_server, s3_server):
    assert CANARY in " ".join(environment(locked_server, s3_server).values()).encode()
    tables = postgres.dump(database)
    contents = {f"s3://infoxlm/{key}": body for key, body in by_url.objects.items()}
    contents |= {str(path): path.read_bytes() for path in by_url.cache.rglob("*") if path.is_file()}
    contents |= {"output": by_url.output.encode(), "MLflow's log": locked_server.log.read_bytes()}
    contents |= {f"table {name}": text.encode() for name, text in tables.items()}

    assert len(contents) > 100 and USER[0] in tables["users"]
    assert not [name for name, content in contents.items() if CANARY in content]
