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
    import json
    import logging
    import os

    from components.adapters.mlflow import registry as model_registry
    from components.platform import artifacts, runtime, tracking
    from infoxlm_core import manifests
    from infoxlm_core.config import RegistrationConfig
    from infoxlm_core.results.trials import HEADLINES

    with runtime.ending_clearly(store, "register"):
        checked = RegistrationConfig.parse(config, "registration")
        model, digest = artifacts.resolve(encoder)
        judged, _ = artifacts.resolve(scores)
        flat = manifests.load(judged)["facts"]
        made = manifests.load(model)
        run = tracking.open_run(store, by="mlflow")  # its registry's, whatever tracks
        os.environ["INFOXLM_IMAGE"] = image
        origin = {f"{key}_digest": value for key, value in made["inputs"].items()}
        origin |= {key: str(value) for key, value in made["made_by"].items()}
        origin |= {"test_set": json.loads((judged / "scores.json").read_bytes())["test_set"]}
        origin["made_as"] = f"{model.parent.parent.name}/{model.parent.name}"  # a digest of version, config and inputs
        origin |= {
            key: value for key, value in {"image": image, "pipeline_run": runtime.pipeline_run()}.items() if value
        }
        done = model_registry.register(
            checked.name,
            model,
            digest,
            {key: flat[key] for key in {*checked.gates, *HEADLINES} if key in flat},
            checked.gates,
            run.id,
            origin,
            judged,
        )
        run.log_params({"registration": checked.model_dump(mode="json")})
        run.end()  # the last step of its pipeline
        metrics.log_metric("version", done.version)
        metrics.log_metric("champion", int(done.champion))
        logging.info("models:/%s/%d is %s: %s", checked.name, done.version, " and ".join(done.aliases), done.reason)
