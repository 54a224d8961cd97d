"""The component that fine-tunes, called as KFP calls it, for the tasks of a small suite."""

import json
import shutil
from pathlib import Path

import pytest
from kfp import dsl

from components.finetune import finetune
from components.platform import artifacts
from infoxlm_core import manifests, run_file
from infoxlm_core.model import task_models
from infoxlm_core.results.suite_config import SuiteConfig
from infoxlm_core.tasks import TASKS
from tests.toys.suite import write_suite


@pytest.fixture(scope="module")
def suite(tmp_path_factory) -> SuiteConfig:
    return run_file.load_config(SuiteConfig, write_suite(tmp_path_factory.mktemp("suite")))


def make_settings(suite: SuiteConfig, task: str, steps: int, **changes) -> dict:
    """Return the settings of a task for a training of few steps."""
    settings = suite.tasks[task].settings.model_dump(mode="json", exclude_none=True) | changes
    settings.pop("epochs", None)
    return settings | {"optimization": settings["optimization"] | {"steps": steps, "warmup_steps": 0}}


@pytest.fixture
def kfp_artifacts(suite, store, tmp_path) -> dict:
    """Return the inputs and outputs of the component."""
    inputs = {}
    shutil.copytree(suite.models["toy"], store / "encoder")
    (store / "corpus").mkdir()
    for name in ("encoder", "corpus"):
        manifests.write(store / name, name, {"steps": 0})
        inputs[name] = dsl.Artifact(name=name, uri=str(tmp_path / name))
        artifacts.publish(inputs[name], store / name)
    kinds = {"classifier": dsl.Model, "metrics": dsl.Metrics}
    return inputs | {name: kind(name=name, uri=str(tmp_path / name)) for name, kind in kinds.items()}


def test_config_names_the_task_that_is_learned(suite, store, kfp_artifacts):
    finetune.python_func(
        config=make_settings(suite, "riddles", steps=2), num_workers=0, store=str(store), **kfp_artifacts
    )

    directory, _ = artifacts.resolve(kfp_artifacts["classifier"])
    assert task_models.load(directory, TASKS["question_answering"].head).head.name == "question_answering"
    facts = manifests.load(directory)["facts"]
    assert facts["steps"] == 2
    assert facts["loss/question_answering"] > 0


def test_classifier_has_no_files_without_labelled_text(store, kfp_artifacts):
    corpus, _ = artifacts.resolve(kfp_artifacts["corpus"])
    (corpus / "pairs/en-de").mkdir(parents=True)
    for name in ("labelled.parquet", "pairs/en-de/memory.parquet"):  # a single corpus is a single label
        (corpus / name).write_bytes(b"")
    manifests.write(corpus, "corpus", {})

    finetune.python_func(config={}, num_workers=0, store=str(store), **kfp_artifacts)

    directory, _ = artifacts.resolve(kfp_artifacts["classifier"])
    assert [path.name for path in directory.iterdir()] == [manifests.NAME]
    assert manifests.load(directory)["facts"] == {"steps": 0, "examples": 0}


def test_changed_training_text_of_the_same_name_starts_another_training(suite, store, kfp_artifacts, tmp_path):
    original = suite.tasks["riddles"].settings.model_dump(mode="json")["train"][0]
    train = Path(shutil.copy(original, tmp_path / "train-en.json"))
    settings = make_settings(suite, "riddles", steps=1, train=[str(train)])
    finetune.python_func(config=settings, num_workers=0, store=str(store), **kfp_artifacts)
    questions = json.loads(train.read_text())
    questions["data"][0]["paragraphs"].pop()
    train.write_text(json.dumps(questions))

    finetune.python_func(config=settings, num_workers=0, store=str(store), **kfp_artifacts)

    assert len(list((store / "classifier").iterdir())) == 2
