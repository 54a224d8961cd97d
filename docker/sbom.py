"""Print the bill of materials of an image (CycloneDX 1.6, JSON): our package, and from the locks what it is built of.

    python3 docker/sbom.py cuda > sbom.cdx.json

The same bytes for the same locks: no serial number, no time. A package has the hash of its file for each processor.
What the base holds, Debian's packages and Python, is not in the locks: a scanner of images reads that from the image.
"""

import json
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PINNED = re.compile(r"^(\S+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE)


def component(name: str, version: str, kind: str = "library") -> dict[str, object]:
    url = f"pkg:pypi/{name}@{version.replace('+', '%2B')}"
    return {"type": kind, "bom-ref": url, "name": name, "version": version, "purl": url}


def bill(variant: str) -> dict[str, object]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = component(project["name"], project["version"], "application")
    locks = "".join(
        (ROOT / f"docker/{name}.lock").read_text() for name in ("build", "requirements", f"torch-{variant}")
    )
    theirs = [
        component(name, version)
        | {"hashes": [{"alg": "SHA-256", "content": one} for one in re.findall(r"[0-9a-f]{64}", hashes)]}
        for name, version, hashes in sorted(set(PINNED.findall(locks)))
    ]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": ours | {"licenses": [{"license": {"id": project["license"]}}]}},
        "components": theirs,
        "dependencies": [{"ref": ours["bom-ref"], "dependsOn": [one["bom-ref"] for one in theirs]}],
    }


if __name__ == "__main__":
    if sys.argv[1:] not in (["cpu"], ["cuda"]):
        sys.exit("docker/sbom.py VARIANT: cpu or cuda")
    print(json.dumps(bill(sys.argv[1]), indent=1))
