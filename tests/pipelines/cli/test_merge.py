"""`infoxlm merge` writes a complete model once."""

from infoxlm_core import manifests
from infoxlm_core.tasks import reference_vectors
from tests.pipelines.commands import assert_refused, invoke
from tests.toys.models import save_model


def test_merged_model_has_reference_vectors_and_is_not_overwritten(tmp_path):
    start = save_model(tmp_path / "start", seed=0)
    encoder = save_model(tmp_path / "encoder", seed=1)
    output = tmp_path / "out"
    command = ["merge", start, encoder, "--weight", "0.5", "--output", output, "--store", tmp_path]

    result = invoke(*command)
    second_result = invoke(*command)

    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"wrote {output}: {start} + 0.5 * ({encoder} - {start})\n"
    assert manifests.load_verified(output, "encoder", "merge")["facts"] == {"merge": {"weight": 0.5}}
    assert len(reference_vectors.read_reference(output).sentences) == 10
    assert_refused(second_result, "exists: give another directory")
