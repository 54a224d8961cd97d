"""Write a prepared corpus of given text, in the layout of the preparation stage, and its shards."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from infoxlm_core import manifests
from infoxlm_core.config import TokenizationConfig
from infoxlm_core.stages.tokenization import tokenize


def write_corpus(directory: Path, sentences: dict[str, list[str]], pairs: dict[str, list[tuple[str, str]]]) -> Path:
    """Write monolingual sentences by language, and pairs by language pair, and return the folder."""
    for language, texts in sentences.items():
        path = directory / "mono" / language / "toy.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(pa.table({"text": texts}), path)
    for name, rows in pairs.items():
        path = directory / "pairs" / name / "toy.parquet"
        path.parent.mkdir(parents=True)
        sources = [source for source, _ in rows]
        targets = [target for _, target in rows]
        pq.write_table(pa.table({"source": sources, "target": targets}), path)
    manifests.write(directory, "corpus")
    return directory


def tokenized(config: TokenizationConfig, corpus: Path, output: Path) -> Path:
    manifests.write(output, "shards", tokenize(config, corpus, output))
    return output
