"""Stage: encoders x tasks -> fine-tunings to run, then one comparison beside the published numbers.

points.plan        a suite's config -> its points: a model, a task, a place in the grid, a seed
measuring.check    what a task reads, looked at before anything is trained
measuring.measure  one point's model -> scores
summary.summarise  scores of all points -> for each model and task the best of the grid, mean and deviation of seeds
report.write       -> suite.html, suite.md, suite.json, model_card.md, tables and figures
summary.flatten    -> metrics of a tracking server, names stable from run to run
"""

from infoxlm_core.results.suite.measuring import SCORES, check, measure, read_settings
from infoxlm_core.results.suite.points import plan
from infoxlm_core.results.suite.report import write
from infoxlm_core.results.suite.summary import flatten, flatten_scores, summarise

__all__ = [
    "SCORES",
    "check",
    "flatten",
    "flatten_scores",
    "measure",
    "plan",
    "read_settings",
    "summarise",
    "write",
]
