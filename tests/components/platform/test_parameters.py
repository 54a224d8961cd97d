"""Parameters beyond what Kubeflow's processes take as an argument: into the store, and out of it again, by content."""

import json

import pytest

from components.platform import parameters
from infoxlm_core.errors import ConfigError, DataCorrupt, InputError

SECTION = {"b": [1, 2.5, None], "a": "ä" * 3000}
TRIALS = [{"trial": {"variant": str(number)}} for number in range(500)]


def test_what_fits_travels_as_it_is_and_the_store_is_not_asked():
    given = {"section": SECTION, "trials": TRIALS, "image": "x@sha256:1"}

    assert parameters.shrink("s3://nowhere/store", given) == given
    assert all(parameters.resolve("s3://nowhere/store", value) is value for value in given.values())


@pytest.fixture(params=["directory", "s3"])
def anywhere(request, tmp_path) -> str:
    """The URI of a store."""
    if request.param == "directory":
        return str(tmp_path)
    request.getfixturevalue("bucket")
    return "s3://models/store"


@pytest.mark.slow
def test_the_largest_go_through_the_store_and_come_back_with_their_order_and_numbers(anywhere):
    given = {"section": SECTION, "trials": TRIALS, "small": {"a": 1}, "workers": 8}

    shrunk = parameters.shrink(anywhere, given, most=1024)

    assert len(json.dumps(shrunk)) < 1024
    assert (shrunk["small"], shrunk["workers"]) == ({"a": 1}, 8)
    assert isinstance(shrunk["section"], dict) and isinstance(shrunk["trials"], list)  # as the pipeline declares them
    back = {name: parameters.resolve(anywhere, value) for name, value in shrunk.items()}
    assert json.dumps(back) == json.dumps(given)
    assert parameters.shrink(anywhere, given, most=1024) == shrunk  # so that Kubeflow's cache finds the step


def test_no_more_is_put_away_than_must_be(tmp_path):
    given = {"section": SECTION, "trials": TRIALS}

    assert parameters.shrink(str(tmp_path), given, most=parameters._size(TRIALS) + 200)["trials"] == TRIALS


def test_what_is_small_by_itself_but_not_quoted_in_argos_template_goes_through_the_store(tmp_path):
    section = {"terms": ["ab"] * 12_000}
    given = {"section": section, "image": "x@sha256:1"}

    shrunk = parameters.shrink(str(tmp_path), given)

    def in_template(parameters: dict) -> int:
        """As it lies in the inputs of a step, in its pod's patch, in Argo's template: in a variable of 128 KiB."""
        patch = {"containers": [{"args": ["--executor_input", json.dumps({"inputs": parameters})]}]}
        return len(json.dumps({"podSpecPatch": json.dumps(patch)}))

    assert len(json.dumps(given)) < parameters.LARGEST and in_template(given) > 128 * 1024  # nothing was shown else
    assert in_template(shrunk) < 1024
    assert parameters.resolve(str(tmp_path), shrunk["section"]) == section


def test_a_reference_to_nothing_or_to_what_was_changed_is_refused(tmp_path):
    shrunk = parameters.shrink(str(tmp_path), {"section": SECTION}, most=200)["section"]
    (file,) = (tmp_path / "parameters").iterdir()
    file.write_text("{}")

    with pytest.raises(DataCorrupt, match="is not what was written"):
        parameters.resolve(str(tmp_path), shrunk)
    file.unlink()
    with pytest.raises(InputError, match="a parameter, is not there"):
        parameters.resolve(str(tmp_path), shrunk)


def test_what_cannot_be_put_away_is_refused_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match="have 2014 bytes without sections and lists, of 1024"):
        parameters.shrink(str(tmp_path), {"text": "x" * 2000}, most=1024)
