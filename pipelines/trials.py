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
    variant_by_settings: dict[str, str] = {}
    for name, variant in choose(read(path), only, path).items():
        overrides = {key: value for key, value in variant.items() if key not in _DESCRIPTIVE}
        base_settings = config.pretraining.model_dump(mode="json", exclude_none=True)
        merged = merge(base_settings, overrides)
        try:
            checked = PretrainingConfig.parse(resolve_last_layer(merged), "pretraining")
        except ConfigError as error:
            raise ConfigError(f"{path}: variant {name}: {error}") from None
        settings = checked.model_copy(update={"seed": 0}).model_dump_json()  # each trial gets its own seed below
        if settings in variant_by_settings:
            twin = variant_by_settings[settings]
            raise ConfigError(f"{path}: variants {twin} and {name} are the same with this config: choose one (--only)")
        variant_by_settings[settings] = name
        # Defaults are omitted, because all trials are passed as one process argument of at most 128 KiB.
        pretraining = checked.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        for seed in seeds:
            trial = {"variant": name, "seed": seed, "what": variant.get("what", "")}
            trials.append({"trial": trial, "pretraining": {**pretraining, "seed": seed}})
    return trials


def read_seeds(text: str) -> list[int]:
    """Parse comma-separated seeds."""
    seeds = [seed.strip() for seed in text.split(",")]
    are_whole_numbers = all(seed.isdecimal() for seed in seeds)
    if not are_whole_numbers or len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds {text!r}: give different whole numbers, such as 1,2,3")
    return [int(seed) for seed in seeds]


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the overrides of each variant in a YAML file.

    Raises:
        ConfigError: there is no such file, it has anchors, tags or repeated names, or a variant is not a mapping.
    """
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
    """Return the variants whose names or aliases are in `only`, or all if it is empty, in the order of the file."""
    name_by_alias = {name: name for name in variants}
    name_by_alias |= {variant["also"]: name for name, variant in variants.items() if "also" in variant}
    for alias in only:
        if alias not in name_by_alias:
            raise ConfigError(f"{path}: no variant {alias!r}; known are {', '.join(name_by_alias)}")
    if not only:
        return variants
    chosen_names = {name_by_alias[alias] for alias in only}
    return {name: variant for name, variant in variants.items() if name in chosen_names}


def merge(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Merge overrides recursively: mappings are merged, other values are replaced."""
    merged = dict(values)
    for key, override in overrides.items():
        value = merged.get(key)
        if isinstance(value, Mapping) and isinstance(override, Mapping):
            merged[key] = merge(value, override)
        else:
            merged[key] = override
    return merged


def resolve_last_layer(pretraining: dict[str, Any]) -> dict[str, Any]:
    """Replace `contrast.layer: last` by the number of layers, unless the start is not on this machine."""
    contrast = pretraining.get("contrast")
    model = pretraining.get("model")
    if not isinstance(contrast, Mapping) or not isinstance(model, Mapping):
        return pretraining  # invalid; parsing the settings reports it
    if contrast.get("layer") != "last":
        return pretraining
    num_layers = model.get("layers")
    start_model = model.get("start")
    if start_model and not Path(start_model).is_dir():
        return pretraining  # its layers are known when it is loaded
    if start_model:
        from infoxlm_core.model.huggingface import pretrained

        num_layers = pretrained.size_of(Path(start_model)).layers
    return pretraining | {"contrast": {**contrast, "layer": num_layers}}
