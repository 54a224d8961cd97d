"""The corpora of a prepared text, as a tracker lists them."""

from infoxlm_core.corpora.datasets import list_datasets

FILES = {
    "mono/de/mail.parquet": {"sha256": "1"},
    "pairs/en-de/mail.parquet": {"sha256": "2"},
    "held_out/en-de/mail.parquet": {"sha256": "3"},
    "held_out/en-fr/exam.parquet": {"sha256": "4"},
    "labelled.parquet": {"sha256": "5"},
}
REPORT = [
    {"corpus": "mail", "kind": "mono", "read": 10, "kept": 8},
    {"corpus": "mail", "kind": "mono", "read": 5, "kept": 5},
    {"corpus": "mail", "kind": "pairs", "read": 4, "kept": 1},
]


def test_corpus_has_languages_and_lines_and_is_held_out_if_it_has_no_training_text():
    exam, mail = list_datasets(FILES, REPORT)

    assert (exam.name, exam.held_out, exam.languages, exam.lines) == ("exam", True, ("en", "fr"), {})
    assert (mail.name, mail.held_out, mail.languages) == ("mail", False, ("de", "en"))
    assert mail.lines == {"mono read": 15, "mono kept": 13, "pairs read": 4, "pairs kept": 1}


def test_digest_of_a_corpus_changes_only_with_its_own_files():
    exam, mail = list_datasets(FILES, REPORT)
    other_exam, other_mail = list_datasets(FILES | {"mono/de/mail.parquet": {"sha256": "9"}}, REPORT)

    assert other_exam == exam
    assert other_mail.digest != mail.digest
