"""python -m benchmarks [NAME …] [--quick]: compare our speed with other projects and write a dated report."""

import argparse
import importlib
import logging
import os
import sys
import time

# torch reads these variables when it is imported.
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

NAMES = ("mlm_step", "infoxlm_step", "end_to_end", "finetune_step", "sampler", "memory")


def main() -> int:
    """Run the named benchmarks and print the path of their report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    # The choices include [], because argparse checks the default of nargs="*", too.
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], metavar="NAME", help=" · ".join(NAMES))
    parser.add_argument("--quick", action="store_true", help="few rounds with the small vocabulary; takes two minutes")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("benchmarks").setLevel(logging.INFO)

    from benchmarks import machine
    from benchmarks.speed import inputs, report

    machine.pin()
    names = tuple(options.names) or NAMES
    load_before = os.getloadavg()  # other work on the machine, before the benchmarks add their own
    ceilings = machine.ceilings()
    cases = []
    for name in names:
        cases += importlib.import_module(f"benchmarks.speed.{name}").run(options.quick)
    settings = {
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()), "quick": options.quick, "seed": inputs.SEED,
        "machine": machine.facts(), "ceilings": ceilings,
        "load": {"before": load_before, "after": os.getloadavg()},
    }  # fmt: skip
    file_name = time.strftime("%Y-%m-%d-%H%M", time.gmtime())
    if names != NAMES:
        file_name += "-" + "-".join(names)
    if options.quick:
        file_name += "-quick"
    print(report.write(cases, settings, file_name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
