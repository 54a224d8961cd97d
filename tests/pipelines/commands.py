"""Run the command `infoxlm` inside the test process, and check that it refused its input."""

from click.testing import Result
from typer.testing import CliRunner

from pipelines.cli import app


def invoke(*arguments: object, **options) -> Result:
    """Run `infoxlm` with these arguments and return its exit code and its output."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)


def assert_refused(result: Result, message: str, exit_code: int = 2) -> None:
    """Assert that the command failed with this exit code and exactly one line, which contains the message."""
    assert result.exit_code == exit_code, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("infoxlm: ")
    assert message in line
