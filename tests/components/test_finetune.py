"""The component that fine-tunes, called as KFP calls it: the task of its config decides what is trained."""

import json
import shutil
import subprocess
import sys
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
    return run_file.load_as(SuiteConfig, write_suite(tmp_path_factory.mktemp("suite")))


@pytest.fixture
def handed(suite, store, tmp_path) -> dict:
    """What the pipeline hands in and takes out."""
    found = {}
    shutil.copytree(suite.models["toy"], store / "encoder")
    (store / "corpus").mkdir()
    for name in ("encoder", "corpus"):
        manifests.write(store / name, name, {"steps": 0})
        found[name] = dsl.Artifact(name=name, uri=str(tmp_path / name))
        artifacts.publish(found[name], store / name)
    kinds = {"classifier": dsl.Model, "metrics": dsl.Metrics}
    return found | {name: kind(name=name, uri=str(tmp_path / name)) for name, kind in kinds.items()}


@pytest.mark.parametrize(("task", "kind"), [("words", "classification"), ("riddles", "question_answering")])
def test_the_task_of_the_config_is_learned_and_found_again(suite, store, handed, task, kind):
    settings = suite.tasks[task].settings.model_dump(mode="json", exclude_none=True)
    settings |= {"optimization": settings["optimization"] | {"steps": 2, "warmup_steps": 1}}
    settings.pop("epochs", None)

    for _ in range(2):
        finetune.python_func(config=settings, num_workers=0, store=str(store), **handed)

    made, _ = artifacts.resolve(handed["classifier"])
    assert task_models.load(made, TASKS[kind].head).head.name == kind
    assert [path.name for path in (store / "classifier").iterdir()] == [made.name]
    facts = manifests.load(made)["facts"]
    assert facts["steps"] == 2 and facts[f"loss/{kind}"] > 0
    assert (made / "test.parquet").is_file() == (kind == "classification")


def test_without_labelled_text_the_classifier_is_an_artifact_without_files(store, handed):
    corpus, _ = artifacts.resolve(handed["corpus"])
    (corpus / "pairs/en-de").mkdir(parents=True)
    for name in ("labelled.parquet", "pairs/en-de/memory.parquet"):  # one corpus is one label
        (corpus / name).write_bytes(b"")
    manifests.write(corpus, "corpus", {})

    finetune.python_func(config={}, num_workers=0, store=str(store), **handed)

    made, _ = artifacts.resolve(handed["classifier"])
    assert [path.name for path in made.iterdir()] == [manifests.NAME]
    assert manifests.load(made)["facts"] == {"steps": 0, "examples": 0}


FIND_AGAIN = """
import json, sys
from kfp import dsl
from components.finetune import finetune

given = json.loads(sys.argv[1])
artifacts = {name: dsl.Artifact(name=name, uri=uri) for name, uri in given.pop("uris").items()}
artifacts["metrics"] = dsl.Metrics(name="metrics", uri=artifacts["metrics"].uri)
finetune.python_func(**given, **artifacts)
print(json.dumps(sorted(sys.modules)))
"""


def test_a_step_that_finds_its_artifact_and_reports_to_mlflow_starts_fast(suite, store, handed):
    settings = suite.tasks["words"].settings.model_dump(mode="json", exclude_none=True)
    settings |= {"optimization": settings["optimization"] | {"steps": 1, "warmup_steps": 0}}
    settings.pop("epochs", None)
    given = {"config": settings, "num_workers": 0, "store": str(store)}
    finetune.python_func(**given, **handed)
    given["uris"] = {name: artifact.uri for name, artifact in handed.items()}

    again = [sys.executable, "-c", FIND_AGAIN, json.dumps(given)]
    said = subprocess.run(again, capture_output=True, text=True, check=True)
    modules = json.loads(said.stdout.splitlines()[-1])

    assert "which was built from the same inputs" in said.stderr
    assert "mlflow" in modules
    assert not {"torch", "transformers", "datasets", "ray", "matplotlib", "mlflow.pyfunc"} & {*modules}


def test_other_text_under_the_same_name_is_another_training(suite, store, handed, tmp_path):
    settings = suite.tasks["riddles"].settings.model_dump(mode="json", exclude_none=True)
    train = Path(shutil.copy(settings["train"][0], tmp_path / "train-en.json"))
    settings |= {"train": [str(train)], "optimization": settings["optimization"] | {"steps": 1, "warmup_steps": 0}}
    settings.pop("epochs", None)
    finetune.python_func(config=settings, num_workers=0, store=str(store), **handed)
    asked = json.loads(train.read_text())
    asked["data"][0]["paragraphs"].pop()
    train.write_text(json.dumps(asked))

    finetune.python_func(config=settings, num_workers=0, store=str(store), **handed)

    assert len(list((store / "classifier").iterdir())) == 2
