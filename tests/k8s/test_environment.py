"""Environment variables of a step's pod: each is set once, even if Kubeflow sets some, and has its usual name."""

import pytest

from components.adapters.kuberay import manifest
from components.settings.cluster import ClusterConfig
from components.settings.environment import apply_prefixed_variables, prefixed_name, unprefixed_name
from pipelines import submit

SET_BY_KUBEFLOW = {
    *("MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_ID", "MLFLOW_WORKSPACE"),
    *("MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"),
    *("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY"),
}
"""Variables that Kubeflow's driver adds for its MLflow plugin and its proxy, without checking whether they exist."""


def config_map_entry(variable: str, key: str) -> dict:
    return {"name": variable, "valueFrom": {"configMapKeyRef": {"name": "infoxlm-environment", "key": key}}}


def list_variables(platform: object) -> set[str]:
    """Return the names of all environment variables in the Kubernetes settings of a compiled pipeline."""
    if isinstance(platform, list):
        return set().union(*(list_variables(value) for value in platform))
    if not isinstance(platform, dict):
        return set()
    names = set().union(*(list_variables(value) for value in platform.values()))
    if "envVar" in platform:
        names.add(platform["envVar"])
    if "fieldPath" in platform:
        names.add(platform["name"])
    return names


@pytest.mark.parametrize("pipeline", submit.PIPELINES)
def test_no_step_sets_a_variable_that_kubeflow_may_set(pipeline):
    """Kubernetes refuses a pod in which a variable has a value and a reference."""
    _, platform = submit.read_compiled(pipeline)

    variables = list_variables(platform)
    assert {"RUN_ID", prefixed_name("MLFLOW_TRACKING_URI")} <= variables
    assert variables & SET_BY_KUBEFLOW == set()


def test_step_reads_prefixed_variables_unless_kubeflow_has_set_them():
    environment = {
        "INFOXLM_MLFLOW_TRACKING_URI": "http://ours:5000",
        "INFOXLM_HTTPS_PROXY": "http://ours:3128",
        "HTTPS_PROXY": "http://kubeflow:3128",
        "INFOXLM_SIGNING_KEY": "/etc/key",
    }

    apply_prefixed_variables(environment)

    assert environment["MLFLOW_TRACKING_URI"] == "http://ours:5000"
    assert environment["HTTPS_PROXY"] == "http://kubeflow:3128"
    assert {"SIGNING_KEY", "MLFLOW_TRACKING_PASSWORD"}.isdisjoint(environment)
    assert unprefixed_name("INFOXLM_SIGNING_KEY") == "INFOXLM_SIGNING_KEY"
    assert unprefixed_name("INFOXLM_NO_PROXY") == "NO_PROXY"


@pytest.mark.parametrize(("address", "is_set"), [("http://kubeflow:5000", False), ("http://ours:5000/", True)])
def test_our_mlflow_password_is_set_only_for_our_server(address, is_set):
    environment = {
        "INFOXLM_MLFLOW_TRACKING_URI": "http://ours:5000",
        "INFOXLM_MLFLOW_TRACKING_PASSWORD": "canary",
        "MLFLOW_TRACKING_URI": address,
    }

    apply_prefixed_variables(environment)

    assert ("MLFLOW_TRACKING_PASSWORD" in environment) == is_set


@pytest.mark.parametrize(
    ("set_by_kubeflow", "user_of_a_step", "user_of_a_registering_step"),
    [
        ({}, "trainings", "pipelines"),
        (
            {"MLFLOW_TRACKING_URI": "http://ours:5000", "MLFLOW_TRACKING_USERNAME": "trainings"},
            "trainings",
            "pipelines",
        ),
        (
            {"MLFLOW_TRACKING_URI": "http://kubeflow:5000", "MLFLOW_TRACKING_USERNAME": "somebody"},
            "somebody",
            "somebody",
        ),
    ],
)
def test_registering_step_uses_the_registry_account_on_our_server(
    set_by_kubeflow, user_of_a_step, user_of_a_registering_step
):
    ours = {"INFOXLM_MLFLOW_TRACKING_URI": "http://ours:5000", "INFOXLM_MLFLOW_TRACKING_USERNAME": "trainings"}

    for registry, expected_user in (
        ({}, user_of_a_step),
        ({"INFOXLM_REGISTRY_USERNAME": "pipelines"}, user_of_a_registering_step),
    ):
        environment = ours | set_by_kubeflow | registry
        apply_prefixed_variables(environment)
        assert environment["MLFLOW_TRACKING_USERNAME"] == expected_user


def test_training_pods_get_each_variable_once_and_kubeflows_value_wins():
    our_address = config_map_entry(prefixed_name("MLFLOW_TRACKING_URI"), "MLFLOW_TRACKING_URI")
    our_proxy = config_map_entry(prefixed_name("HTTPS_PROXY"), "HTTPS_PROXY")
    kubeflows_address = {"name": "MLFLOW_TRACKING_URI", "value": "http://kubeflow:5000"}

    def environment_of_head(*entries: dict) -> dict[str, dict]:
        config = ClusterConfig(image=f"registry.example/infoxlm@sha256:{'1' * 64}")
        job = manifest.render("j-x-1", "s3://infoxlm/store/work/j.json", config, 1, entries, "2.60.0", {})
        [container] = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
        names = [entry["name"] for entry in container["env"]]
        assert len(names) == len(set(names))
        return {entry["name"]: entry for entry in container["env"]}

    without_plugin = environment_of_head(our_address, our_proxy)
    with_plugin = environment_of_head(kubeflows_address, our_address, our_proxy)

    assert without_plugin["MLFLOW_TRACKING_URI"]["valueFrom"] == our_address["valueFrom"]
    assert without_plugin["HTTPS_PROXY"]["valueFrom"] == our_proxy["valueFrom"]
    assert with_plugin["HTTPS_PROXY"]["valueFrom"] == our_proxy["valueFrom"]
    assert with_plugin["MLFLOW_TRACKING_URI"] == kubeflows_address
