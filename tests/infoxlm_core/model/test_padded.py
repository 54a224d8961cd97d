"""XLM adds a language embedding to every token: evaluation and fine-tuning must pass the language of the text."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer, XLMConfig, XLMModel, XLMWithLMHeadModel

from infoxlm_core.data.sampling import make_rng
from infoxlm_core.errors import InputError
from infoxlm_core.model import padded, task_models
from infoxlm_core.model.huggingface.any_encoder import load_encoder
from infoxlm_core.tasks import TASKS, embedding, perplexity
from infoxlm_core.tasks.classification.run import encode_rows
from infoxlm_core.tasks.embedding import VectorSpec
from infoxlm_core.tasks.named_entities import run as named_entities
from infoxlm_core.tasks.named_entities.files import Sentence
from infoxlm_core.tasks.question_answering import run as question_answering
from infoxlm_core.tasks.question_answering.files import Question, QuestionSet
from infoxlm_core.tasks.question_answering.task import AnsweringConfig
from tests.toys.models import TEXTS, WORDS, save_tokenizer

NUMBERS = {"de": 0, "en": 1, "fr": 2}
TOP = VectorSpec("mean", 2)


@pytest.fixture(scope="module")
def xlm(tmp_path_factory) -> Path:
    """Write a tiny XLM of three languages whose language embeddings are larger than its word embeddings."""
    directory = tmp_path_factory.mktemp("xlm")
    size = len(save_tokenizer(directory, WORDS))
    torch.manual_seed(3)
    config = XLMConfig(
        vocab_size=size, emb_dim=16, n_layers=2, n_heads=2, max_position_embeddings=40, pad_token_id=1, pad_index=1,
        n_langs=3, lang2id=NUMBERS, id2lang={0: "de", 1: "en", 2: "fr"}, mask_token_id=size - 1, dropout=0.0,
        attention_dropout=0.0,
    )  # fmt: skip
    model = XLMWithLMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
        model.transformer.lang_embeddings.weight.mul_(10)
    model.save_pretrained(directory)
    return directory


def compute_transformers_vectors(directory: Path, texts: list[str], language: str | None) -> torch.Tensor:
    """Compute the mean of the last layer with Transformers alone, one text at a time."""
    model, tokenizer = XLMModel.from_pretrained(directory).eval(), AutoTokenizer.from_pretrained(directory)
    vectors = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        langs = None if language is None else torch.full_like(ids, NUMBERS[language])
        with torch.inference_mode():
            vectors.append(model(input_ids=ids, langs=langs).last_hidden_state[0].mean(dim=0))
    return torch.stack(vectors)


def test_sentence_vectors_equal_transformers_with_language_embeddings(xlm):
    encoder = embedding.VectorEncoder(*load_encoder(xlm), 2, 32)
    english, german = TEXTS[:2], TEXTS[2:4]

    english_vectors = encoder.embed(english, [TOP], "en")[TOP].cpu()
    german_vectors = encoder.embed(german, [TOP], "de")[TOP].cpu()

    torch.testing.assert_close(english_vectors, compute_transformers_vectors(xlm, english, "en"), atol=1e-5, rtol=0)
    torch.testing.assert_close(german_vectors, compute_transformers_vectors(xlm, german, "de"), atol=1e-5, rtol=0)
    assert not english_vectors.allclose(compute_transformers_vectors(xlm, english, None), atol=0.05)


def test_perplexity_equals_transformers_with_language_embeddings(xlm):
    model, tokenizer = load_encoder(xlm)
    loss_sum, loss_count = 0.0, 0
    for number, text in enumerate(TEXTS):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        words = np.arange(1, ids.shape[1] - 1)
        masked_positions = words[perplexity.choose_masked_positions(len(words), make_rng(1, "perplexity", number))]
        answers = ids[0, masked_positions]
        masked = ids.clone()
        masked[0, masked_positions] = tokenizer.mask_token_id
        with torch.inference_mode():
            output = model(input_ids=masked, langs=torch.full_like(ids, NUMBERS["fr"]))
        logits = output.logits[0, masked_positions]
        loss_sum += F.cross_entropy(logits, answers, reduction="sum").item()
        loss_count += len(masked_positions)

    perplexity_in_french = perplexity.compute_perplexity(model, tokenizer, TEXTS, 2, 32, 1, "fr")

    assert perplexity_in_french == pytest.approx(np.exp(loss_sum / loss_count), rel=1e-4)


def test_classifier_of_pairs_uses_the_language_of_the_row_for_both_sides(xlm, tmp_path):
    table = pd.DataFrame({"text": TEXTS, "text_pair": TEXTS[::-1], "language": ["en", "de", "fr", "de"]})
    module = task_models.create(xlm, TASKS["classification"].head, ["no", "yes"])
    task_models.export(module, xlm, tmp_path)
    transformers_model = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()

    examples = encode_rows(table, tmp_path, 32)
    logits = task_models.compute_logits(task_models.load(tmp_path, TASKS["classification"].head), examples)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for row, (text, pair, language) in enumerate(table.itertuples(index=False)):
        ids = tokenizer(text, pair, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            expected = transformers_model(input_ids=ids, langs=torch.full_like(ids, NUMBERS[language])).logits[0]
        torch.testing.assert_close(logits[row], expected, atol=1e-5, rtol=0)


def test_sentences_to_tag_and_paragraphs_have_their_own_language(xlm):
    sentences = [Sentence(("save", "it"), ("O", "O")), Sentence(("a",), ("O",))]
    config = AnsweringConfig.parse({"train": ["t"], "test": ["q"], "question_tokens": 4, "stride": 2, "max_tokens": 14})
    question = Question("1", "save it", 0, ("door",), None)
    questions = QuestionSet(Path("test.json"), ("de", "fr"), ("open the door and save the file",), (question,))

    tagged, _ = named_entities.encode(sentences, xlm, 32, ["fr", "de"])
    windows = question_answering.WindowMaker(config, xlm).make_windows(questions)

    assert tagged.types.tolist() == [NUMBERS["fr"]] * 4 + [NUMBERS["de"]] * 3
    assert set(windows.examples.types.tolist()) == {NUMBERS["de"]}  # the paragraph's, not the question's


def test_language_without_embedding_is_refused(xlm):
    model, tokenizer = load_encoder(xlm)

    with pytest.raises(InputError, match="no embedding of language swh: give text in de, en, fr"):
        embedding.VectorEncoder(model, tokenizer, 2, 32).embed(TEXTS, [TOP], "swh")
    assert padded.find_language_id(model.config, "deu_Latn") == NUMBERS["de"]


def test_models_without_language_embeddings_ignore_the_language(tiny_encoders):
    encoder = embedding.VectorEncoder(*load_encoder(tiny_encoders["first"]), 2, 32)

    assert encoder.embed(TEXTS, [TOP], "sw")[TOP].equal(encoder.embed(TEXTS, [TOP])[TOP])
