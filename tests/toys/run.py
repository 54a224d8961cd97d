"""The config of a run of the whole DAG on toy catalogs."""

from pathlib import Path

import yaml

from tests.toys.text import write_catalogs

STEPS = 300


def write_config(directory: Path) -> Path:
    """Write the config of a run, and the catalogs that it reads."""
    write_catalogs(directory / "text", {"mail": 350, "wiki": 350, "shop": 350, "held": 150})
    values = {
        "preparation": {
            "languages": ["en", "de", "fr"],
            "corpora": [
                {"name": name, "format": "gettext", "path": str(directory / "text" / name)}
                for name in ("mail", "wiki", "shop", "held")
            ],
            "held_out": ["held"],
            "labelled_share": 0.1,
        },
        "tokenization": {"vocabulary_size": 130, "processes": 1},
        "pretraining": {
            "model": {"layers": 2, "hidden": 32, "ffn": 64, "heads": 2, "max_tokens": 64},
            "contrast": {"layer": 1, "queue_size": 128, "momentum": 0.99, "temperature": 0.05, "normalise": True,
                         "pooling": "mean"},
            "batches": {"global_batch_size": 16, "virtual_shards": 2, "micro_batch_size": 16, "block_tokens": 32,
                        "side_tokens": 30},
            "optimization": {"steps": STEPS, "learning_rate": 0.002, "warmup_steps": 20},
            "checkpoints": {"every": 20},
        },
        "finetuning": {
            "max_tokens": 64,
            "dropout": 0.0,  # so that runs with different numbers of workers are equal
            "optimization": {"steps": 20, "learning_rate": 0.001, "warmup_steps": 2},
        },
        "evaluation": {"retrieval_pairs": 100, "perplexity_sentences": 40},
        "registration": {"name": "toy"},
    }  # fmt: skip
    path = directory / "toy.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def write_translation_config(directory: Path) -> Path:
    """Write the config of a run that trains a translator of English and German, and the catalogs that it reads."""
    values = yaml.safe_load(write_config(directory).read_text())
    del values["finetuning"], values["evaluation"]
    values["preparation"] |= {"languages": ["en", "de"], "labelled_share": 0.0}
    values["tokenization"]["vocabulary_size"] = 95
    values["pretraining"] |= {
        "system": "xlm",
        "objectives": {"mlm": 1, "tlm": 0, "xlco": 0, "masking": "xlm"},
        "optimization": {"steps": 60, "learning_rate": 0.003, "warmup_steps": 6},
    }
    values["pretraining"]["model"] |= {"ffn": 128, "max_tokens": 80}
    values["translation"] = {
        "languages": ["en", "de"],
        "parallel_share": 0.5,
        "denoising": [[0, 1.0], [40, 0.0]],
        "side_tokens": 30,
        "batch_tokens": 200,
        "back_translation_sentences": 4,
        "optimization": {"steps": 80, "learning_rate": 0.01, "warmup_steps": 6},
        "validate_every": 40,
        "validation_pairs": 20,
    }
    path = directory / "toy-translation.yaml"
    path.write_text(yaml.safe_dump(values))
    return path
