"""The driver of a RayJob: reads what is to be trained, trains, and leaves the reason in the store if that fails.

python -m components.job s3://bucket/store/work/j-pretrain-3f2a9c01de.json
"""

import json
import os
import sys

from components import runtime, training
from components.adapters import object_store
from infoxlm_core.errors import InputError


def main(place: str) -> None:
    """Train what `place` describes; exit with the code that the error has, if there is one."""
    store, job = place.rpartition("/work/")[0], place.rpartition("/")[2].removesuffix(".json")
    with runtime.ending_clearly(store, "job", outcome_of=job):
        found = object_store.get(place)
        if found is None:
            raise InputError(f"{place}: there is no such work: submit the pipeline again")
        work = training.Work(**json.loads(found[0]))
        os.environ["RUN_ID"] = work.pipeline_run
        for left in (runtime.outcome_name(job), f"runs/{work.run}/stop"):  # by an earlier attempt
            object_store.delete(f"{store}/{left}")
        training.here(work)


if __name__ == "__main__":
    main(sys.argv[1])
