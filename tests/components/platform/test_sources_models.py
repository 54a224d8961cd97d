"""A model to start from, wherever it is: a directory, S3 (a real server), the hub, the registry."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub.utils import filter_repo_objects

from components.adapters.mlflow import registry as model_registry
from components.adapters.sources import hub
from components.platform import runtime, sources, stores
from components.pretrain import pretrain
from infoxlm_core import manifests
from infoxlm_core.config import PretrainingConfig
from infoxlm_core.errors import DataCorrupt, InputError, StorageUnavailable
from infoxlm_core.model import pretrained
from infoxlm_core.model.encoder import EncoderSize, initialise
from infoxlm_core.model.heads import InfoXLM
from tests.components.conftest import open_run, upload
from tests.conftest import VOCABULARY, tiny_config
from tests.servers.processes import free_port


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_local_directory_is_used_where_it_is(tiny_encoders, tmp_path):
    assert sources.fetch_model(str(tiny_encoders["first"]), tmp_path) == tiny_encoders["first"]


def test_nothing_that_could_run_code_is_taken(tiny_encoders, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(tiny_encoders["first"], directory)
    (directory / "pytorch_model.bin").write_bytes(b"")

    with pytest.raises(InputError, match=r"holds pytorch_model\.bin, which could run code"):
        sources.fetch_model(str(directory), tmp_path)


@pytest.mark.slow
def test_a_model_on_s3_arrives_byte_by_byte_and_once(bucket, tiny_encoders, tmp_path, monkeypatch):
    upload(bucket, tiny_encoders["first"], "xlmr/base")
    bucket.put_object(Key="xlmr/base/checkpoints/huge", Body=b"not the model")
    bucket.put_object(Key="xlmr/base-2.json", Body=b"another")

    found = sources.fetch_model("s3://models/xlmr/base/", tmp_path)

    assert contents(found) == contents(tiny_encoders["first"])
    assert [path.name for path in (tmp_path / "models").iterdir()] == [found.name]  # nothing half-made beside it
    written = (found / "config.json").stat().st_mtime_ns
    assert sources.fetch_model("s3://models/xlmr/base", tmp_path) == found
    assert (found / "config.json").stat().st_mtime_ns == written
    bucket.objects.filter(Prefix="xlmr/base/").delete()
    upload(bucket, tiny_encoders["second"], "xlmr/base")
    assert contents(sources.fetch_model("s3://models/xlmr/base", tmp_path)) == contents(tiny_encoders["second"])


@pytest.mark.slow
def test_a_fine_tuned_model_brings_its_models_of_single_languages(bucket, tiny_encoders, tmp_path):
    shutil.copytree(tiny_encoders["first"], tmp_path / "tuned")
    shutil.copytree(tiny_encoders["second"], tmp_path / "tuned/steps/4000")
    (tmp_path / "tuned/selection.json").write_text('{"rule": "each"}')
    upload(bucket, tmp_path / "tuned", "xnli")
    bucket.put_object(Key="xnli/checkpoints/huge", Body=b"not the model")

    found = sources.fetch_model("s3://models/xnli", tmp_path / "store")

    assert {path.name for path in found.iterdir()} == {path.name for path in (tmp_path / "tuned").iterdir()}
    assert contents(found / "steps/4000") == contents(tiny_encoders["second"])
    assert runtime.digest_inputs(str(found)) == runtime.digest_inputs(str(tmp_path / "tuned"))


def test_words_of_a_tokenizer_come_from_the_hub_too():
    files = ["model.safetensors", "vocab.txt", "merges.txt", "steps/4/config.json", "modeling.py", "model.bin"]

    assert list(filter_repo_objects(files, allow_patterns=hub._FILES)) == files[:4]


@pytest.mark.slow
def test_a_single_file_comes_without_the_weights(bucket, tiny_encoders, tmp_path):
    upload(bucket, tiny_encoders["first"], "xlmr")

    by_directory = sources.fetch_model("s3://models/xlmr", tmp_path, only="tokenizer.json")
    by_name = sources.fetch_model("s3://models/xlmr/tokenizer.json", tmp_path, only="sentencepiece.bpe.model")

    assert by_directory.read_bytes() == by_name.read_bytes() == (tiny_encoders["first"] / "tokenizer.json").read_bytes()
    assert not list((tmp_path / "models").rglob("*.safetensors"))


@pytest.mark.slow
def test_a_model_that_is_not_what_its_manifest_says_is_refused_and_not_kept(bucket, tiny_encoders, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(tiny_encoders["first"], directory)
    manifests.write(directory, "encoder")
    upload(bucket, directory, "ours")
    weights = (directory / "model.safetensors").read_bytes()
    bucket.put_object(Key="ours/model.safetensors", Body=weights[:-1] + bytes([weights[-1] ^ 1]))

    with pytest.raises(DataCorrupt, match=r"model\.safetensors has sha256 .* upload s3://models/ours again"):
        sources.fetch_model("s3://models/ours", tmp_path / "store")

    assert not list((tmp_path / "store" / "models").iterdir())


@pytest.mark.slow
def test_a_wrong_bucket_key_or_server_is_one_line(bucket, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="s3://models/nothing holds no file"):
        sources.fetch_model("s3://models/nothing", tmp_path)
    with pytest.raises(InputError, match=r"s3://nowhere/x: S3 refuses .*NoSuchBucket"):
        sources.fetch_model("s3://nowhere/x", tmp_path)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(InputError, match=r"S3 refuses .*SignatureDoesNotMatch"):
        sources.fetch_model("s3://models/x", tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(StorageUnavailable, match="S3 does not answer"):
        sources.fetch_model("s3://models/x", tmp_path)


@pytest.mark.slow
def test_a_model_of_the_registry_is_copied_to_where_all_workers_see_it(store, tiny_encoders):
    run_id = open_run(store)
    model_registry.register("base", tiny_encoders["first"], "sha256:1", {"s": 0.5}, {"s": 0.0}, run_id, {}, store)

    found = sources.fetch_model("models:/base@champion", store)

    assert found.parent == store / "models"
    assert contents(found) == contents(tiny_encoders["first"])
    assert sources.fetch_model("models:/base/1", store) == found


def test_without_a_network_a_name_of_the_hub_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")

    with pytest.raises(
        StorageUnavailable, match="FacebookAI/xlm-roberta-base: no such directory, and the hub"
    ) as error:
        sources.fetch_model("FacebookAI/xlm-roberta-base", tmp_path)

    assert "\n" not in str(error.value) and "give its directory" in str(error.value)


def hub_cache(store: Path, encoder: Path) -> Path:
    """The hub's cache as its client leaves it: blobs by digest, a snapshot of links to them."""
    root = store / "models/hub/models--org--model"
    snapshot = root / "snapshots" / ("a" * 40)
    for folder in (snapshot, root / "blobs", root / "refs"):
        folder.mkdir(parents=True)
    (root / "refs/main").write_text("a" * 40)
    for path in encoder.iterdir():
        blob = root / "blobs" / manifests.file_sha256(path)
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(blob)
    return root


def test_a_model_fetched_before_needs_no_network_and_is_verified(tiny_encoders, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    root = hub_cache(tmp_path, tiny_encoders["first"])

    assert contents(sources.fetch_model("org/model", tmp_path)) == contents(tiny_encoders["first"])

    blob = root / "blobs" / manifests.file_sha256(tiny_encoders["first"] / "model.safetensors")
    blob.write_bytes(blob.read_bytes()[:-1])
    with pytest.raises(DataCorrupt, match="is not what the hub has: it was removed"):
        sources.fetch_model("org/model", tmp_path)
    assert not blob.exists()


@pytest.mark.parametrize("source", ["nowhere", "./nowhere/at/all", "/nowhere/model", "a/b/c"])
def test_a_path_that_is_not_there_is_refused_with_the_ways_to_say_it(source, tmp_path):
    with pytest.raises(InputError, match=r"no such file or directory: give a path, s3://"):
        sources.fetch_model(source, tmp_path)


class Artifact(SimpleNamespace):
    """What a component asks of a KFP artifact."""

    def log_metric(self, name: str, value: float) -> None:
        pass


@pytest.mark.slow
def test_pretraining_starts_from_s3_and_its_result_goes_by_the_weights_not_by_their_name(
    bucket, store, tiny_shards, tmp_path
):
    def upload_start(seed: int) -> bytes:
        model = InfoXLM(EncoderSize(VOCABULARY, 2, 16, 32, 2, 34), 1, "cls", False)
        initialise(model, seed)
        pretrained.export(model, tmp_path, tmp_path / "start")
        upload(bucket, tmp_path / "start", "start")
        return (tmp_path / "start/model.safetensors").read_bytes()

    def run() -> tuple[Path, Path]:
        shards, encoder, start, metrics = (Artifact(path=str(tmp_path / n), metadata={}) for n in "abcd")
        stores.publish(shards, tiny_shards)
        config = tiny_config(model={"start": "s3://models/start"}).model_dump(mode="json")
        pretrain.python_func(config, 0, str(store), shards, encoder, start, metrics)
        return stores.resolve(encoder)[0], stores.resolve(start)[0]

    weights = upload_start(seed=3)
    first, start = run()
    assert (start / "model.safetensors").read_bytes() == weights
    assert run()[0] == first

    upload_start(seed=4)
    assert run()[0] != first


def test_a_config_may_name_any_source():
    for start in ("s3://models/xlmr", "FacebookAI/xlm-roberta-base@main", "models:/infoxlm@champion"):
        assert PretrainingConfig.parse({"model": {"start": start}}).model.start == start
