"""Why stages of a pipeline run failed, as they have written it into the store."""

import json
from typing import Any

from components.adapters.s3 import client as s3
from components.adapters.s3 import objects as object_store
from components.platform import runtime


def read(store: str, run: str) -> list[dict[str, Any]]:
    """The outcomes of a pipeline run in a store on S3, the oldest first: stage, code, class, message.

    Raises:
        InputError, StorageUnavailable: the store refuses, or does not answer.
    """
    bucket, prefix = object_store.split(f"{store}/{runtime.outcome_name(run=run)}")
    with s3.answering(store) as client:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
        found = sorted((item["LastModified"], item["Key"]) for page in pages for item in page.get("Contents", ()))
    texts = (object_store.get(f"s3://{bucket}/{key}") for _, key in found)
    return [json.loads(text[0]) for text in texts if text]
