"""SeaweedFS: an S3 server in one process, from the package index."""

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.servers.processes import free_port, serving

WEED = Path(sys.executable).with_name("weed")
KEYS = {"k": "s", "canary": "canary-of-s3-7d1f", "reader": "r"}
"""Access keys and their secrets; the second can be looked for in what a run leaves behind, the third may only read."""


def environment(url: str, access: str = "k") -> dict[str, str]:
    """What a client needs, and nothing else: boto3, MLflow and we go by these."""
    return {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": access, "AWS_SECRET_ACCESS_KEY": KEYS[access]}


@contextlib.contextmanager
def serve(directory: Path) -> Iterator[str]:
    """Run a server on loopback with its data in a directory; yield its URL."""
    ports = free_ports()
    with running(directory, ports):
        yield f"http://127.0.0.1:{ports[-1]}"


def free_ports() -> tuple[int, ...]:
    """Of its four parts, S3 last; their gRPC ports are 10,000 above."""
    return tuple(
        next(port for port in iter(free_port, None) if port < 55_000 and _is_free(port + 10_000)) for _ in range(4)
    )


def _is_free(port: int) -> bool:
    with socket.socket() as listener, contextlib.suppress(OSError):
        listener.bind(("127.0.0.1", port))
        return True
    return False


@contextlib.contextmanager
def running(directory: Path, ports: Sequence[int]) -> Iterator[subprocess.Popen]:
    """Run a server on loopback with its data in a directory, where an earlier one may have left some."""
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
    """A bucket of a server, made if it is not there; it can be written to."""
    import boto3
    from botocore.exceptions import ClientError

    key = {"aws_access_key_id": "k", "aws_secret_access_key": KEYS["k"]}
    bucket = boto3.resource("s3", endpoint_url=url, region_name="us-east-1", **key).Bucket(name)
    made = False
    for attempt in range(60):  # a server that answers may still have no list of buckets, and no volume to write to
        try:
            if not made and bucket.creation_date:
                break
            if not made:
                bucket.create()
                made = True
            bucket.put_object(Key="ready", Body=b"?")
            bucket.Object("ready").delete()
            break
        except ClientError:
            if attempt == 59:
                raise
            time.sleep(1)
    return bucket
