"""Promotion and rollback, on a real registry: what moves the alias, what does not, and what is written down."""

import json
import os
import shutil
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from components.adapters.mlflow import connection, model_registry, model_versions, promotion, runs, signing
from components.platform import sources
from infoxlm_core import manifests
from infoxlm_core.errors import DataCorrupt, InputError, NotPromoted, SignatureInvalid
from tests.toys.evaluation import evaluated

METRIC = "retrieval/best"
GATE = {METRIC: 0.0}


def register(store: Path, encoder: Path, digest: str, score: float, name: str = "tiny", test: str = "one", **more):
    run_id = runs.open_run("tests", "demo", {"infoxlm.run": name}, store)
    evaluation = evaluated(store / "evaluation", score, test=test)
    tags = {"test_set": "sha256:t", "corpus_digest": "sha256:c", "code": "sha256:k"}
    return model_registry.register(
        name, encoder, digest, {METRIC: score}, more.get("gate", GATE), run_id, tags, evaluation
    )


@pytest.fixture
def two(store, tiny_encoders):
    """Version 1 is champion; version 2 is as good, so that it is not."""
    register(store, tiny_encoders["first"], "sha256:1", 0.5)
    register(store, tiny_encoders["second"], "sha256:2", 0.5)
    return connection.connect(store)


@pytest.fixture
def better(store, tiny_encoders):
    """Version 1 is champion; version 2 is better, and was registered with a gate it did not pass."""
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


@pytest.mark.parametrize(
    ("gate", "said"),
    [
        ({METRIC: 0.0}, r"not shown to be better than version 1: retrieval/best \+0.0000 \(95 % interval \+0.0000"),
        ({METRIC: -0.01, "perplexity/mean": 0.0}, "perplexity/mean has no outcomes by question"),
        ({"retrieval/tlh": 0.0}, "retrieval/tlh has no outcomes by question"),
    ],
)
def test_a_candidate_that_is_not_better_is_refused_with_the_figures(two, store, gate, said):
    with pytest.raises(NotPromoted, match=said):
        promotion.promote_model("models:/tiny@candidate", gate, store)

    assert champion(two) == 1
    assert decision(two, 2)["what"] == "refused"


def test_a_margin_below_zero_tolerates_a_loss_that_is_small_for_sure(two, store):
    promotion.promote_model("models:/tiny/2", {METRIC: -0.01}, store)

    assert champion(two) == 2


def test_other_questions_are_refused_whatever_the_test_set_is_called(store, tiny_encoders):
    register(store, tiny_encoders["first"], "sha256:1", 0.5)
    register(store, tiny_encoders["second"], "sha256:2", 0.9, test="other")

    with pytest.raises(NotPromoted, match=r"on other questions of retrieval/best, promote by hand"):
        promotion.promote_model("models:/tiny@candidate", GATE, store)


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


def test_a_champion_that_changes_meanwhile_is_judged_against_anew(better, store, tiny_encoders, monkeypatch):
    register(store, tiny_encoders["first"], "sha256:3", 0.7, gate={METRIC: 0.5})
    real, asked = promotion.compare_with_champion, []

    def meanwhile(client, version, gate):
        verdict = real(client, version, gate)
        asked.append(promotion.champion_of(client, "tiny"))
        if len(asked) == 1:  # somebody else is faster
            client.set_registered_model_alias("tiny", "champion", "3")
        return verdict

    monkeypatch.setattr(promotion, "compare_with_champion", meanwhile)

    with pytest.raises(NotPromoted, match="not shown to be better than version 3"):
        promotion.promote_model("models:/tiny/2", GATE, store)

    assert asked == ["1", "3"] and champion(better) == 3


@pytest.mark.item("P11")
@pytest.mark.parametrize(("first", "slow"), [("2", False), ("3", False), ("3", True)])
def test_of_two_that_replace_a_champion_at_once_the_better_one_has_the_alias(
    better, store, tiny_encoders, monkeypatch, first, slow
):
    """Both have seen that version 1 is champion before either moves the alias, or before one of them is done."""
    register(store, tiny_encoders["first"], "sha256:3", 0.8, gate={METRIC: 0.5})
    looked, both_moved, moved, through = (
        threading.Barrier(2),
        threading.Barrier(2),
        threading.Event(),
        threading.Event(),
    )
    move, look, settle = type(better).set_registered_model_alias, promotion.champion_of, promotion._settle
    looks: Counter[int] = Counter()

    def both_look(client, name):
        found = look(client, name)
        looks[threading.get_ident()] += 1
        if looks[threading.get_ident()] == 3:  # it looks first, then to compare, then just before it moves
            looked.wait(60)
        return found

    def in_order(client, name, alias, number):
        if str(number) != first:
            (through if slow else moved).wait(60)
        move(client, name, alias, number)
        moved.set()

    def settled(*given):
        if not slow:
            both_moved.wait(60)
        verdict = settle(*given)
        through.set()
        return verdict

    monkeypatch.setattr(type(better), "set_registered_model_alias", in_order)
    monkeypatch.setattr(promotion, "champion_of", both_look)
    monkeypatch.setattr(promotion, "_settle", settled)
    with ThreadPoolExecutor(2) as pool:
        worse, best = (pool.submit(promotion.promote_model, f"models:/tiny/{number}", GATE, store) for number in (2, 3))

    assert "version 3 became champion at the same time" in str(worse.exception())
    assert "better than version 1" in best.result().verdict.reason
    assert champion(better) == 3
    assert (decision(better, 2)["what"], decision(better, 3)["what"]) == ("refused", "promoted")


@pytest.mark.item("P11")
def test_who_is_overtaken_by_a_rival_settles_with_it_instead_of_judging_alone(
    better, store, tiny_encoders, monkeypatch
):
    """Version 3, as good as 2, takes the place of 1 just before 2 would move the alias, and settles a moment later."""
    register(store, tiny_encoders["first"], "sha256:3", 0.6, gate={METRIC: 0.5})
    rival, look, compare = better.get_model_version("tiny", "3"), promotion.champion_of, promotion.compare_with_champion
    judged = compare(better, rival, GATE)
    looks: list[str | None] = []

    def overtaken(client, name):
        looks.append(look(client, name))
        if len(looks) == 3:  # it looks first, then to compare, then just before it moves
            promotion.record(client, rival, promotion.PROMOTED, judged, "1")
            client.set_registered_model_alias(name, promotion.CHAMPION, "3")
            looks[-1] = "3"
        return looks[-1]

    def settles_meanwhile(client, version, gate):
        if len(looks) > 3:
            promotion._settle(client, rival, "1", gate, judged)
        return compare(client, version, gate)

    monkeypatch.setattr(promotion, "champion_of", overtaken)
    monkeypatch.setattr(promotion, "compare_with_champion", settles_meanwhile)

    assert promotion.promote_model("models:/tiny/2", GATE, store).verdict.passed
    assert not promotion._settle(better, rival, "1", GATE, judged).passed
    assert champion(better) == 2
    assert (decision(better, 2)["what"], decision(better, 3)["what"]) == ("promoted", "refused")


def test_a_rollback_brings_the_previous_champion_back_once(better, store):
    promotion.promote_model("models:/tiny/2", GATE, store)

    assert promotion.roll_back(better, "tiny", "German got worse") == 1
    assert promotion.roll_back(better, "tiny", "German got worse") == 1

    assert champion(better) == 1
    assert decision(better, 2)["reason"] == "rolled back to version 1: German got worse"
    assert decision(better, 1)["reason"] == "champion again after version 2: German got worse"
    assert promotion.promote_model("models:/tiny/2", GATE, store).version == champion(better) == 2


def test_a_first_champion_cannot_be_rolled_back(two):
    with pytest.raises(InputError, match="version 1 replaced no other"):
        promotion.roll_back(two, "tiny", "why not")


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
    promotion.promote_model("models:/tiny/2", GATE, store)  # what was signed does
    promotion.roll_back(better, "tiny", "to try again")
    [model] = (path.parent for path in (store / "mlartifacts").rglob("items.parquet") if same(path, better, store))
    spoil(model.parent / "model")

    with pytest.raises(SignatureInvalid, match=said):
        promotion.promote_model("models:/tiny/2", GATE, store, by_hand="even so")

    assert champion(better) == 1


def same(path: Path, client, store: Path) -> bool:
    location = model_versions.download(client, client.get_model_version("tiny", "2"), "evaluation", None)
    return path.parent == location


@pytest.mark.item("S09")
def test_a_model_signed_with_another_key_does_not_become_champion(keys, better, store, monkeypatch):
    monkeypatch.setenv(signing.VERIFYING, str(keys["theirs public"]))

    with pytest.raises(SignatureInvalid, match="Key mismatch"):
        promotion.promote_model("models:/tiny/2", GATE, store)

    assert champion(better) == 1


@pytest.mark.item("S09")
def test_a_model_that_is_not_the_one_of_its_digest_does_not_become_champion(store, tiny_encoders, tmp_path):
    encoder = tmp_path / "encoder"
    encoder.mkdir()
    for path in tiny_encoders["second"].iterdir():
        (encoder / path.name).write_bytes(path.read_bytes())
    digest = manifests.write(encoder, "encoder")["digest"]
    register(store, tiny_encoders["first"], "sha256:1", 0.5)
    register(store, encoder, digest, 0.6, gate={METRIC: 0.5})
    client = connection.connect(store)
    flip(model_versions.download(client, client.get_model_version("tiny", "2"), "model", None))

    with pytest.raises(DataCorrupt, match=r"model\.safetensors has sha256"):
        promotion.promote_model("models:/tiny/2", GATE, store)

    assert champion(client) == 1


def copied_with_manifest(encoder: Path, target: Path) -> str:
    """Copy an encoder, write its manifest; return its digest."""
    shutil.copytree(encoder, target)
    return manifests.write(target, "encoder")["digest"]


def use(way: str, source: str, store: Path) -> Path:
    return {"embed": model_registry.load_encoder, "start": sources.fetch_model}[way](source, store)


@pytest.mark.item("P5")
@pytest.mark.parametrize("way", ["embed", "start"])
def test_a_registered_model_that_is_not_the_one_of_its_digest_is_not_used(store, tiny_encoders, tmp_path, way):
    digest = copied_with_manifest(tiny_encoders["first"], tmp_path / "encoder")
    register(store, tmp_path / "encoder", digest, 0.5)
    client = connection.connect(store)
    assert (use(way, "models:/tiny@champion", store) / "model.safetensors").is_file()
    model = model_versions.download(client, client.get_model_version("tiny", "1"), "model", None)
    flip(model)

    with pytest.raises(DataCorrupt, match=r"model\.safetensors has sha256"):
        use(way, "models:/tiny@champion", store)

    manifests.write(model, "encoder")  # another model, in itself complete
    with pytest.raises(DataCorrupt, match=r"tiny version 1 holds sha256:\w+…, it was registered as"):
        use(way, "models:/tiny@champion", store)
    (model / manifests.NAME).unlink()  # which every model of the step `register` has
    client.set_model_version_tag("tiny", "1", model_versions.MADE_AS, "pretrained/abc")
    with pytest.raises(InputError, match=r"no manifest\.json in"):
        use(way, "models:/tiny@champion", store)


@pytest.mark.item("S09")
def test_a_registered_model_that_is_not_signed_with_our_key_is_not_used(keys, two, store, monkeypatch):
    model_registry.load_encoder("models:/tiny/1", store)  # what is signed is
    (model_versions.download(two, two.get_model_version("tiny", "2"), "", None) / signing.FILE).unlink()

    with pytest.raises(SignatureInvalid, match="tiny version 2 is not signed"):
        model_registry.load_encoder("models:/tiny/2", store)
    monkeypatch.setenv(signing.VERIFYING, str(keys["theirs public"]))
    with pytest.raises(SignatureInvalid, match="Key mismatch"):
        model_registry.load_encoder("models:/tiny/1", store)


@pytest.mark.parametrize("way", ["embed", "start"])
def test_a_directory_is_compared_with_our_manifest_and_with_no_other(store, tiny_encoders, tmp_path, way):
    directory = tmp_path / "encoder"
    copied_with_manifest(tiny_encoders["first"], directory)
    assert use(way, str(directory), store) == directory
    flip(directory)

    with pytest.raises(DataCorrupt, match=r"model\.safetensors has sha256"):
        use(way, str(directory), store)
    (directory / manifests.NAME).write_text('{"kind": ')
    with pytest.raises(DataCorrupt, match=r"manifest\.json cannot be read"):
        use(way, str(directory), store)

    (directory / manifests.NAME).write_text('{"made by": "another tool"}')
    assert use(way, str(directory), store) == directory


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
def test_a_version_of_the_server_without_outcomes_is_no_reason_to_try_again(on_server, tiny_encoders, tmp_path):
    register(tmp_path, tiny_encoders["first"], "sha256:1", 0.5, name="served")
    run_id = runs.open_run("tests", "demo", {"infoxlm.run": "old"}, tmp_path)
    (tmp_path / "nothing").mkdir()
    model_registry.register(
        "served", tiny_encoders["second"], "sha256:2", {METRIC: 0.9}, GATE, run_id, {"test_set": "sha256:t"},
        tmp_path / "nothing",
    )  # fmt: skip

    with pytest.raises(NotPromoted, match="version 2 has no outcomes by question"):
        promotion.promote_model("models:/served/2", GATE, tmp_path)


def test_where_a_copy_goes_is_read_strictly(two, store):
    for to in ("https://", "https://host", "a/b", "models:/x"):
        with pytest.raises(InputError, match="give the NAME of a registered model"):
            promotion.promote_model("models:/tiny/2", GATE, store, to=to)
    with pytest.raises(InputError, match="give models:/NAME@ALIAS"):
        promotion.promote_model("tiny", GATE, store)


@pytest.mark.parametrize("said", ["{", "5", "[]", '{"what": 5}', "[" * 9999])
def test_a_damaged_tag_of_the_last_decision_is_named_with_its_version(said):
    from mlflow.entities.model_registry import ModelVersion, ModelVersionTag

    version = ModelVersion("toy", "3", 0, tags=[ModelVersionTag(promotion.DECISION, said)])

    with pytest.raises(DataCorrupt, match=r"tag decision of toy version 3 cannot be read .*: delete the tag"):
        promotion._decision(version)


def test_a_version_made_elsewhere_has_no_digest_to_be_copied_by():
    from mlflow.entities.model_registry import ModelVersion

    with pytest.raises(InputError, match="toy version 3 has no tag digest"):
        model_versions.digest_of(ModelVersion("toy", "3", 0))
