"""The driver of a RayJob: reads what is to be done, does it, and leaves the reason in the store if that fails.

python -m components.job s3://bucket/store/work/j-pretrain-3f2a9c01de.json
"""

import json
import os
import sys

from components import runtime, work
from components.adapters import object_store
from infoxlm_core.errors import InputError


def main(place: str) -> None:
    """Do what `place` describes; exit with the code that the error has, if there is one."""
    store, job = place.rpartition("/work/")[0], place.rpartition("/")[2].removesuffix(".json")
    with runtime.ending_clearly(store, "job", outcome_of=job):
        found = object_store.get(place)
        if found is None:
            raise InputError(f"{place}: there is no such work: submit the pipeline again")
        wanted = work.Work(**json.loads(found[0]))
        os.environ["RUN_ID"] = wanted.pipeline_run
        for left in (runtime.outcome_name(job), f"runs/{wanted.run}/stop"):  # by an earlier attempt
            object_store.delete(f"{store}/{left}")
        work.here(wanted)


if __name__ == "__main__":
    main(sys.argv[1])
