"""Manifests: names that stay inside, and files that appear whole."""

import json

import pytest

from infoxlm_core import manifests
from infoxlm_core.errors import InputError, ShardCorrupt

LEADING_OUT = ["/etc/passwd", "../a", "a/../../b", "..", "a//b", "a/", "", ".", "./a", "a\0b", "//a"]


@pytest.mark.parametrize("name", LEADING_OUT)
def test_a_name_from_outside_that_leads_out_of_its_folder_is_refused_in_one_line(tmp_path, name):
    with pytest.raises(InputError, match="a name that leads out of its folder") as refused:
        manifests.inside(tmp_path, name)

    assert str(refused.value).isprintable()


@pytest.mark.parametrize("name", ["a", "a/b.c", "..a/b..", "ä b/…", r"a\b"])
def test_any_other_name_is_joined_to_its_folder(tmp_path, name):
    assert manifests.inside(tmp_path, name) == tmp_path / name


def test_a_manifest_that_names_a_file_outside_its_directory_is_refused(tmp_path):
    (tmp_path / "outside").write_text("x")
    (tmp_path / "it").mkdir()
    (tmp_path / "it/inside").write_text("x")
    written = manifests.write(tmp_path / "it", "corpus")
    files = {"../outside": written["files"]["inside"]}
    content = {"kind": "corpus", "files": files, "facts": {}}
    (tmp_path / "it/manifest.json").write_text(json.dumps(content | {"digest": manifests.digest(content)}))

    with pytest.raises(ShardCorrupt, match=r"\.\./outside: a name that leads out of its folder"):
        manifests.read(tmp_path / "it", "corpus", made_with="prepare")
