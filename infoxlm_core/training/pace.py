"""Measure a training run's speed, for the curves and for a log line every ten seconds."""

import logging
import time
from collections.abc import Mapping

import torch

from infoxlm_core.model.flops import find_peak_flops
from infoxlm_core.progress import format_remaining_time
from infoxlm_core.training import distributed

logger = logging.getLogger(__name__)
SECONDS_BETWEEN_LINES = 10.0
MACHINE_METRICS = ("tokens_per_second", "data_wait", "gpu_memory_gib", "mfu")
"""Metrics that depend on the machine and its load rather than on the training."""


class Pace:
    """Measures the speed of this process in a training run of `steps` steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.steps_taken = 0  # by this process, including repeated steps
        self.start_time = time.monotonic()
        self.last_line_time = self.start_time
        self.tokens_since_line = 0.0
        self.seconds_waited_since_line = 0.0  # waiting time for data
        self.last_probe: dict[str, float] = {}

    def record(self, step: int, metrics: Mapping[str, float], seconds_waited: float) -> dict[str, float]:
        """Count a step, log a line if one is due, and return the speed since the last log line.

        Args:
            step: the step number, counted from 1.
            metrics: the step's metrics.
            seconds_waited: the step's waiting time for data.
        """
        self.steps_taken += 1
        self.tokens_since_line += metrics["tokens"]
        self.seconds_waited_since_line += seconds_waited
        self.last_probe |= {name: value for name, value in metrics.items() if name.startswith("probe/")}
        current_time = time.monotonic()
        speed = self._measure_speed(metrics, current_time)
        if current_time - self.last_line_time >= SECONDS_BETWEEN_LINES or step == self.steps:
            self._log_line(step, metrics, speed["tokens_per_second"], current_time)
            self.last_line_time = current_time
            self.tokens_since_line = 0.0
            self.seconds_waited_since_line = 0.0
        return speed

    def _measure_speed(self, metrics: Mapping[str, float], current_time: float) -> dict[str, float]:
        """Return the `MACHINE_METRICS` since the last log line."""
        seconds_since_line = max(current_time - self.last_line_time, 1e-9)  # the clock may not have advanced
        tokens_per_second = self.tokens_since_line / seconds_since_line
        waiting_share = self.seconds_waited_since_line / seconds_since_line
        speed = {"tokens_per_second": tokens_per_second, "data_wait": waiting_share}
        if torch.cuda.is_available():
            speed["gpu_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
            peak_flops_per_second = find_peak_flops(torch.cuda.get_device_name())
            if peak_flops_per_second and "flops" in metrics:
                flops_per_second = metrics["flops"] / metrics["tokens"] * tokens_per_second
                speed["mfu"] = flops_per_second / (peak_flops_per_second * distributed.world_size())
        return speed

    def _log_line(self, step: int, metrics: Mapping[str, float], tokens_per_second: float, current_time: float) -> None:
        """Log progress, losses, speed and remaining time."""
        total_steps = self.steps_taken + self.steps - step  # steps of this process at the end of training
        remaining_time = format_remaining_time(current_time - self.start_time, self.steps_taken, total_steps)
        quality = self._describe_quality(metrics)
        logger.info("step %d/%d %s, %.0f tokens/s, %s", step, self.steps, quality, tokens_per_second, remaining_time)

    def _describe_quality(self, metrics: Mapping[str, float]) -> str:
        """Format losses, accuracies and the last probe scores."""
        losses = {name: value for name, value in metrics.items() if name.startswith("loss/")}
        accuracies = {name: value for name, value in metrics.items() if name.endswith("accuracy")}
        quality = losses | accuracies | self.last_probe
        # Omit names with two slashes, which are metrics of single languages or pairs, because there are too many.
        return " ".join(f"{name} {value:.3f}" for name, value in quality.items() if name.count("/") == 1)
