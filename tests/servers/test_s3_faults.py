"""The S3 server that fails on demand: it fails as planned, counts it, and otherwise changes nothing."""

import boto3
import pytest
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import ClientError, ConnectionClosedError, IncompleteReadError, ResponseStreamingError

pytestmark = pytest.mark.slow
BODY = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture
def client(faults):
    """A client without retries: what it sees is what came."""
    config = Config(
        retries={"total_max_attempts": 1},
        s3={"addressing_style": "path"},
        response_checksum_validation="when_required",
    )
    return boto3.client("s3", endpoint_url=faults.url, region_name="us-east-1", config=config)


def test_without_a_plan_it_is_the_server_itself(bucket, faults, client, tmp_path):
    (tmp_path / "big").write_bytes(BODY * 12)
    parts = TransferConfig(multipart_threshold=5 << 20, multipart_chunksize=5 << 20)

    client.put_object(Bucket="models", Key="a", Body=BODY, IfNoneMatch="*", ChecksumAlgorithm="SHA256")
    client.upload_file(str(tmp_path / "big"), "models", "b c/ä", {"ChecksumAlgorithm": "SHA256"}, Config=parts)
    client.download_file("models", "b c/ä", str(tmp_path / "again"))
    with pytest.raises(ClientError) as refused:
        client.put_object(Bucket="models", Key="a", Body=b"other", IfNoneMatch="*")

    assert (tmp_path / "again").read_bytes() == BODY * 12
    assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 412
    assert bucket.Object("a").get()["Body"].read() == BODY
    assert client.head_object(Bucket="models", Key="a", ChecksumMode="ENABLED")["ContentLength"] == len(BODY)
    assert {name["Key"] for name in client.list_objects_v2(Bucket="models")["Contents"]} == {"a", "b c/ä"}
    assert not faults.injected
    assert sum("partNumber=" in target for _, target in faults.requests) == 3


@pytest.mark.parametrize("status", ["500", "503"])
def test_an_error_is_answered_so_many_times_and_never_applied(bucket, faults, client, status):
    faults.inject("PUT", "^models/a", status, times=2)

    for _ in range(2):
        with pytest.raises(ClientError) as failed:
            client.put_object(Bucket="models", Key="a", Body=b"x")
        assert failed.value.response["ResponseMetadata"]["HTTPStatusCode"] == int(status)
    assert not list(bucket.objects.all())
    client.put_object(Bucket="models", Key="a", Body=b"x")

    assert faults.injected == [(status, "PUT", "models/a")] * 2
    assert [item.key for item in bucket.objects.all()] == ["a"]


def test_connections_are_reset(faults, client):
    faults.inject("*", "models/a", "reset", times=1)

    with pytest.raises(ConnectionClosedError):
        client.head_object(Bucket="models", Key="a")

    assert faults.injected == [("reset", "HEAD", "models/a")]


@pytest.mark.parametrize(("kind", "error"), [("applied-500", ClientError), ("applied-reset", ConnectionClosedError)])
def test_what_was_applied_stays_though_its_answer_is_lost(bucket, faults, client, kind, error):
    faults.inject("PUT", "a$", kind)

    with pytest.raises(error):
        client.put_object(Bucket="models", Key="a", Body=b"x")

    assert bucket.Object("a").get()["Body"].read() == b"x"


def test_an_answer_is_cut_in_the_middle_or_has_a_wrong_bit(bucket, faults, client):
    bucket.put_object(Key="a", Body=BODY)
    faults.inject("GET", "models/a", "truncated", times=1)
    faults.inject("GET", "models/a", "flipped", times=1)

    with pytest.raises((IncompleteReadError, ResponseStreamingError)):
        client.get_object(Bucket="models", Key="a")["Body"].read()
    flipped = client.get_object(Bucket="models", Key="a")["Body"].read()

    assert sum(a != b for a, b in zip(flipped, BODY, strict=True)) == 1
    assert [kind for kind, *_ in faults.injected] == ["truncated", "flipped"]
    assert client.get_object(Bucket="models", Key="a")["Body"].read() == BODY


def test_what_is_planned_can_be_forgotten(faults, client):
    faults.inject("PUT", "", "503")
    faults.heal()

    client.put_object(Bucket="models", Key="a", Body=b"x")

    assert not faults.injected
