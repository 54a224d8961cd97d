"""`infoxlm translate` refuses in one line; what it translates is tested with the pipeline."""

import pytest
from typer.testing import CliRunner

from pipelines.cli import app


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("{encoder}", "--to", "de", "Save"), "has no translator: give the output of translate"),
        (("{encoder}", "--to", "de", "--file", "{encoder}/none.txt"), "none.txt"),
        (("{encoder}", "--to", "de", "--file", "{encoder}/config.json", "Save"), "give sentences or --file, not both"),
        (("{encoder}/nowhere", "--to", "de", "Save"), "has no config.json"),
        (("models:/nothing@champion", "--to", "de", "--store", "{encoder}", "Save"), "has no MLflow database"),
    ],
)
def test_what_cannot_be_translated_is_one_line(tiny_encoders, arguments, reason):
    filled = [argument.replace("{encoder}", str(tiny_encoders["first"])) for argument in arguments]

    result = CliRunner().invoke(app, ["translate", *filled])

    assert (result.exit_code, result.stderr.count("\n")) == (2, 1) and reason in result.stderr


def test_the_language_is_required():
    result = CliRunner().invoke(app, ["translate", "models:/nothing@champion", "Save"])

    assert result.exit_code == 2 and "--to" in result.stderr
