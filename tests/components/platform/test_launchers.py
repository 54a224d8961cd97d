"""Which launcher starts the workers of a piece of work, and that one of them needs no Ray."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from components.adapters import storage
from components.adapters.kuberay import job
from components.platform import artifacts, launchers, stage_work
from components.platform.stage_work import Work
from infoxlm_core.errors import ConfigError
from infoxlm_core.training import tracker
from tests.toys.pretraining import tiny_config


@pytest.fixture
def work(tiny_shards, tmp_path) -> Work:
    config = tiny_config().model_dump(mode="json")
    places = {"shards_path": str(tiny_shards)}
    return Work("pretrain", str(tmp_path / "store"), "pretrained", "abc", config, 2, places, "pretrained-abc")


def a_launcher_that(seen: list, monkeypatch, name: str) -> None:
    def launch(work: Work, cluster: dict, task: object) -> None:
        seen.append(name)
        artifacts.get_or_build(work.store, work.kind, work.name, lambda output: {})

    monkeypatch.setitem(launchers.LAUNCHERS, name, launch)


@pytest.mark.parametrize(
    ("pod", "workers", "cluster", "variable", "chosen"),
    [
        ("", 2, {}, "", "ray"),
        ("", 2, {}, "torchrun", "torchrun"),
        ("", 2, {"image": "i"}, "", "kuberay"),
        ("step-1", 0, {}, "", "process"),  # on the CPU of a pod
        ("step-1", 2, None, "", "ray"),  # a trial of a suite, whose pod has GPUs
    ],
)
def test_parameters_and_environment_choose_the_launcher(work, monkeypatch, pod, workers, cluster, variable, chosen):
    monkeypatch.setenv("KFP_POD_NAME", pod)
    monkeypatch.setenv(launchers.VARIABLE, variable)
    seen: list[str] = []
    for name in launchers.LAUNCHERS:
        a_launcher_that(seen, monkeypatch, name)

    made = launchers.run(replace(work, num_workers=workers), cluster)

    assert seen == [chosen] and made.is_dir()


@pytest.mark.parametrize(("stage", "least"), [("pretrain", 1), ("finetune", 0)])
def test_a_job_is_told_with_how_few_workers_it_may_go_on_if_its_figures_do_not_depend_on_it(
    work, bucket, tmp_path, monkeypatch, stage, least
):
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "cache"))
    told: list[tuple[str, int]] = []
    monkeypatch.setattr(job, "run", lambda _, place, cluster, *__, **___: told.append((place, cluster.min_workers)))

    cluster = {"image": f"registry.example/infoxlm@sha256:{'1' * 64}", "min_workers": 1}
    launchers.kuberay(replace(work, stage=stage, store="s3://models/store"), cluster, None)

    [(place, of_the_pods)] = told
    assert json.loads(storage.open(place).get()[0])["min_workers"] == of_the_pods == least


def test_a_step_without_gpus_does_not_train_in_their_place_when_no_cluster_is_given(work, monkeypatch):
    monkeypatch.setenv("KFP_POD_NAME", "step-1")
    for name in launchers.LAUNCHERS:
        monkeypatch.setitem(launchers.LAUNCHERS, name, lambda *_: pytest.fail("it trains"))

    with pytest.raises(ConfigError, match=r"cluster is empty, .*start the run by `infoxlm submit`"):
        launchers.run(replace(work, num_workers=2), {})


def test_an_unknown_launcher_is_one_clear_line_before_anything_starts(monkeypatch):
    monkeypatch.setenv(launchers.VARIABLE, "slurm")

    with pytest.raises(ConfigError, match=r"INFOXLM_LAUNCHER: 'slurm' .*: set it to ray or torchrun"):
        launchers.local_launcher()


@pytest.mark.slow
def test_torchrun_makes_the_artifact_and_never_imports_ray(work, monkeypatch):
    monkeypatch.setenv(launchers.VARIABLE, "torchrun")
    monkeypatch.setitem(sys.modules, "ray", None)  # an import of it fails

    made = launchers.run(work)

    assert len(tracker.read(made / "encoder" / tracker.METRICS)) == 6


def lengths(chunk: pa.Table) -> pa.Table:
    return pa.table({"length": [len(text) for text in chunk["text"].to_pylist()]})


@pytest.mark.slow
def test_text_is_worked_on_by_processes_of_this_machine(work, monkeypatch):
    def count(work: Work, spread, output: Path) -> dict:
        chunks = [pa.table({"text": [word]}) for word in ("a", "bb", "ccc")]
        return {"lengths": sum(table["length"][0].as_py() for table in spread(lengths, iter(chunks)))}

    monkeypatch.setenv(launchers.VARIABLE, "torchrun")
    monkeypatch.setitem(stage_work.TEXT_STAGES, "prepare_corpus", count)

    made = launchers.run(replace(work, stage="prepare_corpus", kind="corpus", run=""))

    assert '"lengths": 6' in (made / "manifest.json").read_text()
