"""Variables of a step's pod: none is set twice when Kubeflow sets some itself, and everybody finds the usual names."""

import pytest

from components.adapters.kuberay import manifest
from components.settings.cluster import ClusterConfig
from components.settings.environment import apply_prefixed_variables, prefixed_name, unprefixed_name
from pipelines import submit

INJECTED = {
    *("MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_ID", "MLFLOW_WORKSPACE"),
    *("MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"),
    *("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY"),
}
"""What Kubeflow's driver adds by itself, for its MLflow plugin and its API server's proxy; it looks for no doubles."""
PLUGIN = {"name": "MLFLOW_TRACKING_URI", "value": "http://theirs:5000"}


def of_config_map(variable: str, key: str) -> dict:
    return {"name": variable, "valueFrom": {"configMapKeyRef": {"name": "infoxlm-environment", "key": key}}}


def names_in(part: object) -> set[str]:
    """Every environment variable that is named somewhere in the platform's part of a pipeline."""
    if isinstance(part, dict):
        own = {value for key, value in part.items() if key == "envVar" or (key == "name" and "fieldPath" in part)}
        return own.union(*(names_in(value) for value in part.values()))
    return set().union(*(names_in(value) for value in part)) if isinstance(part, list) else set()


@pytest.mark.parametrize("pipeline", submit.PIPELINES)
def test_no_step_asks_for_a_variable_that_kubeflow_may_set_too(pipeline):
    """An entry with a value and a reference is refused: may not be specified when `value` is not empty."""
    _, platform = submit.read_compiled(pipeline)

    names = names_in(platform)
    assert "RUN_ID" in names and prefixed_name("MLFLOW_TRACKING_URI") in names
    assert names & INJECTED == set()


def test_a_step_finds_ours_under_the_usual_names_and_theirs_first():
    known = {
        "INFOXLM_MLFLOW_TRACKING_URI": "http://ours:5000",
        "INFOXLM_HTTPS_PROXY": "http://ours:3128",
        "HTTPS_PROXY": "http://theirs:3128",
        "INFOXLM_SIGNING_KEY": "/etc/key",
    }

    apply_prefixed_variables(known)

    assert known["MLFLOW_TRACKING_URI"] == "http://ours:5000"
    assert known["HTTPS_PROXY"] == "http://theirs:3128"
    assert "SIGNING_KEY" not in known and "MLFLOW_TRACKING_PASSWORD" not in known
    assert [unprefixed_name(name) for name in ("INFOXLM_SIGNING_KEY", "INFOXLM_NO_PROXY")] == [
        "INFOXLM_SIGNING_KEY",
        "NO_PROXY",
    ]


@pytest.mark.parametrize(("address", "taken"), [("http://theirs:5000", False), ("http://ours:5000/", True)])
def test_our_login_goes_to_no_server_but_ours(address, taken):
    known = {
        "INFOXLM_MLFLOW_TRACKING_URI": "http://ours:5000",
        "INFOXLM_MLFLOW_TRACKING_PASSWORD": "canary",
        "MLFLOW_TRACKING_URI": address,
    }

    apply_prefixed_variables(known)

    assert ("MLFLOW_TRACKING_PASSWORD" in known) == taken


def test_a_step_that_registers_is_the_account_that_may_even_where_kubeflow_gives_every_step_another():
    ours = {"INFOXLM_MLFLOW_TRACKING_URI": "http://ours:5000", "INFOXLM_MLFLOW_TRACKING_USERNAME": "trainings"}
    plugin = {"MLFLOW_TRACKING_URI": "http://ours:5000", "MLFLOW_TRACKING_USERNAME": "trainings"}
    elsewhere = {"MLFLOW_TRACKING_URI": "http://theirs:5000", "MLFLOW_TRACKING_USERNAME": "somebody"}
    taken = []

    for theirs in ({}, plugin, elsewhere):
        for registry in ({}, {"INFOXLM_REGISTRY_USERNAME": "pipelines"}):
            known = ours | theirs | registry
            apply_prefixed_variables(known)
            taken.append(known["MLFLOW_TRACKING_USERNAME"])

    assert taken == ["trainings", "pipelines", "trainings", "pipelines", "somebody", "somebody"]


def test_the_pods_of_a_training_get_each_variable_once_theirs_before_ours():
    ours = of_config_map(prefixed_name("MLFLOW_TRACKING_URI"), "MLFLOW_TRACKING_URI")
    proxy = of_config_map(prefixed_name("HTTPS_PROXY"), "HTTPS_PROXY")

    def environment_of_head(*entries: dict) -> dict[str, dict]:
        config = ClusterConfig(image=f"registry.example/infoxlm@sha256:{'1' * 64}")
        job = manifest.render("j-x-1", "s3://infoxlm/store/work/j.json", config, 1, entries, "2.60.0", {})
        [container] = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
        names = [entry["name"] for entry in container["env"]]
        assert len(names) == len(set(names))
        return {entry["name"]: entry for entry in container["env"]}

    alone, beside = environment_of_head(ours, proxy), environment_of_head(PLUGIN, ours, proxy)

    assert alone["MLFLOW_TRACKING_URI"]["valueFrom"] == ours["valueFrom"]
    assert alone["HTTPS_PROXY"]["valueFrom"] == beside["HTTPS_PROXY"]["valueFrom"] == proxy["valueFrom"]
    assert beside["MLFLOW_TRACKING_URI"] == PLUGIN
