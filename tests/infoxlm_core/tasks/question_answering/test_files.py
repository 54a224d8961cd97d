"""SQuAD's format, read strictly: what is in the files of SQuAD, MLQA, XQuAD and TyDiQA, and what is refused."""

import json
import logging
from pathlib import Path

import pytest

from infoxlm_core.errors import InputError
from infoxlm_core.tasks.question_answering import files
from tests.toys.questions import write_squad

pytestmark = pytest.mark.item("A21")
BERLIN = "Berlin liegt an der Spree."


def write(path: Path, *questions: dict, paragraph: str = BERLIN) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": paragraph, "qas": list(questions)}]}]}))
    return path


def question(name: str, *answers: tuple[str, int], **more) -> dict:
    texts = [{"text": text, "answer_start": start} for text, start in answers]
    return {"id": name, "question": "Wo?", "answers": texts} | more


def test_a_question_knows_its_paragraph_its_answers_and_where_the_first_stands(tmp_path):
    rows = [("a", BERLIN, "Wo?", "Spree"), ("b", "北京是首都。", "谁？", "首都"), ("c", BERLIN, "Wer?", "Berlin")]

    found = files.read_squad(write_squad(tmp_path / "xquad.de.json", rows))

    assert found.languages == ("de", "de") and found.paragraphs == (BERLIN, "北京是首都。")
    assert {q.id: (q.text, q.paragraph, q.answers, q.span) for q in found.questions} == {
        "a": ("Wo?", 0, ("Spree",), (20, 25)),
        "c": ("Wer?", 0, ("Berlin",), (0, 6)),
        "b": ("谁？", 1, ("首都",), (3, 5)),
    }


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("test-context-de-question-en.json", ("de", "en")),
        ("dev-context-zh-question-zh.json", ("zh", "zh")),
        ("xquad.el.json", ("el", "el")),
        ("tydiqa.goldp.en.train.json", ("en", "en")),
        ("tydiqa.sw.dev.json", ("sw", "sw")),
        ("tydiqa-goldp-dev-arabic.json", ("ar", "ar")),
        ("train-v1.1.json", ("en", "en")),
        ("dev-v1.1.json", ("en", "en")),
        ("SQuAD.json", ("en", "en")),
        ("squad.translate.train.en-de.json", ("de", "de")),
        ("de_squad-translate-train-train-v1.1.json", ("de", "de")),
    ],
)
def test_languages_stand_in_the_names_of_the_published_files(name, cell):
    assert files.parse_languages(Path("anywhere") / name) == cell


def test_the_folder_of_mlqas_translations_has_training_and_development_files(tmp_path):
    names = [f"de_squad-translate-train-{split}-v1.1.json" for split in ("train", "dev")]
    for name in names:
        write(tmp_path / name, question("a", ("Spree", 20)))

    assert [path.name for path in files.list_files([str(tmp_path)], "train")] == names[:1]
    assert [path.name for path in files.list_files([str(tmp_path)], "dev")] == names[1:]


def test_a_folder_gives_its_json_files_and_of_mlqa_those_of_the_split(tmp_path):
    for split in ("test", "dev"):
        for pair in ("en-question-en", "de-question-de", "de-question-en"):
            write(tmp_path / "mlqa" / f"{split}-context-{pair}.json", question("a", ("Spree", 20)))
    write(tmp_path / "xquad/xquad.de.json", question("a", ("Spree", 20)))
    for folder in ("mlqa", "xquad"):
        (tmp_path / folder / "LICENSE").write_text("free")
        (tmp_path / folder / "README.md").write_text("# read me")

    assert set(files.read_sets([str(tmp_path / "mlqa")], "test")) == {("en", "en"), ("de", "de")}
    mixed = files.read_sets([str(tmp_path / "mlqa")], "dev", mixed=True)
    assert set(mixed) == {("en", "en"), ("de", "de"), ("de", "en")}
    assert {found.path.name[:4] for found in mixed.values()} == {"dev-"}
    assert list(files.read_sets([str(tmp_path / "xquad")], "test")) == [("de", "de")]
    both = [str(tmp_path / "xquad"), str(tmp_path / "mlqa/test-context-en-question-en.json")]
    assert set(files.read_sets(both, "test")) == {("de", "de"), ("en", "en")}


def test_an_answer_that_is_not_where_it_should_be_is_no_training_text_but_a_test(tmp_path, caplog):
    rows = [question("right", ("Spree", 20)), question("wrong", ("Spree", 19)), question("negative", ("Spree.", -6)),
            question("second", ("Spree", 3), ("Berlin", 0))]  # fmt: skip
    path = str(write(tmp_path / "train.de.json", *rows))

    with caplog.at_level(logging.WARNING):
        (trained,) = files.read_training([path])
        tested = files.read_sets([path], "test")["de", "de"]

    assert {q.id: q.span for q in trained.questions} == {"right": (20, 25), "second": (0, 6)}
    assert [q.id for q in tested.questions] == ["right", "wrong", "negative", "second"]
    assert tested.questions[3].answers == ("Spree", "Berlin")
    assert [path in line and " 2 answers are not at" in line for line in caplog.messages] == [True, True]


def test_spaces_at_the_edges_of_an_answer_are_no_part_of_where_it_stands(tmp_path):
    path = write(tmp_path / "xquad.de.json", question("a", (" an der ", 12)))

    assert files.read_squad(path).questions[0].span == (13, 19)


def test_training_files_may_repeat_ids_as_those_of_tydiqa_do(tmp_path):
    path = write(tmp_path / "tydiqa.goldp.sw.train.json", question("0", ("Spree", 20)), question("0", ("Berlin", 0)))

    assert [len(found.questions) for found in files.read_training([str(path), str(path.parent)])] == [2]


def test_a_byte_order_mark_is_no_error(tmp_path):
    path = write_squad(tmp_path / "xquad.zh.json", [("a", "北京是首都。", "谁？", "首都")])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())

    assert files.read_squad(path).questions[0].span == (3, 5)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([question("q7", is_impossible=True)], "question q7 has no answer"),
        ([question("q7", ("Spree", 20), is_impossible=True)], "question q7 has no answer"),
        ([question("q7")], "question q7 has no answer"),
        ([question("q7", (" ", 6))], "question q7 has an empty answer"),
        ([question("q6", ("Spree", 20)), question("q7", ("Spree", 20)), question("q7", ("Berlin", 0))],
         "2 questions have the id q7"),
    ],
    ids=["impossible", "impossible with an answer", "no answer", "hidden answer", "one id twice"],
)  # fmt: skip
def test_a_question_that_cannot_be_scored_is_refused_by_its_id(tmp_path, rows, said):
    path = write(tmp_path / "xquad.de.json", *rows)

    assert said in refusal(lambda: files.read_sets([str(path)], "test"), path)


def test_paths_that_give_no_unambiguous_set_are_refused(tmp_path):
    def tested(*names: str, mixed: bool = False):
        return lambda: files.read_sets([str(tmp_path / name) for name in names], "test", mixed)

    asked = question("a", ("Spree", 20))
    write(tmp_path / "a/xquad.de.json", asked)
    write(tmp_path / "b/test-context-de-question-de.json", asked)
    write(tmp_path / "c/test-context-de-question-en.json", asked)
    write(tmp_path / "d/train.json", asked)
    (tmp_path / "e").mkdir()

    assert "no such file or folder (test)" in refusal(tested("nowhere.de.json"), tmp_path / "nowhere.de.json")
    assert "the folder has no .json file" in refusal(tested("e"), tmp_path / "e")
    assert "are both de-de. Give one test file per language" in refusal(tested("a", "b"), tmp_path / "a/xquad.de.json")
    assert "no file has questions in the language of its paragraphs" in refusal(tested("c"), tmp_path / "c")
    assert "no file has two languages" in refusal(tested("a", mixed=True), tmp_path / "a")
    assert "its name contains no language. Call it train.de.json" in refusal(tested("d"), tmp_path / "d/train.json")
    with pytest.raises(InputError, match=r"its name contains no language\. Call it my-squad\.de\.json"):
        files.parse_languages(Path("my-squad.json"))  # not Burmese
    wrong = write(tmp_path / "f/train.de.json", question("a", ("Spree", 1)))
    assert "no questions to train on" in refusal(lambda: files.read_training([str(wrong)]), wrong)


def refusal(act, path: Path) -> str:
    with pytest.raises(InputError) as caught:
        act()
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    return message
