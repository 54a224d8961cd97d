"""What the InfoXLM paper reports for its ablations, to stand beside ours where the task is the same.

Source: Chi et al. 2020, "InfoXLM", arXiv 2007.07834 version 1, Tables 6 and 7: base-sized models trained on 15
languages, means of five runs. XNLI is accuracy, MLQA is F1 and exact match; shares from 0 to 1, as our own metrics.
"""

SOURCE = "InfoXLM (Chi et al. 2020, arXiv 2007.07834v1), Tables 6 and 7: base15 models, means of five runs"

METRICS = {
    "xnli/mean": "XNLI, accuracy",
    "mlqa/f1": "MLQA, F1",
    "mlqa/exact_match": "MLQA, exact match",
}
"""The names under which a run must log the same tasks to stand beside the paper; the demo has others."""

ABLATIONS: dict[str, dict[str, float]] = {
    "full": {"xnli/mean": 0.7645, "mlqa/f1": 0.6787, "mlqa/exact_match": 0.4958},
    "-XLCO": {"xnli/mean": 0.7624, "mlqa/f1": 0.6743, "mlqa/exact_match": 0.4923},
    "-TLM": {"xnli/mean": 0.7585, "mlqa/f1": 0.6784, "mlqa/exact_match": 0.4954},
    "-TLM:universal": {"mlqa/f1": 0.6742, "mlqa/exact_match": 0.4927},
    "-TLM-XLCO": {"xnli/mean": 0.7533, "mlqa/f1": 0.6686, "mlqa/exact_match": 0.4882},
    "-TLM-Mixup": {"xnli/mean": 0.7543, "mlqa/f1": 0.6721, "mlqa/exact_match": 0.4919},
    "-TLM-Momentum": {"xnli/mean": 0.7532, "mlqa/f1": 0.6658, "mlqa/exact_match": 0.4866},
    "-Universal": {"xnli/mean": 0.7612, "mlqa/f1": 0.6783, "mlqa/exact_match": 0.4950},
}
"""By variant. -TLM of Table 7 is the row of the last layer in Table 6; with the universal layer (`-TLM:universal`) the
paper gives MLQA alone. For -TLM-Mixup and -TLM-Momentum it does not say the layer."""
