"""`infoxlm upload` against a server that keeps what it is sent: what Kubeflow's page begins with."""

import os
from pathlib import Path

import pytest
import yaml
from kfp import components
from typer.testing import CliRunner

from infoxlm_core import run_file
from pipelines import submit
from pipelines.cli import app
from tests.pipelines.kubeflow_server import Kubeflow, running_kubeflow

CONFIGS = Path(__file__).parents[2] / "configs"
IMAGE = f"registry.example/infoxlm@sha256:{'a1' * 32}"
SECTIONS = ("preparation", "tokenization", "pretraining", "finetuning", "evaluation", "registration")


@pytest.fixture(scope="module", autouse=True)
def no_defaults():
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("KF_PIPELINES_")]:
            patch.delenv(name)
        yield


@pytest.fixture
def kubeflow():
    with running_kubeflow() as server:
        yield server


@pytest.fixture(scope="module")
def with_the_demo(tmp_path_factory):
    """A server to which all pipelines were uploaded with the demo; nothing else is sent to it."""
    with running_kubeflow() as server:
        result = upload(server, write_cluster(tmp_path_factory.mktemp("cluster")))
        assert result.exit_code == 0, result.stderr
        yield server


def write_cluster(directory: Path, image: str = IMAGE) -> Path:
    values = yaml.safe_load((CONFIGS / "cluster.yaml").read_text()) | {"image": image}
    (directory / "cluster.yaml").write_text(yaml.safe_dump(values))
    return directory / "cluster.yaml"


def upload(kubeflow: Kubeflow, *arguments: str | Path):
    return CliRunner().invoke(app, ["upload", *map(str, arguments), "--host", kubeflow.host])


def uploaded(kubeflow: Kubeflow) -> dict[str, dict]:
    """The specs that were uploaded last, by pipeline."""
    return {
        version["display_name"].partition("-0.")[0]: next(yaml.safe_load_all(text))
        for version, text in zip(kubeflow.versions, kubeflow.uploads, strict=True)
    }


def defaults(spec: dict) -> dict:
    return {
        name: said["defaultValue"] for name, said in submit.declared_parameters(spec).items() if "defaultValue" in said
    }


def test_create_run_without_typing_is_the_demo_on_this_cluster(with_the_demo):
    spec = uploaded(with_the_demo)["infoxlm"]
    begin = defaults(spec)
    assert not [name for name, said in submit.declared_parameters(spec).items() if not said.get("isOptional")]
    assert begin["image"] == begin["cluster"]["image"] == IMAGE and begin["store"] == "s3://infoxlm/store"
    assert spec["defaultPipelineRoot"] == "s3://infoxlm/runs" and begin["overrides"] == {}
    sections = {name: begin[name] for name in SECTIONS}
    demo = run_file.load(CONFIGS / "demo.yaml")
    assert run_file.RunConfig.parse(sections | {"num_workers": begin["num_workers"]}) == demo
    assert components.load_component_from_text(with_the_demo.uploads[0]).component_spec.inputs["image"].default == IMAGE


def test_the_page_shows_few_parameters_and_how_to_fill_in_the_form(with_the_demo):
    """The page lists parameters alphabetically, and shows no description of a parameter."""
    for spec in uploaded(with_the_demo).values():
        assert len(submit.declared_parameters(spec)) <= 12
        description = spec["pipelineInfo"]["description"]
        assert "enter infoxlm-runner as Service Account" in description and "docs/configuration.md" in description
    assert all("infoxlm-runner" in pipeline["description"] for pipeline in with_the_demo.pipelines)


def test_the_same_is_uploaded_once_and_another_image_is_another_version(kubeflow, tmp_path):
    first = upload(kubeflow, write_cluster(tmp_path))
    again = upload(kubeflow, write_cluster(tmp_path))
    versions = [version["display_name"] for version in kubeflow.versions]
    another = upload(kubeflow, write_cluster(tmp_path, image=IMAGE.replace("a1", "b2")))

    assert (first.stdout.count("uploaded"), again.stdout.count("unchanged")) == (6, 6)
    assert len(versions) == 6 and another.stdout.count("uploaded") == 6 and len(kubeflow.versions) == 12
    assert {p["display_name"] for p in kubeflow.pipelines} == {
        "infoxlm", "infoxlm-ablations", "infoxlm-suite", "infoxlm-promotion", "infoxlm-translation",
        "infoxlm-translation-ablations",
    }  # fmt: skip
    assert all(f"{kubeflow.host}/#/pipelines/details/p-" in line for line in first.stdout.splitlines()[:6])


def test_where_kubeflow_has_many_users_the_namespace_of_the_runs_has_the_pipelines(kubeflow, tmp_path):
    cluster = write_cluster(tmp_path)
    cluster.write_text(cluster.read_text() + "namespace: team-a\n")

    upload(kubeflow, cluster)

    assert {pipeline.get("namespace") for pipeline in kubeflow.pipelines} == {"team-a"}


def test_an_ablation_and_a_promotion_begin_with_the_demo_too_and_a_suite_asks(with_the_demo):
    found = uploaded(with_the_demo)
    trials = defaults(found["infoxlm-ablations"])["trials"]
    assert [item["trial"]["variant"] for item in trials] == ["full", "-XLCO", "-TLM-XLCO"] * 3
    assert run_file.override_trials({name: defaults(found["infoxlm"])[name] for name in SECTIONS}, trials, {})
    assert defaults(found["infoxlm-promotion"])["model"] == "models:/infoxlm@candidate"
    asked = {
        name for name, said in submit.declared_parameters(found["infoxlm-suite"]).items() if not said.get("isOptional")
    }
    assert asked == {"suite"}


def test_a_suite_and_a_run_of_ones_own_can_be_what_the_page_begins_with(kubeflow, tmp_path):
    (tmp_path / "suite.yaml").write_text("""
models: {ours: "models:/infoxlm@champion"}
tasks: {tatoeba: {settings: {task: retrieval, data: "s3://data/tatoeba"}}}
""")

    result = upload(kubeflow, write_cluster(tmp_path), "--suite", tmp_path / "suite.yaml",
                    "--set", "pretraining.optimization.steps=7000")  # fmt: skip

    assert result.exit_code == 0, result.stderr
    found = uploaded(kubeflow)
    assert defaults(found["infoxlm"])["pretraining"]["optimization"]["steps"] == 7000
    assert defaults(found["infoxlm-suite"])["suite"]["models"][0]["name"] == "ours"


@pytest.mark.parametrize(
    ("image", "options", "code", "said"),
    [
        (f"registry.example/infoxlm@sha256:{'0' * 64}", (), 2, "placeholder"),
        (IMAGE, ("--set", "pretraining.optimization.stepz=1"), 2, "stepz: unknown name"),
        (IMAGE, ("--set", "num_workers=4", "--set", "pretraining.batches.virtual_shards=3"), 2, "must"),
    ],
)
def test_what_could_not_run_is_not_uploaded(kubeflow, tmp_path, image, options, code, said):
    result = upload(kubeflow, write_cluster(tmp_path, image), *options)

    assert result.exit_code == code and said in result.stderr and result.stderr.count("\n") == 1
    assert kubeflow.requests == []
