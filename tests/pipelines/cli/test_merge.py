"""`infoxlm merge`: the written model, and one line where it refuses."""

from typer.testing import CliRunner

from infoxlm_core import manifests
from infoxlm_core.tasks import reference_vectors
from pipelines.cli import app
from tests.toys.models import save_model


def test_merge_writes_a_model_with_its_reference_vectors_once(tmp_path):
    start, encoder = (str(save_model(tmp_path / name, seed=seed)) for seed, name in enumerate(("start", "encoder")))
    command = ["merge", start, encoder, "--weight", "0.5", "--output", str(tmp_path / "out"), "--store", str(tmp_path)]

    result = CliRunner().invoke(app, command)
    again = CliRunner().invoke(app, command)

    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"wrote {tmp_path / 'out'}: {start} + 0.5 * ({encoder} - {start})\n"
    assert manifests.read(tmp_path / "out", "encoder", "merge")["facts"] == {"merge": {"weight": 0.5}}
    assert len(reference_vectors.read(tmp_path / "out").sentences) == 10
    assert (again.exit_code, again.stderr.count("\n")) == (2, 1) and "exists: give another directory" in again.stderr
