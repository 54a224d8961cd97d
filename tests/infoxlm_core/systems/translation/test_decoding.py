"""BLEU compares translations with the original references, with sacreBLEU's tokenizer of each language."""

import math

import pytest
import sacrebleu

from infoxlm_core.systems.translation.decoding import TextTranslator, compute_bleu
from infoxlm_core.systems.translation.evaluation import HeldOutPairs

# Article 1 of the Universal Declaration of Human Rights
SENTENCES = {
    "de": ["Alle Menschen sind frei und gleich an Würde und Rechten geboren."],
    "ja": ["すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。"],
    "th": ["มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ ต่างมีเหตุผลและมโนธรรม"],
    "zh": ["人人生而自由，在尊严和权利上一律平等。"],
}


class FixedTranslator(TextTranslator):
    """A translator without a network, which returns given translations."""

    def __init__(self, pair: tuple[str, str], translations: dict[str, list[str]]) -> None:
        object.__setattr__(self, "pair", pair)  # the dataclass is frozen
        object.__setattr__(self, "translations", translations)

    def translate(self, texts: list[str], target: str) -> list[str]:
        return self.translations[target]


@pytest.mark.item("A24")
@pytest.mark.parametrize("language", ["ja", "th", "zh"])
def test_perfect_translation_scores_100_in_every_language(language):
    texts = {"de": SENTENCES["de"], language: SENTENCES[language]}

    results = HeldOutPairs(texts).translate(FixedTranslator(("de", language), texts))

    scores = {direction: result.bleu for direction, result in results.items()}
    assert scores == pytest.approx({f"de-{language}": 100, f"{language}-de": 100})


@pytest.mark.item("A24")
def test_bleu_compares_with_the_original_reference_instead_of_its_normal_form():
    original = "Ａｕｆ Seite ½ … steht mehr als dort"  # SentencePiece writes `Auf Seite 1/2 ... steht mehr als dort`
    normal_form = "Auf Seite 1⁄2 ... steht mehr als dort"
    translator = FixedTranslator(("en", "de"), {"en": ["There is more"], "de": [normal_form]})

    result = HeldOutPairs({"en": ["There is more"], "de": [original]}).translate(translator)["en-de"]

    expected = sacrebleu.corpus_bleu([normal_form], [[original]]).score
    assert expected < 60
    assert result.bleu == pytest.approx(expected)
    assert result.references == [original]


@pytest.mark.item("A24")
@pytest.mark.parametrize(
    ("translation", "reference", "expected"),
    [
        # 1-grams 7 of 8 (the third "the" is clipped), 2-grams 5 of 7, 3-grams 3 of 6, 4-grams 2 of 5
        (
            "the cat sat on the the mat now",
            "the cat sat on the red mat now",
            100 * (7 / 8 * 5 / 7 * 3 / 6 * 2 / 5) ** 0.25,
        ),
        ("a b c d", "a b c d e f", 100 * math.exp(1 - 6 / 4)),  # the brevity penalty
        ("", "a b c d", 0),
        ("a b c d e", "a b c x d e", 0),  # no common 4-gram
    ],
)
def test_bleu_is_the_geometric_mean_of_clipped_precisions(translation, reference, expected):
    score, signature = compute_bleu([translation], [reference], "en")

    assert score == pytest.approx(expected)
    assert "tok:13a" in signature
    assert "smooth:none" in signature
    assert "version:" in signature


@pytest.mark.item("A24")
@pytest.mark.parametrize(
    ("language", "tokenizer", "reference", "translation"),
    [
        ("ja", "char", "abcdef。", "abcdex。"),
        ("tha_Thai", "char", "abcdef。", "abcdex。"),
        ("zh", "zh", "人人生而自由。", "人人生而自x。"),
        ("cmn", "zh", "人人生而自由。", "人人生而自x。"),
    ],
)
def test_languages_without_spaces_are_compared_by_character(language, tokenizer, reference, translation):
    score, signature = compute_bleu([translation], [reference], language)

    assert score == pytest.approx(100 * math.prod([6 / 7, 4 / 6, 3 / 5, 2 / 4]) ** 0.25)
    assert f"tok:{tokenizer}" in signature
