"""Settings that travel by reference: they come back as they were, and every change is noticed."""

import json

import pytest

from components.platform import parameters
from infoxlm_core.errors import ConfigError, DataCorrupt, InputError

SECTION = {"b": [1, 2.5, None], "a": "ä" * 3000}
TRIALS = [{"trial": {"variant": str(number)}} for number in range(2000)]


def test_small_parameters_travel_directly_and_the_store_is_not_used():
    given = {"section": SECTION, "trials": TRIALS[:5], "image": "x@sha256:1"}

    assert parameters.fit("s3://nowhere/store", given) == given
    assert all(parameters.resolve("s3://nowhere/store", value) is value for value in given.values())


@pytest.mark.slow
def test_large_parameters_come_back_from_the_store_with_their_order_and_numbers(anywhere):
    given = {"section": SECTION, "trials": TRIALS, "store": anywhere, "workers": 8}

    sent = parameters.fit(anywhere, given)

    assert len(json.dumps(sent)) < 1024
    assert isinstance(sent["section"], dict) and isinstance(sent["trials"], list)  # as the pipeline declares them
    received = {name: parameters.resolve(anywhere, value) for name, value in sent.items()}
    assert json.dumps(received) == json.dumps(given)
    assert parameters.fit(anywhere, given) == sent  # so that Kubeflow's cache finds the step


def test_parameters_that_travel_directly_fit_into_a_variable_of_a_pod():
    """The inputs of a step are JSON in its pod's patch, which is JSON in Argo's template: a variable of 128 KiB."""
    quoted = {"terms": ["ab"] * ((parameters.MAX_DIRECT_BYTES - 100) // 6)}
    assert parameters.fit("s3://nowhere/store", quoted) == quoted

    patch = {"containers": [{"args": ["--executor_input", json.dumps({"inputs": quoted})]}]}
    assert len(json.dumps({"podSpecPatch": json.dumps(patch)})) < 120 * 1024


def test_a_reference_to_missing_or_changed_content_is_refused(tmp_path):
    reference = parameters.write_reference(str(tmp_path), SECTION)
    (file,) = (tmp_path / "parameters").iterdir()
    file.write_text("{}")

    with pytest.raises(DataCorrupt, match="was changed after it was written"):
        parameters.resolve(str(tmp_path), reference)
    file.unlink()
    with pytest.raises(InputError, match="a parameter of this run, does not exist"):
        parameters.resolve(str(tmp_path), reference)


@pytest.mark.parametrize(("points", "steps"), [(1, 1), (150, 150), (151, 16), (242, 25), (1500, 150)])
def test_a_suite_has_a_step_for_every_point_until_they_are_too_many(points, steps):
    batches = parameters.split_trials(range(points))

    sizes = {len(batch) for batch in batches}
    assert len(batches) == steps and max(sizes) - min(sizes) <= 1
    assert sorted(point for batch in batches for point in batch) == list(range(points))


def test_a_suite_that_argo_cannot_hold_is_refused():
    with pytest.raises(
        ConfigError, match=r"1501 trials need 151 steps, but Argo allows 150: submit one task at a time"
    ):
        parameters.split_trials(range(1501))
