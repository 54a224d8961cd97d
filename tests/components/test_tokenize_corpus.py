"""What the component tells the tracker of the shards."""

from pathlib import Path

from kfp import dsl

from components.platform import artifacts, stage_work, tracking
from components.tokenize_corpus import tokenize_corpus
from infoxlm_core.training.step import count_targets


class Told(tracking.Untracked):
    """A tracker that remembers numbers."""

    metrics: dict[str, float]

    def log_metrics(self, metrics) -> None:
        self.metrics = dict(metrics)


def test_the_tokens_of_a_corpus_have_another_name_than_those_of_a_training_step(tmp_path, monkeypatch):
    told = Told()
    monkeypatch.setitem(tracking.TRACKERS, "told", lambda: told)
    monkeypatch.setenv(tracking.VARIABLE, "told")
    facts = {"sequences": 3, "tokens": 40}
    monkeypatch.setitem(stage_work.TEXT_STAGES, "tokenize_corpus", lambda work, spread, output: facts)
    corpus, shards, metrics = (dsl.Artifact(uri=str(tmp_path / name)) for name in ("corpus", "shards", "metrics"))
    made = artifacts.get_or_build(str(tmp_path / "store"), "corpus", "a", lambda output: {})
    artifacts.publish(corpus, Path(made))

    tokenize_corpus.python_func({}, str(tmp_path / "store"), corpus, shards, dsl.Metrics(uri=metrics.uri))

    assert told.metrics == {"shards/sequences": 3, "shards/tokens": 40}
    assert "tokens" in count_targets([], []) and not count_targets([], []).keys() & told.metrics.keys()
