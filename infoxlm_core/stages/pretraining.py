"""Stage pretrain: token shards -> an InfoXLM, XLM or mBERT encoder, and its start model.

The system provides the model, the batches and the losses. All systems share a training loop.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from infoxlm_core import manifests
from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.reading import PartSource
from infoxlm_core.data.shards import Shards, open_shards
from infoxlm_core.errors import ConfigError
from infoxlm_core.model.huggingface import any_encoder, origin, pretrained
from infoxlm_core.systems.table import SYSTEMS
from infoxlm_core.tasks import reference_vectors, unreserved
from infoxlm_core.training import distributed, loop
from infoxlm_core.training.checkpoints import RemoteCheckpoints
from infoxlm_core.training.fingerprint import Fingerprint
from infoxlm_core.training.run import export_curves, run_directory
from infoxlm_core.training.tracker import FileTracker, Tracker

COUNTED_STEPS = 100
"""Number of steps for estimating the tokens per step; even, because XLM's objectives alternate."""


def pretrain(
    config: PretrainingConfig,
    shards_path: Path,
    output: Path,
    run: Path,
    track: Callable[[Path], Tracker] = FileTracker,
    remote: RemoteCheckpoints | None = None,
    shards_source: PartSource | None = None,
) -> dict[str, Any]:
    """Pre-train an encoder, or resume from the newest valid checkpoint in `run`. Every worker calls this function.

    Args:
        config: stage settings.
        shards_path: directory of token shards.
        output: directory for two models in Hugging Face format: `start/` (before training) and `encoder/` (after
            training).
        run: directory for checkpoints and `metrics.jsonl`.
        track: factory for the tracker, given the path of the curves.
        remote: remote checkpoint storage if the machines share no disk.
        shards_source: storage of the text if `shards_path` contains only the manifest and the tokenizer.

    Returns:
        The metrics of the last step, and the number of steps.
    """
    system = SYSTEMS[config.system]
    with distributed.sharing_errors():  # the files of one machine may be damaged or unavailable
        shards = open_shards(shards_path, shards_source)
        config = _resolve_steps(config, shards)
        model = system.build(config, shards)
        learner = system.create_learner(config, model, shards)
        observe = system.create_observer(config, learner, shards)
        inputs = {"shards": shards.manifest["digest"], "tokenizer": shards.manifest["facts"]["tokenizer"]}
        if config.model.start:
            inputs["model.start"] = pretrained.digest_weights(Path(config.model.start))
    fingerprint = Fingerprint.of(config, manifests.VERSIONS["pretrained"], inputs)
    saves_in_background = distributed.device().type == "cuda"  # on CPUs, writing would slow down the steps
    may_rewind = config.guard.rewinds > 0  # to an earlier checkpoint, if training diverges
    accept_changes = config.checkpoints.resume == run.name  # users accept changes by naming the run
    opened_run = run_directory(
        run, fingerprint, config.checkpoints, track, remote, saves_in_background, may_rewind, accept_changes
    )
    with opened_run as (checkpoints, tracker):
        metrics = loop.train(
            learner, config.optimization, checkpoints, tracker, config.log_every, observe, config.guard
        )
        # Weights may be sharded, so all workers must gather them before the first worker exports the model.
        weights = distributed.tensors_on_first(dict(learner.module.named_parameters()))
        distributed.on_first(lambda: _export(config, weights, shards, inputs, run, output))
    return metrics | {"steps": config.optimization.steps}


def _resolve_steps(config: PretrainingConfig, shards: Shards) -> PretrainingConfig:
    """If `config.tokens` is set, return the config with the number of steps that process this many tokens.

    Raises:
        ConfigError: the tokens do not suffice for the warm-up.
    """
    if not config.tokens:
        return config
    # Steps differ in their number of tokens, so use the mean of the first steps.
    counted_tokens = SYSTEMS[config.system].count_tokens(config, shards, range(COUNTED_STEPS))
    tokens_per_step = counted_tokens / COUNTED_STEPS
    steps = round(config.tokens / tokens_per_step)
    optimization = config.optimization
    if steps <= optimization.warmup_steps:
        raise ConfigError(
            f"pretraining.tokens ({config.tokens}) suffices for {steps} steps of {tokens_per_step:.0f} tokens, but the "
            f"warm-up alone has {optimization.warmup_steps}: raise tokens, or lower optimization.warmup_steps"
        )
    return config.model_copy(update={"optimization": optimization.model_copy(update={"steps": steps})})


def _export(
    config: PretrainingConfig,
    weights: dict[str, Tensor],
    shards: Shards,
    inputs: dict[str, str],
    run: Path,
    output: Path,
) -> None:
    """Write the models `start/` (before training) and `encoder/` (after training) in Hugging Face format.

    `weights` are the trained weights by name, and `inputs` are digests of the run's inputs for the manifests.
    """
    system = SYSTEMS[config.system]
    model = system.build(config, shards)  # reproduces the weights before training
    system.export(model, config, shards, output / "start")
    if config.model.start and config.system == "infoxlm":
        # Otherwise evaluations would measure the start model at the contrast layer of this training.
        any_encoder.copy_embedding_settings(Path(config.model.start), output / "start")
    model.load_state_dict(weights)
    system.export(model, config, shards, output / "encoder")
    export_curves(run, output / "encoder")
    reference_vectors.write_reference(output / "encoder")
    facts = {"steps": config.optimization.steps} | _describe_training_text(config, shards)
    # By this digest, evaluations recognise encoders whose training text excludes the corpus's held-out text.
    lineage = inputs | {"corpus": shards.manifest["facts"]["corpus"]}
    manifests.write(output / "encoder", "encoder", facts, lineage)
    manifests.write(output / "start", "encoder", {"steps": 0}, lineage)


def _describe_training_text(config: PretrainingConfig, shards: Shards) -> dict[str, Any]:
    """Describe the training text for the encoder's manifest, so that evaluations can detect leaked test sets.

    Returns:
        `origin`: the published start model. `reserved`: digests of test sets whose sentences were removed from the
        training text, and from that of a start model trained by this project. `other_corpora`: the start model's other
        training corpora, which may contain held-out sentences of this corpus. Empty entries are omitted.
    """
    reserved_digests = set(shards.manifest["facts"].get("reserved", ()))
    other_corpora: set[str] = set()
    facts: dict[str, Any] = {}
    if config.model.start:
        start = Path(config.model.start)
        published_model = origin.read(start)
        if published_model:
            facts[origin.FACT] = published_model
        start_manifest = unreserved.load_pretraining_manifest(start)
        if start_manifest:
            start_facts = start_manifest["facts"]
            # The start model may have seen test sets that only this corpus reserves.
            reserved_digests &= set(start_facts.get("reserved", ()))
            other_corpora = set(start_facts.get("other_corpora", ()))
            if "corpus" in start_manifest["inputs"]:
                other_corpora.add(start_manifest["inputs"]["corpus"])
            other_corpora.discard(shards.manifest["facts"]["corpus"])
    if reserved_digests:
        facts["reserved"] = sorted(reserved_digests)
    if other_corpora:
        facts["other_corpora"] = sorted(other_corpora)
    return facts
