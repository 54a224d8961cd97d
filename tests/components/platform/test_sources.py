"""Models and data are fetched from a path, S3 (a real server), the hub and the registry."""

import hashlib
import json
import shutil
from contextlib import nullcontext
from datetime import datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from urllib.parse import urlsplit

import boto3
import pytest
from botocore.stub import Stubber
from kfp import dsl

from components.adapters.mlflow import model_registry
from components.adapters.s3 import store as s3
from components.platform import artifacts, builds, sources
from components.prepare_corpus import prepare_corpus
from components.pretrain import pretrain
from infoxlm_core import manifests
from infoxlm_core.config import PreparationConfig
from infoxlm_core.errors import ConfigError, DataCorrupt, InputError, StorageUnavailable
from infoxlm_core.model.encoder import EncoderSize, initialise
from infoxlm_core.model.heads import InfoXLM
from infoxlm_core.model.huggingface import pretrained
from infoxlm_core.model.huggingface.any_encoder import read_embedding_settings
from infoxlm_core.training import fingerprint
from tests.components.conftest import open_run, upload
from tests.servers.processes import answering, free_port
from tests.toys.exports import save_encoder
from tests.toys.pretraining import VOCABULARY, tiny_config


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# models


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """Remove the pauses between attempts of the S3 client."""
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.01)


@pytest.mark.item("B17")
def test_model_with_a_pickle_is_refused(tiny_encoders, tmp_path):
    directory = shutil.copytree(tiny_encoders["first"], tmp_path / "model")
    (directory / "pytorch_model.pt").write_bytes(b"")

    with pytest.raises(InputError, match=r"holds pytorch_model\.pt, which could run code"):
        sources.fetch_model(str(directory), tmp_path)


@pytest.mark.slow
def test_model_on_s3_is_copied_completely_and_again_only_after_a_change(bucket, tiny_encoders, tmp_path):
    """It has the settings of its vector in one subfolder, and models of single languages in another."""
    directory = save_encoder(tmp_path / "bge", "bge")
    shutil.copytree(tiny_encoders["second"], directory / "steps/4000")
    (directory / "selection.json").write_text('{"rule": "each"}')
    upload(bucket, directory, "xlmr/base")
    bucket.put_object(Key="xlmr/base/checkpoints/huge", Body=b"not the model")
    bucket.put_object(Key="xlmr/base-2.json", Body=b"another")

    copy = sources.fetch_model("s3://models/xlmr/base/", tmp_path)

    assert contents(copy) == contents(directory)
    assert read_embedding_settings(copy) == (3, "cls")
    assert fingerprint.digest_inputs(str(copy)) == fingerprint.digest_inputs(str(directory))
    assert [path.name for path in (tmp_path / "models").iterdir()] == [copy.name]  # and no partial copy
    time_of_copy = (copy / "config.json").stat().st_mtime_ns
    assert sources.fetch_model("s3://models/xlmr/base", tmp_path) == copy
    assert (copy / "config.json").stat().st_mtime_ns == time_of_copy
    (directory / "config.json").write_text((directory / "config.json").read_text() + "\n")
    upload(bucket, directory, "xlmr/base")
    assert contents(sources.fetch_model("s3://models/xlmr/base", tmp_path)) == contents(directory)


@pytest.mark.slow
def test_tokenizer_is_fetched_without_the_weights(bucket, tiny_encoders, tmp_path):
    upload(bucket, tiny_encoders["first"], "xlmr")

    directory, digests = sources.fetch_tokenizer("s3://models/xlmr", tmp_path)
    file, [digest] = sources.fetch_tokenizer("s3://models/xlmr/tokenizer.json", tmp_path)

    assert digest == digests[0]
    assert len(digests) > 1
    original = (tiny_encoders["first"] / "tokenizer.json").read_bytes()
    assert (Path(directory) / "tokenizer.json").read_bytes() == original
    assert Path(file).read_bytes() == original
    assert not list((tmp_path / "models").rglob("*.safetensors"))


@pytest.mark.slow
def test_model_that_differs_from_its_manifest_is_refused_and_not_kept(bucket, tiny_encoders, tmp_path):
    directory = shutil.copytree(tiny_encoders["first"], tmp_path / "model")
    manifests.write(directory, "encoder")
    upload(bucket, directory, "ours")
    weights = (directory / "model.safetensors").read_bytes()
    bucket.put_object(Key="ours/model.safetensors", Body=weights[:-1] + bytes([weights[-1] ^ 1]))

    with pytest.raises(DataCorrupt, match=r"model\.safetensors has sha256 .* upload s3://models/ours again"):
        sources.fetch_model("s3://models/ours", tmp_path / "store")

    assert not list((tmp_path / "store" / "models").iterdir())


@pytest.mark.slow
def test_wrong_prefix_bucket_or_key_of_s3_is_reported(bucket, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="s3://models/nothing has no files"):
        sources.fetch_model("s3://models/nothing", tmp_path)
    with pytest.raises(InputError, match=r"s3://nowhere/x: S3 refuses .*NoSuchBucket"):
        sources.fetch_model("s3://nowhere/x", tmp_path)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(InputError, match=r"S3 refuses .*SignatureDoesNotMatch"):
        sources.fetch_model("s3://models/x", tmp_path)


@pytest.mark.slow
def test_model_of_the_registry_is_copied_to_the_store_and_repaired(store, tiny_encoders, tmp_path):
    run_id = open_run(store)
    first = model_registry.EvaluatedEncoder(tiny_encoders["first"], "sha256:1", {"s": 0.5}, run_id, {}, store)
    model_registry.register("base", first, {"s": 0.0})

    copy = sources.fetch_model("models:/base@champion", store)

    assert copy.parent == store / "models"
    assert contents(copy) == contents(tiny_encoders["first"])
    assert sources.fetch_model("models:/base/1", store) == copy
    (copy / "tokenizer.json").write_text("damaged")
    assert contents(sources.fetch_model("models:/base/1", store)) == contents(tiny_encoders["first"])

    other = shutil.copytree(tiny_encoders["first"], tmp_path / "other")  # with the same weights
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + "\n")
    second = model_registry.EvaluatedEncoder(other, "sha256:2", {"s": 0.5}, run_id, {}, store)
    model_registry.register("base", second, {"s": 0.0})

    assert contents(sources.fetch_model("models:/base/2", store)) == contents(other)


def test_model_on_the_hub_is_reported_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")

    with pytest.raises(StorageUnavailable, match="xlm-roberta-base: no such directory, and the hub") as error:
        sources.fetch_model("FacebookAI/xlm-roberta-base", tmp_path)

    assert "\n" not in str(error.value)
    assert "give its directory" in str(error.value)


def write_hub_cache(store: Path, encoder: Path) -> Path:
    """Write the cache of the hub's client: files by digest, and a snapshot of links to them."""
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


def test_model_in_the_hubs_cache_needs_no_network_and_is_verified(tiny_encoders, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    root = write_hub_cache(tmp_path, tiny_encoders["first"])

    assert contents(sources.fetch_model("org/model", tmp_path)) == contents(tiny_encoders["first"])
    sources.check_start(tiny_config(model={"start": "org/model"}), tmp_path)
    with pytest.raises(ConfigError, match=r"contrast\.layer \(7\) is above the 2 layers"):
        sources.check_start(tiny_config(model={"start": "org/model"}, contrast={"layer": 7}), tmp_path)

    weights = root / "blobs" / manifests.file_sha256(tiny_encoders["first"] / "model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(DataCorrupt, match="differs from the hub's file: the copy was removed"):
        sources.fetch_model("org/model", tmp_path)
    assert not weights.exists()


@pytest.mark.slow
def test_start_on_s3_is_checked_without_its_weights(bucket, tiny_encoders, tmp_path):
    upload(bucket, tiny_encoders["first"], "start")
    config = tiny_config(model={"start": "s3://models/start"})

    sources.check_start(config, tmp_path)

    assert not list(tmp_path.rglob("*.safetensors"))
    bucket.Object("start/pytorch_model.bin").put(Body=b"pickle")
    sources.check_start(config, tmp_path)
    bucket.Object("start/model.safetensors").delete()
    with pytest.raises(InputError, match=r"s3://models/start has pytorch_model\.bin, but no \*\.safetensors"):
        sources.check_start(config, tmp_path)


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's API that lists and downloads the files of one model, without authentication."""

    files: ClassVar[dict[str, bytes]] = {}
    downloads: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        name = path.rpartition("/")[2]
        if path.startswith("/api/models/org/model/tree/"):
            entries = [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in self.files]
            body = json.dumps(entries).encode()
        elif path.startswith("/api/models/org/model"):
            siblings = [{"rfilename": name} for name in self.files]
            body = json.dumps({"id": "org/model", "sha": "a" * 40, "siblings": siblings}).encode()
        else:
            body = self.files[name]
            self.downloads.append(name)
        self.send_response(200)
        self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def test_start_on_the_hub_is_checked_without_its_weights(tiny_encoders, tmp_path, monkeypatch):
    files = contents(tiny_encoders["first"])
    monkeypatch.setattr(Hub, "files", files)
    monkeypatch.setattr(Hub, "downloads", [])
    config = tiny_config(model={"start": "org/model"})
    with answering(Hub) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)

        sources.check_start(config, tmp_path)

        assert {"config.json", "tokenizer.json"} <= set(Hub.downloads)
        assert "model.safetensors" not in Hub.downloads
        files["pytorch_model.bin"] = files.pop("model.safetensors")
        with pytest.raises(InputError, match=r"org/model has pytorch_model\.bin, but no \*\.safetensors"):
            sources.check_start(config, tmp_path)


@pytest.mark.parametrize("source", ["nowhere", "/nowhere/model", "a/b/c"])
def test_missing_model_is_refused(source, tmp_path):
    with pytest.raises(InputError, match=r"no such file or directory: give a path, s3://"):
        sources.fetch_model(source, tmp_path)


class Artifact(SimpleNamespace):
    """The part of a KFP artifact that a component uses."""

    def log_metric(self, name: str, value: float) -> None:
        pass


@pytest.mark.slow
def test_pretraining_depends_on_the_weights_of_its_start_on_s3(bucket, store, tiny_shards, tmp_path):
    def upload_start(seed: int) -> bytes:
        model = InfoXLM(EncoderSize(VOCABULARY, 2, 16, 32, 2, 34), 1, "cls", False)
        initialise(model, seed)
        pretrained.export(model, tmp_path, tmp_path / "start")
        upload(bucket, tmp_path / "start", "start")
        return (tmp_path / "start/model.safetensors").read_bytes()

    def run() -> tuple[Path, Path]:
        paths = (str(tmp_path / name) for name in ("shards", "encoder", "start of run", "metrics"))
        shards, encoder, start, metrics = (Artifact(path=path, metadata={}) for path in paths)
        artifacts.publish(shards, tiny_shards)
        config = tiny_config(model={"start": "s3://models/start"}, optimization={"steps": 2, "warmup_steps": 1})
        pretrain.python_func(config.model_dump(mode="json"), 0, str(store), shards, encoder, start, metrics)
        return artifacts.resolve(encoder)[0], artifacts.resolve(start)[0]

    weights = upload_start(seed=3)
    encoder, start = run()
    assert (start / "model.safetensors").read_bytes() == weights
    assert run()[0] == encoder

    upload_start(seed=4)
    assert run()[0] != encoder


# data sets


@pytest.fixture
def questions(tmp_path) -> Path:
    """Return a folder with subfolders, such as the published folder of a test set."""
    folder = tmp_path / "mlqa"
    for name in ("dev/dev-context-de-question-de.json", "test/test-context-de-question-de.json", "LICENSE"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"this is {name}")
    return folder


def test_local_data_are_used_in_place_and_missing_data_are_refused(questions, tmp_path):
    for path in (questions, questions / "LICENSE"):
        assert sources.fetch_data(str(path), tmp_path / "store") == path
    assert not (tmp_path / "store").exists()
    with pytest.raises(InputError, match=r"nowhere: no such file or directory: give a path, or s3://bucket/prefix"):
        sources.fetch_data("nowhere", tmp_path)


@pytest.mark.slow
def test_copies_of_a_file_a_folder_and_its_parent_on_s3_keep_their_names(bucket, questions, tmp_path):
    upload(bucket, questions, "eval/mlqa")
    bucket.put_object(Key="eval/mlqa/empty/", Body=b"")
    file = "dev/dev-context-de-question-de.json"  # its name contains its language

    folder = sources.fetch_data("s3://models/eval/mlqa/", tmp_path / "store")
    bucket.put_object(Key="eval/mlqa-2/other", Body=b"not of this set")
    parent = sources.fetch_data("s3://models/eval", tmp_path / "store")
    copied_file = sources.fetch_data(f"s3://models/eval/mlqa/{file}", tmp_path / "store")

    assert folder.name == "mlqa"
    assert contents(folder) == contents(parent / "mlqa") == contents(questions)
    assert (copied_file.name, copied_file.read_bytes()) == (Path(file).name, (questions / file).read_bytes())
    assert len(list((tmp_path / "store/data").iterdir())) == 3  # and no partial copy


@pytest.mark.slow
@pytest.mark.parametrize("file", ["LICENSE", manifests.NAME])
def test_damaged_copy_of_data_is_downloaded_again(bucket, questions, tmp_path, caplog, file):
    (questions / manifests.NAME).write_text("a file of another program")
    upload(bucket, questions, "mlqa")
    copy = sources.fetch_data("s3://models/mlqa", tmp_path / "store")

    (copy / file).write_bytes(b"x" * (copy / file).stat().st_size)

    assert contents(sources.fetch_data("s3://models/mlqa", tmp_path / "store")) == contents(questions)
    assert caplog.text.count("was changed after it was downloaded") == 1


def test_name_on_s3_that_leads_out_of_its_directory_is_refused(tmp_path, monkeypatch):
    client = boto3.client("s3", region_name="us-east-1", aws_access_key_id="k", aws_secret_access_key="s")
    listing = {
        "Contents": [{"Key": "set/../../outside", "Size": 1, "ETag": "x", "LastModified": datetime(2026, 1, 1)}],
        "IsTruncated": False,
    }
    stubber = Stubber(client)  # our test server refuses such names, other servers may not
    stubber.add_response("list_objects_v2", listing)
    monkeypatch.setattr(s3, "open_client", lambda *_: nullcontext(client))

    with stubber, pytest.raises(InputError, match=r"set/\.\./\.\./outside: the file name leads out of its directory"):
        sources.fetch_data("s3://models/set", tmp_path / "store")


@pytest.mark.parametrize("storage", ["directory", pytest.param("s3", marks=pytest.mark.slow)])
def test_pattern_matches_the_files_of_a_folder_in_sorted_order(storage, tmp_path, request):
    (tmp_path / "text/deep").mkdir(parents=True)
    for name in ("b.jsonl", "a.jsonl", "notes.txt", "deep/c.jsonl"):
        (tmp_path / "text" / name).write_text("{}\n")
    folder = str(tmp_path / "text")
    if storage == "s3":
        upload(request.getfixturevalue("bucket"), tmp_path / "text", "text")
        folder = "s3://models/text"
    corpus = {"name": "web", "format": "jsonl", "languages": ["de"], "text_field": "text"}
    config = PreparationConfig.parse({"languages": ["en", "de"], "corpora": [corpus | {"path": f"{folder}/*.jsonl"}]})

    expanded = sources.expand_patterns(config)

    assert expanded.paths == (f"{folder}/a.jsonl", f"{folder}/b.jsonl")
    assert {corpus.name for corpus in expanded.corpora} == {"web"}
    assert sources.expand_patterns(expanded) == expanded
    empty = PreparationConfig.parse({"languages": ["en", "de"], "corpora": [corpus | {"path": f"{folder}/*.zst"}]})
    with pytest.raises(InputError, match=r"\*\.zst: no file matches: check the path of the corpus"):
        sources.expand_patterns(empty)


def test_key_of_a_corpus_depends_on_the_encoder_that_filters_its_pairs(clean_environment, tmp_path, monkeypatch):
    keys = []

    def prepare(spec, parallel_map, output):
        keys.append(spec.name)
        (output / "report.json").write_text("{}")
        return {}

    monkeypatch.setitem(builds.TEXT_STAGES, "prepare_corpus", prepare)
    (tmp_path / "en-de.tsv").write_text("A sentence\tEin Satz\n")
    source = {"name": "web", "format": "tsv", "path": str(tmp_path / "en-de.tsv"), "languages": ["en", "de"]}
    similarity = {"encoder": str(tmp_path / "encoder"), "minimum": 0.6}
    config = {"languages": ["en", "de"], "corpora": [source], "cleaning": {"similarity": similarity}}
    corpus, metrics = dsl.Dataset(uri=str(tmp_path / "pointer")), dsl.Metrics(uri=str(tmp_path / "metrics"))

    for kind in ("e5", "bge"):
        save_encoder(tmp_path / "encoder", kind)
        prepare_corpus.python_func(config, str(tmp_path / "store"), corpus, metrics)

    assert len(set(keys)) == 2
