"""BLEU compares translations with the original references, with sacreBLEU's tokenizer of each language."""

import math

import pytest
import sacrebleu

from infoxlm_core.systems.translation.decoding import TextTranslator, bleu
from infoxlm_core.systems.translation.evaluation import HeldOutPairs

# Article 1 of the Universal Declaration of Human Rights
SENTENCES = {
    "de": ["Alle Menschen sind frei und gleich an Würde und Rechten geboren."],
    "ja": ["すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。"],
    "th": ["มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ ต่างมีเหตุผลและมโนธรรม"],
    "zh": ["人人生而自由，在尊严和权利上一律平等。"],
}


class Fixed(TextTranslator):
    """A translator without a network, which returns fixed translations."""

    def __init__(self, pair: tuple[str, str], translations: dict[str, list[str]]) -> None:
        object.__setattr__(self, "pair", pair)
        object.__setattr__(self, "translations", translations)

    def translate(self, texts: list[str], target: str) -> list[str]:
        return self.translations[target]


@pytest.mark.item("A24")
@pytest.mark.parametrize("language", ["ja", "th", "zh"])
def test_a_perfect_translation_scores_100_in_every_language(language):
    texts = {"de": SENTENCES["de"], language: SENTENCES[language]}

    results = HeldOutPairs(texts).translate(Fixed(("de", language), texts))

    scores = {direction: result.bleu for direction, result in results.items()}
    assert scores == pytest.approx({f"de-{language}": 100, f"{language}-de": 100})


@pytest.mark.item("A24")
def test_bleu_compares_with_the_original_reference_and_not_with_its_normal_form():
    original = "Ａｕｆ Seite ½ … steht mehr als dort"  # SentencePiece writes `Auf Seite 1/2 ... steht mehr als dort`
    normal_form = "Auf Seite 1⁄2 ... steht mehr als dort"
    translator = Fixed(("en", "de"), {"en": ["There is more"], "de": [normal_form]})

    results = HeldOutPairs({"en": ["There is more"], "de": [original]}).translate(translator)

    expected = sacrebleu.corpus_bleu([normal_form], [[original]]).score
    assert results["en-de"].bleu == pytest.approx(expected) and expected < 60
    assert results["en-de"].references == [original] and "tok:13a" in results["en-de"].signature


@pytest.mark.item("A24")
@pytest.mark.parametrize(
    ("translation", "reference", "expected"),
    [
        # 1-grams 7 of 8 (the third "a" is clipped), 2-grams 5 of 7, 3-grams 3 of 6, 4-grams 2 of 5
        (
            "the cat sat on the the mat now",
            "the cat sat on the red mat now",
            100 * (7 / 8 * 5 / 7 * 3 / 6 * 2 / 5) ** 0.25,
        ),
        ("a b c d", "a b c d e f", 100 * math.exp(1 - 6 / 4)),  # the brevity penalty
        ("", "a b c d", 0),
    ],
)
def test_bleu_is_the_geometric_mean_of_clipped_precisions(translation, reference, expected):
    score, signature = bleu([translation], [reference], "en")

    assert score == pytest.approx(expected) and "tok:13a" in signature and "version:" in signature


@pytest.mark.item("A24")
@pytest.mark.parametrize(
    ("language", "segments"), [("ja", "char"), ("th", "char"), ("tha_Thai", "char"), ("zh", "zh"), ("cmn", "zh")]
)
def test_languages_without_spaces_are_compared_by_character(language, segments):
    reference = "abcdef。" if segments == "char" else "人人生而自由。"
    translation = reference.replace(reference[5], "x")  # one wrong character of seven

    score, signature = bleu([translation], [reference], language)

    assert score == pytest.approx(100 * math.prod([6 / 7, 4 / 6, 3 / 5, 2 / 4]) ** 0.25)
    assert f"tok:{segments}" in signature
