"""The bucket of a store is made once, with its rule, and rules of others stay."""

import boto3
import pytest

from components.adapters.s3 import bucket as buckets
from infoxlm_core.errors import InputError


@pytest.mark.parametrize("url", ["", "infoxlm", "s3://", "s3://infoxlm/store"])
def test_what_is_no_bucket_is_refused_before_anybody_is_asked(url):
    with pytest.raises(InputError, match="is not a bucket: write s3://NAME"):
        buckets.ensure(url)


def test_made_again_the_bucket_has_its_rule_once_beside_that_of_another(bucket):
    client = boto3.client("s3")
    others = {"ID": "theirs", "Status": "Enabled", "Filter": {"Prefix": "old/"}, "Expiration": {"Days": 3}}
    buckets.ensure("s3://made")
    client.put_bucket_lifecycle_configuration(Bucket="made", LifecycleConfiguration={"Rules": [others]})

    for _ in range(2):
        buckets.ensure("s3://made")

    rules = client.get_bucket_lifecycle_configuration(Bucket="made")["Rules"]
    assert sorted(rule["ID"] for rule in rules) == [buckets.RULE["ID"], "theirs"]
