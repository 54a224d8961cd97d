"""The registry: one version per content digest, `candidate` and `champion` aliases, and the gate between them.

A version holds the encoder's Hugging Face directory file by file, in MLflow's transformers flavour: what is loaded
from the registry is what was trained, byte for byte.
"""

import atexit
import importlib.metadata
import json
import logging
import math
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.adapters import mlflow_runs
from infoxlm_core.errors import InputError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

logger = logging.getLogger(__name__)

CANDIDATE, CHAMPION = "candidate", "champion"
_URI = re.compile(r"models:/(?P<name>[^/@]+)(@(?P<alias>[^/@]+)|/(?P<version>[0-9]+))")
_GATE = "gate"  # tag with the gate's verdict; written last, so a version that has it is registered completely


@dataclass(frozen=True)
class Registration:
    """What came of a registration."""

    version: int
    aliases: tuple[str, ...]
    champion: bool
    reason: str
    """The gate's verdict in words."""


def register(
    name: str,
    encoder_dir: Path,
    digest: str,
    metrics: Mapping[str, float],
    metric: str,
    run_id: str,
    tags: Mapping[str, str],
    model_card: str,
) -> Registration:
    """Make an encoder a version of the registered model `name`, once per digest, and pass it through the gate.

    It may be called again, at the same time elsewhere, or after a crash at any point: the result is the same.

    Args:
        name: of the registered model.
        encoder_dir: a Hugging Face directory: masked LM in safetensors, and its tokenizer.
        digest: of the encoder's content.
        metrics: scores by name; all become tags of the version.
        metric: the score on which the gate decides; higher is better.
        run_id: the MLflow run that made the encoder (`mlflow_runs.open_run`).
        tags: further tags, such as the digests of corpus and tokenizer.
        model_card: Markdown, with a YAML header if there is one.

    Raises:
        InputError: the score is missing or not finite, or the directory holds no encoder; nothing is registered.
        StorageUnavailable: MLflow does not answer.
    """
    from mlflow import MlflowClient

    if _score(metrics, metric) is None:
        raise InputError(f"metric {metric} is {metrics.get(metric, 'missing')}, not a finite number: evaluate again")
    check_encoder(encoder_dir)
    client = MlflowClient()
    with mlflow_runs.answering(f"registered model {name}"):
        if not _versions(client, name, digest):
            described = {**tags, **{key: repr(float(value)) for key, value in metrics.items()}, "digest": digest}
            _create(client, name, log_model(run_id, encoder_dir, model_card), run_id, described)
        version, *doubles = _versions(client, name, digest)
        for double in doubles:  # of another process, or of a request that was sent twice
            _delete(client, double)
        if _GATE not in version.tags:
            _promote(client, version, metric)
        return _describe(client, name, version.version)


def log_model(run_id: str, encoder_dir: Path, model_card: str) -> str:
    """Copy an encoder into its MLflow run, after it has filled one mask; return its URI, `models:/m-…`.

    MLflow puts weights and tokenizer into different folders and leaves out what it does not know (and its own way to
    log a directory fails with transformers 5.23), so its `model` folder is replaced by the encoder's directory.
    """
    import mlflow
    import transformers
    from huggingface_hub import ModelCard

    model = transformers.AutoModelForMaskedLM.from_pretrained(encoder_dir, use_safetensors=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder_dir)
    fill = transformers.pipeline("fill-mask", model=model, tokenizer=tokenizer)
    sentence = f"One {tokenizer.mask_token} is hidden."
    signature = mlflow.models.infer_signature([sentence], [fill(sentence, top_k=1)[0]["token_str"]])
    installed = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "safetensors")}
    client = mlflow.MlflowClient()
    logged = client.create_logged_model(client.get_run(run_id).info.experiment_id, "encoder", source_run_id=run_id)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "encoder")
        mlflow.transformers.save_model(
            fill,
            path,
            mlflow_model=mlflow.models.Model(logged.artifact_location, run_id, model_id=logged.model_id),
            model_card=ModelCard(model_card, ignore_metadata_errors=True),
            signature=signature,
            pip_requirements=[f"{name}=={version.partition('+')[0]}" for name, version in installed.items()],
        )
        shutil.rmtree(path / "model")
        shutil.copytree(encoder_dir, path / "model")
        client.log_model_artifacts(logged.model_id, str(path))
    client.finalize_logged_model(logged.model_id, "READY")
    client.log_outputs(run_id, [mlflow.entities.LoggedModelOutput(logged.model_id, step=0)])
    return logged.model_uri


def load_encoder(source: str | Path, default_store: Path) -> Path:
    """Return a local Hugging Face directory for a directory, `models:/NAME@ALIAS` or `models:/NAME/VERSION`.

    Raises:
        InputError: there is no such model, or it holds something that is no encoder.
        StorageUnavailable: MLflow does not answer.
    """
    match = _URI.fullmatch(str(source))
    if not match:
        check_encoder(Path(source))
        return Path(source)
    client = mlflow_runs.connect(default_store)
    import mlflow

    with mlflow_runs.answering(str(source)):
        name, alias = match["name"], match["alias"]
        version = match["version"] or client.get_model_version_by_alias(name, alias).version
        location = client.get_model_version_download_uri(name, version)
        mlflow_runs.check_location(location)
        target = None  # files on this machine are read where they are
        if not location.startswith("file:"):
            target = tempfile.mkdtemp(prefix="infoxlm-")
            atexit.register(shutil.rmtree, target, ignore_errors=True)
        encoder = Path(mlflow.artifacts.download_artifacts(artifact_uri=f"{location}/model", dst_path=target))
    check_encoder(encoder)
    return encoder


def check_encoder(directory: Path) -> None:
    """Refuse what is no encoder, and what could run code while it is loaded."""
    if not (directory / "config.json").is_file() or not list(directory.glob("*.safetensors")):
        raise InputError(f"{directory} holds no config.json with *.safetensors: give the output of pretrain")
    if pickles := [path.name for path in directory.rglob("*") if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".py")]:
        raise InputError(f"{directory} holds {pickles[0]}, which could run code: keep only safetensors and JSON")
    for path in directory.glob("*config.json"):
        try:
            config = json.loads(path.read_bytes())
        except ValueError as error:
            raise InputError(f"{path} is no JSON ({error}): export the model again") from None
        if "auto_map" in config:
            raise InputError(f"{path} asks for code of its own (auto_map): export the model with a built-in class")


def _score(values: Mapping[str, Any], metric: str) -> float | None:
    """A finite score among metrics or a version's tags; none otherwise."""
    try:
        score = float(values[metric])
    except (KeyError, TypeError, ValueError):
        return None
    return score if math.isfinite(score) else None


def _versions(client: "MlflowClient", name: str, digest: str) -> "list[ModelVersion]":
    """All versions with a digest, the oldest first."""
    found = client.search_model_versions(f"name = '{name}' and tags.digest = '{digest}'")
    return sorted(found, key=lambda version: int(version.version))


def _create(client: "MlflowClient", name: str, source: str, run_id: str, tags: dict[str, str]) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    try:
        client.create_model_version(name, source, run_id, tags=tags, model_id=source.removeprefix("models:/"))
    except MlflowException:  # the answer may be lost: what counts is what the registry holds
        if not _versions(client, name, tags["digest"]):
            raise


def _delete(client: "MlflowClient", version: "ModelVersion") -> None:
    from mlflow.exceptions import MlflowException

    with suppress(MlflowException):  # the other process deletes it as well; what stays is found next time
        client.delete_model_version(version.name, version.version)


def _promote(client: "MlflowClient", version: "ModelVersion", metric: str) -> None:
    """Set the aliases: `champion` if the gate says so, `candidate` in any case."""
    better, reason = _judge(client, version, metric)
    if better:
        client.set_registered_model_alias(version.name, CHAMPION, version.version)
    client.set_registered_model_alias(version.name, CANDIDATE, version.version)
    client.set_model_version_tag(version.name, version.version, _GATE, reason)
    logger.info("%s version %s: %s", version.name, version.version, reason)


def _judge(client: "MlflowClient", version: "ModelVersion", metric: str) -> tuple[bool, str]:
    """The gate: a candidate becomes champion if there is none, or if it scores strictly higher."""
    champion = client.get_registered_model(version.name).aliases.get(CHAMPION)
    score = _score(version.tags, metric)
    if champion is None:
        return True, f"champion with {metric} {score}: the first one"
    if int(champion) == int(version.version):  # set before a crash, or by the same registration elsewhere
        return True, f"champion with {metric} {score}"
    holder = client.get_model_version(version.name, champion).tags
    best = _score(holder, metric)
    if holder.get("test_set") != version.tags.get("test_set"):
        return False, (
            f"candidate with {metric} {score}: champion version {champion} has {best} on another test set, "
            "promote by hand"
        )
    if score is None or best is None:
        return False, f"candidate with {metric} {score}: champion version {champion} has {best}, promote by hand"
    if score > best:
        return True, f"champion with {metric} {score}: above {best} of version {champion}"
    return False, f"candidate with {metric} {score}: not above {best} of version {champion}"


def _describe(client: "MlflowClient", name: str, version: str) -> Registration:
    aliases = client.get_registered_model(name).aliases
    own = tuple(sorted(alias for alias, number in aliases.items() if int(number) == int(version)))
    reason = client.get_model_version(name, version).tags[_GATE]
    return Registration(int(version), own, CHAMPION in own, reason)
