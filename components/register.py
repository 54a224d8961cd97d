"""Component: evaluated encoder -> a version in the registry, `candidate` and perhaps `champion`."""

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
    """Register an encoder once per content; make it champion if it is shown to be better than the present one.

    Args:
        config: a `RegistrationConfig` as a mapping.
        store: directory of the local registry, if MLFLOW_TRACKING_URI names no server.
        encoder: the model in Hugging Face format.
        scores: output of evaluate.
        image: of this step, for the record.
        metrics: version, and whether it is champion (1) or not (0).
    """
    import logging
    import os

    from components.adapters.mlflow import model_registry, model_versions
    from components.platform import artifacts, runtime
    from components.platform.stage_run import stage_run
    from infoxlm_core import manifests
    from infoxlm_core.config import RegistrationConfig
    from infoxlm_core.results import evidence
    from infoxlm_core.results.trials import HEADLINES

    with stage_run("register", store, tracker="mlflow", last=True) as step:  # which has the registry, whatever tracks
        os.environ["INFOXLM_IMAGE"] = image
        checked = RegistrationConfig.parse(step.read(config), "registration")
        model, digest = artifacts.resolve(encoder)
        judged, _ = artifacts.resolve(scores)
        made, figures = manifests.load(model), manifests.load(judged)["facts"]
        origin = {f"{name}_digest": value for name, value in made["inputs"].items()}
        origin |= {name: str(value) for name, value in made["made_by"].items()}
        origin |= {
            "test_set": evidence.read_scores(judged)["test_set"],
            model_versions.MADE_AS: f"{model.parent.parent.name}/{model.parent.name}",  # its key
            "pipeline_run": runtime.pipeline_run(),
        } | ({"image": image} if image else {})
        headlines = {name: figures[name] for name in {*checked.gates, *HEADLINES} if name in figures}
        done = model_registry.register(
            checked.name, model, digest, headlines, checked.gates, step.run.id, origin, judged
        )
        step.report(registration=checked)
        step.run.end()  # the last step of its pipeline
        artifacts.show({"version": done.version, "champion": int(done.champion)}, metrics)
        logging.info("models:/%s/%d is %s: %s", checked.name, done.version, " and ".join(done.aliases), done.reason)
