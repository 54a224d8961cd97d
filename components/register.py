"""Component: register an evaluated encoder as `candidate`, and as `champion` if it passes the gate."""

from typing import Any

from kfp import dsl

from components.platform.stage import stage


@stage
def register(
    config: dict[str, Any],
    store: str,
    encoder: dsl.Input[dsl.Model],
    scores: dsl.Input[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
    image: str = "",
) -> None:
    """Register an encoder unless its content is registered. Promote it if it is significantly better than the champion.

    Args:
        config: a `RegistrationConfig` as a mapping.
        store: directory of the local registry if MLFLOW_TRACKING_URI is not set.
        encoder: the model in Hugging Face format.
        scores: output of evaluate.
        image: container image of this step, for the registration record.
        metrics: the version, and 1 if it is champion, else 0.
    """
    import logging
    import os

    from components.adapters.mlflow import model_registry, model_versions, promotion
    from components.platform import artifacts, runtime
    from components.platform.stage_run import stage_run
    from infoxlm_core import manifests
    from infoxlm_core.config import RegistrationConfig
    from infoxlm_core.results import evidence
    from infoxlm_core.results.trials import HEADLINES, describe_headlines

    with stage_run("register", store, tracker="mlflow", ends_run_on_failure=True) as step:  # the registry is MLflow's
        os.environ["INFOXLM_IMAGE"] = image  # the record of a promotion names the image that decided
        registration_config = RegistrationConfig.parse(step.read(config), "registration")
        encoder_directory, digest = artifacts.resolve(encoder)
        evaluation_directory, _ = artifacts.resolve(scores)
        manifest = manifests.load(encoder_directory)
        metric_values = manifests.load(evaluation_directory)["facts"]
        tags = {f"{name}_digest": value for name, value in manifest["inputs"].items()}
        tags |= {name: str(value) for name, value in manifest["made_by"].items()}
        tags[model_versions.AGAINST] = registration_config.against
        tags["test_set"] = evidence.read_scores(evaluation_directory)["test_set"]
        artifact_directory = encoder_directory.parent  # STORE/kind/key; garbage collection keeps this artifact
        tags[model_versions.MADE_AS] = f"{artifact_directory.parent.name}/{artifact_directory.name}"
        tags["pipeline_run"] = runtime.read_run_id()
        if image:
            tags["image"] = image
        main_metrics = {*registration_config.gates, *HEADLINES}
        main_scores = {name: metric_values[name] for name in main_metrics if name in metric_values}
        candidate = model_registry.EvaluatedEncoder(
            encoder_directory, digest, main_scores, step.run.id, tags, evaluation_directory
        )
        with artifacts.exclusive(store, *promotion.LOCK):  # no other process may change the champion meanwhile
            registered = model_registry.register(registration_config.name, candidate, registration_config.gates)
        step.report(registration=registration_config)
        artifacts.log_metrics({"version": registered.version, "champion": int(registered.champion)}, metrics)
        decision = f"models:/{registration_config.name}/{registered.version} is {registered.role}: {registered.reason}"
        logging.info(decision)
        step.summarise(
            *describe_headlines(metric_values),
            f"version     {decision}",
            f"report      {artifacts.find_uri(evaluation_directory / 'report.html')}",
        )
        step.run.end()  # this is the last step of its pipeline
