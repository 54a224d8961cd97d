"""SeaweedFS, an S3 server in one process that the package index has."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.servers.processes import free_port, serving

WEED = Path(sys.executable).with_name("weed")
KEYS = {"k": "s", "canary": "canary-of-s3-7d1f", "reader": "r"}
"""Access key -> secret. Tests look for the secret of `canary` in the files of a run. `reader` may only read."""


def environment(url: str, access: str = "k") -> dict[str, str]:
    """Return the environment variables that boto3, MLflow and this project need to use the server."""
    return {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": access, "AWS_SECRET_ACCESS_KEY": KEYS[access]}


@contextlib.contextmanager
def serve(directory: Path) -> Iterator[str]:
    """Run a server on loopback with its data in a directory. Yield its URL."""
    ports = [free_port() for _ in range(4)]
    with running(directory, ports):
        yield f"http://127.0.0.1:{ports[-1]}"


@contextlib.contextmanager
def running(directory: Path, ports: Sequence[int]) -> Iterator[subprocess.Popen]:
    """Run a server on loopback with its data in a directory, which may have data of an earlier server.

    Args:
        directory: has the data, the configuration and the log.
        ports: ports of master, volume, filer and S3. Each also uses the port 10,000 above for gRPC.
    """
    (directory / "data").mkdir(exist_ok=True)
    keys = {access: {"accessKey": access, "secretKey": secret} for access, secret in KEYS.items()}
    reader = {"name": "reader", "credentials": [keys.pop("reader")], "actions": ["Read", "List"]}
    writer = {"name": "t", "credentials": [*keys.values()], "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    (directory / "config.json").write_text(json.dumps({"identities": [writer, reader]}))
    master, volume, filer, s3 = ports
    command = [
        str(WEED),
        "-logtostderr=true",
        "server",
        f"-dir={directory}/data",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
    ]
    command += ["-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=40", f"-master.port={master}"]
    command += [f"-volume.port={volume}", "-filer", f"-filer.port={filer}", "-s3", f"-s3.port={s3}"]
    command += [f"-s3.config={directory}/config.json", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    with serving(command, f"http://127.0.0.1:{s3}/healthz", directory / "server.log") as server:
        yield server


def bucket(url: str, name: str) -> Any:
    """Return a bucket of a server. Create it if it does not exist, and wait until it is writable."""
    import boto3
    from botocore.exceptions import ClientError

    key = {"aws_access_key_id": "k", "aws_secret_access_key": KEYS["k"]}
    bucket = boto3.resource("s3", endpoint_url=url, region_name="us-east-1", **key).Bucket(name)
    was_created = False
    for attempt in range(60):  # after its first answers, a server may still have no list of buckets and no volume
        try:
            if not was_created and bucket.creation_date:
                break
            if not was_created:
                bucket.create()
                was_created = True
            bucket.put_object(Key="ready", Body=b"?")
            bucket.Object("ready").delete()
            break
        except ClientError:
            if attempt == 59:
                raise
            time.sleep(1)
    return bucket
