"""Parameters and environment choose the launcher that starts the workers of a stage."""

import functools
import json
import sys
from dataclasses import replace

import pytest

from components.adapters import storage
from components.adapters.kuberay import job
from components.platform import artifacts, launchers
from components.platform.builds import BuildSpec
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
