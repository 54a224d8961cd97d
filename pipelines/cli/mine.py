"""The command `infoxlm mine`: find translation pairs in two files of sentences."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infoxlm_core import manifests
from infoxlm_core.errors import InputError
from pipelines.cli.app import Store, command, split_list

if TYPE_CHECKING:
    from infoxlm_core.tasks.mining.mine import MiningResult


@command()
def mine(
    model: Annotated[
        str, typer.Argument(help="Directory in Hugging Face format, models:/NAME@ALIAS or models:/NAME/VERSION.")
    ],
    source: Annotated[Path, typer.Argument(help="File with one sentence per line, such as news.en or en.txt.gz.")],
    target: Annotated[Path, typer.Argument(help="File with one sentence per line in the other language.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File for the pairs: .tsv, .tmx or .parquet.")],
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="File of known translation pairs (.tsv, .tmx, .xliff, .jsonl or .parquet), which determine the margin."
        ),
    ] = None,
    precision: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="With --calibrate: share of the mined pairs that must be right.")
    ] = 0.95,
    threshold: Annotated[
        float | None, typer.Option(help="Instead of --calibrate: smallest margin of a pair. 0 writes all pairs.")
    ] = None,
    languages: Annotated[
        str, typer.Option(help="Languages of the two files, such as en,de. Default: the languages in their names.")
    ] = "",
    prefix: Annotated[
        str | None,
        typer.Option(help="Text before every sentence. Default: the prefix with which the model was trained."),
    ] = None,
    store: Store = "runs",
) -> None:
    """Find translation pairs in two files of sentences, in which most sentences have no translation.

    The command ranks pairs by the ratio margin: the cosine of two lines, divided by the mean cosine to their nearest
    neighbours. Each line is in at most one pair. Duplicate lines are used once, and equal lines are not a pair.

    The right threshold of the margin depends on the model and the text. With --calibrate, the command adds known
    translation pairs to the two files, and chooses the smallest margin that reaches --precision. Use 1,000 to 2,000
    pairs of the same kind of text. They must not be in the model's training text.

    The command also writes OUTPUT.json with the precision and recall at each margin, a histogram of the margins, and
    the numbers of dropped lines. It stores the vectors in ~/.cache/infoxlm/vectors. A second call with the same files
    and model reuses these vectors.

    infoxlm mine models:/infoxlm@champion news.en news.de --calibrate memory.tmx --output mined.tmx
    """
    from components.adapters.mlflow import model_registry
    from components.platform import artifacts
    from components.settings.environment import cache
    from infoxlm_core.tasks import embedding
    from infoxlm_core.tasks.mining import files, neighbours
    from infoxlm_core.tasks.mining import mine as mining

    if (calibrate is None) == (threshold is None):
        raise InputError("The margin needs one of --calibrate and --threshold. Give one of them, not both.")
    # Check all files before the model is downloaded and computes vectors.
    files.check_output(output)
    codes = files.check_languages(split_list(languages)) if languages else files.infer_languages((source, target))
    corpus = mining.read_corpus((source, target), calibrate, codes)
    # The search also compares the planted pairs, which `mine_pairs` adds to both files.
    neighbours.check_faiss_if_large(
        len(corpus.sources.texts) + len(corpus.planted), len(corpus.targets.texts) + len(corpus.planted)
    )
    directory = model_registry.load_encoder(model, artifacts.local_directory(store))
    embedder = embedding.load_embedder(directory, prefix=prefix)
    model_digest = manifests.digest_files(directory)  # a key of the stored vectors
    mined = mining.mine_pairs(corpus, embedder, model_digest, cache() / "vectors", precision, threshold)
    files.write_pairs(output, codes, mining.list_pairs(corpus, mined))
    report = {
        "model": model,
        "files": [str(source), str(target)],
        "languages": codes,
        "vector": embedder.spec._asdict() | {"prefix": embedder.encoder.prefix},
        **mining.describe(corpus, mined),
    }
    report_path = output.with_name(f"{output.name}.json")
    manifests.write_atomically(report_path, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    typer.echo(summarise(mined))
    typer.echo(f"wrote {output} and {report_path}")


def summarise(mined: "MiningResult") -> str:
    """Summarise the mined pairs in one line."""
    summary = f"{mined.num_pairs:,} of {len(mined.matches.margins):,} matches have margin {mined.margin:.4f} or more"
    if mined.curves is None:  # without --calibrate, no known pairs were planted in the files
        return summary
    chosen = mined.curves.look_up(mined.margin)
    return f"{summary}: precision at least {chosen['precision']:.3f}, recall {chosen['recall']:.3f} of planted pairs"
