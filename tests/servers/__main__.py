"""Run a command with SeaweedFS and with an MLflow server that has accounts, then list the bucket and the models.

python -m tests.servers -- infoxlm run configs/demo.yaml --store s3://infoxlm/store
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from components.platform import artifacts
from tests.servers import postgres, s3
from tests.servers.tracking import USER, LockedMlflow, locked_mlflow


def main(command: list[str]) -> int:
    """Run the command and return its exit code."""
    if not command:
        sys.exit(__doc__)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave the block below, which stops the servers
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="infoxlm-servers-")))
        for name in ("s3", "mlflow", "cache"):
            (folder / name).mkdir()
        url = stack.enter_context(s3.serve(folder / "s3"))
        mlflow = stack.enter_context(locked_mlflow(folder / "mlflow", stack.enter_context(postgres.serve()), url))
        print(f"S3: {url}   MLflow: {mlflow.url}, user {USER[0]}, tables in PostgreSQL, artifacts on S3", flush=True)
        for wheel in artifacts.cache().glob("*.whl"):  # reuse downloads, but no copies of artifacts
            (folder / "cache" / wheel.name).symlink_to(wheel)
        variables = os.environ | s3.environment(url) | mlflow.environment() | {"INFOXLM_CACHE": str(folder / "cache")}
        code = subprocess.run(command, env=variables, check=False).returncode
        print_bucket(url)
        print_models(mlflow)
        return code


def print_bucket(url: str) -> None:
    """Print the number and size of the objects by their first two folders."""
    sizes: dict[str, list[int]] = defaultdict(list)
    for item in s3.bucket(url, "infoxlm").objects.all():
        sizes["/".join(item.key.split("/")[:2])].append(item.size)
    for folder, object_sizes in sorted(sizes.items()):
        print(f"s3://infoxlm/{folder:28} {len(object_sizes):6} objects {sum(object_sizes) / 1e6:10.1f} MB")


def print_models(mlflow: LockedMlflow) -> None:
    """Print the aliases of the registered models, as the account of the run sees them."""
    _, answer = mlflow.call("GET", "/api/2.0/mlflow/registered-models/search", user=USER)
    for model in json.loads(answer).get("registered_models", ()):
        for alias in model.get("aliases", ()):
            print(f"models:/{model['name']}@{alias['alias']} is version {alias['version']}")


if __name__ == "__main__":
    words = sys.argv[1:]
    sys.exit(main(words[1:] if words[:1] == ["--"] else words))
