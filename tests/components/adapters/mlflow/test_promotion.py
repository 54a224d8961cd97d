"""Promotion and rollback on a real registry: what moves the alias `champion`, and what is recorded."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from components.adapters.mlflow import connection, model_registry, model_versions, promotion, runs, signing
from infoxlm_core import manifests
from infoxlm_core.errors import DataCorrupt, InputError, LeaseHeld, NotPromoted, SignatureInvalid
from tests.toys.evaluation import evaluated

if TYPE_CHECKING:
    from mlflow import MlflowClient

METRIC = "retrieval/served"
GATE = {METRIC: 0.0}
STRICT_GATE = {METRIC: 0.5}
TAGS = {"test_set": "sha256:t", "corpus_digest": "sha256:c", "code": "sha256:k"}


def register(
    store: Path,
    encoder: Path,
    digest: str,
    score: float,
    name: str = "tiny",
    gate: dict[str, float] = GATE,
    start_score: float | None = None,
) -> model_registry.Registration:
    """Register an encoder with an evaluation. With `start_score`, it must be better than its start."""
    run_id = runs.open_run("tests", "demo", {"infoxlm.run": name}, store)
    evaluation = evaluated(store / "evaluation", score, start=start_score)
    tags = TAGS if start_score is None else TAGS | {model_versions.AGAINST: "start"}
    encoder = model_registry.EvaluatedEncoder(encoder, digest, {METRIC: score}, run_id, tags, evaluation)
    return model_registry.register(name, encoder, gate)


@pytest.fixture
def equal(store, tiny_encoders) -> "MlflowClient":
    """Return a registry in which version 1 is champion, and version 2 is equally good, so the gate refused it."""
    register(store, tiny_encoders["first"], "sha256:1", 0.5)
    register(store, tiny_encoders["second"], "sha256:2", 0.5)
    return connection.connect(store)


@pytest.fixture
def better(store, tiny_encoders) -> "MlflowClient":
    """Return a registry in which version 1 is champion, and version 2 is better, but was refused by a stricter gate."""
    register(store, tiny_encoders["first"], "sha256:1", 0.5)
    register(store, tiny_encoders["second"], "sha256:2", 0.6, gate=STRICT_GATE)
    return connection.connect(store)


def read_champion(client: "MlflowClient", name: str = "tiny") -> int:
    return int(client.get_registered_model(name).aliases["champion"])


def read_decision(client: "MlflowClient", version: int) -> dict:
    return json.loads(client.get_model_version("tiny", str(version)).tags["decision"])


def find_files(client: "MlflowClient", version: int) -> Path:
    """Return the local folder in which the registry keeps the files of a version."""
    return model_versions.download(client, client.get_model_version("tiny", str(version)))


def test_better_candidate_becomes_champion_and_can_be_rolled_back(better, store, monkeypatch):
    decider = {
        "pod": "promote-1",
        "run": "r-1",
        "service_account": "infoxlm-runner",
        "image": "registry.example/infoxlm@sha256:ab",
    }
    for variable, value in zip(
        ("KFP_POD_NAME", "RUN_ID", "SERVICE_ACCOUNT", "INFOXLM_IMAGE"), decider.values(), strict=True
    ):
        monkeypatch.setenv(variable, value)
    with pytest.raises(InputError, match="version 1 did not replace another version"):
        promotion.roll_back(better, "tiny", "reason")

    promoted = promotion.promote_model("models:/tiny@candidate", GATE, store)

    assert promoted.version == read_champion(better) == 2
    decision = read_decision(better, 2)
    assert decision["what"] == "promoted"
    assert decision["previous_champion"] == 1
    assert decision["by"] == decider
    figures = decision["figures"][METRIC]
    assert figures["gain"] == pytest.approx(0.1)
    assert 0 < figures["lower"] < 0.1 < figures["upper"]
    assert figures["questions"] == 400
    assert figures["least"] == 0.0
    version = better.get_model_version("tiny", "2")
    assert version.tags["previous_champion"] == "1"
    assert version.tags["gate"] == decision["reason"]
    files = [file.path for file in better.list_artifacts(version.run_id, "promotion")]
    [file] = [path for path in files if path.endswith("promoted-version-2.json")]
    record = json.loads(Path(better.download_artifacts(version.run_id, file, str(store))).read_text())
    assert record["registered"]["corpus_digest"] == "sha256:c"

    restored_versions = [promotion.roll_back(better, "tiny", "German got worse") for _ in range(2)]

    assert restored_versions == [1, 1]
    assert read_champion(better) == 1
    assert read_decision(better, 2)["reason"] == "rolled back to version 1: German got worse"
    assert read_decision(better, 1)["reason"] == "champion again after version 2: German got worse"
    assert promotion.promote_model("models:/tiny/2", GATE, store).version == read_champion(better) == 2


def test_equal_candidate_is_refused_but_can_be_promoted_by_hand(equal, store, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ada")
    message = r"models:/tiny/2 stays candidate, not shown to be better than version 1: retrieval/served \+0.0000 \(95 %"

    with pytest.raises(NotPromoted, match=message):
        promotion.promote_model("models:/tiny@candidate", GATE, store)
    assert read_champion(equal) == 1
    assert read_decision(equal, 2)["what"] == "refused"

    promotion.promote_model("models:/tiny@candidate", GATE, store, manual_reason="agreed on 3 May")
    assert read_champion(equal) == 2
    assert read_decision(equal, 2)["reason"] == "champion by hand: agreed on 3 May"
    assert read_decision(equal, 2)["by"]["user"] == "ada"


def test_first_version_must_be_better_than_its_start_if_demanded(store, tiny_encoders):
    registration = register(store, tiny_encoders["first"], "sha256:1", 0.5, start_score=0.5)

    refusal = "not shown to be better than its start: retrieval/served +0.0000 (95 % interval"
    assert registration.aliases == ("candidate",)
    assert registration.reason.startswith(f"candidate, {refusal}")
    with pytest.raises(NotPromoted, match=re.escape(refusal)):  # the demand is stored with the version
        promotion.promote_model("models:/tiny/1", GATE, store)


def test_refused_version_is_judged_again_if_the_gate_of_its_run_has_changed(better, store, tiny_encoders, monkeypatch):
    def register_again(gate: dict[str, float]) -> model_registry.Registration:
        return register(store, tiny_encoders["second"], "sha256:2", 0.6, gate=gate)

    refused = register_again(STRICT_GATE)
    with monkeypatch.context() as patch:
        # This is the last call before the alias moves, and the decision is already recorded.
        patch.setattr(promotion, "find_champion", Mock(side_effect=["1", SystemExit]))
        with pytest.raises(SystemExit):
            register_again(GATE)
    judged_again = register_again(GATE)

    assert (refused.version, refused.champion) == (2, False)
    assert (judged_again.version, judged_again.champion) == (2, True)
    assert judged_again.reason.startswith("champion, better than version 1: retrieval/served +0.1000")
    assert read_champion(better) == 2


def test_refused_version_is_judged_again_if_it_need_not_be_better_than_its_start(store, tiny_encoders, monkeypatch):
    from mlflow import MlflowClient

    refused = register(store, tiny_encoders["first"], "sha256:1", 0.5, start_score=0.5)
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "set_model_version_tag", Mock(side_effect=SystemExit))
        with pytest.raises(SystemExit):  # interrupted before the new demand is stored
            register(store, tiny_encoders["first"], "sha256:1", 0.5)
    judged_again = register(store, tiny_encoders["first"], "sha256:1", 0.5)

    assert (refused.version, refused.champion) == (1, False)
    assert (judged_again.version, judged_again.champion) == (1, True)
    assert judged_again.reason.startswith("champion with retrieval/served 0.5: there was none before")


def test_refused_version_keeps_its_evaluation_until_it_is_deleted(equal, store, tiny_encoders, caplog):
    refused = register(store, tiny_encoders["second"], "sha256:2", 0.5)
    assert "keeps its first evaluation" not in caplog.text

    repeated = register(store, tiny_encoders["second"], "sha256:2", 0.6)

    assert repeated == refused
    assert "models:/tiny/2 keeps its first evaluation: to judge the model by the new one, delete" in caplog.text
    equal.delete_model_version("tiny", "2")
    assert register(store, tiny_encoders["second"], "sha256:2", 0.6).champion


def test_interrupted_promotion_is_finished_by_the_next(better, store, monkeypatch):
    from mlflow import MlflowClient

    def end_process(*_):
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "set_registered_model_alias", end_process)
        with pytest.raises(SystemExit):
            promotion.promote_model("models:/tiny/2", GATE, store)
    assert read_champion(better) == 1

    first = promotion.promote_model("models:/tiny/2", GATE, store)
    second = promotion.promote_model("models:/tiny/2", GATE, store)

    assert read_champion(better) == 2
    assert first.verdict == second.verdict
    assert better.get_model_version("tiny", "2").tags["previous_champion"] == "1"


@pytest.mark.item("P11")
def test_champion_that_changed_during_the_comparison_is_not_replaced(better, store, monkeypatch):
    """A process with another store has another lock, so the alias is read again before it moves."""
    compare = promotion.compare

    def compare_while_champion_changes(client, version, champion, gate):
        verdict = compare(client, version, champion, gate)
        client.delete_registered_model_alias("tiny", "champion")
        return verdict

    monkeypatch.setattr(promotion, "compare", compare_while_champion_changes)

    with pytest.raises(LeaseHeld, match="champion of tiny changed during the comparison"):
        promotion.promote_model("models:/tiny/2", GATE, store)

    assert promotion.find_champion(better, "tiny") is None


# ---------------------------------------------------------------- signatures and digests


def write_key_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a private and a public key."""
    key = ec.generate_private_key(ec.SECP256R1())
    private_path, public_path = folder / f"{name}.private.pem", folder / f"{name}.public.pem"
    private_path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    public_path.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return private_path, public_path


@pytest.fixture
def signing_keys(tmp_path, monkeypatch) -> None:
    """Sign and verify with a key pair."""
    private_path, public_path = write_key_pair(tmp_path, "ours")
    monkeypatch.setenv(signing.SIGNING_KEY, str(private_path))
    monkeypatch.setenv(signing.VERIFYING_KEY, str(public_path))


def flip_bit(model: Path) -> None:
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


FORGERIES: dict[str, Callable[[Path], object]] = {
    "Hash mismatch": flip_bit,
    "Extra files": lambda model: (model / "extra.json").write_text("{}"),
    "Missing files": lambda model: (model / "tokenizer.json").unlink(),
    "tiny version 2 is not signed": lambda model: (model.parent / signing.FILE).unlink(),
}
"""Message -> how the folder of a model is changed."""


@pytest.mark.item("S09")
def test_model_that_is_not_as_signed_is_neither_promoted_nor_loaded(signing_keys, better, store, tmp_path, monkeypatch):
    def assert_refused(message: str) -> None:
        with pytest.raises(SignatureInvalid, match=message):
            promotion.promote_model("models:/tiny/2", GATE, store, manual_reason="reason")
        with pytest.raises(SignatureInvalid, match=message):
            model_registry.load_encoder("models:/tiny/2", store)
        assert read_champion(better) == 1

    files = find_files(better, 2)
    shutil.copytree(files, tmp_path / "signed")

    for message, forge in FORGERIES.items():
        forge(files / "model")
        assert_refused(message)
        shutil.rmtree(files)
        shutil.copytree(tmp_path / "signed", files)
    _, other_public_key = write_key_pair(tmp_path, "theirs")
    with monkeypatch.context() as patch:
        patch.setenv(signing.VERIFYING_KEY, str(other_public_key))
        assert_refused("Key mismatch")

    assert promotion.promote_model("models:/tiny/2", GATE, store).version == 2


@pytest.mark.item("P5", "S09")
def test_model_that_does_not_match_its_digest_is_neither_promoted_nor_loaded(store, tiny_encoders, tmp_path):
    encoder = shutil.copytree(tiny_encoders["first"], tmp_path / "encoder")
    register(store, encoder, manifests.write(encoder, "encoder")["digest"], 0.5)
    client = connection.connect(store)
    assert (model_registry.load_encoder("models:/tiny@champion", store) / "model.safetensors").is_file()
    client.delete_registered_model_alias("tiny", "champion")
    model = find_files(client, 1) / "model"

    flip_bit(model)
    with pytest.raises(DataCorrupt, match=r"model\.safetensors has sha256"):
        promotion.promote_model("models:/tiny/1", GATE, store)
    assert promotion.find_champion(client, "tiny") is None
    with pytest.raises(DataCorrupt, match=r"model\.safetensors has sha256"):
        model_registry.load_encoder("models:/tiny/1", store)

    manifests.write(model, "encoder")  # another model, complete in itself
    with pytest.raises(DataCorrupt, match=r"tiny version 1 contains sha256:\w+…, but was registered as"):
        model_registry.load_encoder("models:/tiny/1", store)
    (model / manifests.NAME).unlink()  # all versions of the step `register` have a manifest
    client.set_model_version_tag("tiny", "1", model_versions.MADE_AS, "pretrained/abc")
    with pytest.raises(InputError, match=r"no manifest\.json in"):
        model_registry.load_encoder("models:/tiny/1", store)


# ---------------------------------------------------------------- copies


def test_copy_within_a_server_is_created_once_and_compared_with_its_champion(equal, store):
    first = promotion.promote_model("models:/tiny/2", GATE, store, target="production.tiny")
    second = promotion.promote_model("models:/tiny/2", GATE, store, target="production.tiny")

    assert (first.name, first.version) == ("production.tiny", 1)
    assert second.version == 1
    version = equal.get_model_version("production.tiny", "1")
    assert version.tags["digest"] == "sha256:2"
    assert version.tags["copied_from"] == "models:/tiny/2"
    assert "previous_champion" not in version.tags
    assert read_champion(equal) == 1
    with pytest.raises(NotPromoted, match="not shown to be better than version 1"):
        promotion.promote_model("models:/tiny/1", GATE, store, target="production.tiny")

    for invalid_target in ("https://", "https://host", "a/b", "models:/x"):
        with pytest.raises(InputError, match="give the NAME of a registered model"):
            promotion.promote_model("models:/tiny/2", GATE, store, target=invalid_target)
    with pytest.raises(InputError, match="give models:/NAME@ALIAS"):
        promotion.promote_model("tiny", GATE, store)
    equal.delete_model_version_tag("tiny", "2", "digest")  # as in a version that another tool created
    for target in ("other", "https://host/other"):
        with pytest.raises(InputError, match="tiny version 2 has no tag digest"):
            promotion.promote_model("models:/tiny/2", GATE, store, target=target)


def test_copy_has_neither_the_role_nor_the_origin_of_its_original(better, store):
    promotion.promote_model("models:/tiny/1", GATE, store, target="staging")
    promotion.promote_model("models:/tiny/2", GATE, store, target="staging")

    promotion.promote_model("models:/staging/2", GATE, store, target="production")

    tags = better.get_model_version("production", "1").tags
    assert tags["copied_from"] == "models:/staging/2"
    assert "previous_champion" not in tags
    with pytest.raises(InputError, match="production version 1 did not replace another version"):
        promotion.roll_back(better, "production", "reason")


def test_copy_to_a_model_that_has_the_version_changes_only_its_alias(better, store, tiny_encoders):
    promotion.promote_model("models:/tiny/2", GATE, store)
    register(store, tiny_encoders["second"], "sha256:2", 0.6, name="second")

    promoted = promotion.promote_model("models:/second/1", GATE, store, target="tiny")

    assert promoted.version == 2
    assert "copied_from" not in better.get_model_version("tiny", "2").tags
    assert promotion.roll_back(better, "tiny", "reason") == 1


def read_files(client: "MlflowClient", name: str, version: int) -> dict[Path, bytes]:
    """Return the content of all files of a version, by path."""
    with model_versions.checked_download(client, client.get_model_version(name, str(version))) as folder:
        return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_copy_to_another_server_has_all_files_and_tags_and_passes_the_gate(
    signing_keys, better, store, mlflow_server, monkeypatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "staging")
    monkeypatch.setenv("TARGET_MLFLOW_TRACKING_USERNAME", "production")
    source_uri = f"sqlite:///{store}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", source_uri)
    files = read_files(better, "tiny", 2)

    for number in (1, 2, 2):
        promoted = promotion.promote_model(f"models:/tiny/{number}", GATE, store, target=f"{mlflow_server}/production")

    assert os.environ["MLFLOW_TRACKING_URI"] == source_uri
    assert os.environ["MLFLOW_TRACKING_USERNAME"] == "staging"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    client = connection.connect(store)
    assert promoted.version == read_champion(client, "production") == 2
    assert len(client.search_model_versions("name = 'production'")) == 2
    version = client.get_model_version("production", "2")
    assert version.tags["copied_from"] == f"{source_uri} models:/tiny/2"
    assert version.tags["corpus_digest"] == "sha256:c"
    assert version.tags["previous_champion"] == "1"
    assert read_files(client, "production", 2) == files


@pytest.mark.slow
@pytest.mark.parametrize("registry", ["store", "on_server"])
def test_candidate_without_outcomes_is_refused(registry, request, tiny_encoders, tmp_path):
    request.getfixturevalue(registry)
    store, name = tmp_path / "store", f"without-{registry}"
    register(store, tiny_encoders["first"], "sha256:1", 0.5, name)
    run_id = runs.open_run("tests", "demo", {"infoxlm.run": name}, store)
    candidate = model_registry.EvaluatedEncoder(
        tiny_encoders["second"], "sha256:2", {METRIC: 0.9}, run_id, {"test_set": "sha256:t"}, tmp_path / "missing"
    )

    registration = model_registry.register(name, candidate, GATE)

    assert not registration.champion
    assert "version 2 has no outcomes by question" in registration.reason
