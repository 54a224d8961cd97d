"""BLEU of translations compares text of one form, whatever the language."""

import io
import math
from types import SimpleNamespace

import pytest
import sentencepiece

from infoxlm_core.data.encoding import encode
from infoxlm_core.systems.translation import decoding
from infoxlm_core.systems.translation.decoding import BLEU, Validation, bleu, sacrebleu

# Article 1 of the Universal Declaration of Human Rights, and the beginning of article 11
SENTENCES = {
    "de": [
        "Alle Menschen sind frei und gleich an Würde und Rechten geboren.",
        "Sie sind mit Vernunft und Gewissen begabt und sollen einander im Geist der Brüderlichkeit begegnen.",
    ],
    "ja": [
        "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。",
        "人間は、理性と良心とを授けられており、互いに同胞の精神をもって行動しなければならない。",
    ],
    "th": [
        "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ ต่างมีเหตุผลและมโนธรรม",
        "ทุกคนที่ถูกกล่าวหาว่ากระทำผิดทางอาญามีสิทธิที่จะได้รับการสันนิษฐานไว้ก่อนว่าบริสุทธิ์",
    ],
    "zh": [
        "人人生而自由，在尊严和权利上一律平等。",
        "他们赋有理性和良心，并应以兄弟关系的精神相对待。",
    ],
}


@pytest.fixture(scope="module")
def processor() -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    lines = [sentence for sentences in SENTENCES.values() for sentence in sentences]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=170, minloglevel=2
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.mark.item("A24")
@pytest.mark.parametrize("language", ["ja", "th", "zh"])
def test_a_perfect_translation_scores_100_in_every_language(language, processor, monkeypatch):
    texts = SENTENCES["de"], SENTENCES[language]
    ids = encode(processor, texts[0]), encode(processor, texts[1])
    validation = Validation(("de", language), (0, 1), ids, texts, processor)
    monkeypatch.setattr(decoding, "translate", lambda model, sentences, source, target: ids[target])

    scores = validation.score(SimpleNamespace())

    assert scores == pytest.approx(dict.fromkeys(scores, 100.0))
    assert {BLEU, f"{BLEU}/de-{language}", f"valid/sacrebleu/{language}-de"} <= scores.keys()


@pytest.mark.item("A24")
@pytest.mark.parametrize(
    ("language", "segments"), [("ja", "char"), ("th", "char"), ("tha_Thai", "char"), ("zh", "zh"), ("cmn", "zh")]
)
def test_languages_without_spaces_are_compared_by_character(language, segments):
    reference = "abcdef。" if segments == "char" else "人人生而自由。"
    translation = reference.replace(reference[5], "x")  # one wrong character of seven

    expected = 100 * math.prod([6 / 7, 4 / 6, 3 / 5, 2 / 4]) ** 0.25
    assert bleu([translation], [reference], language) == pytest.approx(expected)
    score, signature = sacrebleu([translation], [reference], language)
    assert score == pytest.approx(expected) and f"tok:{segments}" in signature
