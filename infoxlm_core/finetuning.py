"""Stage: encoder + labelled text -> a classifier of sentences or sentence pairs, trained on some languages.

Any CSV, TSV or Parquet file with text (or a pair of texts), label and language columns will do. The rows of its test
split, in every language, travel with the model (`test.parquet`), so that evaluation measures on text it never saw.
"""

import csv
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from infoxlm_core.config import FinetuningConfig
from infoxlm_core.data.layouts import Sequences, positions
from infoxlm_core.data.sampling import generator
from infoxlm_core.data.vocabulary import BOS, EOS
from infoxlm_core.errors import ConfigError, CorpusTooSmall, InputError
from infoxlm_core.model import pretrained
from infoxlm_core.model.encoder import initialise
from infoxlm_core.model.heads import Classifier
from infoxlm_core.model.tokenizers import load_fast
from infoxlm_core.training import distributed, loop
from infoxlm_core.training.tracker import FileTracker, Tracker

logger = logging.getLogger(__name__)


def finetune(
    config: FinetuningConfig, encoder: Path, corpus: Path | None, output: Path, run: Path,
    track: Callable[[Path], Tracker] = FileTracker,
) -> dict:  # fmt: skip
    """Fine-tune a classifier on an encoder in Hugging Face format; every worker calls this.

    Args:
        corpus: the prepared corpus whose labelled set is used when `config.data` is None.
        output: gets the model, its tokenizer, `test.parquet` and `metrics.jsonl`.
        run: gets checkpoints; the same directory continues the same run.

    Returns:
        the last step's figures.

    Raises:
        InputError: a column is missing or a row is not usable, with file and row.
        CorpusTooSmall: no text to train on, or fewer than two labels.
    """
    table = read_labelled(config, corpus)
    train = table[(table["split"] == "train") & table["language"].isin(config.train_languages)]
    labels = sorted(train["label"].unique())
    if len(labels) < 2:
        raise CorpusTooSmall(
            f"{len(train)} training rows in {', '.join(config.train_languages)} with labels {labels}: "
            f"have={len(labels)} need=2 labels; set finetuning.train_languages to languages of the data"
        )
    size = pretrained.size_of(encoder)
    model = Classifier(pretrained.load_encoder(encoder), len(labels), config.head_dropout)
    for head in (model.dense, model.output):
        initialise(head, config.seed)
    sequences = _lay_out(train, encoder, min(config.max_tokens, size.positions - 2))
    answers = train["label"].map({label: number for number, label in enumerate(labels)}).to_numpy()
    finetuning = Finetuning(config, model.to(distributed.device()), sequences, answers)
    identity = loop.fingerprint(config) | {"encoder": pretrained.digest_of(encoder), "rows": len(table)}
    logger.info("fine-tuning on %d rows with %d labels", len(train), len(labels))
    with loop.run_directory(run, identity, config.checkpoints, track) as (checkpoints, tracker):
        figures = loop.train(finetuning, config.optimization, checkpoints, tracker, config.log_every)
        distributed.on_first(lambda: _export(model, labels, table, encoder, run, output))
    return figures


def _export(model: Classifier, labels: list[str], table: pd.DataFrame, encoder: Path, run: Path, output: Path) -> None:
    pretrained.export_classifier(model, labels, encoder, output)
    test = table[table["split"] == "test"]
    if strange := (~test["label"].isin(labels)).sum():
        logger.warning("%d of %d test rows have a label that training never saw: left out", strange, len(test))
        test = test[test["label"].isin(labels)]
    test.drop(columns="split").to_parquet(output / "test.parquet", index=False)
    loop.export_curves(run, output)


def read_labelled(config: FinetuningConfig, corpus: Path | None) -> pd.DataFrame:
    """Read labelled text into columns text, text_pair (if there is one), label, language, split."""
    path = Path(config.data) if config.data else (corpus or Path()) / "labelled.parquet"
    readers = {".parquet": pd.read_parquet, ".csv": _read_csv(","), ".tsv": _read_csv("\t")}
    if path.suffix not in readers:
        raise InputError(f"{path}: give labelled text as .csv, .tsv or .parquet (finetuning.data)")
    if not path.is_file():
        remedy = "set finetuning.data" if config.data else "set preparation.labelled_share above 0 or finetuning.data"
        raise InputError(f"{path}: no such file: {remedy}")
    try:
        found = readers[path.suffix](path)
    except (ValueError, OSError, csv.Error) as error:
        raise InputError(f"{path}: not readable ({' '.join(str(error).split())}): save it as UTF-8") from None
    wanted = {"text": config.text, "label": config.label, "language": config.language}
    wanted |= {"text_pair": config.text_pair} if config.text_pair else {}
    for field, column in wanted.items():
        if column not in found:
            raise InputError(f"{path}: no column {column!r} (finetuning.{field}); there are {', '.join(found.columns)}")
    table = pd.DataFrame({name: found[column].astype("string") for name, column in wanted.items()})
    if config.split in found:
        table["split"] = found[config.split].astype("string")
    else:  # a tenth is set aside, the same one every time
        luck = generator(config.seed, "split").random(len(table))
        table["split"] = pd.Series(np.where(luck < 0.1, "test", "train"), dtype="string")
    empty = table.isna() | (table.apply(lambda column: column.str.strip()) == "")
    if empty.any(axis=None):
        row, column = np.argwhere(empty.to_numpy())[0]
        # the header is line 1 of a text file
        raise InputError(f"{path}:{row + 2}: {table.columns[column]} is empty: fill it or remove the row")
    unknown = ~table["split"].isin(["train", "test"])
    if unknown.any():
        row = int(np.argmax(unknown))
        raise InputError(
            f"{path}:{row + 2}: {config.split} is {table['split'][row]!r}: use train or test, or remove the row"
        )
    return table


def _read_csv(separator: str) -> Callable[[Path], pd.DataFrame]:
    quoting: Any = csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL  # tab-separated text is not quoted

    def read(path: Path) -> pd.DataFrame:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=separator, quoting=quoting)
            header, rows = next(reader, []), []
            for row in reader:
                if len(row) != len(header):
                    raise InputError(
                        f"{path}:{reader.line_num}: {len(row)} fields, the header has {len(header)}: quote the text"
                    )
                rows.append(row)
        return pd.DataFrame(rows, columns=header, dtype="string")

    return read


def _lay_out(table: pd.DataFrame, encoder: Path, limit: int) -> Sequences:
    """`<s> a </s>`, or `<s> a </s> </s> b </s>` for pairs: XLM-R's task layout, the longer side cut first."""
    tokenizer = load_fast(encoder).backend_tokenizer

    def encode(texts: pd.Series) -> list[list[int]]:
        return [found.ids for found in tokenizer.encode_batch(texts.tolist(), add_special_tokens=False)]

    first = encode(table["text"])
    second = encode(table["text_pair"]) if "text_pair" in table else [None] * len(first)
    rows = []
    for a, b in zip(first, second, strict=True):
        if b is None:
            rows.append(np.concatenate([[BOS], a[: limit - 2], [EOS]]))
            continue
        room = limit - 4
        share_a = max(room - len(b), min(len(a), room // 2))
        share_b = room - min(len(a), share_a)
        rows.append(np.concatenate([[BOS], a[:share_a], [EOS, EOS], b[:share_b], [EOS]]))
    return Sequences(np.concatenate(rows).astype(np.int64), np.array([len(row) for row in rows]))


@dataclass(frozen=True)
class LabelledBatch:
    """One micro-batch: (T,) ids of N packed sequences, their (N,) labels, and (N, 2, d) what dropout keeps."""

    ids: Tensor
    lengths: tuple[int, ...]
    labels: Tensor
    kept: Tensor


class Finetuning:
    """The learner of a classifier: every row once an epoch, in an order by (seed, epoch)."""

    weighting = "mean"

    def __init__(self, config: FinetuningConfig, module: Classifier, sequences: Sequences, labels: np.ndarray) -> None:
        self.config, self.module, self.sequences, self.labels = config, module, sequences, labels
        self.weights = {"classification": 1.0}
        self.ends = np.concatenate([[0], sequences.lengths.cumsum()])

    def begin(self) -> None:
        """Nothing to prepare."""

    def batches(self, step: int) -> Sequence[LabelledBatch]:
        size, count, workers = self.config.batch_size, len(self.labels), distributed.world_size()
        if workers > size:
            raise ConfigError(f"{workers} workers must not exceed finetuning.batch_size ({size})")
        mine = np.array_split(np.arange(size), workers)[distributed.rank()]
        places = step * size + mine
        order = {
            epoch: generator(self.config.seed, "epoch", epoch).permutation(count) for epoch in set(places // count)
        }
        rows = np.array([order[place // count][place % count] for place in places], np.int64)
        # drawn for the whole batch on every worker: dropout does not depend on who has which sample
        luck = generator(self.config.seed, "dropout", step).random((size, 2, self.module.encoder.size.hidden))
        kept = torch.from_numpy(luck[mine] >= self.config.head_dropout)
        micro = self.config.micro_batch_size
        return [self._pack(rows[i : i + micro], kept[i : i + micro]) for i in range(0, len(rows), micro)]

    def _pack(self, rows: np.ndarray, kept: Tensor) -> LabelledBatch:
        parts = [self.sequences.flat[self.ends[row] : self.ends[row + 1]] for row in rows]
        return LabelledBatch(
            torch.from_numpy(np.concatenate(parts)),
            tuple(map(len, parts)),
            torch.from_numpy(self.labels[rows].astype(np.int64)),
            kept,
        )

    def counts(self, batches: Sequence[LabelledBatch]) -> dict[str, int]:
        return {
            "classification": sum(len(batch.labels) for batch in batches),
            "tokens": sum(len(batch.ids) for batch in batches),
        }

    def losses(self, batch: LabelledBatch, scales: Mapping[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        device = distributed.device()
        where = torch.from_numpy(positions(np.array(batch.lengths))).to(device)
        labels = batch.labels.to(device)
        with loop.autocast(device):
            logits = self.module(batch.ids.to(device), where, batch.lengths, batch.kept.to(device))
        loss = F.cross_entropy(logits.float(), labels, reduction="sum")
        hits = (logits.argmax(dim=1) == labels).sum()
        return loss * scales["classification"], {"classification": loss.detach(), "hits": hits}

    def statistics(self, sums: Mapping[str, Any], counts: Mapping[str, float]) -> dict[str, float]:
        return {"train/accuracy": sums["hits"] / counts["classification"]}

    def observe(self, step: int) -> dict[str, float]:
        return {}

    def finish_step(self, step: int, good: bool) -> None:
        """Nothing but the weights moves."""

    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """There is nothing but weights and optimizer."""
