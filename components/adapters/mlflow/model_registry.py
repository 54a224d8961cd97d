"""Register encoders with their evaluation, one version per content digest.

A new version becomes `candidate`. A version that passes the gate also becomes `champion`. Versions use MLflow's
transformers flavour and contain the encoder's unchanged Hugging Face directory, so a model from the registry is byte
for byte the trained model. `model_versions` lists the other files of a version.
"""

import atexit
import importlib.metadata
import logging
import math
import shutil
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.adapters.mlflow import connection, model_versions, promotion, signing
from components.adapters.mlflow.errors import translate_errors
from components.adapters.mlflow.model_versions import AGAINST, CANDIDATE, CHAMPION, GATE
from infoxlm_core import locks, manifests
from infoxlm_core.errors import InputError
from infoxlm_core.model.huggingface import directories
from infoxlm_core.results import evidence

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.models import Model as MlflowModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluatedEncoder:
    """An encoder and its evaluation, ready for registration."""

    directory: Path
    """Hugging Face directory with a safetensors model and its tokenizer."""
    digest: str
    """Digest of the encoder's content."""
    metrics: Mapping[str, float]
    """Scores by metric name, which become tags of the version."""
    run_id: str
    """Id of the MLflow run that trained the encoder (`runs.open_run`)."""
    tags: Mapping[str, str]
    """Further tags, such as the digests of corpus and tokenizer."""
    evaluation: Path
    """Output directory of `evaluate`, with any of model_card.md, scores.json and items.parquet."""


@dataclass(frozen=True)
class Registration:
    """Result of a registration."""

    version: int
    aliases: tuple[str, ...]
    champion: bool
    reason: str
    """The gate's verdict in words."""

    @property
    def role(self) -> str:
        """Aliases in words. A version that was registered before may have lost its aliases to a newer version."""
        return " and ".join(self.aliases) or "no longer candidate or champion"


def register(name: str, encoder: EvaluatedEncoder, gate: Mapping[str, float]) -> Registration:
    """Register an encoder as a version of the model `name`, and apply the promotion gate to the version.

    There is one version per digest, and it keeps its first evaluation. A repeated call has the same result, even after
    a crash at any point. But a version that was refused is judged again if the gate or the tag `AGAINST` has changed.
    The caller must hold `promotion.LOCK`.

    Args:
        name: name of the registered model.
        encoder: the encoder with its evaluation.
        gate: mapping from metric name to required gain over the champion; higher scores are better.

    Raises:
        InputError: a score for the gate is missing or not finite, or the directory contains no encoder.
        StorageUnavailable: MLflow does not answer.
    """
    from mlflow import MlflowClient

    _check_gate(encoder.metrics, gate)
    directories.check_encoder(encoder.directory)
    client = MlflowClient()
    score_tags = {metric: repr(float(score)) for metric, score in encoder.metrics.items()}
    tags = {**encoder.tags, **score_tags, "digest": encoder.digest}
    against = promotion.read_against(tags)
    with translate_errors(f"registered model {name}"):
        if not model_versions.find_by_digest(client, name, encoder.digest):
            source = log_model(encoder.run_id, encoder.directory, encoder.evaluation)
            model_id = source.removeprefix("models:/")
            model_versions.create_version(client, name, source, encoder.run_id, tags, model_id)
        version = model_versions.keep_oldest(client, name, encoder.digest)
        is_finished = GATE in version.tags  # the tag is set last
        if is_finished and promotion.was_refused_by_other_gate(version, gate, against):
            # Judge the version again. Without the tag, the next call does so if this one is interrupted.
            client.delete_model_version_tag(name, version.version, GATE)
            is_finished = False
        if promotion.was_refused(version) and _has_other_evaluation(version, tags, encoder.metrics):
            logger.warning(
                "%s keeps its first evaluation: to judge the model by the new one, delete the version in MLflow and "
                "run again",
                model_versions.make_uri(version),
            )
        if not is_finished:
            if promotion.read_against(version.tags) != against:
                client.set_model_version_tag(name, version.version, AGAINST, against)
                version = client.get_model_version(name, version.version)
            client.set_registered_model_alias(name, CANDIDATE, version.version)
            promotion.promote(client, version, gate)
        return _read_registration(client, name, version.version)


def _has_other_evaluation(version: "ModelVersion", tags: Mapping[str, str], metrics: Collection[str]) -> bool:
    """Return whether a version was registered with another test set, or with another score in one of the metrics."""
    # A changed gate may add a metric, so a missing score does not mean another evaluation.
    known_tags = version.tags.keys() & tags.keys() & {"test_set", *metrics}
    return any(version.tags[tag] != tags[tag] for tag in known_tags)


def _check_gate(metrics: Mapping[str, float], gate: Mapping[str, float]) -> None:
    """Raise InputError if a gate metric has no finite score."""
    for metric in gate:
        score = metrics.get(metric)
        if score is None or not math.isfinite(score):
            # The gate compares shares of correct answers. Other metrics, such as perplexity, would not help the user.
            prefixes = ("retrieval/", "guard/", "classification/")
            available = ", ".join(name for name in metrics if name.startswith(prefixes)) or "none"
            raise InputError(
                f"The gate needs a finite value of {metric}, but it is {score}. Evaluate again, or give the gate a "
                f"metric of the evaluation: {available}."
            )


def log_model(run_id: str, encoder_dir: Path, evaluation: Path) -> str:
    """Log an encoder or translator to its MLflow run. Test an encoder on one sentence first. Return the model's URI.

    MLflow's own functions store weights and tokenizer in different directories, drop unknown files, and cannot log a
    directory with transformers 5.23. Therefore, the encoder's directory replaces the directory `model` that MLflow
    writes. The URI has the form `models:/m-…`.
    """
    import mlflow

    client = mlflow.MlflowClient()
    logged_model = model_versions.open_upload(client, run_id)
    description = mlflow.models.Model(logged_model.artifact_location, run_id, model_id=logged_model.model_id)
    with tempfile.TemporaryDirectory() as directory:
        files = Path(directory, "encoder")
        if directories.is_translator(encoder_dir):  # MLflow has no flavour for translators
            files.mkdir()
            description.save(files / "MLmodel")
        else:
            _save_encoder(encoder_dir, files, description, evaluation / model_versions.CARD)
            _export_for_sentence_transformers(encoder_dir, files)
        shutil.copytree(encoder_dir, files / model_versions.MODEL)
        signing.sign(files / model_versions.MODEL, files / signing.FILE)
        (files / model_versions.EVALUATION).mkdir()
        for name in ("scores.json", evidence.FILE):
            # A file may be missing. Without the answers, the gate cannot compare the version with others.
            if (evaluation / name).exists():
                shutil.copy(evaluation / name, files / model_versions.EVALUATION)
        return model_versions.upload(client, run_id, logged_model, files)


def _save_encoder(encoder_dir: Path, files: Path, description: "MlflowModel", card_file: Path) -> None:
    """Write MLflow's description of an encoder and the model card, but not the weights."""
    import mlflow
    from huggingface_hub import ModelCard

    pipeline, sentence, output = _run_example(encoder_dir)
    requirements = []
    for library in ("torch", "transformers", "safetensors"):
        public_version, _, _ = importlib.metadata.version(library).partition("+")  # drop a suffix such as +cu130
        requirements.append(f"{library}=={public_version}")
    card = ModelCard(card_file.read_text(encoding="utf-8"), ignore_metadata_errors=True) if card_file.exists() else None
    mlflow.transformers.save_model(
        pipeline,
        files,
        mlflow_model=description,
        model_card=card,
        signature=mlflow.models.infer_signature([sentence], [output]),
        pip_requirements=requirements,
    )
    shutil.rmtree(files / model_versions.MODEL)  # `log_model` later puts the encoder's own directory in its place


def _run_example(encoder_dir: Path) -> tuple[Any, str, Any]:
    """Test a model by running its transformers pipeline on one sentence. Return (pipeline, sentence, output).

    A model with a language-model head predicts a masked token. Any other model computes a vector for each token. MLflow
    derives the model's input and output types from the sentence and the output.
    """
    import transformers

    from infoxlm_core.model.huggingface import any_encoder  # this import takes seconds

    model: Any
    tokenizer: Any
    model, tokenizer = any_encoder.load_encoder(encoder_dir, "cpu")
    if any_encoder.has_language_model_head(encoder_dir):
        fill_mask = transformers.pipeline("fill-mask", model=model, tokenizer=tokenizer)
        sentence = f"One {tokenizer.mask_token} is hidden."
        (best_prediction,) = fill_mask(sentence, top_k=1)
        return fill_mask, sentence, best_prediction["token_str"]
    extract_features: Any = transformers.pipeline("feature-extraction", model=model, tokenizer=tokenizer)
    sentence = "One sentence."
    (token_vectors,) = extract_features(sentence)
    return extract_features, sentence, token_vectors[0]


def _export_for_sentence_transformers(encoder_dir: Path, files: Path) -> None:
    """Add an export for sentence-transformers to a version's files. Log a warning if the export is impossible."""
    from infoxlm_core.stages.export import SENTENCE_TRANSFORMERS, ExportSettings, export  # this import takes seconds

    directory = files / model_versions.EXPORT
    try:
        export(encoder_dir, "encoder", ExportSettings([SENTENCE_TRANSFORMERS]), directory)
    except InputError as error:
        shutil.rmtree(directory, ignore_errors=True)  # `check_files` would refuse an incomplete export
        logger.warning("the version has no directory %s: %s", model_versions.EXPORT, error)
        return
    signing.sign(directory, files / model_versions.EXPORT_SIGNATURE)


def load_encoder(source: str | Path, store: Path) -> Path:
    """Return the local Hugging Face directory of an encoder. Download the encoder if the registry is remote.

    Args:
        source: directory, `models:/NAME@ALIAS` or `models:/NAME/VERSION`.
        store: local directory of the store, which contains the registry if MLFLOW_TRACKING_URI is not set.

    Raises:
        InputError: the model does not exist, or its files are not an encoder.
        DataCorrupt: the files differ from the trained or registered files.
        SignatureInvalid: a verifying key is set, and a registered model has no valid signature.
        StorageUnavailable: MLflow does not answer.
    """
    if not model_versions.is_uri(str(source)):
        directories.check_model(Path(source))
        return Path(source)
    client = connection.connect_existing(store)
    version = model_versions.find_version(client, str(source))
    with translate_errors(str(source)):
        if client.get_model_version_download_uri(version.name, version.version).startswith("file:"):
            files = model_versions.download(client, version)  # local files are not copied
        else:
            # Delete the files only when this process ends, because the caller may read them until then.
            files = Path(tempfile.mkdtemp(prefix="infoxlm-"))
            atexit.register(shutil.rmtree, files, ignore_errors=True)
            model_versions.download_encoder(client, version, files)
    model_versions.check_files(files, version)
    return files / model_versions.MODEL


def copy_to_store(source: str, store: Path) -> Path:
    """Copy a registered model to the store, where all processes of a run can read it. Return the copy's directory.

    A damaged copy is replaced. Raises the errors of `load_encoder`.
    """
    model = load_encoder(source, store)
    digest = manifests.digest_files(model)  # covers all files, because models may differ only in their tokenizer
    short_digest = digest.removeprefix("sha256:")[:16]
    target = store.resolve() / "models" / f"registry-{short_digest}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with locks.scratch_directory(target.parent) as scratch:
        if target.is_dir() and manifests.digest_files(target) != digest:
            target.rename(scratch / "damaged")  # unlike a deletion, this takes effect at once
        if not target.is_dir():
            temporary_copy = scratch / "copy"
            shutil.copytree(model, temporary_copy)
            manifests.move_into_place(temporary_copy, target)  # other processes never see a partial copy
    return target


def read_registration(uri: str, store: Path) -> Registration:
    """Return the aliases of a registered version and the gate's verdict on the version.

    Args:
        uri: `models:/NAME/VERSION` or `models:/NAME@ALIAS`.
        store: local directory of the store, which contains the registry if MLFLOW_TRACKING_URI is not set.

    Raises:
        InputError: the version does not exist.
        StorageUnavailable: MLflow does not answer.
    """
    client = connection.connect_existing(store)
    version = model_versions.find_version(client, uri)
    with translate_errors(uri):
        return _read_registration(client, version.name, version.version)


def _read_registration(client: "MlflowClient", name: str, version: str) -> Registration:
    """Read a version's aliases and gate verdict from the registry."""
    model_aliases = client.get_registered_model(name).aliases
    # MLflow returns version numbers as int from a database, and as str from a server.
    version_aliases = sorted(alias for alias, number in model_aliases.items() if int(number) == int(version))
    reason = client.get_model_version(name, version).tags[GATE]
    return Registration(int(version), tuple(version_aliases), CHAMPION in version_aliases, reason)
