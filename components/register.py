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
    """Register an encoder once per content, and promote it if it is significantly better than the champion.

    Args:
        config: a `RegistrationConfig` as a mapping.
        store: directory of the local registry if MLFLOW_TRACKING_URI is not set.
        encoder: the model in Hugging Face format.
        scores: output of evaluate.
        image: container image of this step, which the record names.
        metrics: the version, and whether it is champion (1) or not (0).
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

    with stage_run("register", store, tracker="mlflow", ends_run=True) as step:  # the registry is MLflow's
        os.environ["INFOXLM_IMAGE"] = image
        checked = RegistrationConfig.parse(step.read(config), "registration")
        encoder_dir, digest = artifacts.resolve(encoder)
        evaluation, _ = artifacts.resolve(scores)
        manifest = manifests.load(encoder_dir)
        figures = manifests.load(evaluation)["facts"]
        tags = {f"{name}_digest": value for name, value in manifest["inputs"].items()}
        tags |= {name: str(value) for name, value in manifest["made_by"].items()}
        tags[model_versions.AGAINST] = checked.against
        tags["test_set"] = evidence.read_scores(evaluation)["test_set"]
        artifact_dir = encoder_dir.parent  # STORE/kind/key
        tags[model_versions.MADE_AS] = f"{artifact_dir.parent.name}/{artifact_dir.name}"
        tags["pipeline_run"] = runtime.read_run_id()
        if image:
            tags["image"] = image
        main_scores = {name: figures[name] for name in {*checked.gates, *HEADLINES} if name in figures}
        candidate = model_registry.EvaluatedEncoder(encoder_dir, digest, main_scores, step.run.id, tags, evaluation)
        with artifacts.exclusive(store, *promotion.LOCK):
            registered = model_registry.register(checked.name, candidate, checked.gates)
        step.report(registration=checked)
        artifacts.log_metrics({"version": registered.version, "champion": int(registered.champion)}, metrics)
        aliases = " and ".join(registered.aliases)
        decision = f"models:/{checked.name}/{registered.version} is {aliases}: {registered.reason}"
        logging.info(decision)
        step.summarise(
            *describe_headlines(figures),
            f"version     {decision}",
            f"report      {artifacts.find_uri(evaluation / 'report.html')}",
        )
        step.run.end()  # the last step of its pipeline
