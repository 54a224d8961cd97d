"""Translation units are read without native codes, with their languages, in little memory."""

import gzip
import tracemalloc

import pytest

from infoxlm_core.corpora.translation_units import Unit, read_units

XLIFF = """<?xml version="1.0"?><xliff version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2">
<file original="a.html" source-language="en-US" target-language="de-DE" datatype="html"><header/><body><group id="g">
<trans-unit id="1"><source>Press <x id="1"/>the <g id="2">red</g> key</source>
  <seg-source><mrk mid="0" mtype="seg">no segment of its own</mrk></seg-source>
  <target state="final">Rote <bpt id="3">&lt;b&gt;</bpt>Taste<ept id="3">&lt;/b&gt;</ept></target><note>x</note>
  <alt-trans><source>Press the key</source><target>Taste</target></alt-trans></trans-unit>
<trans-unit id="2"><source>Open</source><target state="needs-review-translation">Offen</target></trans-unit></group>
<trans-unit id="3"><source>Alone</source></trans-unit>
<trans-unit id="4"><source>Save</source><target xml:lang="fr-CA">Enregistrer</target></trans-unit></body></file>
<file original="b.html" source-language="de" target-language="en" datatype="plaintext"><body>
<trans-unit id="1"><source>Ja</source><target state="translated">Yes</target></trans-unit></body></file></xliff>"""
XLIFF_2 = """<?xml version="1.0"?><xliff version="2.1" srcLang="en" trgLang="fr"
 xmlns="urn:oasis:names:tc:xliff:document:2.0"><file id="f"><group id="g"><unit id="1"><notes><note>x</note></notes>
<originalData><data id="d">&lt;b&gt;</data></originalData>
<segment state="reviewed"><source>Press the <pc id="1" dataRefStart="d">red</pc> key. </source>
  <target>Touche <mrk id="m" type="term">rouge</mrk><ph id="2"/>. </target></segment>
<ignorable><source> </source></ignorable>
<segment><source>Yes<cp hex="001A"/></source><target>Oui</target></segment>
<segment state="initial"><source>No</source><target>No</target></segment></unit></group></file></xliff>"""


def test_xliff_1_2_unit_is_a_pair_without_codes_unless_it_is_unfinished(tmp_path):
    (tmp_path / "x.xlf").write_text(XLIFF)

    assert list(read_units(tmp_path / "x.xlf", "xliff")) == [
        Unit({"en": "Press the red key", "de": "Rote Taste"}),
        Unit({}, "unfinished"),
        Unit({}),
        Unit({"en": "Save", "fr": "Enregistrer"}),
        Unit({"de": "Ja", "en": "Yes"}),
    ]


@pytest.mark.parametrize(
    ("attributes", "state", "expected"),
    [
        ('approved="no"', "", Unit({}, "unapproved")),
        ('approved="no"', 'state="needs-translation"', Unit({}, "unfinished")),
        ('approved="no"', 'state="translated"', Unit({"en": "Open", "de": "Offen"})),  # it waits for its final review
        ('approved="yes"', "", Unit({"en": "Open", "de": "Offen"})),
    ],
)
def test_xliff_1_2_unit_without_approval_needs_the_state_of_a_translation(tmp_path, attributes, state, expected):
    head = XLIFF[: XLIFF.index("<group")]
    unit = f'<trans-unit id="1" {attributes}><source>Open</source><target {state}>Offen</target></trans-unit>'
    (tmp_path / "x.xlf").write_text(f"{head}{unit}</body></file></xliff>")

    assert list(read_units(tmp_path / "x.xlf", "xliff")) == [expected]


def test_xliff_2_segment_is_a_pair_without_codes_unless_it_is_unfinished(tmp_path):
    (tmp_path / "x.xlf.gz").write_bytes(gzip.compress(XLIFF_2.encode()))

    assert list(read_units(tmp_path / "x.xlf.gz", "xliff")) == [
        Unit({"en": "Press the red key. ", "fr": "Touche rouge. "}),
        Unit({"en": "Yes", "fr": "Oui"}),
        Unit({}, "unfinished"),
    ]


def test_file_of_many_units_is_read_in_little_memory(tmp_path):
    unit = '<trans-unit id="1"><source>Open the page</source><target>Die Seite öffnen</target></trans-unit>'
    head = XLIFF[: XLIFF.index("<group")]
    path = tmp_path / "x.xlf"
    path.write_text(f"{head}{unit * 10_000}</body></file></xliff>")

    tracemalloc.start()
    assert sum(set(unit.texts) == {"en", "de"} for unit in read_units(path, "xliff")) == 10_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20  # bytes; the elements of all units have twice as many
