"""A tracker for the tests of the platform."""

import pytest

from components.platform import tracking


class Recorder(tracking.Untracked):
    """A tracker, and its run, that records what a stage reports."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def open_run(self, key, name, store, local_store, trial) -> tracking.Run:
        self.id = trial.name if trial else key
        self.calls.append(("opened", self.id))
        return self

    def end(self, status: str = "FINISHED", stage: str = "", message: str = "") -> None:
        self.calls.append((status, self.id, stage, message))

    def log_params(self, config) -> None:
        self.calls.append(dict(config))

    def log_metrics(self, metrics) -> None:
        self.calls.append(dict(metrics))

    def log_artifacts(self, source, path=None) -> None:
        self.calls.append((source.name, path))


@pytest.fixture
def recorder(monkeypatch) -> Recorder:
    """Return the tracker that the environment names."""
    recorder = Recorder()
    monkeypatch.setitem(tracking.TRACKERS, "recorder", lambda: recorder)
    monkeypatch.setenv(tracking.VARIABLE, "recorder")
    monkeypatch.setenv("RUN_ID", "toy-1")
    return recorder
