"""Plan an ablation's trials from a YAML file of variants, and check all trials before the first one starts."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infoxlm_core import run_file, user_files
from infoxlm_core.config import StageConfig
from infoxlm_core.config.base import merge
from infoxlm_core.errors import ConfigError, InputError
from infoxlm_core.run_file import RunConfig

_VARIANT_NAME = re.compile(r"[\w+.:-][\w+.: -]*")
_SPECIAL_KEYS = {"translation": dict, "what": str, "also": str}
"""Keys of a variant that do not override settings of `pretraining`, with the types of their values."""


def plan_trials(config: RunConfig, path: Path, only: Sequence[str], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return an ablation's trials, one for each chosen variant and seed.

    Args:
        config: config of the run that the variants change.
        path: YAML file that maps variant names to overrides of `pretraining`. Special keys of a variant are
            `translation` (overrides of this section), `what` (a description) and `also` (an alias for `only`).
        only: names of the chosen variants; empty for all.
        seeds: seeds for initialisation, data and fine-tuning.

    Returns:
        The value of the pipeline parameter `trials`.

    Raises:
        ConfigError: the file, a name or a variant is invalid; the message names the variant.
    """
    variants = choose_variants(read_variants(path), only, path)
    settings_by_variant = {}
    for name, overrides in variants.items():
        try:
            settings_by_variant[name] = _apply_overrides(config, overrides)
        except ConfigError as error:
            raise ConfigError(f"{path}, variant {name}: {error}") from None
    _check_variants_differ(settings_by_variant, path)
    trials: list[dict[str, Any]] = []
    for seed in seeds:  # seeds in the outer loop, so that even an interrupted sweep compares all variants
        # The comparison sorts its rows by rank, that is, in the order of the file.
        for rank, (name, settings) in enumerate(settings_by_variant.items()):
            description = {"variant": name, "seed": seed, "what": variants[name].get("what", ""), "rank": rank}
            pretraining = {**settings["pretraining"], "seed": seed}
            trials.append({"trial": description, **settings, "pretraining": pretraining})
    return trials


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise ConfigError if an override such as `pretraining.seed=5` sets a seed that each trial replaces."""
    for assignment in overrides:
        if assignment.partition("=")[0].strip() in run_file.SEEDS_OF_TRIALS:
            raise ConfigError(
                f"--set {assignment!r:.200} has no effect, because each trial has its own seed. Give --seeds instead."
            )


def _apply_overrides(config: RunConfig, variant: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a variant's settings by section: `pretraining`, and `translation` if the run has this section.

    Raises:
        ConfigError: a setting is invalid, or the variant overrides a missing section or a seed.
    """
    if "seed" in variant or "seed" in variant.get("translation", {}):
        raise ConfigError("the variant sets a seed, but each trial has its own. Remove it, and give --seeds")
    pretraining_overrides = {key: value for key, value in variant.items() if key not in _SPECIAL_KEYS}
    translation_overrides = variant.get("translation", {})
    settings = {"pretraining": _override_section(config.pretraining, "pretraining", pretraining_overrides)}
    if config.translation is not None:
        settings["translation"] = _override_section(config.translation, "translation", translation_overrides)
    elif translation_overrides:
        raise ConfigError("the variant changes the section translation, but the run has no such section")
    return settings


def _override_section(section: StageConfig, name: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Apply overrides to a section, and return the settings that differ from their defaults.

    Defaults are omitted, because all trials together form one process argument of at most 128 KiB.
    """
    values = merge(section.model_dump(mode="json", exclude_none=True), overrides)
    return type(section).parse(values, name).model_dump(mode="json", exclude_none=True, exclude_defaults=True)


def _check_variants_differ(settings_by_variant: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Raise ConfigError if two variants have the same settings, so that their comparison would mean nothing."""
    variant_by_settings: dict[str, str] = {}
    for name, settings in settings_by_variant.items():
        first_name = variant_by_settings.setdefault(json.dumps(settings), name)
        if first_name != name:
            raise ConfigError(
                f"The variants {first_name} and {name} of {path} are the same with this config. Choose one with --only."
            )


def parse_seeds(text: str) -> list[int]:
    """Parse the comma-separated option --seeds. Raise ConfigError for a repeated or malformed seed."""
    elements = [element.strip() for element in text.split(",")]
    # Kubeflow passes numbers as doubles, which represent all numbers of 15 digits.
    seeds = [int(element) for element in elements if re.fullmatch("[0-9]{1,15}", element)]
    if len(set(seeds)) < len(elements):  # a malformed element has no seed, and 1 and 01 are the same seed
        raise ConfigError(
            f"--seeds {text!r:.200} is not a list of seeds. Give different whole numbers, such as 1,2,3, of at most 15 "
            "digits."
        )
    return seeds


def read_variants(path: Path) -> dict[str, dict[str, Any]]:
    """Read a YAML file of variants. Return a mapping from name to overrides, description and alias.

    Raises:
        ConfigError: the file is missing, it has anchors, tags or repeated names, a variant is not a mapping, or one of
            its special keys has a value of another type.
    """
    if not path.is_file():
        raise ConfigError(f"There is no file {path}. Give a YAML file of variants.")
    try:
        variants = run_file.parse_yaml(user_files.read_text(path, run_file.MAX_SIZE))
    except InputError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(variants, dict) or not variants:
        raise ConfigError(f"{path}: expected a mapping from names to variants.")
    for name, variant in variants.items():
        if not isinstance(name, str) or not _VARIANT_NAME.fullmatch(name):
            raise ConfigError(f"{path} has a variant {name!r}. Use letters, digits and + - . : _ in names.")
        if not isinstance(variant, dict | None):  # None: a variant without overrides, which is the run itself
            raise ConfigError(f"Variant {name} of {path} is {variant!r}, not a mapping of overrides.")
        for key, value_type in _SPECIAL_KEYS.items():
            if variant and key in variant and not isinstance(variant[key], value_type):
                expected = "a mapping" if value_type is dict else "text"
                raise ConfigError(f"Variant {name} of {path} has {key} {variant[key]!r:.100}. Give {expected}.")
    return {name: variant or {} for name, variant in variants.items()}


def choose_variants(variants: dict[str, dict[str, Any]], only: Sequence[str], path: Path) -> dict[str, dict[str, Any]]:
    """Return the variants with the given names, in the order of the file.

    Args:
        variants: all variants by name. A variant's key `also` is its alias.
        only: names or aliases of the variants to return; empty for all.
        path: path of the file, for the error message.

    Raises:
        ConfigError: `only` contains an unknown name; the message lists the known names.
    """
    if not only:
        return variants
    name_by_alias = {name: name for name in variants}
    for name, variant in variants.items():
        if "also" in variant:
            name_by_alias.setdefault(variant["also"], name)  # a variant's own name takes precedence
    chosen_names = set()
    for alias in only:
        if alias not in name_by_alias:
            raise ConfigError(f"{path} has no variant {alias!r}. Choose from {', '.join(name_by_alias)}.")
        chosen_names.add(name_by_alias[alias])
    return {name: variant for name, variant in variants.items() if name in chosen_names}
