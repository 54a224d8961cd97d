"""The bucket of a store is created once with its rule, beside the rules of others."""

import boto3
import pytest

from components.adapters.s3 import bucket as buckets
from infoxlm_core.errors import InputError


@pytest.mark.parametrize("url", ["", "infoxlm", "s3://", "s3://infoxlm/store"])
def test_url_that_is_not_a_bucket_is_refused(url):
    with pytest.raises(InputError, match="is not a bucket: write s3://NAME"):
        buckets.ensure_bucket(url)


def test_repeated_setup_keeps_one_rule_beside_those_of_others(bucket):
    client = boto3.client("s3")
    other_rule = {"ID": "other", "Status": "Enabled", "Filter": {"Prefix": "old/"}, "Expiration": {"Days": 3}}
    buckets.ensure_bucket("s3://created")
    client.put_bucket_lifecycle_configuration(Bucket="created", LifecycleConfiguration={"Rules": [other_rule]})

    for _ in range(2):
        buckets.ensure_bucket("s3://created")

    rules = client.get_bucket_lifecycle_configuration(Bucket="created")["Rules"]
    assert sorted(rule["ID"] for rule in rules) == [buckets.LIFECYCLE_RULE["ID"], "other"]
