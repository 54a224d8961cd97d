"""The settings and the Python code of the tutorial work. `test_pipeline.py` runs its commands."""

import re
import zipfile
from pathlib import Path

import pytest

from infoxlm_core import run_file
from tests.toys.models import save_model

TUTORIAL = (Path(__file__).parents[2] / "docs/tutorial.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", TUTORIAL, re.DOTALL)
CATALOG = """
msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8\\n"

msgid "Save your changes"
msgstr "{translation}"
"""


def block_with(text: str) -> str:
    """Return the only block of Python that contains a text."""
    (block,) = (block for block in PYTHON if text in block)
    return block


@pytest.fixture
def directory(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_text_is_written_as_the_settings_read_it(directory):
    Path("wheels").mkdir()
    for program in ("wagtail", "django_cms", "django"):
        with zipfile.ZipFile(f"wheels/{program}-1.0-py3-none-any.whl", "w") as wheel:
            for language, translation in (("de", "Speichern Sie"), ("fr", "Enregistrez")):
                catalog = CATALOG.format(translation=translation)
                wheel.writestr(f"{program}/locale/{language}/LC_MESSAGES/django.po", catalog)

    exec(block_with("catalogs.read_rows"), {})

    (settings,) = re.findall(r"```yaml\n(.*?)```", TUTORIAL, re.DOTALL)
    Path("my.yaml").write_text(settings, encoding="utf-8")
    run = run_file.load("my.yaml", re.findall(r"--set (\S+)", TUTORIAL))
    assert run.pretraining.optimization.steps == 400
    assert sorted(corpus.path for corpus in run.preparation.corpora) == sorted(map(str, Path("text").iterdir()))
    assert Path("text/wagtail.de.tsv").read_text(encoding="utf-8") == "Save your changes\tSpeichern Sie\n"


def test_transformers_and_this_project_compute_the_same_similarities(directory, capsys):
    sentences = re.findall(r"sentences = (\[.*\])", TUTORIAL)
    words = sorted(set(re.findall(r"\w+", sentences[0])))
    space = {"layer": 2, "pooling": "mean", "normalise": False}
    save_model(directory / "champion/model", words=words, num_hidden_layers=3, infoxlm=space)

    printed = []
    for text in ("AutoModel.from_pretrained", "load_embedder"):
        exec(block_with(text), {})
        printed.append([float(number) for number in re.findall(r"-?\d\.\d+", capsys.readouterr().out)])

    assert len(printed[0]) == 3
    assert printed[0] == pytest.approx(printed[1], abs=1e-5)


def test_the_code_for_sentence_transformers_is_valid_python():
    compile(block_with("SentenceTransformer("), "tutorial.md", "exec")
