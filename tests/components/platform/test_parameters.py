"""Large settings are passed by reference, come back unchanged, and any damage is noticed."""

import json

import pytest

from components.platform import parameters
from infoxlm_core.errors import ConfigError, DataCorrupt, InputError

SECTION = {"b": [1, 2.5, None], "a": "ä" * 3000}
TRIALS = [{"trial": {"variant": str(number)}} for number in range(2000)]


def test_small_parameters_are_passed_directly_without_the_store():
    values = {"section": SECTION, "trials": TRIALS[:5], "image": "x@sha256:1"}

    assert parameters.store_if_large("s3://nowhere/store", values) == values
    assert all(parameters.dereference("s3://nowhere/store", value) is value for value in values.values())


@pytest.mark.slow
def test_large_parameters_are_passed_by_reference_and_come_back_unchanged(anywhere):
    values = {"section": SECTION, "trials": TRIALS, "store": anywhere, "workers": 8}

    references = parameters.store_if_large(anywhere, values)

    assert len(json.dumps(references)) < 1024
    assert isinstance(references["section"], dict)  # as the pipeline declares it
    assert isinstance(references["trials"], list)
    resolved = {name: parameters.dereference(anywhere, value) for name, value in references.items()}
    assert json.dumps(resolved) == json.dumps(values)
    assert parameters.store_if_large(anywhere, values) == references  # so that Kubeflow's cache recognises the step


def test_direct_parameters_fit_into_a_variable_of_a_pod():
    """The inputs of a step are JSON in its pod's patch, which is JSON in Argo's template: a variable of 128 KiB."""
    quoted = {"terms": ["ab"] * ((parameters.MAX_DIRECT_BYTES - 100) // 6)}
    assert parameters.store_if_large("s3://nowhere/store", quoted) == quoted

    patch = {"containers": [{"args": ["--executor_input", json.dumps({"inputs": quoted})]}]}
    assert len(json.dumps({"podSpecPatch": json.dumps(patch)})) < 120 * 1024


def test_a_reference_to_missing_or_changed_content_is_refused(tmp_path):
    reference = parameters.write_reference(str(tmp_path), SECTION)
    (file,) = (tmp_path / "parameters").iterdir()
    file.write_text("{}")

    with pytest.raises(DataCorrupt, match="was changed after it was written"):
        parameters.dereference(str(tmp_path), reference)
    file.unlink()
    with pytest.raises(InputError, match="a parameter of this run, does not exist"):
        parameters.dereference(str(tmp_path), reference)


@pytest.mark.parametrize(("trials", "steps"), [(1, 1), (150, 150), (151, 16), (242, 25), (1500, 150)])
def test_each_trial_has_its_own_step_until_there_are_too_many(trials, steps):
    batches = parameters.split_trials(range(trials))

    sizes = {len(batch) for batch in batches}
    assert len(batches) == steps
    assert max(sizes) - min(sizes) <= 1
    assert sorted(trial for batch in batches for trial in batch) == list(range(trials))


def test_suite_with_too_many_trials_for_argo_is_refused():
    with pytest.raises(ConfigError, match=r"1501 trials need 151 steps, but Argo allows 150: submit one task at a"):
        parameters.split_trials(range(1501))
