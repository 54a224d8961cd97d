"""`infoxlm upload` sends all pipelines to Kubeflow with default parameters, so that its web page can start runs."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import yaml
from click.testing import Result
from kfp import components

from components.settings.cluster import ClusterFile
from infoxlm_core import run_file
from pipelines import submit, upload
from pipelines.cli.app import CONFIGS
from tests.pipelines.commands import assert_refused, invoke
from tests.pipelines.conftest import IMAGE, SUITE, write_cluster
from tests.pipelines.kubeflow_server import Kubeflow, running_kubeflow

SECTIONS = ("preparation", "tokenization", "pretraining", "finetuning", "evaluation", "registration")
PIPELINE_NAMES = {
    "infoxlm", "infoxlm-ablations", "infoxlm-suite", "infoxlm-promotion", "infoxlm-translation",
    "infoxlm-translation-ablations",
}  # fmt: skip


class Upload(NamedTuple):
    """A server to which all pipelines were uploaded, and the result of the command."""

    kubeflow: Kubeflow
    result: Result


@pytest.fixture(scope="module")
def demo_upload(tmp_path_factory) -> Iterator[Upload]:
    """Upload all pipelines with the settings of the demo."""
    with running_kubeflow() as kubeflow:
        cluster = write_cluster(tmp_path_factory.mktemp("cluster"))
        yield Upload(kubeflow, invoke("upload", cluster, "--host", kubeflow.host))


def read_specs(kubeflow: Kubeflow) -> dict[str, dict[str, Any]]:
    """Return the specification of each uploaded pipeline by name."""
    specs = [next(yaml.load_all(text, yaml.CSafeLoader)) for text in kubeflow.uploads]
    return {spec["pipelineInfo"]["name"]: spec for spec in specs}


def default_values(spec: dict[str, Any]) -> dict[str, Any]:
    declarations = submit.read_declarations(spec)
    return {name: field["defaultValue"] for name, field in declarations.items() if "defaultValue" in field}


def required_parameters(spec: dict[str, Any]) -> set[str]:
    """Return the parameters that the user has to fill in."""
    return {name for name, field in submit.read_declarations(spec).items() if not field.get("isOptional")}


def test_all_pipelines_are_uploaded_with_their_pages(demo_upload):
    assert demo_upload.result.exit_code == 0, demo_upload.result.stderr
    lines = demo_upload.result.stdout.splitlines()[:6]
    for line in lines:
        assert line.startswith("uploaded ")
        assert f"{demo_upload.kubeflow.host}/#/pipelines/details/p-" in line
    assert {pipeline["display_name"] for pipeline in demo_upload.kubeflow.pipelines} == PIPELINE_NAMES


def test_run_with_the_default_parameters_is_the_demo_on_this_cluster(demo_upload):
    spec = read_specs(demo_upload.kubeflow)["infoxlm"]
    defaults = default_values(spec)

    assert required_parameters(spec) == set()
    assert defaults["image"] == defaults["cluster"]["image"] == IMAGE
    assert defaults["store"] == "s3://infoxlm/store"
    assert spec["defaultPipelineRoot"] == "s3://infoxlm/runs"
    assert defaults["overrides"] == {}
    config = {name: defaults[name] for name in (*SECTIONS, "num_workers")}
    assert run_file.RunConfig.parse(config) == run_file.load(CONFIGS / "demo.yaml")
    component = components.load_component_from_text(demo_upload.kubeflow.uploads[0])
    assert component.component_spec.inputs["image"].default == IMAGE


def test_page_of_a_pipeline_has_few_parameters_and_explains_the_form(demo_upload):
    """Kubeflow lists the parameters alphabetically, without their descriptions."""
    for spec in read_specs(demo_upload.kubeflow).values():
        assert len(submit.read_declarations(spec)) <= 12
        description = spec["pipelineInfo"]["description"]
        assert "enter infoxlm-runner as Service Account" in description
        assert "docs/configuration.md" in description
    assert all("infoxlm-runner" in pipeline["description"] for pipeline in demo_upload.kubeflow.pipelines)


def test_ablation_and_promotion_have_the_defaults_of_the_demo_and_a_suite_is_required(demo_upload):
    specs = read_specs(demo_upload.kubeflow)
    trials = default_values(specs["infoxlm-ablations"])["trials"]
    demo = default_values(specs["infoxlm"])

    assert [item["trial"]["variant"] for item in trials] == ["full", "-XLCO", "-TLM-XLCO"] * 3
    assert run_file.override_all_trials({name: demo[name] for name in SECTIONS}, trials, {})
    assert default_values(specs["infoxlm-promotion"])["model"] == "models:/infoxlm@candidate"
    assert required_parameters(specs["infoxlm-suite"]) == {"suite"}


def test_unchanged_pipeline_is_not_uploaded_again_but_another_image_is_a_new_version(kubeflow, tmp_path):
    client = submit.connect(kubeflow.host)

    def upload_promotion(image: str) -> upload.UploadedVersion:
        cluster = run_file.load_config(ClusterFile, write_cluster(tmp_path, image=image))
        return upload.upload_version(client, kubeflow.host, cluster, "promotion", {"image": image})

    first, repeated = upload_promotion(IMAGE), upload_promotion(IMAGE)
    other_image = upload_promotion(IMAGE.replace("a1", "b2"))

    assert [first.is_new, repeated.is_new, other_image.is_new] == [True, False, True]
    assert first == upload.UploadedVersion(repeated.name, repeated.page, is_new=True)
    assert other_image.name != first.name
    assert len(kubeflow.pipelines) == 1


def test_namespace_suite_and_overrides_reach_the_uploaded_pipelines(kubeflow, tmp_path):
    cluster = write_cluster(tmp_path, namespace="team-a")
    (tmp_path / "suite.yaml").write_text(SUITE)
    options = ["--suite", tmp_path / "suite.yaml", "--set", "pretraining.optimization.steps=7000"]

    result = invoke("upload", cluster, "--host", kubeflow.host, *options)

    assert result.exit_code == 0, result.stderr
    specs = read_specs(kubeflow)
    assert default_values(specs["infoxlm"])["pretraining"]["optimization"]["steps"] == 7000
    assert default_values(specs["infoxlm-suite"])["suite"]["models"][0]["name"] == "ours"
    assert {pipeline["namespace"] for pipeline in kubeflow.pipelines} == {"team-a"}


@pytest.mark.parametrize(
    ("image", "overrides", "message"),
    [
        (f"registry.example/infoxlm@sha256:{'0' * 64}", [], "placeholder"),
        (IMAGE, ["pretraining.optimization.stepz=1"], "stepz: unknown name"),
        (IMAGE, ["num_workers=4", "pretraining.batches.virtual_shards=3"], "must"),
    ],
)
def test_invalid_settings_are_refused_before_anything_is_sent(kubeflow, tmp_path, image, overrides, message):
    options = [part for override in overrides for part in ("--set", override)]

    result = invoke("upload", write_cluster(tmp_path, image=image), "--host", kubeflow.host, *options)

    assert_refused(result, message)
    assert kubeflow.requests == []
