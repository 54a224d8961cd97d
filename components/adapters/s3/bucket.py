"""Create a store's bucket, with a lifecycle rule that deletes the parts of unfinished uploads after a day.

    python -m components.adapters.s3.bucket s3://infoxlm

A second call changes nothing. The bucket's other rules are kept.
"""

import sys
from typing import Any

from components.adapters.s3 import store
from infoxlm_core.errors import InfoXLMError, InputError

LIFECYCLE_RULE = {
    "ID": "infoxlm-unfinished-uploads",
    "Status": "Enabled",
    "Filter": {"Prefix": ""},
    "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
}
"""Aborts unfinished uploads after a day, because they take up space but do not appear in listings."""


def ensure_bucket(url: str) -> None:
    """Create the bucket `s3://NAME` and the rule by which S3 deletes unfinished uploads, unless they exist.

    Raises:
        InputError: the URL is malformed, or S3 refuses.
        StorageUnavailable: S3 does not answer.
    """
    bucket = url.removeprefix("s3://").rstrip("/")
    if not url.startswith("s3://") or not bucket or "/" in bucket:
        raise InputError(f"{url!r} is not a bucket: write s3://NAME")
    with store.open_client(url) as client:
        # Look first, because S3 may refuse to create a bucket that exists.
        existing_buckets = [description["Name"] for description in client.list_buckets()["Buckets"]]
        if bucket not in existing_buckets:
            client.create_bucket(Bucket=bucket)
        rules = _read_lifecycle_rules(client, bucket)
        rule_ids = [rule.get("ID") for rule in rules]
        if LIFECYCLE_RULE["ID"] not in rule_ids:
            all_rules = {"Rules": [*rules, LIFECYCLE_RULE]}  # the request replaces all rules of the bucket
            client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=all_rules)


def _read_lifecycle_rules(client: Any, bucket: str) -> list[dict[str, Any]]:
    """Return the lifecycle rules of a bucket, or an empty list if it has none."""
    from botocore.exceptions import ClientError

    try:
        return list(client.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"])
    except ClientError as error:
        if error.response["Error"]["Code"] != "NoSuchLifecycleConfiguration":
            raise
        return []  # S3 answers with an error if a bucket has no rules


if __name__ == "__main__":
    try:
        ensure_bucket(sys.argv[1] if len(sys.argv) > 1 else "")
    except InfoXLMError as error:
        print(f"bucket: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
