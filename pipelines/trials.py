"""Plan the trials of an ablation from a YAML file of variants, and check them before any starts."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from infoxlm_core import outside, run_file
from infoxlm_core.config import PretrainingConfig
from infoxlm_core.errors import ConfigError, InputError
from infoxlm_core.run_file import RunConfig

_NAME = re.compile(r"[\w+.:-][\w+.: -]*")
_DESCRIPTIVE = ("what", "also")
"""Keys that describe a variant; all other keys override `pretraining`."""


def plan(config: RunConfig, path: Path, only: Sequence[str], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return every chosen variant with every seed, as the pipeline's parameter `trials`.

    Args:
        config: the run that the variants change.
        path: YAML file that maps names to overrides of `pretraining`, a description `what` and an alias `also`.
        only: names of the chosen variants; empty for all.
        seeds: seeds of initialisation, data and fine-tuning.

    Raises:
        ConfigError: the file, a name or a variant is invalid; the message names the variant.
    """
    trials: list[dict[str, Any]] = []
    variant_of: dict[str, str] = {}  # maps settings to the name of the variant
    for name, variant in choose(read(path), only, path).items():
        overrides = {key: value for key, value in variant.items() if key not in _DESCRIPTIVE}
        try:
            merged = merge(config.pretraining.model_dump(mode="json", exclude_none=True), overrides)
            checked = PretrainingConfig.parse(resolve(merged), "pretraining")
        except ConfigError as error:
            raise ConfigError(f"{path}: variant {name}: {error}") from None
        settings = checked.model_copy(update={"seed": 0}).model_dump_json()
        if settings in variant_of:
            raise ConfigError(
                f"{path}: variants {variant_of[settings]} and {name} are the same with this config: choose one (--only)"
            )
        variant_of[settings] = name
        trials += [
            {
                "trial": {"variant": name, "seed": seed, "what": variant.get("what", "")},
                # Omit defaults, because all trials are passed as one process argument of at most 128 KiB.
                "pretraining": checked.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
                | {"seed": seed},
            }
            for seed in seeds
        ]
    return trials


def read_seeds(text: str) -> list[int]:
    """Parse comma-separated seeds."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts) or len(set(parts)) < len(parts):
        raise ConfigError(f"--seeds {text!r}: give different whole numbers, such as 1,2,3")
    return [int(part) for part in parts]


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Read a file of variants, without anchors, tags or repeated names."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file: give a YAML file of variants")
    try:
        variants = yaml.load(outside.read_text(path, run_file.MAX_SIZE), Loader=run_file.StrictLoader)  # noqa: S506 - a SafeLoader
    except (InputError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(variants, dict) or not variants:
        raise ConfigError(f"{path}: expected a mapping from names to variants")
    for name, variant in variants.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(f"{path}: variant {name!r}: use letters, digits and + - . : _ in names")
        if not isinstance(variant, dict | None):
            raise ConfigError(f"{path}: variant {name}: {variant!r} is not a mapping of overrides")
    return {name: variant or {} for name, variant in variants.items()}


def choose(variants: dict[str, dict[str, Any]], only: Sequence[str], path: Path) -> dict[str, dict[str, Any]]:
    """Return the variants named in `only`, or all if it is empty, in the order of the file."""
    by_name = {name: name for name in variants}
    by_name |= {variant["also"]: name for name, variant in variants.items() if "also" in variant}
    for name in only:
        if name not in by_name:
            raise ConfigError(f"{path}: no variant {name!r}; known are {', '.join(by_name)}")
    chosen = {by_name[name] for name in only or variants}
    return {name: variant for name, variant in variants.items() if name in chosen}


def merge(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Merge overrides recursively: mappings are merged, other values are replaced."""
    merged = dict(values)
    for key, value in overrides.items():
        before = merged.get(key)
        merged[key] = merge(before, value) if isinstance(value, Mapping) and isinstance(before, Mapping) else value
    return merged


def resolve(pretraining: dict[str, Any]) -> dict[str, Any]:
    """Replace `contrast.layer: last` by the number of layers of the start model, or by `model.layers` without one."""
    contrast, model = pretraining.get("contrast"), pretraining.get("model")
    if not isinstance(contrast, Mapping) or contrast.get("layer") != "last" or not isinstance(model, Mapping):
        return pretraining
    layers = model.get("layers")
    if model.get("start") and Path(model["start"]).is_dir():
        from infoxlm_core.model.huggingface import pretrained

        layers = pretrained.size_of(Path(model["start"])).layers
    return pretraining | {"contrast": {**contrast, "layer": layers}}
