"""Parameters and environment choose the launcher that starts the workers of a stage."""

import functools
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from components.adapters import storage
from components.adapters.kuberay import job
from components.platform import artifact_files, artifacts, launchers
from components.platform.builds import BuildSpec
from infoxlm_core import manifests
from infoxlm_core.errors import ConfigError
from infoxlm_core.training import tracker
from tests.toys.pretraining import tiny_config


@pytest.fixture
def spec(tiny_shards, tmp_path) -> BuildSpec:
    config = tiny_config().model_dump(mode="json")
    inputs = {"shards_path": str(tiny_shards)}
    return BuildSpec("pretrain", str(tmp_path / "store"), "pretrained", "abc", config, 2, inputs, "pretrained-abc")


@pytest.mark.parametrize(
    ("stage", "pod", "workers", "cluster", "variable", "chosen"),
    [
        ("pretrain", "", 2, {}, "", "ray"),
        ("pretrain", "", 2, {}, "torchrun", "torchrun"),
        ("pretrain", "", 2, {"image": "i"}, "", "kuberay"),
        ("pretrain", "step-1", 0, {}, "", "process"),  # on the CPU of a pod
        ("pretrain", "step-1", 2, None, "", "ray"),  # a trial of a suite, whose pod has GPUs
        ("prepare_corpus", "", 0, {"image": "i"}, "", "process"),
        ("prepare_corpus", "", 2, {"image": "i"}, "", "kuberay"),
    ],
)
def test_parameters_and_environment_choose_the_launcher(
    spec, monkeypatch, stage, pod, workers, cluster, variable, chosen
):
    monkeypatch.setenv("KFP_POD_NAME", pod)
    monkeypatch.setenv(launchers.VARIABLE, variable)
    used = []

    def launch(name: str, spec: BuildSpec, *_) -> None:
        used.append(name)
        artifacts.get_or_build(spec.store, spec.kind, spec.name, lambda output: {})

    for name in launchers.LAUNCHERS:
        monkeypatch.setitem(launchers.LAUNCHERS, name, functools.partial(launch, name))

    launchers.run(replace(spec, stage=stage, num_workers=workers), cluster)

    assert used == [chosen]


@pytest.mark.parametrize(("stage", "min_workers"), [("pretrain", 1), ("finetune", 0)])
def test_only_a_pretraining_may_continue_with_fewer_workers(spec, bucket, tmp_path, monkeypatch, stage, min_workers):
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "cache"))
    jobs = []
    monkeypatch.setattr(job, "run", lambda _, location, config, *__, **___: jobs.append((location, config.min_workers)))

    cluster = {"image": f"registry.example/infoxlm@sha256:{'1' * 64}", "min_workers": 1}
    launchers.run_as_rayjob(replace(spec, stage=stage, store="s3://models/store"), cluster, ())

    [(location, min_workers_of_pods)] = jobs
    assert min_workers_of_pods == min_workers
    assert json.loads(storage.open(location).get()[0])["min_workers"] == min_workers


def test_run_that_is_resumed_with_other_settings_does_not_follow_the_job_with_the_earlier_ones(
    spec, bucket, tmp_path, monkeypatch
):
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "cache"))
    names = []
    monkeypatch.setattr(job, "run", lambda name, *_, **__: names.append(name))

    cluster = {"image": f"registry.example/infoxlm@sha256:{'1' * 64}"}
    for artifact in ("abc", "abc", "def"):  # all three continue the run pretrained-abc
        launchers.run_as_rayjob(replace(spec, store="s3://models/store", name=artifact), cluster, ())

    first, repeated, resumed = names
    assert first == repeated != resumed


def test_step_downloads_only_the_small_files_of_the_artifact_that_a_job_built(spec, bucket, tmp_path, monkeypatch):
    spec = replace(spec, store="s3://models/store")
    step_cache, job_cache = tmp_path / "step", tmp_path / "job"

    def build(output: Path) -> dict[str, int]:
        (output / "encoder").mkdir()
        (output / "encoder" / "model.safetensors").write_text("gigabytes of weights")
        (output / "encoder" / tracker.METRICS).write_text("{}")
        manifests.write(output / "encoder", "encoder")
        return {"steps": 8}

    def launch(spec: BuildSpec, *_) -> None:
        monkeypatch.setenv("INFOXLM_CACHE", str(job_cache))
        artifacts.get_or_build(spec.store, spec.kind, spec.name, build)
        monkeypatch.setenv("INFOXLM_CACHE", str(step_cache))

    monkeypatch.setitem(launchers.LAUNCHERS, "kuberay", launch)
    monkeypatch.setenv("INFOXLM_CACHE", str(step_cache))
    for _ in ("build", "reuse"):
        directory = launchers.run(spec, {"image": "i"})

        assert manifests.load(directory)["facts"] == {"steps": 8}
        assert artifacts.find_uri(directory / "encoder") == "s3://models/store/pretrained/abc/encoder"
        assert {path.name for path in (directory / "encoder").iterdir()} == {manifests.NAME, tracker.METRICS}
        assert not list(step_cache.rglob("*.safetensors"))

    built = artifacts.get_or_build(spec.store, spec.kind, spec.name, build)  # needs all files
    assert (built / "encoder" / "model.safetensors").is_file()


def test_summary_follows_an_artifact_that_was_built_again(bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "step"))
    store, name = "s3://models/store", "abc"
    for lines in (3, 4):
        artifact = tmp_path / f"corpus with {lines} lines"
        artifact.mkdir()
        manifests.write(artifact, "corpus", {"lines": lines})
        artifact_files.upload(artifact, f"{store}/corpus/{name}", replace=True)

        assert manifests.load(artifacts.fetch_summary(store, "corpus", name))["facts"] == {"lines": lines}


def test_step_without_gpus_and_cluster_does_not_train(spec, monkeypatch):
    monkeypatch.setenv("KFP_POD_NAME", "step-1")

    with pytest.raises(ConfigError, match=r"cluster is empty, .*start the run by `infoxlm submit`"):
        launchers.run(spec, {})


def test_unknown_launcher_is_refused(monkeypatch):
    monkeypatch.setenv(launchers.VARIABLE, "slurm")

    with pytest.raises(ConfigError, match=r"INFOXLM_LAUNCHER: 'slurm' .*: set it to ray or torchrun"):
        launchers.choose_local_launcher()


@pytest.mark.slow
def test_torchrun_trains_without_importing_ray(spec, monkeypatch):
    monkeypatch.setenv(launchers.VARIABLE, "torchrun")
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it fails

    artifact = launchers.run(spec)

    assert len(tracker.read(artifact / "encoder" / tracker.METRICS)) == 6
