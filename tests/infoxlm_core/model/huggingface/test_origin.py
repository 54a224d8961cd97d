import json

import pytest

from infoxlm_core import manifests
from infoxlm_core.model.huggingface import origin


def test_origin_of_a_hub_model_is_its_name_and_the_licence_of_its_card(tmp_path):
    snapshot = tmp_path / "models--intfloat--multilingual-e5-small" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    assert origin.describe_origin(origin.read(snapshot)).endswith(
        "is not recorded: find it out before you share this model."
    )
    (snapshot / "README.md").write_text("---\nlicense: mit\nlanguage: [de]\n---\n# Multilingual E5\n")

    facts = origin.read(snapshot)

    assert facts == {"base_model": "intfloat/multilingual-e5-small", "licence": "mit"}
    assert origin.describe_origin(facts) == "It was made from intfloat/multilingual-e5-small, whose licence is mit."


def test_model_trained_from_a_published_one_keeps_its_origin(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({}))
    facts = {"steps": 3, origin.FACT: {"base_model": "a/b", "licence": "mit"}}
    manifests.write(tmp_path, "encoder", facts)

    assert origin.read(tmp_path) == {"base_model": "a/b", "licence": "mit"}
    assert origin.name_adapted(tmp_path) == "b, adapted"
    manifests.write(tmp_path, "encoder", {"steps": 3})
    assert origin.describe_origin(origin.read(tmp_path)) == ""
    assert origin.name_adapted(tmp_path) == "Adapted encoder"


@pytest.mark.parametrize("card", [b"---\nlicense: [mit\n---\n", b"---\n- mit\n---\n", b"# Modell f\xfcr alle\n"])
def test_damaged_card_and_foreign_manifest_are_ignored(card, tmp_path, caplog):
    (tmp_path / "README.md").write_bytes(card)
    (tmp_path / manifests.NAME).write_text('{"name": "mine", "version": "1.0"}')

    assert origin.read(tmp_path) == {}
    assert "README.md: its metadata cannot be read" in caplog.text
