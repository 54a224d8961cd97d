"""Plan the trials of an ablation from a YAML file of variants, and check them before any starts."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from infoxlm_core import outside, run_file
from infoxlm_core.config import StageConfig
from infoxlm_core.config.base import merge
from infoxlm_core.errors import ConfigError, InputError
from infoxlm_core.run_file import RunConfig

_NAME = re.compile(r"[\w+.:-][\w+.: -]*")
_DESCRIPTIVE = ("what", "also")
"""Keys that describe a variant. `translation` overrides this section, and all other keys override `pretraining`."""


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
    variants = choose(read(path), only, path)
    sections_by_variant = {name: _apply(config, variant, name, path) for name, variant in variants.items()}
    _refuse_twins(sections_by_variant, path)
    trials: list[dict[str, Any]] = []
    for seed in seeds:  # all variants of a seed before the next seed, so that an interrupted sweep compares them all
        for rank, (name, sections) in enumerate(sections_by_variant.items()):
            trial = {"variant": name, "seed": seed, "what": variants[name].get("what", ""), "rank": rank}
            pretraining = {**sections["pretraining"], "seed": seed}
            trials.append({"trial": trial, **sections, "pretraining": pretraining})
    return trials


def _apply(config: RunConfig, variant: Mapping[str, Any], name: str, path: Path) -> dict[str, dict[str, Any]]:
    """Return the sections that a variant of a run may change, by name; ConfigError if its settings are invalid."""
    pretraining_overrides = {key: value for key, value in variant.items() if key not in (*_DESCRIPTIVE, "translation")}
    sections = {}
    for section, overrides in (
        ("pretraining", pretraining_overrides),
        ("translation", variant.get("translation", {})),
    ):
        base: StageConfig | None = getattr(config, section)
        if base is None:
            if overrides:
                raise ConfigError(
                    f"{path}: variant {name}: the run has no section {section}, which the variant changes"
                )
            continue
        try:
            checked = type(base).parse(merge(base.model_dump(mode="json", exclude_none=True), overrides), section)
        except ConfigError as error:
            raise ConfigError(f"{path}: variant {name}: {error}") from None
        # Defaults are omitted, because all trials are passed as one process argument of at most 128 KiB.
        sections[section] = checked.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    return sections


def _refuse_twins(sections_by_variant: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Raise ConfigError if two variants have the same settings."""
    variant_by_settings: dict[str, str] = {}
    for name, sections in sections_by_variant.items():
        twin = variant_by_settings.setdefault(json.dumps(sections), name)
        if twin != name:
            raise ConfigError(f"{path}: variants {twin} and {name} are the same with this config: choose one (--only)")


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
