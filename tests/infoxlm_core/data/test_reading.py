"""Reading parts of token shards, from a directory and from S3."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from components.adapters import storage
from infoxlm_core import manifests
from infoxlm_core.data import reading
from infoxlm_core.data.samples import Sampler
from infoxlm_core.data.shards import open_shards
from infoxlm_core.data.window import MIN_PARTS
from infoxlm_core.errors import DataCorrupt, StorageUnavailable
from infoxlm_core.stages.pretraining import pretrain
from infoxlm_core.training.tracker import FileTracker
from tests.helpers.curves import losses
from tests.toys.pretraining import VOCABULARY, tiny_config, write_shards

URI = "s3://models/shards"


def moving_config(**changes):
    """Return a config whose windows have `MIN_PARTS` parts of each table."""
    batches = {"block_tokens": 512, "window": 1}
    return tiny_config(model={"max_tokens": 512}, batches=batches, **changes)


@pytest.fixture(scope="module")
def shards_of_many_parts(tmp_path_factory) -> Path:
    return write_shards(tmp_path_factory.mktemp("local") / "shards", {"one": 800}, ("de",), part_tokens=400)


@pytest.fixture(autouse=True)
def no_delays(monkeypatch):
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.01)
    monkeypatch.setattr(reading, "RETRY_INTERVAL", 0.05)


def upload(shards: Path, cache: Path) -> None:
    """Upload shards to S3. The cache gets their manifest."""
    store = storage.open(URI)
    for name in manifests.load(shards)["files"]:
        store.put(name, (shards / name).read_bytes())
    cache.mkdir()
    (cache / manifests.NAME).write_bytes((shards / manifests.NAME).read_bytes())


@pytest.mark.item("F15")
@pytest.mark.parametrize("fault", ["flipped bit", "truncated", "longer", "empty", "swapped sides", "missing", "id"])
def test_damaged_shards_are_refused_before_the_first_step(tmp_path, fault):
    write_shards(tmp_path, {"one": 5}, ("de",))
    part = tmp_path / "pairs/en-de/one/000000.safetensors"
    content = part.read_bytes()
    sides_swapped = content.replace(b"source.tokens", b"source.TOKENS").replace(b"target.tokens", b"source.tokens")
    sides_swapped = sides_swapped.replace(b"source.TOKENS", b"target.tokens")  # as many bytes, and all ids are valid
    damaged_content = {
        "flipped bit": content[:-5] + bytes([content[-5] ^ 1]) + content[-4:],
        "truncated": content[:-3],
        "longer": content + b"0000",
        "empty": b"",
        "swapped sides": sides_swapped,
    }
    part.write_bytes(damaged_content.get(fault, content))
    if fault == "missing":
        part.unlink()
    if fault == "id":
        manifest = tmp_path / "manifest.json"
        manifest.write_text(manifest.read_text().replace(f'"vocabulary_size": {VOCABULARY}', '"vocabulary_size": 9'))

    with pytest.raises(DataCorrupt, match="remove the directory and run tokenize_corpus again"):
        Sampler(open_shards(tmp_path), tiny_config()).draw(0, range(4))


def test_steps_download_only_the_parts_of_their_windows_and_draw_the_same_samples(
    faults, shards_of_many_parts, tmp_path
):
    upload(shards_of_many_parts, tmp_path / "cache")
    config = moving_config()
    local = Sampler(open_shards(shards_of_many_parts), config)
    remote = Sampler(open_shards(tmp_path / "cache", storage.open(URI)), config)
    part_count = len(list(shards_of_many_parts.rglob("*.safetensors")))
    max_cached_parts = 2 * 2 * MIN_PARTS  # in two tables, the parts of the window and as many that come next

    for step in range(12):
        local_ids, remote_ids = [sampler.draw(step, range(4)).tlm.masked_ids.tolist() for sampler in (local, remote)]
        assert remote_ids == local_ids
        if step == 0:
            downloaded_parts = {target for method, target in faults.requests if method == "GET"}
            assert len(downloaded_parts) <= max_cached_parts < part_count / 2

    # Each thread of the reader may just have downloaded a part that the window has left.
    cached_parts = len(list((tmp_path / "cache").rglob("*.safetensors")))
    assert cached_parts <= max_cached_parts + reading.DOWNLOAD_THREADS


@pytest.mark.item("F15")
def test_a_part_that_is_damaged_on_s3_is_refused_before_it_is_used(bucket, shards_of_many_parts, tmp_path):
    upload(shards_of_many_parts, tmp_path / "cache")
    for path in (shards_of_many_parts / "pairs").rglob("*.safetensors"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        bucket.Object(f"shards/{path.relative_to(shards_of_many_parts)}").put(Body=bytes(content))

    with pytest.raises(DataCorrupt, match=f"{URI}/pairs/en-de/one/.*, but its manifest lists .*: delete the shards"):
        Sampler(open_shards(tmp_path / "cache", storage.open(URI)), moving_config()).draw(0, range(4))
    assert not list((tmp_path / "cache/pairs").rglob("*.safetensors"))


@pytest.mark.item("F15")
@pytest.mark.parametrize("damage", [b"0000", None], ids=["changed", "missing"])
def test_a_damaged_local_copy_of_a_part_is_downloaded_again(shards_of_many_parts, tmp_path, damage, caplog):
    source = SimpleNamespace(uri=URI, read=lambda name: (shards_of_many_parts / name).read_bytes())
    (tmp_path / manifests.NAME).write_bytes((shards_of_many_parts / manifests.NAME).read_bytes())
    expected_ids = Sampler(open_shards(tmp_path, source), moving_config()).draw(0, range(4)).tlm.masked_ids
    for path in tmp_path.rglob("*.safetensors"):
        path.unlink()
        if damage:
            path.write_bytes(damage)

    ids = Sampler(open_shards(tmp_path, source), moving_config()).draw(0, range(4)).tlm.masked_ids

    assert ids.tolist() == expected_ids.tolist()
    assert ("is damaged: downloading it again" in caplog.text) == bool(damage)


def test_s3_that_does_not_answer_ends_a_training_with_75(faults, shards_of_many_parts, tmp_path, monkeypatch):
    upload(shards_of_many_parts, tmp_path / "cache")
    monkeypatch.setattr(reading, "RETRY_SECONDS", 0.1)
    faults.inject("GET", "safetensors", "503")

    with pytest.raises(StorageUnavailable) as failure:
        Sampler(open_shards(tmp_path / "cache", storage.open(URI)), moving_config()).draw(0, range(4))

    assert failure.value.exit_code == 75


def test_a_training_waits_while_s3_breaks_all_connections_and_has_the_same_losses(
    faults, shards_of_many_parts, tmp_path, monkeypatch
):
    config = moving_config(optimization={"steps": 20}, checkpoints={"every": 20})
    pretrain(config, shards_of_many_parts, tmp_path / "local model", tmp_path / "local run")
    upload(shards_of_many_parts, tmp_path / "cache")
    waits = []

    class BreakingTracker(FileTracker):
        """Breaks all connections after the third step, until the training warns that it waits."""

        def log(self, step, metrics):
            super().log(step, metrics)
            if step == 3:
                faults.inject("*", "", "reset")

    def heal_at_warning(message, *args):
        waits.append(message % args)
        faults.heal()

    monkeypatch.setattr(reading.logger, "warning", heal_at_warning)
    pretrain(
        config, tmp_path / "cache", tmp_path / "remote model", tmp_path / "remote run", BreakingTracker,
        shards_source=storage.open(URI),
    )  # fmt: skip

    (wait,) = waits
    assert wait.startswith("training waits for its text for up to 180 seconds: ")
    assert losses(tmp_path / "remote run") == losses(tmp_path / "local run")
