"""The `infoxlm` command reports invalid input, signals and system errors in one line, with a documented exit code."""

import contextlib
import errno
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from pipelines.cli.app import CONFIGS, find_config, interrupt_on_signals, report_errors
from tests.pipelines.commands import assert_refused, invoke

CONFIG = """
preparation:
  languages: [en, de]
  held_out_share: 0.1
  corpora:
    - {name: a, format: tsv, path: a.tsv, languages: [en, de]}
"""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


@contextlib.contextmanager
def signal_handlers(handler: signal.Handlers) -> Iterator[None]:
    """Set the handler of all three signals, and restore the original handlers at the end."""
    original_handlers = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, original_handler in original_handlers.items():
            signal.signal(number, original_handler)


@pytest.mark.item("F17", "B14", "B15")
@pytest.mark.parametrize(
    ("section", "message"),
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
def test_invalid_config_is_refused_before_anything_runs(config, tmp_path, section, message):
    config.write_text(CONFIG + section)

    result = invoke("run", config, "--store", tmp_path / "store")

    assert_refused(result, message)
    assert f"ConfigError: {config}" in result.stderr
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "{folder}/no.yaml"], "no such config file"),
        (["plan", "x" * 5_000], "give a shorter name"),
        (["embed", "{folder}/nothing", "a sentence"], "{folder}/nothing"),
        (["run", "{folder}/run.yaml", "--store", "/proc/nothing/store"], "/proc/nothing"),
    ],
)
def test_unusable_path_is_refused(config, tmp_path, arguments, message):
    result = invoke(*(argument.replace("{folder}", str(tmp_path)) for argument in arguments))

    assert_refused(result, message.replace("{folder}", str(tmp_path)))


def test_bare_name_is_a_packaged_file_unless_a_file_of_this_name_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()  # for example the store of `infoxlm run demo --store demo`
    (tmp_path / "base").write_text(CONFIG)

    assert find_config("demo") == CONFIGS / "demo.yaml"
    assert find_config("base") == Path("base")


@pytest.mark.item("P8")
@pytest.mark.parametrize("number", SIGNALS)
def test_signal_ends_a_command_with_the_exit_code_of_a_temporary_failure(number, capsys):
    # pytest itself ignores signals if it runs under nohup or in the background of a shell
    with signal_handlers(signal.SIG_DFL):
        interrupt_on_signals()
        with pytest.raises(typer.Exit) as exit_info, report_errors():
            signal.raise_signal(number)

    assert exit_info.value.exit_code == 75
    assert capsys.readouterr().err == "infoxlm: Preempted: The command was interrupted. Run it again to continue.\n"


def test_command_under_nohup_continues_to_ignore_a_closed_terminal():
    with signal_handlers(signal.SIG_IGN):
        interrupt_on_signals()

        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.item("P21")
@pytest.mark.parametrize(
    ("error", "exit_code", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "runs/x"), 75, "StorageFull"),
        (OSError(errno.EROFS, "Read-only file system", "runs/x"), 2, "give a path that can be written"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 2, "let the program that reads the output read to the end"),
        (type("PanicException", (BaseException,), {})("retry-limit"), 2, "the tokenizer fails (retry-limit)"),
    ],
)
def test_system_error_has_an_exit_code_and_a_remedy(error, exit_code, message, capsys):
    with pytest.raises(typer.Exit) as exit_info, report_errors():
        raise error

    line = capsys.readouterr().err
    assert exit_info.value.exit_code == exit_code
    assert line.count("\n") == 1
    assert message in line
