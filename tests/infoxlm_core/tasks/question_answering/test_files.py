"""SQuAD's format is read strictly: the files of SQuAD, MLQA, XQuAD and TyDiQA, and what is refused."""

import json
import logging
from pathlib import Path

import pytest

from infoxlm_core.errors import InputError
from infoxlm_core.tasks.question_answering import files
from tests.toys.questions import write_squad

pytestmark = pytest.mark.item("A21")
BERLIN = "Berlin liegt an der Spree."


def write(path: Path, *questions: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": BERLIN, "qas": list(questions)}]}]}))
    return path


def build_question(question_id: str, *answers: tuple[str, int], **fields) -> dict:
    texts = [{"text": text, "answer_start": start} for text, start in answers]
    return {"id": question_id, "question": "Wo?", "answers": texts} | fields


def test_questions_have_their_paragraph_answers_and_span(tmp_path):
    rows = [("a", BERLIN, "Wo?", "Spree"), ("b", "北京是首都。", "谁？", "首都"), ("c", BERLIN, "Wer?", "Berlin")]
    path = write_squad(tmp_path / "xquad.de.json", rows)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # a byte order mark

    question_set = files.read_squad(path)

    assert question_set.languages == ("de", "de")
    assert question_set.paragraphs == (BERLIN, "北京是首都。")
    fields_by_id = {row.id: (row.text, row.paragraph, row.answers, row.span) for row in question_set.questions}
    assert fields_by_id == {
        "a": ("Wo?", 0, ("Spree",), (20, 25)),
        "c": ("Wer?", 0, ("Berlin",), (0, 6)),
        "b": ("谁？", 1, ("首都",), (3, 5)),
    }


@pytest.mark.parametrize(
    ("name", "languages"),
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
def test_names_of_published_files_contain_their_languages(name, languages):
    assert files.parse_languages(Path("anywhere") / name) == languages


@pytest.mark.parametrize("name", ["train.json", "my-squad.json"])  # `my` is not Burmese here
def test_a_name_without_a_language_is_refused(name):
    with pytest.raises(InputError, match=rf"its name contains no language\. Call it {Path(name).stem}\.de\.json"):
        files.parse_languages(Path(name))


def test_the_folder_of_mlqas_translations_has_files_of_two_splits(tmp_path):
    names = [f"de_squad-translate-train-{split}-v1.1.json" for split in ("train", "dev")]
    for name in names:
        write(tmp_path / name, build_question("a", ("Spree", 20)))

    assert [path.name for path in files.list_files([str(tmp_path)], "train")] == names[:1]
    assert [path.name for path in files.list_files([str(tmp_path)], "dev")] == names[1:]


def test_sets_of_a_folder_are_those_of_the_requested_split_and_languages(tmp_path):
    mlqa = tmp_path / "mlqa"
    xquad = write(tmp_path / "xquad/xquad.de.json", build_question("a", ("Spree", 20))).parent
    (xquad / "README.md").write_text("about the set")
    for split in ("test", "dev"):
        for pair in ("en-question-en", "de-question-de", "de-question-en"):
            write(mlqa / f"{split}-context-{pair}.json", build_question("a", ("Spree", 20)))

    sets = files.read_sets([str(mlqa)], "test")
    mixed_sets = files.read_sets([str(mlqa)], "dev", mixed=True)
    sets_of_two_paths = files.read_sets([str(xquad), str(mlqa / "test-context-en-question-en.json")], "test")

    assert set(sets) == {("en", "en"), ("de", "de")}
    assert set(mixed_sets) == {("en", "en"), ("de", "de"), ("de", "en")}
    assert all(question_set.path.name.startswith("dev-") for question_set in mixed_sets.values())
    assert set(sets_of_two_paths) == {("de", "de"), ("en", "en")}


def test_questions_with_a_misplaced_answer_are_tested_but_not_trained_on(tmp_path, caplog):
    path = write(
        tmp_path / "train.de.json",
        build_question("correct", ("Spree", 20)),
        build_question("misplaced", ("Spree", 19)),
        build_question("negative", ("Spree.", -6)),
        build_question("second answer", ("Spree", 3), ("Berlin", 0)),
        build_question("spaces", (" an der ", 12)),
    )

    with caplog.at_level(logging.WARNING):
        (training_set,) = files.read_training([str(path)])
        test_set = files.read_sets([str(path)], "test")["de", "de"]

    spans = {question.id: question.span for question in training_set.questions}
    assert spans == {"correct": (20, 25), "second answer": (0, 6), "spaces": (13, 19)}  # without outer spaces
    assert [question.id for question in test_set.questions] == [
        "correct", "misplaced", "negative", "second answer", "spaces"
    ]  # fmt: skip
    assert test_set.questions[3].answers == ("Spree", "Berlin")
    assert [f"{path}: 2 answers are not at" in message for message in caplog.messages] == [True, True]


def test_training_files_may_repeat_ids_as_those_of_tydiqa_do(tmp_path):
    path = write(
        tmp_path / "tydiqa.goldp.sw.train.json",
        build_question("0", ("Spree", 20)),
        build_question("0", ("Berlin", 0)),
    )

    (training_set,) = files.read_training([str(path), str(path.parent)])

    assert len(training_set.questions) == 2


@pytest.mark.parametrize(
    ("questions", "reason"),
    [
        ([build_question("q7", is_impossible=True)], "question q7 has no answer"),
        ([build_question("q7", ("Spree", 20), is_impossible=True)], "question q7 has no answer"),
        ([build_question("q7")], "question q7 has no answer"),
        ([build_question("q7", (" ", 6))], "question q7 has an empty answer"),
        ([build_question("q7", ("Spree", 20)), build_question("q7", ("Berlin", 0))], "2 questions have the id q7"),
    ],
    ids=["impossible", "impossible with an answer", "no answer", "hidden answer", "repeated id"],
)
def test_questions_that_cannot_be_scored_are_refused_by_id(tmp_path, questions, reason):
    path = write(tmp_path / "xquad.de.json", *questions)

    with pytest.raises(InputError, match=rf"xquad\.de\.json: {reason}"):
        files.read_sets([str(path)], "test")


@pytest.mark.parametrize(
    ("names", "mixed", "reason"),
    [
        (["nowhere.de.json"], False, r"nowhere\.de\.json: no such file or directory \(test\)"),
        (["empty"], False, "empty: the directory has no .json file"),
        (["a", "b"], False, r"a/xquad\.de\.json and .* are both de-de. Give one test file per language"),
        (["c"], False, "c: no file has questions in the language of its paragraphs"),
        (["a"], True, "a: no file has de and a second language. Set mixed to false"),
        (["a", "d"], True, "d: no file has de and a second language. Set mixed to false"),
    ],
)
def test_paths_without_one_set_per_language_are_refused(tmp_path, names, mixed, reason):
    question = build_question("a", ("Spree", 20))
    write(tmp_path / "a/xquad.de.json", question)
    write(tmp_path / "b/test-context-de-question-de.json", question)
    write(tmp_path / "c/test-context-de-question-en.json", question)
    write(tmp_path / "d/test-context-en-question-es.json", question)
    (tmp_path / "empty").mkdir()

    with pytest.raises(InputError, match=reason):
        files.read_sets([str(tmp_path / name) for name in names], "test", mixed)


def test_training_text_without_a_usable_question_is_refused(tmp_path):
    path = write(tmp_path / "train.de.json", build_question("a", ("Spree", 1)))

    with pytest.raises(InputError, match=r"train\.de\.json: no questions to train on"):
        files.read_training([str(path)])
