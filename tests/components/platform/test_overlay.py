"""Local code: real processes run with an edited copy of the core, as a step, a RayJob's driver and Ray workers do."""

import io
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import asdict
from pathlib import Path

import pytest

import infoxlm_core
from components.adapters.mlflow import runs as mlflow_runs
from components.platform import artifacts, keys, overlay
from components.platform.work import Work
from components.settings import environment
from infoxlm_core import manifests
from infoxlm_core.config import PreparationConfig, TokenizationConfig
from infoxlm_core.errors import DataCorrupt, InputError
from tests.toys.text import write_catalogs

CORE = Path(infoxlm_core.__file__).parent
EDIT = """

_facts_of_the_image = facts


def facts(report):
    return _facts_of_the_image(report) | {"edited": 1}
"""
MARK = """
MARK = 42.0


def train(run):
    import infoxlm_core
    from ray import train

    rank = train.get_context().get_world_rank()
    (run / f"worker-{rank}").write_text(infoxlm_core.__file__)
    return {"mark": MARK}
"""


def edited(folder: Path) -> Path:
    """A copy of the package in which one function is changed and one module new."""
    shutil.copytree(CORE, folder / "infoxlm_core", ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "infoxlm_core/stages/preparation.py").open("a") as file:
        file.write(EDIT)
    (folder / "infoxlm_core/marked.py").write_text(MARK)
    return folder / "infoxlm_core"


@pytest.fixture(scope="module")
def code(tmp_path_factory) -> bytes:
    return overlay.pack(edited(tmp_path_factory.mktemp("checkout")))


@pytest.fixture
def store(tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("INFOXLM_TRACKER", "none")
    monkeypatch.setenv("RUN_ID", "toy-1")
    return str(tmp_path / "store")


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """Run Python in the checkout, whose core is what an image has installed."""
    known = os.environ | {"PYTHONPATH": str(CORE.parent)} | variables
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=known, cwd=CORE.parent, timeout=240
    )


def prepare(store: str, text: Path, digest: str, **variables: str) -> subprocess.CompletedProcess:
    """The step `prepare_corpus` in a process of its own."""
    program = f"""
from kfp import dsl
from components.prepare_corpus import prepare_corpus

corpus, metrics = dsl.Dataset(uri={str(text / "pointer")!r}), dsl.Metrics(uri={str(text / "metrics")!r})
prepare_corpus.python_func({preparation(text)!r}, {store!r}, corpus, metrics, local_code={digest!r})
"""
    return python("-c", program, **variables)


def preparation(text: Path) -> dict:
    corpora = [{"name": "mail", "format": "gettext", "path": str(text / "mail")}]
    return PreparationConfig.parse({"languages": ["en", "de", "fr"], "corpora": corpora}, "preparation").model_dump(
        mode="json"
    )


def made(text: Path) -> dict:
    """The manifest of what the last step has made."""
    return manifests.load(Path(json.loads((text / "pointer").read_bytes())["location"]))


# ---------------------------------------------------------------- the archive


def test_an_archive_is_the_same_bytes_whenever_and_wherever_the_files_were_written(tmp_path, code):
    copy = edited(tmp_path)
    (copy / "__pycache__").mkdir()
    (copy / "__pycache__/errors.cpython-311.pyc").write_bytes(b"compiled")
    (copy / "notes.txt").write_text("mine")
    for path in copy.rglob("*.py"):
        path.chmod(0o600)
        os.utime(path, (time.time() - 1e6,) * 2)

    assert overlay.pack(copy) == code
    (tmp_path / "it.zip").write_bytes(code)
    with zipfile.ZipFile(tmp_path / "it.zip") as archive:
        names = archive.namelist()
        assert names == sorted(names) and {Path(name).suffix for name in names} == {".py", ".yaml", ".j2"}
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert {entry.external_attr >> 16 for entry in archive.infolist()} == {0o644}


def test_the_archive_has_all_data_that_the_wheel_has():
    data = [path for path in CORE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]

    with zipfile.ZipFile(io.BytesIO(overlay.pack(CORE))) as archive:
        assert {f"infoxlm_core/{path.relative_to(CORE)}" for path in data} <= set(archive.namelist())


def test_what_is_too_large_for_code_is_refused_by_name(tmp_path):
    copy = edited(tmp_path)
    (copy / "table.yaml").write_bytes(b"a" * overlay.LARGEST)

    with pytest.raises(InputError, match=r"more than 4194304: move table\.yaml elsewhere"):
        overlay.pack(copy)


# ---------------------------------------------------------------- identity


def test_an_artifact_has_the_name_it_always_had_and_with_local_code_another_for_every_edit(monkeypatch):
    def key() -> str:
        return keys.artifact_key("shards", TokenizationConfig(vocabulary_size=160), "sha256:a")

    found = [key()]
    for digest in ("a" * 64, "b" * 64):
        monkeypatch.setenv(environment.OVERLAY, f"s3://bucket/code/store/code/{digest}.zip")
        assert environment.local_code() == f"sha256:{digest}"
        found.append(key())

    assert found[0] == "7e47a28ef95f6bdd"  # as it was before there was local code
    assert len(set(found)) == 3


def test_what_the_image_has_is_no_edit(code):
    assert overlay.is_edited(overlay.digest_of(code))
    assert not overlay.is_edited(overlay.digest_of(overlay.pack(CORE))) and not overlay.is_edited("")


# ---------------------------------------------------------------- a step


@pytest.mark.slow
def test_a_step_uses_an_edit_and_finds_nothing_that_the_image_has_made_unless_nothing_is_edited(store, code, tmp_path):
    write_catalogs(tmp_path, {"mail": 60})
    digest = overlay.send(store, code)

    plain = prepare(store, tmp_path, "")
    assert plain.returncode == 0, plain.stderr
    before = made(tmp_path)
    with_edit = prepare(store, tmp_path, digest)
    assert with_edit.returncode == 0, with_edit.stderr

    after = made(tmp_path)
    assert "edited" not in before["facts"] and after["facts"] == before["facts"] | {"edited": 1}
    unedited = prepare(store, tmp_path, overlay.send(store, overlay.pack(CORE)))
    assert unedited.returncode == 0, unedited.stderr
    assert made(tmp_path) == before and len(list(Path(store, "corpus").iterdir())) == 2
    assert f"made with local code {digest}, based on commit" in with_edit.stderr
    assert "files that differ (2): marked.py, stages/preparation.py" in with_edit.stderr
    assert "local code" not in plain.stderr + unedited.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "variables", "error", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes() + b"\n"), {}, DataCorrupt, "not that of its name"),
        (lambda path: path.unlink(), {}, InputError, "is not there: submit again, --with-local-code"),
        (lambda path: None, {"INFOXLM_LOCAL_CODE": "forbidden"}, InputError, "forbidden here (INFOXLM_LOCAL_CODE"),
    ],
    ids=["other code", "none", "forbidden"],
)
def test_a_step_refuses_in_one_line_code_that_is_not_what_was_submitted(
    store, code, tmp_path, spoil, variables, error, said
):
    digest = overlay.send(store, code)
    spoil(Path(store, overlay.place_of(digest)))

    done = prepare(store, tmp_path, digest, **variables)

    assert done.returncode == error.exit_code
    assert done.stderr.count("\n") == 1 and said in done.stderr
    [outcome] = Path(store, "outcome/toy-1").iterdir()
    assert json.loads(outcome.read_bytes())["class"] == error.__name__
    assert not Path(store, "corpus").exists()


@pytest.mark.slow
def test_the_driver_of_a_rayjob_uses_what_its_pod_is_told(store, code, tmp_path):
    write_catalogs(tmp_path, {"mail": 60})
    digest = overlay.send(store, code)
    work = Work("prepare_corpus", store, "corpus", "a", preparation(tmp_path), 0, {}, pipeline_run="toy-1", job="j-1")
    artifacts.write(store, "work/j-1.json", json.dumps(asdict(work)))
    job = ("-m", "components.platform.overlay", "run", "components.platform.job", f"{store}/work/j-1.json")
    told = {environment.OVERLAY: f"{store}/{overlay.place_of(digest)}"}

    done = python(*job, **told)

    assert done.returncode == 0, done.stderr
    assert manifests.load(Path(store, "corpus/a"))["facts"]["edited"] == 1
    Path(store, overlay.place_of(digest)).unlink()
    shutil.rmtree(os.environ["INFOXLM_CACHE"])
    assert python(*job, **told).returncode == InputError.exit_code
    assert json.loads(Path(store, "outcome/jobs/j-1.json").read_bytes())["class"] == "InputError"


@pytest.mark.slow
def test_ray_workers_use_it_though_the_driver_s_folder_has_the_image_s(store, code, tmp_path, ray_here):
    """The driver is a process of its own, as of another run, on the Ray that the tests share."""
    import ray

    digest = overlay.send(store, code)
    program = f"""
from pathlib import Path

from components.platform import overlay

overlay.use({store!r}, {digest!r})
from components.adapters.ray import train as ray_train
from infoxlm_core import marked

print(ray_train.run(marked.train, 2, run=Path({str(tmp_path)!r})))
"""

    done = python("-c", program, RAY_ADDRESS=ray.get_runtime_context().gcs_address)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "{'mark': 42.0}"
    places = {Path(tmp_path, f"worker-{rank}").read_text() for rank in range(2)}
    assert len(places) == 2 and not any(place.startswith(str(CORE)) for place in places)  # each has its own


# ---------------------------------------------------------------- lineage


def test_the_run_in_mlflow_and_the_card_keep_the_digest_and_the_diff(monkeypatch, tmp_path):
    monkeypatch.setenv(environment.OVERLAY, f"s3://bucket/store/code/{'c' * 64}.zip")
    monkeypatch.setenv(mlflow_runs.COMMIT, "d" * 40)
    image = edited(tmp_path / "image")  # as if this checkout had taken both edits back
    monkeypatch.setattr(overlay, "_installed", lambda: image)
    files: dict[str, str] = {}

    class Told:
        def log_params(self, config) -> None:
            self.params = dict(config)

        def log_artifacts(self, source: Path, path: str | None = None) -> None:
            files[f"{path}/{source.name}"] = source.read_text()

    overlay.record(told := Told())  # type: ignore[arg-type]
    (tmp_path / "card.md").write_text("# InfoXLM\n")
    overlay.add_to_card(tmp_path / "card.md")

    assert told.params == {"local_code": f"sha256:{'c' * 64}"}
    assert mlflow_runs.source()["local_code"] == f"sha256:{'c' * 64}"
    diff = files["local_code/diff.txt"]
    assert "--- a/infoxlm_core/marked.py\n" in diff and "-MARK = 42.0\n" in diff
    assert '-    return _facts_of_the_image(report) | {"edited": 1}\n' in diff
    card = (tmp_path / "card.md").read_text()
    assert (
        f"made with local code sha256:{'c' * 64}, based on commit {'d' * 40}; files that differ (2): marked.py" in card
    )
