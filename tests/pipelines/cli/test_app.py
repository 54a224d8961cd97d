"""The `infoxlm` command: bad input gets one line and its exit code."""

import errno
import signal
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.cli.app import interrupt_on_signals, report_errors

CONFIG = """
preparation:
  languages: [en, de]
  held_out_share: 0.1
  corpora:
    - {name: a, format: tsv, path: a.tsv, languages: [en, de]}
"""


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


@pytest.mark.item("F17", "B14", "B15")
@pytest.mark.parametrize(
    ("added", "said"),
    [
        ("pretrianing: {}", "pretrianing: unknown name; known are data_workers, evaluation"),
        ("pretraining: {optimization: {stepz: 3}}", "pretraining.optimization.stepz: unknown name; known are betas"),
        ("pretraining: {contrast: {layer: 13}}", "contrast.layer (13) is above model.layers (12)"),
        ("pretraining: {batches: {global_batch_size: 100}}", "must be a multiple of virtual_shards (64)"),
        ("num_workers: 65", "num_workers (65) must not exceed pretraining.batches.virtual_shards (64)"),
        ("num_workers: 1\nnum_workers: 2", "'num_workers' occurs twice"),
        ("evaluation: [", "run.yaml"),
    ],
)
def test_a_bad_config_is_refused_in_one_line_before_anything_runs(config, tmp_path, added, said):
    config.write_text(CONFIG + added)
    result = run("run", str(config), "--store", str(tmp_path / "store"))

    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("infoxlm: ConfigError") and str(config) in line and said in line
    assert not (tmp_path / "store").exists()


def test_a_missing_config_and_a_missing_model_are_one_line(tmp_path):
    result = run("run", str(tmp_path / "no.yaml"))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1) and "no such config file" in result.stderr

    result = run("plan", "x" * 5_000)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1) and "give a shorter name" in result.stderr

    result = run("embed", str(tmp_path / "nothing"), "a sentence")
    assert result.exit_code == 2 and str(tmp_path / "nothing") in result.stderr


def test_a_store_that_cannot_be_made_is_one_line(config):
    result = run("run", str(config), "--store", "/proc/nothing/store")

    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and "/proc/nothing" in result.stderr


@pytest.mark.item("P8")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_with_one_line_and_the_code_that_says_run_it_again(number, capsys):
    # under nohup, and in the background of a shell, tests begin with signals that are ignored
    before = {each: signal.signal(each, signal.SIG_DFL) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        interrupt_on_signals()
        with pytest.raises(typer.Exit) as ended, report_errors():
            signal.raise_signal(number)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)

    assert ended.value.exit_code == 75
    assert capsys.readouterr().err == "infoxlm: Preempted: The command was interrupted. Run it again to continue.\n"


def test_under_nohup_a_closed_terminal_means_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    others = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        interrupt_on_signals()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for each, handler in (others | {signal.SIGHUP: before}).items():
            signal.signal(each, handler)


@pytest.mark.item("P21")
@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "runs/x"), 75, "StorageFull"),
        (OSError(errno.EROFS, "Read-only file system", "runs/x"), 2, "give a path that can be written"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 2, "let the program that reads the output read to the end"),
        (type("PanicException", (BaseException,), {})("retry-limit"), 2, "the tokenizer fails (retry-limit)"),
    ],
)
def test_what_the_system_says_has_its_code_and_remedy(error, code, said, capsys):
    with pytest.raises(typer.Exit) as ended, report_errors():
        raise error

    line = capsys.readouterr().err
    assert (ended.value.exit_code, line.count("\n")) == (code, 1) and said in line
