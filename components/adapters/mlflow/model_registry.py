"""The registry: one version per content digest, with its evaluation, as `candidate` and perhaps `champion`.

A version holds the encoder's Hugging Face directory file by file, in MLflow's transformers flavour: what is loaded
from the registry is what was trained, byte for byte. `model_versions` lists the files beside it.
"""

import atexit
import importlib.metadata
import math
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.adapters.mlflow import connection, model_versions, promotion, signing
from components.adapters.mlflow.errors import translate_errors
from components.adapters.mlflow.model_versions import CANDIDATE, CHAMPION, GATE
from infoxlm_core.errors import InputError
from infoxlm_core.model.huggingface import directories
from infoxlm_core.results import evidence

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


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
    gate: Mapping[str, float],
    run_id: str,
    tags: Mapping[str, str],
    evaluation: Path,
) -> Registration:
    """Make an encoder a version of the registered model `name`, once per digest, and pass it through the gate.

    It may be called again, at the same time elsewhere, or after a crash at any point: the result is the same.

    Args:
        name: of the registered model.
        encoder_dir: a Hugging Face directory: masked LM in safetensors, and its tokenizer.
        digest: of the encoder's content.
        metrics: scores by name; all become tags of the version.
        gate: the scores on which the gate decides, with the least gain of each; higher is better.
        run_id: the MLflow run that made the encoder (`runs.open_run`).
        tags: further tags, such as the digests of corpus and tokenizer.
        evaluation: output of evaluate: model_card.md, scores.json, items.parquet. What is missing is left out.

    Raises:
        InputError: a score is missing or not finite, or the directory holds no encoder; nothing is registered.
        StorageUnavailable: MLflow does not answer.
    """
    from mlflow import MlflowClient

    for metric in gate:
        if not _is_finite(metrics.get(metric)):
            raise InputError(
                f"metric {metric} is {metrics.get(metric, 'missing')}, not a finite number: evaluate again"
            )
    directories.check_encoder(encoder_dir)
    client = MlflowClient()
    with translate_errors(f"registered model {name}"):
        if not model_versions.versions_of(client, name, digest):
            described = {**tags, **{key: repr(float(value)) for key, value in metrics.items()}, "digest": digest}
            model_versions.create(client, name, log_model(run_id, encoder_dir, evaluation), run_id, described)
        version, *doubles = model_versions.versions_of(client, name, digest)
        for double in doubles:  # of another process, or of a request that was sent twice
            _delete(client, double)
        if GATE not in version.tags:
            model_versions.put(client.set_registered_model_alias, name, CANDIDATE, version.version)
            promotion.promote(client, version, gate)
        return _describe(client, name, version.version)


def log_model(run_id: str, encoder_dir: Path, evaluation: Path) -> str:
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
    card = evaluation / model_versions.CARD
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "encoder")
        mlflow.transformers.save_model(
            fill,
            path,
            mlflow_model=mlflow.models.Model(logged.artifact_location, run_id, model_id=logged.model_id),
            model_card=ModelCard(card.read_text(encoding="utf-8"), ignore_metadata_errors=True)
            if card.exists()
            else None,
            signature=signature,
            pip_requirements=[f"{name}=={version.partition('+')[0]}" for name, version in installed.items()],
        )
        shutil.rmtree(path / model_versions.MODEL)
        shutil.copytree(encoder_dir, path / model_versions.MODEL)
        signing.sign(path / model_versions.MODEL, path / signing.FILE)
        (path / model_versions.EVALUATION).mkdir()
        for file in ("scores.json", evidence.FILE):
            if (evaluation / file).exists():
                shutil.copy(evaluation / file, path / model_versions.EVALUATION)
        client.log_model_artifacts(logged.model_id, str(path))
    client.finalize_logged_model(logged.model_id, "READY")
    client.log_outputs(run_id, [mlflow.entities.LoggedModelOutput(logged.model_id, step=0)])
    return logged.model_uri


def load_encoder(source: str | Path, default_store: Path) -> Path:
    """Return a local Hugging Face directory for a directory, `models:/NAME@ALIAS` or `models:/NAME/VERSION`.

    Raises:
        InputError: there is no such model, or it holds something that is no encoder.
        DataCorrupt: it is not what was trained or registered.
        SignatureInvalid: it comes from the registry, a key to verify it is set, and its signature does not fit.
        StorageUnavailable: MLflow does not answer.
    """
    if not model_versions.is_uri(str(source)):
        directories.check(Path(source))
        return Path(source)
    client = connection.connect_existing(default_store)
    version = model_versions.find(client, str(source))
    with translate_errors(str(source)):
        target = None  # files on this machine are read where they are
        if not client.get_model_version_download_uri(version.name, version.version).startswith("file:"):
            target = Path(tempfile.mkdtemp(prefix="infoxlm-"))
            atexit.register(shutil.rmtree, target, ignore_errors=True)
        files = model_versions.download(client, version, "", target)
    model_versions.check(files, version)
    return files / model_versions.MODEL


def _is_finite(score: Any) -> bool:
    try:
        return math.isfinite(float(score))
    except (TypeError, ValueError):
        return False


def _delete(client: "MlflowClient", version: "ModelVersion") -> None:
    from mlflow.exceptions import MlflowException

    with suppress(MlflowException):  # the other process deletes it as well; what stays is found next time
        client.delete_model_version(version.name, version.version)


def _describe(client: "MlflowClient", name: str, version: str) -> Registration:
    aliases = client.get_registered_model(name).aliases
    own = tuple(sorted(alias for alias, number in aliases.items() if int(number) == int(version)))
    reason = client.get_model_version(name, version).tags[GATE]
    return Registration(int(version), own, CHAMPION in own, reason)
