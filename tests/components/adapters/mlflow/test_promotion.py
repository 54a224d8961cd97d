"""Promotion and rollback on a real registry: what moves the alias, what does not, and what is recorded."""

import json
import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from components.adapters.mlflow import connection, model_registry, model_versions, promotion, runs, signing
from infoxlm_core import manifests
from infoxlm_core.errors import DataCorrupt, InputError, LeaseHeld, NotPromoted, SignatureInvalid
from tests.toys.evaluation import evaluated

METRIC = "retrieval/served"
GATE = {METRIC: 0.0}
TAGS = {"test_set": "sha256:t", "corpus_digest": "sha256:c", "code": "sha256:k"}


def register(store: Path, encoder: Path, digest: str, score: float, name: str = "tiny", gate: dict = GATE) -> None:
    run_id = runs.open_run("tests", "demo", {"infoxlm.run": name}, store)
    evaluation = evaluated(store / "evaluation", score)
    candidate = model_registry.EvaluatedEncoder(encoder, digest, {METRIC: score}, run_id, TAGS, evaluation)
    model_registry.register(name, candidate, gate)


@pytest.fixture
def two(store, tiny_encoders):
    """Version 1 is champion; version 2 is as good, so the gate refused it."""
    register(store, tiny_encoders["first"], "sha256:1", 0.5)
    register(store, tiny_encoders["second"], "sha256:2", 0.5)
    return connection.connect(store)


@pytest.fixture
def better(store, tiny_encoders):
    """Version 1 is champion; version 2 is better, and was registered with a gate that it did not pass."""
    register(store, tiny_encoders["first"], "sha256:1", 0.5)
    register(store, tiny_encoders["second"], "sha256:2", 0.6, gate={METRIC: 0.5})
    return connection.connect(store)


def champion(client, name: str = "tiny") -> int:
    return int(client.get_registered_model(name).aliases["champion"])


def decision(client, version: int, name: str = "tiny") -> dict:
    return json.loads(client.get_model_version(name, str(version)).tags["decision"])


def test_a_better_candidate_becomes_champion_and_everything_is_written_down(better, store, monkeypatch):
    monkeypatch.setenv("KFP_POD_NAME", "promote-1")
    monkeypatch.setenv("RUN_ID", "r-1")
    monkeypatch.setenv("SERVICE_ACCOUNT", "infoxlm-runner")
    monkeypatch.setenv("INFOXLM_IMAGE", "registry.example/infoxlm@sha256:ab")

    done = promotion.promote_model("models:/tiny@candidate", GATE, store)

    assert (done.version, champion(better)) == (2, 2)
    said = decision(better, 2)
    assert (said["what"], said["previous_champion"]) == ("promoted", 1)
    assert said["by"] == {
        "pod": "promote-1",
        "run": "r-1",
        "service_account": "infoxlm-runner",
        "image": "registry.example/infoxlm@sha256:ab",
    }
    figure = said["figures"][METRIC]
    assert figure["gain"] == pytest.approx(0.1) and 0 < figure["lower"] < 0.1 < figure["upper"]
    assert (figure["questions"], figure["least"]) == (400, 0.0)
    version = better.get_model_version("tiny", "2")
    assert (version.tags["previous_champion"], version.tags["gate"]) == ("1", said["reason"])
    files = [file.path for file in better.list_artifacts(version.run_id, "promotion")]
    assert [name for name in files if name.endswith("promoted-version-2.json")]
    path = better.download_artifacts(version.run_id, files[-1], str(store))
    assert json.loads(Path(path).read_text())["registered"]["corpus_digest"] == "sha256:c"


@pytest.mark.parametrize(("score", "promoted"), [(0.6, True), (0.5, False)], ids=["better", "equal"])
def test_against_its_start_the_first_version_is_champion_only_if_it_is_better(store, tiny_encoders, score, promoted):
    run_id = runs.open_run("tests", "demo", {"infoxlm.run": "tiny"}, store)
    evaluation = evaluated(store / "evaluation", score, start=0.5)
    tags = TAGS | {model_versions.AGAINST: "start"}
    encoder = tiny_encoders["first"]
    candidate = model_registry.EvaluatedEncoder(encoder, "sha256:1", {METRIC: score}, run_id, tags, evaluation)

    registered = model_registry.register("tiny", candidate, GATE)

    assert registered.champion is promoted and registered.aliases[0] == "candidate"
    verdict = "champion, better than" if promoted else "candidate, not shown to be better than"
    assert registered.reason.startswith(f"{verdict} its start: retrieval/served +{score - 0.5:.4f} (95 % interval")
    if not promoted:  # the rule belongs to the version, so a later promotion by the gate follows it, too
        with pytest.raises(NotPromoted, match="not shown to be better than its start"):
            promotion.promote_model("models:/tiny/1", GATE, store)
        assert promotion.promote_model("models:/tiny/1", GATE, store, by_hand="agreed on 3 May").version == 1


def test_a_candidate_that_is_not_better_is_refused_with_the_figures(two, store):
    expected = (
        r"models:/tiny/2 stays candidate, not shown to be better than version 1: retrieval/served \+0.0000 \(95 %"
    )
    with pytest.raises(NotPromoted, match=expected):
        promotion.promote_model("models:/tiny@candidate", GATE, store)

    assert champion(two) == 1
    assert decision(two, 2)["what"] == "refused"


def test_a_person_can_decide_and_has_to_say_why(two, store, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ada")

    promotion.promote_model("models:/tiny@candidate", GATE, store, by_hand="agreed on 3 May")

    assert champion(two) == 2
    assert (decision(two, 2)["reason"], decision(two, 2)["by"]["user"]) == ("champion by hand: agreed on 3 May", "ada")


def test_promoting_twice_and_after_a_crash_is_promoting_once(better, store, monkeypatch):
    from mlflow import MlflowClient

    def power_cut(*args):
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "set_registered_model_alias", power_cut)
        with pytest.raises(SystemExit):
            promotion.promote_model("models:/tiny/2", GATE, store)
    assert champion(better) == 1

    first, second = (promotion.promote_model("models:/tiny/2", GATE, store) for _ in range(2))

    assert champion(better) == 2 and first.verdict == second.verdict
    assert better.get_model_version("tiny", "2").tags["previous_champion"] == "1"


@pytest.mark.item("P11")
def test_a_champion_that_changes_during_the_comparison_is_no_longer_replaced(better, store, monkeypatch):
    """Another store has another lock: the alias is read again before it moves."""
    register(store, model_versions.download(better, better.get_model_version("tiny", "1"), "model", None),
             "sha256:3", 0.7, gate={METRIC: 0.5})  # fmt: skip
    compare = promotion.compare

    def compare_slowly(client, version, number, gate):
        client.set_registered_model_alias("tiny", "champion", "3")
        return compare(client, version, number, gate)

    with monkeypatch.context() as patch:
        patch.setattr(promotion, "compare", compare_slowly)
        with pytest.raises(LeaseHeld, match="champion of tiny changed during the comparison"):
            promotion.promote_model("models:/tiny/2", GATE, store)

    with pytest.raises(NotPromoted, match="not shown to be better than version 3"):
        promotion.promote_model("models:/tiny/2", GATE, store)
    assert champion(better) == 3


def test_a_rollback_brings_the_previous_champion_back_once(better, store):
    with pytest.raises(InputError, match="version 1 did not replace another version"):
        promotion.roll_back(better, "tiny", "why not")
    promotion.promote_model("models:/tiny/2", GATE, store)

    assert [promotion.roll_back(better, "tiny", "German got worse") for _ in range(2)] == [1, 1]

    assert champion(better) == 1
    assert decision(better, 2)["reason"] == "rolled back to version 1: German got worse"
    assert decision(better, 1)["reason"] == "champion again after version 2: German got worse"
    assert promotion.promote_model("models:/tiny/2", GATE, store).version == champion(better) == 2


@pytest.fixture
def keys(tmp_path, monkeypatch):
    """A key pair that signs and verifies, and another public key."""
    paths = {}
    for name in ("ours", "theirs"):
        key = ec.generate_private_key(ec.SECP256R1())
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        for kind, text in (("private", private), ("public", public)):
            paths[f"{name} {kind}"] = tmp_path / f"{name}.{kind}.pem"
            paths[f"{name} {kind}"].write_bytes(text)
    monkeypatch.setenv(signing.SIGNING, str(paths["ours private"]))
    monkeypatch.setenv(signing.VERIFYING, str(paths["ours public"]))
    return paths


def flip(model: Path) -> None:
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


@pytest.mark.item("S09")
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (flip, "Hash mismatch"),
        (lambda model: (model / "more.json").write_text("{}"), "Extra files"),
        (lambda model: (model / "tokenizer.json").unlink(), "Missing files"),
        (lambda model: (model.parent / "signature.json").unlink(), "is not signed"),
    ],
    ids=["flipped bit", "extra file", "missing file", "no signature"],
)
def test_what_is_not_what_was_signed_does_not_become_champion(keys, better, store, spoil, said):
    spoil(model_versions.download(better, better.get_model_version("tiny", "2"), "model", None))

    with pytest.raises(SignatureInvalid, match=said):
        promotion.promote_model("models:/tiny/2", GATE, store, by_hand="even so")

    assert champion(better) == 1


@pytest.mark.item("S09")
def test_a_model_signed_with_another_key_does_not_become_champion(keys, better, store, monkeypatch):
    monkeypatch.setenv(signing.VERIFYING, str(keys["theirs public"]))

    with pytest.raises(SignatureInvalid, match="Key mismatch"):
        promotion.promote_model("models:/tiny/2", GATE, store)

    assert champion(better) == 1


@pytest.fixture
def with_manifest(store, tiny_encoders):
    """Version 1 is an encoder with our manifest, as the step `register` registers it, and is champion."""
    encoder = store / "encoder"
    encoder.mkdir()
    for path in tiny_encoders["first"].iterdir():
        (encoder / path.name).write_bytes(path.read_bytes())
    register(store, encoder, manifests.write(encoder, "encoder")["digest"], 0.5)
    return connection.connect(store)


@pytest.mark.item("S09")
def test_a_model_that_is_not_the_one_of_its_digest_does_not_become_champion(with_manifest, store):
    with_manifest.delete_registered_model_alias("tiny", "champion")
    flip(model_versions.download(with_manifest, with_manifest.get_model_version("tiny", "1"), "model", None))

    with pytest.raises(DataCorrupt, match=r"model\.safetensors has sha256"):
        promotion.promote_model("models:/tiny/1", GATE, store)

    assert promotion.champion_of(with_manifest, "tiny") is None


@pytest.mark.item("P5")
def test_a_registered_model_that_is_not_the_one_of_its_digest_is_not_used(with_manifest, store):
    assert (model_registry.load_encoder("models:/tiny@champion", store) / "model.safetensors").is_file()
    model = model_versions.download(with_manifest, with_manifest.get_model_version("tiny", "1"), "model", None)
    flip(model)

    with pytest.raises(DataCorrupt, match=r"model\.safetensors has sha256"):
        model_registry.load_encoder("models:/tiny@champion", store)

    manifests.write(model, "encoder")  # another model, in itself complete
    with pytest.raises(DataCorrupt, match=r"tiny version 1 contains sha256:\w+…, but was registered as"):
        model_registry.load_encoder("models:/tiny@champion", store)
    (model / manifests.NAME).unlink()  # which every model of the step `register` has
    with_manifest.set_model_version_tag("tiny", "1", model_versions.MADE_AS, "pretrained/abc")
    with pytest.raises(InputError, match=r"no manifest\.json in"):
        model_registry.load_encoder("models:/tiny@champion", store)


@pytest.mark.item("S09")
def test_a_registered_model_that_is_not_signed_with_our_key_is_not_used(keys, two, store, monkeypatch):
    model_registry.load_encoder("models:/tiny/1", store)  # what is signed is
    (model_versions.download(two, two.get_model_version("tiny", "2"), "", None) / signing.FILE).unlink()

    with pytest.raises(SignatureInvalid, match="tiny version 2 is not signed"):
        model_registry.load_encoder("models:/tiny/2", store)
    monkeypatch.setenv(signing.VERIFYING, str(keys["theirs public"]))
    with pytest.raises(SignatureInvalid, match="Key mismatch"):
        model_registry.load_encoder("models:/tiny/1", store)


def test_a_copy_within_a_server_is_made_once_and_judged_where_it_goes(two, store):
    first, again = (promotion.promote_model("models:/tiny/2", GATE, store, to="production.tiny") for _ in range(2))

    assert (first.name, first.version, again.version) == ("production.tiny", 1, 1)
    version = two.get_model_version("production.tiny", "1")
    assert (version.tags["digest"], version.tags["copied_from"]) == ("sha256:2", "models:/tiny/2")
    assert "previous_champion" not in version.tags and champion(two) == 1
    with pytest.raises(NotPromoted, match="not shown to be better than version 1"):
        promotion.promote_model("models:/tiny/1", GATE, store, to="production.tiny")


@pytest.mark.slow
def test_a_copy_to_another_server_brings_all_files_tags_and_the_gate(keys, better, store, mlflow_server, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "staging")
    monkeypatch.setenv("TARGET_MLFLOW_TRACKING_USERNAME", "production")
    with model_versions.fetched(better, better.get_model_version("tiny", "2")) as files:
        sent = {path.relative_to(files): path.read_bytes() for path in files.rglob("*") if path.is_file()}

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{store}/mlflow.db")
    for number in (1, 2, 2):
        done = promotion.promote_model(f"models:/tiny/{number}", GATE, store, to=f"{mlflow_server}/production")

    assert os.environ["MLFLOW_TRACKING_URI"] == f"sqlite:///{store}/mlflow.db"
    assert os.environ["MLFLOW_TRACKING_USERNAME"] == "staging"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    client = connection.connect(store)
    assert (done.version, champion(client, "production")) == (2, 2)
    assert len(client.search_model_versions("name = 'production'")) == 2
    version = client.get_model_version("production", "2")
    assert version.tags["copied_from"] == f"sqlite:///{store}/mlflow.db models:/tiny/2"
    assert (version.tags["corpus_digest"], version.tags["previous_champion"]) == ("sha256:c", "1")
    with model_versions.fetched(client, version) as files:
        assert {path.relative_to(files): path.read_bytes() for path in files.rglob("*") if path.is_file()} == sent


@pytest.mark.slow
@pytest.mark.parametrize("registry", ["store", "on_server"])
def test_a_candidate_without_outcomes_is_refused_and_not_tried_again(registry, request, tiny_encoders, tmp_path):
    request.getfixturevalue(registry)
    store, name = tmp_path / "store", f"without-{registry}"
    register(store, tiny_encoders["first"], "sha256:1", 0.5, name)
    run_id = runs.open_run("tests", "demo", {"infoxlm.run": name}, store)
    nothing, tags = tmp_path / "nothing", {"test_set": "sha256:t"}
    encoder = tiny_encoders["second"]
    candidate = model_registry.EvaluatedEncoder(encoder, "sha256:2", {METRIC: 0.9}, run_id, tags, nothing)
    model_registry.register(name, candidate, GATE)

    with pytest.raises(NotPromoted, match="version 2 has no outcomes by question"):
        promotion.promote_model(f"models:/{name}/2", GATE, store)


def test_where_a_copy_goes_and_what_is_copied_are_read_strictly(two, store):
    for to in ("https://", "https://host", "a/b", "models:/x"):
        with pytest.raises(InputError, match="give the NAME of a registered model"):
            promotion.promote_model("models:/tiny/2", GATE, store, to=to)
    with pytest.raises(InputError, match="give models:/NAME@ALIAS"):
        promotion.promote_model("tiny", GATE, store)
    two.delete_model_version_tag("tiny", "2", "digest")  # as of a version that another tool has made
    for to in ("other", "https://host/other"):
        with pytest.raises(InputError, match="tiny version 2 has no tag digest"):
            promotion.promote_model("models:/tiny/2", GATE, store, to=to)


@pytest.mark.parametrize("text", ["{", "[]", '{"what": 5}'])
def test_a_damaged_tag_of_the_last_decision_is_named_with_its_version(better, text):
    better.set_model_version_tag("tiny", "1", "decision", text)

    with pytest.raises(DataCorrupt, match=r"tag decision of tiny version 1 cannot be read .*: delete the tag"):
        promotion.roll_back(better, "tiny", "German got worse")
