"""Print the bill of materials of an image (CycloneDX 1.6, JSON): our package, and all packages in the locks.

    python3 docker/sbom.py cuda > sbom.cdx.json

The same locks give the same bytes, because the output has no serial number and no time. A package has the hash of its
file for each processor. Python and Debian's packages are not in the locks; an image scanner finds them in the image.
"""

import json
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKED_PACKAGE = re.compile(r"^(\S+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE)


def describe_package(name: str, version: str, kind: str = "library") -> dict[str, object]:
    """Return the CycloneDX component of a Python package, without hashes."""
    url = f"pkg:pypi/{name}@{version.replace('+', '%2B')}"
    return {"type": kind, "bom-ref": url, "name": name, "version": version, "purl": url}


def build_sbom(variant: str) -> dict[str, object]:
    """Return the bill of materials of a variant of the image."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    application = describe_package(project["name"], project["version"], "application")
    lock_names = ("build", "requirements", f"torch-{variant}")
    locks = "".join((ROOT / f"docker/{name}.lock").read_text() for name in lock_names)
    dependencies = []
    for name, version, hash_options in sorted(set(LOCKED_PACKAGE.findall(locks))):
        digests = re.findall(r"[0-9a-f]{64}", hash_options)
        package = describe_package(name, version)
        package["hashes"] = [{"alg": "SHA-256", "content": digest} for digest in digests]
        dependencies.append(package)
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": application | {"licenses": [{"license": {"id": project["license"]}}]}},
        "components": dependencies,
        "dependencies": [
            {"ref": application["bom-ref"], "dependsOn": [package["bom-ref"] for package in dependencies]}
        ],
    }


if __name__ == "__main__":
    if sys.argv[1:] not in (["cpu"], ["cuda"]):
        sys.exit("usage: docker/sbom.py VARIANT; VARIANT is cpu or cuda")
    print(json.dumps(build_sbom(sys.argv[1]), indent=1))
