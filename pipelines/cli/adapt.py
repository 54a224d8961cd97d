"""The command `infoxlm adapt`: train a public encoder on translations, compare it with its start, and export it."""

from pathlib import Path
from typing import Annotated

import typer

from infoxlm_core.errors import InputError
from pipelines.cli.app import CONFIGS, Overrides, Store, command, split_list


@command()
def adapt(
    start: Annotated[
        str,
        typer.Argument(
            help="Encoder to adapt: a directory in Hugging Face format, s3://bucket/prefix, a hub name such as "
            "intfloat/multilingual-e5-base, or models:/NAME@ALIAS."
        ),
    ],
    pairs: Annotated[
        list[str],
        typer.Option(
            help="Translations: a file .tmx, .xliff, .tsv, .jsonl or .parquet, or a directory, wheel or zip file with "
            "gettext catalogs. Repeatable."
        ),
    ],
    languages: Annotated[
        str, typer.Option(help="Comma-separated language codes. The first one is a side of every pair.")
    ],
    guard: Annotated[
        str,
        typer.Option(
            help="Directory of aligned sentences, such as Tatoeba, on which the result must lose less than half a "
            "point. Default: messages of Django from the package index."
        ),
    ] = "",
    prefix: Annotated[
        str | None,
        typer.Option(help="Text before every sentence, such as 'query: '. Default: the default prompt of the encoder."),
    ] = None,
    config: Annotated[
        Path,
        typer.Option(
            help="YAML file to write; its name is also the name of the registered model. If the file exists with the "
            "same settings, the run continues."
        ),
    ] = Path("adapted.yaml"),
    output: Annotated[Path, typer.Option(help="Directory for the exported encoder.")] = Path("adapted"),
    to: Annotated[
        str, typer.Option(help="Comma-separated formats of the export: sentence-transformers, onnx, onnx-int8.")
    ] = "sentence-transformers",
    store: Store = "runs",
    set_: Overrides = None,
) -> None:
    """Train a public encoder on your translations, and export the result if it is better than the original.

    The command holds out a twentieth of the messages, or up to a quarter of a small memory. The report compares the
    result with the original encoder on the held-out pairs and on the guard set. The result passes if it is better on
    the held-out pairs and loses less than half a point on the guard set. Otherwise, it is only registered as a
    candidate, nothing is exported, and the exit code is 2.

    The command writes all settings to a YAML file. You can change this file and run it with `infoxlm run`. If the
    command is interrupted, run it again to resume.
    """
    codes = split_list(languages)
    if len(codes) < 2:
        raise InputError(f"--languages {languages!r} is too short. Give at least two language codes, such as en,de.")
    from components.platform import artifacts, sources
    from infoxlm_core.config import EvaluationConfig
    from infoxlm_core.stages import export

    export_settings = export.ExportSettings(split_list(to))
    export.check_settings(export_settings, output)  # now, because the training before the export may take long
    from pipelines import adaptation, local
    from pipelines.infoxlm import infoxlm

    local_store = artifacts.local_directory(store)
    # The name contains the languages, because a guard set that exists is not written again.
    guard_directory = guard or str(config.parent / f"guard-{'-'.join(codes)}")
    settings = adaptation.plan_settings(start, pairs, codes, guard_directory, prefix, local_store)
    if not guard:
        adaptation.write_default_guard(Path(guard_directory), codes, local_store)
    # Check the guard before the config is written, because a config with another guard would have to be removed first.
    sources.check_guard_set(EvaluationConfig.parse({"guard": settings["evaluation.guard"]}), local_store)
    settings["registration.name"] = config.stem  # the gate cannot compare models trained on different translations
    run_config = adaptation.write_config(config, CONFIGS / "adapt.yaml", settings, set_ or ())
    typer.echo(f"settings    {config}")
    local.run_pipeline(infoxlm, local.select_sections(run_config, infoxlm), store, config.stem)
    summary = local.read_summary(store)
    typer.echo(summary)
    model = adaptation.find_promoted_model(summary, local_store)
    export.export(sources.fetch_model(model, local_store), model, export_settings, output)
    typer.echo(f"exported    {output}: see {output / 'README.md'}")
