"""Where a model or data may be: what stands before the first colon decides, and a path has no such thing."""

import importlib

import pytest

from components.adapters import source, storage


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("models:/infoxlm@champion", "models"),
        ("pypi:package==1.0", "pypi"),
        ("s3://bucket/prefix", "s3"),
        ("FacebookAI/xlm-roberta-base", ""),
        ("./runs/a:b", ""),
        ("C:\\data", ""),
        ("", ""),
    ],
)
def test_the_scheme_is_what_stands_before_the_first_colon(name, scheme):
    assert storage.scheme(name, ":") == scheme


@pytest.mark.parametrize(
    ("uri", "scheme"),
    [("s3://bucket/prefix", "s3"), ("S3://bucket", "S3"), ("pypi:package", ""), ("./runs/a:b", ""), ("./a://b", "")],
)
def test_the_scheme_of_a_storage_stands_before_two_slashes(uri, scheme):
    assert storage.scheme(uri) == scheme


@pytest.mark.parametrize("module", {**source.DATA, **source.MODELS}.values())
def test_every_module_of_the_tables_can_fetch(module):
    assert callable(importlib.import_module(module).fetch)


def test_a_place_that_is_in_no_table_is_nobodys(tmp_path):
    assert source.fetch(source.DATA, source.Request("ftp://x", tmp_path, tmp_path)) is None
