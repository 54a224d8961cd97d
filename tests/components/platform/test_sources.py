"""A model to start from and a data set, wherever they are: a path, S3 (a real server), the hub, the registry."""

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
from huggingface_hub.utils import filter_repo_objects
from kfp import dsl

from components.adapters.mlflow import model_registry
from components.adapters.s3 import store as s3
from components.adapters.sources import hub
from components.platform import artifacts, sources, stage_work
from components.prepare_corpus import prepare_corpus
from components.pretrain import pretrain
from infoxlm_core import manifests
from infoxlm_core.config import PreparationConfig
from infoxlm_core.errors import ConfigError, DataCorrupt, InputError, StorageUnavailable
from infoxlm_core.model.encoder import EncoderSize, initialise
from infoxlm_core.model.heads import InfoXLM
from infoxlm_core.model.huggingface import pretrained
from infoxlm_core.model.huggingface.any_encoder import served_space
from infoxlm_core.training import fingerprint
from tests.components.conftest import open_run, upload
from tests.servers.processes import answering, free_port
from tests.toys.exports import save_encoder
from tests.toys.pretraining import VOCABULARY, tiny_config


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# models


@pytest.mark.item("B17")
def test_nothing_that_could_run_code_is_taken(tiny_encoders, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(tiny_encoders["first"], directory)
    (directory / "pytorch_model.pt").write_bytes(b"")

    with pytest.raises(InputError, match=r"holds pytorch_model\.pt, which could run code"):
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
def test_a_model_of_sentence_transformers_on_s3_keeps_the_settings_of_its_vector(bucket, tmp_path):
    directory = save_encoder(tmp_path / "bge", "bge")
    upload(bucket, directory, "bge")

    fetched = sources.fetch_model("s3://models/bge", tmp_path / "store")

    assert contents(fetched) == contents(directory)
    assert served_space(fetched) == (3, "cls")


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
    assert fingerprint.digest_inputs(str(found)) == fingerprint.digest_inputs(str(tmp_path / "tuned"))


def test_words_of_a_tokenizer_come_from_the_hub_too():
    files = ["model.safetensors", "vocab.txt", "merges.txt", "steps/4/config.json", "modeling.py", "model.bin"]

    assert list(filter_repo_objects(files, allow_patterns=hub._FILES)) == files[:4]


@pytest.mark.slow
def test_a_tokenizer_comes_without_the_weights(bucket, tiny_encoders, tmp_path):
    upload(bucket, tiny_encoders["first"], "xlmr")

    directory, digests = sources.fetch_tokenizer("s3://models/xlmr", tmp_path)
    by_name, (digest,) = sources.fetch_tokenizer("s3://models/xlmr/tokenizer.json", tmp_path)

    assert digest == digests[0] and len(digests) > 1
    original = (tiny_encoders["first"] / "tokenizer.json").read_bytes()
    assert (Path(directory) / "tokenizer.json").read_bytes() == Path(by_name).read_bytes() == original
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
    with pytest.raises(InputError, match="s3://models/nothing has no files"):
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
def test_a_model_of_the_registry_is_copied_to_where_all_workers_see_it(store, tiny_encoders, tmp_path):
    run_id = open_run(store)
    first = model_registry.EvaluatedEncoder(tiny_encoders["first"], "sha256:1", {"s": 0.5}, run_id, {}, store)
    model_registry.register("base", first, {"s": 0.0})

    found = sources.fetch_model("models:/base@champion", store)

    assert found.parent == store / "models"
    assert contents(found) == contents(tiny_encoders["first"])
    assert sources.fetch_model("models:/base/1", store) == found
    (found / "tokenizer.json").write_text("damaged")
    assert contents(sources.fetch_model("models:/base/1", store)) == contents(tiny_encoders["first"])

    other = shutil.copytree(tiny_encoders["first"], tmp_path / "other")  # the same weights
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + "\n")
    second = model_registry.EvaluatedEncoder(other, "sha256:2", {"s": 0.5}, run_id, {}, store)
    model_registry.register("base", second, {"s": 0.0})

    assert contents(sources.fetch_model("models:/base/2", store)) == contents(other) != contents(found)


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
    with pytest.raises(DataCorrupt, match="differs from the hub's file: the copy was removed"):
        sources.fetch_model("org/model", tmp_path)
    assert not blob.exists()


@pytest.mark.slow
def test_a_start_on_s3_is_checked_without_its_weights(bucket, tiny_encoders, tmp_path):
    upload(bucket, tiny_encoders["first"], "start")
    config = tiny_config(model={"start": "s3://models/start"})

    sources.check_start(config, tmp_path)

    assert not list(tmp_path.rglob("*.safetensors"))
    bucket.Object("start/pytorch_model.bin").put(Body=b"pickle")
    sources.check_start(config, tmp_path)
    bucket.Object("start/model.safetensors").delete()
    with pytest.raises(InputError, match=r"s3://models/start has pytorch_model\.bin, but no \*\.safetensors"):
        sources.check_start(config, tmp_path)


def test_a_start_on_the_hub_that_was_fetched_before_is_checked_without_a_network(tiny_encoders, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    hub_cache(tmp_path, tiny_encoders["first"])

    sources.check_start(tiny_config(model={"start": "org/model"}), tmp_path)

    with pytest.raises(ConfigError, match=r"contrast\.layer \(7\) is above the 2 layers"):
        sources.check_start(tiny_config(model={"start": "org/model"}, contrast={"layer": 7}), tmp_path)


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


def test_a_start_on_the_hub_is_checked_without_its_weights(tiny_encoders, tmp_path, monkeypatch):
    files = contents(tiny_encoders["first"])
    monkeypatch.setattr(Hub, "files", files)
    monkeypatch.setattr(Hub, "downloads", [])
    config = tiny_config(model={"start": "org/model"})
    with answering(Hub) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)

        sources.check_start(config, tmp_path)

        assert {"config.json", "tokenizer.json"} <= set(Hub.downloads) and "model.safetensors" not in Hub.downloads
        files["pytorch_model.bin"] = files.pop("model.safetensors")
        with pytest.raises(InputError, match=r"org/model has pytorch_model\.bin, but no \*\.safetensors"):
            sources.check_start(config, tmp_path)


@pytest.mark.parametrize("source", ["nowhere", "./nowhere/at/all", "/nowhere/model", "a/b/c"])
def test_a_model_that_is_not_there_is_refused_with_the_ways_to_say_it(source, tmp_path):
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
        artifacts.publish(shards, tiny_shards)
        config = tiny_config(model={"start": "s3://models/start"}).model_dump(mode="json")
        pretrain.python_func(config, 0, str(store), shards, encoder, start, metrics)
        return artifacts.resolve(encoder)[0], artifacts.resolve(start)[0]

    weights = upload_start(seed=3)
    first, start = run()
    assert (start / "model.safetensors").read_bytes() == weights
    assert run()[0] == first

    upload_start(seed=4)
    assert run()[0] != first


# data sets


@pytest.fixture
def questions(tmp_path) -> Path:
    """A folder of files in folders, as test sets are published."""
    folder = tmp_path / "mlqa"
    for name in ("dev/dev-context-de-question-de.json", "test/test-context-de-question-de.json", "LICENSE"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"this is {name}")
    return folder


def test_a_local_path_is_used_where_it_is(questions, tmp_path):
    for path in (questions, questions / "LICENSE"):
        assert sources.fetch_data(str(path), tmp_path / "store") == path
    assert not (tmp_path / "store").exists()


def test_a_path_that_is_not_there_is_refused_with_the_ways_to_say_it(tmp_path):
    with pytest.raises(InputError, match=r"nowhere: no such file or folder: give a path, or s3://bucket/prefix"):
        sources.fetch_data("nowhere", tmp_path)


@pytest.mark.slow
def test_a_folder_on_s3_arrives_with_its_folders_and_its_name(bucket, questions, tmp_path):
    upload(bucket, questions, "eval/mlqa")
    bucket.put_object(Key="eval/mlqa-2/other", Body=b"not of this set")
    bucket.put_object(Key="eval/mlqa/empty/", Body=b"")

    found = sources.fetch_data("s3://models/eval/mlqa/", tmp_path / "store")

    assert contents(found) == contents(questions) and found.name == "mlqa"
    assert [path.name for path in (tmp_path / "store/data").iterdir()] == [found.parent.name]  # nothing half-made


@pytest.mark.slow
def test_what_has_not_changed_is_found_again_and_what_has_is_fetched_anew(bucket, questions, tmp_path):
    upload(bucket, questions, "mlqa")
    first = sources.fetch_data("s3://models/mlqa", tmp_path)
    written = (first / "LICENSE").stat().st_mtime_ns

    assert sources.fetch_data("s3://models/mlqa", tmp_path) == first
    assert (first / "LICENSE").stat().st_mtime_ns == written

    bucket.put_object(Key="mlqa/test/test-context-de-question-de.json", Body=b"corrected")
    second = sources.fetch_data("s3://models/mlqa", tmp_path)
    assert second != first and (second / "test/test-context-de-question-de.json").read_bytes() == b"corrected"
    digests = [fingerprint.digest_inputs(str(path)) for path in (first, second, questions)]
    assert digests[1] != digests[0] == digests[2]


@pytest.mark.slow
@pytest.mark.parametrize("file", ["LICENSE", manifests.NAME])
def test_a_damaged_copy_of_data_is_fetched_again(bucket, questions, tmp_path, caplog, file):
    (questions / manifests.NAME).write_text("somebody else's")
    upload(bucket, questions, "mlqa")
    found = sources.fetch_data("s3://models/mlqa", tmp_path / "store")

    (found / file).write_bytes(b"x" * (found / file).stat().st_size)
    assert contents(sources.fetch_data("s3://models/mlqa", tmp_path / "store")) == contents(questions)
    assert caplog.text.count("was changed after it was downloaded") == 1

    shutil.rmtree(tmp_path / "store/verified")  # as older code left it
    (found / file).write_bytes(b"y" * (found / file).stat().st_size)
    assert contents(sources.fetch_data("s3://models/mlqa", tmp_path / "store")) == contents(questions)


@pytest.mark.slow
def test_the_same_objects_by_a_longer_and_a_shorter_prefix_are_copies_that_keep_their_names(
    bucket, questions, tmp_path
):
    upload(bucket, questions, "eval/mlqa")
    file = "dev/dev-context-de-question-de.json"  # its name says its language

    whole, part = (sources.fetch_data(f"s3://models/{prefix}", tmp_path) for prefix in ("eval", "eval/mlqa"))
    alone = sources.fetch_data(f"s3://models/eval/mlqa/{file}", tmp_path)

    assert contents(whole / "mlqa") == contents(part) == contents(questions)
    assert alone.name == Path(file).name and alone.read_bytes() == (questions / file).read_bytes()


def test_a_name_that_leads_out_of_its_folder_is_refused(tmp_path, monkeypatch):
    client = boto3.client("s3", region_name="us-east-1", aws_access_key_id="k", aws_secret_access_key="s")
    listed = {
        "Contents": [{"Key": "set/../../outside", "Size": 1, "ETag": "x", "LastModified": datetime(2026, 1, 1)}],
        "IsTruncated": False,
    }
    stubber = Stubber(client)  # our test server refuses such names, other servers may not
    stubber.add_response("list_objects_v2", listed)
    monkeypatch.setattr(s3, "translate_errors", lambda *_: nullcontext(client))

    with stubber, pytest.raises(InputError, match=r"set/\.\./\.\./outside: the file name leads out of its folder"):
        sources.fetch_data("s3://models/set", tmp_path / "store")


@pytest.mark.parametrize("place", ["folder", pytest.param("s3", marks=pytest.mark.slow)])
def test_a_pattern_names_all_files_of_a_folder_in_order(place, tmp_path, request):
    (tmp_path / "text/deep").mkdir(parents=True)
    for name in ("b.jsonl", "a.jsonl", "notes.txt", "deep/c.jsonl"):
        (tmp_path / "text" / name).write_text("{}\n")
    folder = str(tmp_path / "text")
    if place == "s3":
        upload(request.getfixturevalue("bucket"), tmp_path / "text", "text")
        folder = "s3://models/text"
    corpus = {"name": "web", "format": "jsonl", "languages": ["de"], "text_field": "text"}
    config = PreparationConfig.parse({"languages": ["en", "de"], "corpora": [corpus | {"path": f"{folder}/*.jsonl"}]})

    expanded = sources.expand_patterns(config)

    assert expanded.paths == (f"{folder}/a.jsonl", f"{folder}/b.jsonl")
    assert {source.name for source in expanded.corpora} == {"web"}
    assert sources.expand_patterns(expanded) == expanded
    empty = PreparationConfig.parse({"languages": ["en", "de"], "corpora": [corpus | {"path": f"{folder}/*.zst"}]})
    with pytest.raises(InputError, match=r"\*\.zst: no file matches: check the path of the corpus"):
        sources.expand_patterns(empty)


def test_the_key_of_a_corpus_depends_on_the_content_of_the_encoder_that_filters_its_pairs(tmp_path, monkeypatch):
    keys = []

    def prepare(work, parallel_map, output):
        keys.append(work.name)
        (output / "report.json").write_text("{}")
        return {}

    monkeypatch.setitem(stage_work.TEXT_STAGES, "prepare_corpus", prepare)
    (tmp_path / "en-de.tsv").write_text("A sentence\tEin Satz\n")
    source = {"name": "web", "format": "tsv", "path": str(tmp_path / "en-de.tsv"), "languages": ["en", "de"]}
    similarity = {"encoder": str(tmp_path / "encoder"), "minimum": 0.6}
    config = {"languages": ["en", "de"], "corpora": [source], "cleaning": {"similarity": similarity}}
    corpus, metrics = dsl.Dataset(uri=str(tmp_path / "pointer")), dsl.Metrics(uri=str(tmp_path / "metrics"))

    for kind in ("e5", "bge"):
        save_encoder(tmp_path / "encoder", kind)
        prepare_corpus.python_func(config, str(tmp_path / "store"), corpus, metrics)

    assert len(set(keys)) == 2
