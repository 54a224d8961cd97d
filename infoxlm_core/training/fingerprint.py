"""What a checkpoint belongs to: data, tokenizer and settings must be the same on resuming, code and libraries may not.

A change of the first kind is refused, unless the config names this very run (`checkpoints.resume`): the curve would be
that of no run one could repeat. A change of the second kind is told in one line: a mended comment, or a library with a
security fix, must not cost a week of training.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from infoxlm_core import manifests
from infoxlm_core.config import StageConfig
from infoxlm_core.errors import ConfigMismatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fingerprint:
    """Of one start of a training."""

    compared: dict[str, object] = field(default_factory=dict)  # stage's version, decisive settings, digests of inputs
    recorded: dict[str, object] = field(default_factory=dict)  # code, libraries, threads, workers, kind of device

    @classmethod
    def of(cls, config: StageConfig, version: int, inputs: Mapping[str, str]) -> Self:
        """The fingerprint of a training in this process: of a stage's config, its version (see `manifests.VERSIONS`),
        and digests of inputs by name."""
        from infoxlm_core.training import distributed  # imports torch: who only compares does without

        return cls(decisive(config, version, inputs), manifests.made_by() | distributed.describe())

    def meta(self) -> dict[str, Any]:
        """What a checkpoint says of it."""
        return {"fingerprint": self.compared, "made_by": self.recorded}

    def check(self, meta: Mapping[str, Any], run: str, accepted: bool = False) -> None:
        """Compare with what a checkpoint of `run`, its directory, says; warn of what may change.

        Raises ConfigMismatch if it has other data or settings that are not `accepted`; warns of them otherwise.
        """
        refused = differences(meta["fingerprint"], self.compared)
        if refused and not accepted:
            raise mismatch(run, refused)
        changed = refused + differences(meta.get("made_by", {}), self.recorded)  # an older version has none
        if changed:
            logger.warning("%s goes on with what it did not begin with: %s", run, "; ".join(changed))


def decisive(config: StageConfig, version: int, inputs: Mapping[str, str]) -> dict[str, object]:
    """What decides the result, by name: all settings but how often to save, log and probe.

    An input that is named like a setting takes its place: the content counts, not the path.
    """
    return {"version": version, **flatten(config.result_fields()), **inputs}


def differences(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Each name whose value is another one, with both."""
    return [
        f"{name} was {before.get(name)!r}, is {now.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def mismatch(run: str, refused: list[str]) -> ConfigMismatch:
    """The error of a run that was begun with other data or settings, and the three ways out."""
    name = run.rstrip("/").rpartition("/")[2]
    return ConfigMismatch(
        f"{run} was begun otherwise: {'; '.join(refused)}: set it back, go on all the same with checkpoints.resume: "
        f"{name}, or remove {run} to start over"
    )


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """{"a": {"b": 1}} -> {"a.b": 1}: a config whose differences have names."""
    flat: dict[str, object] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
