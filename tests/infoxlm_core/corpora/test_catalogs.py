"""Messages of gettext catalogs are read as pairs, and damaged catalogs are refused."""

import contextlib
import os
import zipfile
from pathlib import Path

import polib
import pytest

from infoxlm_core.corpora import catalogs
from infoxlm_core.errors import InputError


def write_catalog(path: Path, messages: list[dict], plural: str = "nplurals=2; plural=(n != 1);") -> Path:
    """Write a .po or .mo file with these messages, and return its path."""
    catalog = polib.POFile()
    catalog.metadata = {"Content-Type": "text/plain; charset=utf-8", "Plural-Forms": plural}
    catalog.extend(polib.POEntry(**message) for message in messages)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".po":
        catalog.save(str(path))
    else:
        catalog.save_as_mofile(str(path))
    return path


def test_symbolic_ids_are_replaced_and_unusable_translations_are_dropped(tmp_path):
    default = 'Default: "Save "\n"the \\"page\\""'
    messages = [
        {"msgid": "label_save", "msgstr": "Seite speichern", "comment": default},
        {"msgid": "label_no_text", "msgstr": "Irgendwas"},
        {"msgid": "label_add", "msgstr": "Hinzufügen"},
        {"msgid": "May", "msgstr": "Mai", "msgctxt": "month"},
        {"msgid": "Guess", "msgstr": "Rate", "flags": ["fuzzy"]},
        {"msgid": "New", "msgstr": ""},
        {"msgid": "Old", "msgstr": "Alt", "obsolete": True},
    ]
    write_catalog(tmp_path / "de/LC_MESSAGES/app.po", messages)
    write_catalog(tmp_path / "en/LC_MESSAGES/app.po", [{"msgid": "label_add", "msgstr": "Add it"}])

    rows = list(catalogs.read_rows(("en", "de"), "en", tmp_path))

    assert {row.texts for row in rows if row.dropped is None} == {
        ('Save the "page"', "Seite speichern"),
        ("Add it", "Hinzufügen"),
        ("May", "Mai"),
    }
    assert sorted(filter(None, (row.dropped for row in rows))) == ["empty", "fuzzy", "no_source_text", "obsolete"]


def test_source_is_the_text_of_a_pivot_other_than_english(tmp_path):
    french = [
        {"msgid": "Save the page", "msgstr": "Enregistrer la page"},
        {"msgid": "label_add", "msgstr": "Ajouter", "comment": 'Default: "Add it"'},
        {"msgid": "New message", "msgstr": "Nouveau message"},
    ]
    german = [{"msgid": "Save the page", "msgstr": "Seite speichern"}, {"msgid": "label_add", "msgstr": "Hinzufügen"}]
    write_catalog(tmp_path / "fr/LC_MESSAGES/app.po", french)
    rows_without_german = list(catalogs.read_rows(("fr",), "de", tmp_path))
    write_catalog(tmp_path / "de/LC_MESSAGES/app.po", german)

    rows = list(catalogs.read_rows(("fr",), "de", tmp_path))

    assert [(row.texts, row.dropped) for row in rows] == [
        (("Seite speichern", "Enregistrer la page"), None),
        (("Hinzufügen", "Ajouter"), None),
        (("", "Nouveau message"), "no_source_text"),
    ]
    # Without a German catalog, the ids may be German.
    assert [row.texts[0] for row in rows_without_german if not row.dropped] == ["Save the page", "New message"]


def test_plural_message_is_read_in_its_form_for_one(tmp_path):
    message = {"msgid": "%d file", "msgid_plural": "%d files", "msgstr_plural": {0: "zero", 1: "one", 2: "two"}}
    plural = "nplurals=3; plural=n==0 ? 0 : n==1 ? 1 : 2;"
    write_catalog(tmp_path / "ar/LC_MESSAGES/app.po", [message], plural)
    write_catalog(tmp_path / "fr/LC_MESSAGES/app.mo", [message], "nplurals=2; plural=(n > 1);")

    rows = list(catalogs.read_rows(("en", "ar", "fr"), "en", tmp_path))

    assert [(row.languages[1], row.texts) for row in rows] == [("ar", ("%d file", "one")), ("fr", ("%d file", "zero"))]


def test_best_locale_of_each_language_is_read_from_a_wheel(tmp_path):
    for locale in ("de", "de_Formal", "zh_Hant", "zh_TW", "fr_CA", "fr_FR"):
        write_catalog(tmp_path / f"src/{locale}/LC_MESSAGES/app.mo", [{"msgid": "Hello", "msgstr": locale}])
    write_catalog(
        tmp_path / "src/zh_CN/LC_MESSAGES/app.po", [{"msgid": text, "msgstr": "zh_CN"} for text in ("One", "Two")]
    )
    write_catalog(tmp_path / "src/zh-Hans/LC_MESSAGES/app.po", [{"msgid": "One", "msgstr": "zh-Hans"}])
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as wheel:
        for file in (tmp_path / "src").rglob("*.?o"):
            wheel.write(file, f"app/locale/{file.relative_to(tmp_path / 'src')}")

    rows = catalogs.read_rows(("en", "de", "fr", "zh"), "en", tmp_path / "x.whl")

    assert [row.texts[1] for row in rows] == ["de", "fr_FR", "zh_CN", "zh_CN"]


@pytest.mark.parametrize("locale", ["zh_Hans_CN", "zh-Hans", "zh_CN.UTF-8", "zh"])
def test_every_name_of_simplified_chinese_is_read(tmp_path, locale):
    for name in (locale, "zh_Hant_TW", "zh_HK"):
        write_catalog(tmp_path / name / "LC_MESSAGES/app.po", [{"msgid": "Hello", "msgstr": name}])

    assert [row.texts for row in catalogs.read_rows(("en", "zh"), "en", tmp_path)] == [("Hello", locale)]


@pytest.mark.parametrize("boundary", ["\u2028", "\u2029", "\x85", "\x0c"])
def test_only_a_line_feed_or_carriage_return_ends_a_line_of_a_catalog(tmp_path, boundary):
    path = tmp_path / "de/LC_MESSAGES/app.po"
    path.parent.mkdir(parents=True)
    path.write_text(f'msgid "Open the page"\nmsgstr "Die Seite{boundary}öffnen"\n', encoding="utf-8")

    assert [row.texts for row in catalogs.read_rows(("en", "de"), "en", tmp_path)] == [
        ("Open the page", "Die Seite öffnen")
    ]


@pytest.mark.parametrize("kind", ["po", "mo"])
@pytest.mark.parametrize("packed", [True, False], ids=["wheel", "directory"])
def test_catalog_that_contains_a_path_does_not_open_that_file(tmp_path, kind, packed):
    private = write_catalog(tmp_path / f"private.{kind}", [{"msgid": "The password", "msgstr": "hunter2 ist es"}])
    corpus = tmp_path / "theirs"
    member = f"locale/de/LC_MESSAGES/x.{kind}"
    (corpus / member).parent.mkdir(parents=True)
    (corpus / member).write_text(str(private))
    if packed:
        with zipfile.ZipFile(tmp_path / "theirs.whl", "w") as wheel:
            wheel.write(corpus / member, member)
        corpus = tmp_path / "theirs.whl"

    with pytest.raises(InputError, match=f"{corpus}: {member} is not a readable gettext catalog") as error:
        list(catalogs.read_rows(("en", "de"), "en", corpus))

    assert str(private) not in str(error.value)


def write_large_catalog(path: Path) -> None:
    os.truncate(write_catalog(path, []), catalogs.MAX_CATALOG + 1)


@pytest.mark.item("B12")
@pytest.mark.parametrize(
    ("create", "message"),
    [
        (os.mkfifo, "is a named pipe"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device"),
        (write_large_catalog, "give a smaller file"),
    ],
)
def test_pipes_devices_and_huge_files_in_a_directory_are_refused(tmp_path, create, message):
    directory = tmp_path / "x/de/LC_MESSAGES"
    write_catalog(directory / "good.po", [{"msgid": "One", "msgstr": "Eins"}])
    create(directory / "bad.po")

    with pytest.raises(InputError, match=f"bad.po .*{message}"):
        list(catalogs.read_rows(("en", "de"), "en", tmp_path / "x"))


@pytest.mark.item("B12")
def test_pipe_instead_of_a_directory_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(InputError, match="pipe is a named pipe"):
        list(catalogs.read_rows(("en", "de"), "en", tmp_path / "pipe"))


@pytest.mark.item("B11")
def test_archive_with_too_many_entries_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(catalogs, "MAX_ENTRIES", 1000)
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as wheel:
        for number in range(2000):
            wheel.writestr(f"pkg/{number}.txt", b"")

    with pytest.raises(InputError, match=r"lists 2,000 files, more than 1,000: give a directory"):
        list(catalogs.read_rows(("en", "de"), "en", tmp_path / "x.whl"))


@pytest.mark.item("B11")
@pytest.mark.parametrize("offset", range(0, 140, 7))
def test_damaged_archive_is_refused_or_gives_its_own_message(tmp_path, offset):
    write_catalog(tmp_path / "x.po", [{"msgid": "One", "msgstr": "Eins"}])
    with zipfile.ZipFile(tmp_path / "x.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.write(tmp_path / "x.po", "a/de/LC_MESSAGES/x.po")
    content = bytearray((tmp_path / "x.whl").read_bytes())
    content[offset] ^= 0xFF
    content[-1 - offset] ^= 0xFF
    (tmp_path / "x.whl").write_bytes(content)

    texts = []
    with contextlib.suppress(InputError):
        texts = [row.texts for row in catalogs.read_rows(("en", "de"), "en", tmp_path / "x.whl")]
    assert texts in ([], [("One", "Eins")])
