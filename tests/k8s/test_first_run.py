"""The settings that the document gives for the first run: explained, valid, and within the quota of `small`."""

import re

import yaml

from components.adapters.kuberay.manifest import _SUBMITTER
from components.settings.cluster import ClusterFile, Pool, RayConfig
from infoxlm_core import run_file
from pipelines.cli.cluster import prepare
from tests.k8s.manifests import ROOT, named, pods

DOCUMENT = (ROOT / "docs/cluster.md").read_text()
_UNITS = {"m": 1e-3, "Mi": 2**20, "Gi": 2**30}


def first_run() -> ClusterFile:
    """configs/cluster.yaml with the lines of the document."""
    block = DOCUMENT.partition("## 4. The first run")[2].partition("```yaml\n")[2].partition("```")[0]
    known, changed = yaml.safe_load((ROOT / "configs/cluster.yaml").read_text()), yaml.safe_load(block)
    for name, value in changed.items():
        known[name] = known[name] | value if isinstance(value, dict) else value
    return ClusterFile.model_validate(known | {"image": f"registry.example/infoxlm@sha256:{'1' * 64}"})


def amount(quantity: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(\w*)", quantity).groups()
    return int(number) * _UNITS.get(unit, 1)


def test_the_document_explains_every_field_of_the_cluster_s_file_and_no_other():
    table = DOCUMENT.partition("| in `configs/cluster.yaml` |")[2].partition("\n\n")[0]
    explained = {
        name for row in re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE) for name in re.findall(r"[\w.]+", row)
    }

    parts = {"pool": Pool, "ray": RayConfig}
    inside = {f"{part}.{name}" for part, fields in parts.items() for name in fields.model_fields}
    assert explained == set(ClusterFile.model_fields) - set(parts) | inside


def test_the_demo_is_taken_with_one_worker():
    changes = ["num_workers=1"]

    prepared = prepare(
        "infoxlm", ROOT / "configs/demo.yaml", first_run(), changes, ROOT / "configs/ablations.yaml", [], "1"
    )

    assert prepared["num_workers"] == run_file.load(ROOT / "configs/demo.yaml", changes).num_workers == 1


def test_the_demo_asks_for_what_the_document_says_and_the_quota_of_small_holds_it():
    """At its largest: the model trains, and the untrained encoder's job has a head and waits for the GPU."""
    place = first_run()
    limits = named("small", "LimitRange", "infoxlm")["spec"]["limits"][0]["defaultRequest"]
    quota = named("small", "ResourceQuota", "infoxlm")["spec"]["hard"]
    said = dict(
        zip(("cpu", "memory"), re.search(r"asks for (\d+) cores and (\d+) GiB", DOCUMENT).groups(), strict=True)
    )
    submitter = {name: amount(value) for name, value in _SUBMITTER.items()}

    for name, unit in (("cpu", 1), ("memory", 2**30)):
        heads = 2 * amount({"cpu": place.ray.head_cpu, "memory": place.ray.head_memory}[name])
        steps = 2 * (amount(limits[name]) + submitter[name])
        worker = amount({"cpu": place.pool.cpu, "memory": place.pool.memory}[name])
        services = sum(
            max(amount(container["resources"]["requests"][name]) for container in template["spec"]["containers"])
            for kind, template in pods("small").items()
            if not kind.startswith("Job/")
        )
        asked = worker + heads + steps + services

        assert asked <= amount(said[name]) * unit < asked + 2 * unit
        assert asked <= amount(quota[f"requests.{name}"])
    assert place.pool.gpus <= int(quota["requests.nvidia.com/gpu"])
