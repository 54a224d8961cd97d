"""A data set, wherever it is: a path, or S3 (a real server), folders and names as they were."""

import shutil
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path

import boto3
import pytest
from botocore.stub import Stubber

from components.adapters.s3 import store as s3
from components.platform import runtime, sources
from infoxlm_core import manifests
from infoxlm_core.errors import DataCorrupt, InputError
from tests.components.conftest import upload


@pytest.fixture
def questions(tmp_path) -> Path:
    """A folder of files in folders, as test sets are published."""
    folder = tmp_path / "mlqa"
    for name in ("dev/dev-context-de-question-de.json", "test/test-context-de-question-de.json", "LICENSE"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"this is {name}")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_local_path_is_used_where_it_is(questions, tmp_path):
    for path in (questions, questions / "LICENSE"):
        assert sources.fetch_data(str(path), tmp_path / "store") == path
    assert not (tmp_path / "store").exists()


def test_a_path_that_is_not_there_is_refused_with_the_ways_to_say_it(tmp_path):
    with pytest.raises(InputError, match=r"nowhere: no such file or folder: give a path, or s3://bucket/prefix"):
        sources.fetch_data("nowhere", tmp_path)


@pytest.mark.slow
def test_a_folder_on_s3_arrives_with_its_folders_and_its_name(bucket, questions, tmp_path):
    upload(bucket, questions, "eval/mlqa")
    bucket.put_object(Key="eval/mlqa-2/other", Body=b"not of this set")
    bucket.put_object(Key="eval/mlqa/empty/", Body=b"")

    found = sources.fetch_data("s3://models/eval/mlqa/", tmp_path / "store")

    assert contents(found) == contents(questions) and found.name == "mlqa"
    assert [path.name for path in (tmp_path / "store/data").iterdir()] == [found.parent.name]  # nothing half-made


@pytest.mark.slow
def test_what_has_not_changed_is_found_again_and_what_has_is_fetched_anew(bucket, questions, tmp_path):
    upload(bucket, questions, "mlqa")
    first = sources.fetch_data("s3://models/mlqa", tmp_path)
    written = (first / "LICENSE").stat().st_mtime_ns

    assert sources.fetch_data("s3://models/mlqa", tmp_path) == first
    assert (first / "LICENSE").stat().st_mtime_ns == written

    bucket.put_object(Key="mlqa/test/test-context-de-question-de.json", Body=b"corrected")
    second = sources.fetch_data("s3://models/mlqa", tmp_path)
    assert second != first and (second / "test/test-context-de-question-de.json").read_bytes() == b"corrected"
    assert (
        runtime.digest_inputs(str(second)) != runtime.digest_inputs(str(first)) == runtime.digest_inputs(str(questions))
    )


@pytest.mark.slow
def test_one_object_keeps_its_name_which_says_its_language(bucket, questions, tmp_path):
    upload(bucket, questions, "mlqa")

    found = sources.fetch_data("s3://models/mlqa/dev/dev-context-de-question-de.json", tmp_path)

    assert found.read_bytes() == (questions / "dev" / found.name).read_bytes()
    assert found.name == "dev-context-de-question-de.json"


@pytest.mark.slow
def test_the_same_objects_by_a_longer_and_a_shorter_prefix_are_two_copies(bucket, questions, tmp_path):
    upload(bucket, questions, "eval/mlqa")

    whole, part = (sources.fetch_data(f"s3://models/{prefix}", tmp_path) for prefix in ("eval", "eval/mlqa"))

    assert contents(whole / "mlqa") == contents(part) == contents(questions)


@pytest.mark.slow
def test_a_set_that_is_not_what_its_manifest_says_is_refused_and_not_kept(bucket, questions, tmp_path):
    directory = tmp_path / "copy"
    shutil.copytree(questions, directory)
    manifests.write(directory, "data")
    upload(bucket, directory, "mlqa")
    bucket.put_object(
        Key="mlqa/dev/dev-context-de-question-de.json", Body=b"this is dev/dev-context-de-question-dE.json"
    )

    with pytest.raises(DataCorrupt, match=r"dev-context-de-question-de\.json has .* upload s3://models/mlqa again"):
        sources.fetch_data("s3://models/mlqa", tmp_path / "store")

    assert not list((tmp_path / "store/data").iterdir())


def test_a_name_that_leads_out_of_its_folder_is_refused(tmp_path, monkeypatch):
    client = boto3.client("s3", region_name="us-east-1", aws_access_key_id="k", aws_secret_access_key="s")
    listed = {
        "Contents": [{"Key": "set/../../outside", "Size": 1, "ETag": "x", "LastModified": datetime(2026, 1, 1)}],
        "IsTruncated": False,
    }
    stubber = Stubber(client)  # our test server refuses such names, other servers may not
    stubber.add_response("list_objects_v2", listed)
    monkeypatch.setattr(s3, "translate_errors", lambda *_: nullcontext(client))

    with stubber, pytest.raises(InputError, match=r"set/\.\./\.\./outside: a name that leads out of its folder"):
        sources.fetch_data("s3://models/set", tmp_path / "store")


@pytest.mark.slow
def test_an_empty_prefix_is_one_line(bucket, tmp_path):
    with pytest.raises(InputError, match="s3://models/nothing holds no file: check bucket and prefix"):
        sources.fetch_data("s3://models/nothing", tmp_path)
