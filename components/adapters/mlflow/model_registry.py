"""Register encoders: one version per content digest, with its evaluation, as `candidate` and perhaps `champion`.

A version holds the encoder's Hugging Face directory unchanged, in MLflow's transformers flavour, so a model loaded from
the registry is byte for byte the trained model. `model_versions` lists the other files of a version.
"""

import atexit
import importlib.metadata
import logging
import math
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.adapters.mlflow import connection, model_versions, promotion, signing
from components.adapters.mlflow.errors import translate_errors
from components.adapters.mlflow.model_versions import CANDIDATE, CHAMPION, GATE
from infoxlm_core import manifests
from infoxlm_core.errors import InputError
from infoxlm_core.model.huggingface import directories
from infoxlm_core.results import evidence

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.models import Model as MlflowModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluatedEncoder:
    """An encoder with its evaluation, which `register` makes a version of a model."""

    directory: Path
    """A Hugging Face directory with a model in safetensors and its tokenizer."""
    digest: str
    """Digest of the encoder's content."""
    metrics: Mapping[str, float]
    """Scores by name. All become tags of the version."""
    run_id: str
    """The MLflow run that trained the encoder (`runs.open_run`)."""
    tags: Mapping[str, str]
    """Further tags, such as the digests of corpus and tokenizer."""
    evaluation: Path
    """Output of evaluate: model_card.md, scores.json, items.parquet. Missing files are left out."""


@dataclass(frozen=True)
class Registration:
    """The result of a registration."""

    version: int
    aliases: tuple[str, ...]
    champion: bool
    reason: str
    """The verdict of the gate, in words."""


def register(name: str, encoder: EvaluatedEncoder, gate: Mapping[str, float]) -> Registration:
    """Register an encoder as a version of the model `name`, once per digest, and apply the promotion gate to it.

    A second call, or a call after a crash at any point, has the same result. The caller holds `promotion.LOCK`.

    Args:
        name: name of the registered model.
        encoder: the encoder with its evaluation.
        gate: least gain by metric; higher scores are better.

    Raises:
        InputError: a score of the gate is missing or not finite, or the directory holds no encoder.
        StorageUnavailable: MLflow does not answer.
    """
    from mlflow import MlflowClient

    _check_gate(encoder.metrics, gate)
    directories.check_encoder(encoder.directory)
    client = MlflowClient()
    with translate_errors(f"registered model {name}"):
        if not model_versions.find_by_digest(client, name, encoder.digest):
            source = log_model(encoder.run_id, encoder.directory, encoder.evaluation)
            score_tags = {metric: repr(float(score)) for metric, score in encoder.metrics.items()}
            tags = {**encoder.tags, **score_tags, "digest": encoder.digest}
            model_versions.create_version(client, name, source, encoder.run_id, tags)
        version = model_versions.keep_oldest(client, name, encoder.digest)
        if GATE not in version.tags:
            client.set_registered_model_alias(name, CANDIDATE, version.version)
            promotion.promote(client, version, gate)
        return _read_registration(client, name, version.version)


def _check_gate(metrics: Mapping[str, float], gate: Mapping[str, float]) -> None:
    """Raise InputError if a metric of the gate has no finite score."""
    for metric in gate:
        score = metrics.get(metric)
        if score is None or not math.isfinite(score):
            prefixes = ("retrieval/", "guard/", "classification/")
            available = ", ".join(name for name in metrics if name.startswith(prefixes)) or "none"
            raise InputError(
                f"The gate needs a finite value of {metric}, but it is {score}. Evaluate again, or give the gate a "
                f"metric of the evaluation: {available}."
            )


def log_model(run_id: str, encoder_dir: Path, evaluation: Path) -> str:
    """Log an encoder or translator to its MLflow run, after testing it on one sentence. Return its URI, `models:/m-…`.

    MLflow's own functions are not sufficient: MLflow stores weights and tokenizer in different folders, drops files
    that it does not know, and cannot log a directory with transformers 5.23. So the folder `model` that MLflow writes
    is replaced by the encoder's directory.
    """
    import mlflow

    client = mlflow.MlflowClient()
    logged_model = model_versions.open_upload(client, run_id)
    description = mlflow.models.Model(logged_model.artifact_location, run_id, model_id=logged_model.model_id)
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "encoder")
        if directories.is_translator(encoder_dir):  # MLflow has no flavour for it
            files.mkdir()
            description.save(files / "MLmodel")
        else:
            _save_encoder(encoder_dir, files, description, evaluation / model_versions.CARD)
            _write_export(encoder_dir, files)
        shutil.copytree(encoder_dir, files / model_versions.MODEL)
        signing.sign(files / model_versions.MODEL, files / signing.FILE)
        (files / model_versions.EVALUATION).mkdir()
        for name in ("scores.json", evidence.FILE):
            if (evaluation / name).exists():
                shutil.copy(evaluation / name, files / model_versions.EVALUATION)
        return model_versions.upload(client, run_id, logged_model, files)


def _save_encoder(encoder_dir: Path, files: Path, description: "MlflowModel", card_file: Path) -> None:
    """Write MLflow's description of an encoder and its model card, without the weights."""
    import mlflow
    from huggingface_hub import ModelCard

    example = _run_example(encoder_dir)
    requirements = []
    for library in ("torch", "transformers", "safetensors"):
        public_version, _, _ = importlib.metadata.version(library).partition("+")  # without a build such as +cu130
        requirements.append(f"{library}=={public_version}")
    card = None
    if card_file.exists():
        card = ModelCard(card_file.read_text(encoding="utf-8"), ignore_metadata_errors=True)
    mlflow.transformers.save_model(
        example.pipeline,
        files,
        mlflow_model=description,
        model_card=card,
        signature=mlflow.models.infer_signature([example.sentence], [example.output]),
        pip_requirements=requirements,
    )
    shutil.rmtree(files / model_versions.MODEL)


@dataclass(frozen=True)
class _Example:
    """One call of a transformers pipeline."""

    pipeline: Any
    sentence: str
    output: Any


def _run_example(encoder_dir: Path) -> _Example:
    """Call a transformers pipeline of a model on one sentence, which tests the model.

    A model with a language-model head predicts a masked token. Other models compute a vector for each token.
    """
    import transformers

    from infoxlm_core.model.huggingface import any_encoder  # takes seconds

    model: Any
    tokenizer: Any
    model, tokenizer = any_encoder.load_encoder(encoder_dir, "cpu")
    if any_encoder.has_language_model_head(encoder_dir):
        fill_mask = transformers.pipeline("fill-mask", model=model, tokenizer=tokenizer)
        sentence = f"One {tokenizer.mask_token} is hidden."
        (best_prediction,) = fill_mask(sentence, top_k=1)
        return _Example(fill_mask, sentence, best_prediction["token_str"])
    extract_features: Any = transformers.pipeline("feature-extraction", model=model, tokenizer=tokenizer)
    sentence = "One sentence."
    (token_vectors,) = extract_features(sentence)
    return _Example(extract_features, sentence, token_vectors[0])


def _write_export(encoder_dir: Path, files: Path) -> None:
    """Export an encoder for sentence-transformers into the files of a version. Log a warning if that is impossible."""
    from infoxlm_core.stages.export import SENTENCE_TRANSFORMERS, ExportSettings, export  # takes seconds

    directory = files / model_versions.EXPORT
    try:
        export(encoder_dir, "encoder", ExportSettings([SENTENCE_TRANSFORMERS]), directory)
    except InputError as error:
        shutil.rmtree(directory, ignore_errors=True)
        logger.warning("the version has no folder %s: %s", model_versions.EXPORT, error)
        return
    signing.sign(directory, files / model_versions.EXPORT_SIGNATURE)


def load_encoder(source: str | Path, store: Path) -> Path:
    """Return the local Hugging Face directory of an encoder, which is downloaded if the registry is remote.

    Args:
        source: a directory, `models:/NAME@ALIAS` or `models:/NAME/VERSION`.
        store: directory of the store, which has the registry if MLFLOW_TRACKING_URI is not set.

    Raises:
        InputError: there is no such model, or its files are not an encoder.
        DataCorrupt: the files are not those that were trained or registered.
        SignatureInvalid: it comes from the registry, a key for verification is set, and the signature does not fit.
        StorageUnavailable: MLflow does not answer.
    """
    if not model_versions.is_uri(str(source)):
        directories.check_model(Path(source))
        return Path(source)
    client = connection.connect_existing(store)
    version = model_versions.find_version(client, str(source))
    with translate_errors(str(source)):
        if client.get_model_version_download_uri(version.name, version.version).startswith("file:"):
            files = model_versions.download(client, version, "", None)  # without a copy
        else:
            # Deleted when this process ends, because the caller may read the files until then.
            files = Path(tempfile.mkdtemp(prefix="infoxlm-"))
            atexit.register(shutil.rmtree, files, ignore_errors=True)
            model_versions.download_encoder(client, version, files)
    model_versions.check_files(files, version)
    return files / model_versions.MODEL


def copy_to_store(source: str, store: Path) -> Path:
    """Copy a registered model to the store, where all processes of a run can read it, and return the copy.

    A damaged copy is replaced. Raises as `load_encoder` does.
    """
    model = load_encoder(source, store)
    digest = manifests.digest_files(model)  # of all files, because the same weights may have another tokenizer
    short_digest = digest.removeprefix("sha256:")[:16]
    copy = store.resolve() / "models" / f"registry-{short_digest}"
    copy.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=copy.parent) as scratch:
        if copy.is_dir() and manifests.digest_files(copy) != digest:
            copy.rename(Path(scratch) / "damaged")
        if not copy.is_dir():
            temporary_copy = Path(scratch) / "copy"
            shutil.copytree(model, temporary_copy)
            manifests.move_into_place(temporary_copy, copy)  # other processes never see a part of the model
    return copy


def read_registration(uri: str, store: Path) -> Registration:
    """Return the aliases of a registered version and the gate's verdict on it.

    Args:
        uri: `models:/NAME/VERSION` or `models:/NAME@ALIAS`.
        store: directory of the store, which has the registry if MLFLOW_TRACKING_URI is not set.

    Raises:
        InputError: there is no such version.
        StorageUnavailable: MLflow does not answer.
    """
    client = connection.connect_existing(store)
    version = model_versions.find_version(client, uri)
    with translate_errors(uri):
        return _read_registration(client, version.name, version.version)


def _read_registration(client: "MlflowClient", name: str, version: str) -> Registration:
    """Read the aliases of a version and the gate's verdict from the registry."""
    model_aliases = client.get_registered_model(name).aliases
    version_aliases = sorted(alias for alias, number in model_aliases.items() if int(number) == int(version))
    reason = client.get_model_version(name, version).tags[GATE]
    return Registration(int(version), tuple(version_aliases), CHAMPION in version_aliases, reason)
