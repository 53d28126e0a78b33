"""Let TLC explore a specification within given limits,
or hunt the mistakes that are planted in it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from specs.model_checker import ORDERING, PLANTED, REPLICATION, STEPS, Model, check

MODELS: Final = {"replication": REPLICATION, "ordering": ORDERING, "steps": STEPS}


def main() -> int:
    """Exit code 0: the invariants hold, or every mistake was found."""
    parser = argparse.ArgumentParser(description=__doc__, prog="tools/run specs")
    parser.add_argument("specification", choices=MODELS)
    parser.add_argument(
        "limits",
        nargs="*",
        metavar="NAME=VALUE",
        help="limits of the model, such as MaxEpoch=3 (docs/JUDGES.md)",
    )
    parser.add_argument(
        "--mistakes",
        action="store_true",
        help="hunt the planted mistakes, each within its own limits",
    )
    parser.add_argument(
        "--workers",
        type=int,
        help="threads of TLC (default: one for each processor; to hunt mistakes one)",
    )
    options = parser.parse_args()
    model = MODELS[options.specification]
    with tempfile.TemporaryDirectory() as folder:
        if options.mistakes:
            return hunt(
                model, Path(folder), options.workers or 1
            )  # with more, TLC's first counterexample may not be the shortest
        within = model.within(**dict(each.split("=", 1) for each in options.limits))
        return explore(within, Path(folder), options.workers or os.cpu_count() or 1)


def explore(model: Model, folder: Path, workers: int) -> int:
    begun = time.monotonic()
    verdict = check(
        model, folder, workers=workers, progress=lambda line: print(line, file=sys.stderr)
    )
    limits = ", ".join(f"{name}={value}" for name, value in model.constants.items())
    print(f"{model.name} with {limits}")
    print(
        f"{verdict.generated:,} states, {verdict.distinct:,} of them distinct, in "
        f"{time.monotonic() - begun:,.0f} s"
    )
    if verdict.violated is None:
        print("all invariants hold")
        return 0
    print(verdict.output[verdict.output.index("Error:") :])
    return 1


def hunt(model: Model, folder: Path, workers: int) -> int:
    missed = 0
    for number, (planted_in, mistake) in enumerate(PLANTED):
        if planted_in is not model:
            continue
        text = mistake.made_in(model.text)
        verdict = check(
            model.within(**mistake.limits), folder / str(number), text=text, workers=workers
        )
        missed += verdict.violated is None
        found = (
            "not found"
            if verdict.violated is None
            else f"breaks {verdict.violated} after {verdict.steps} steps"
        )
        print(f"{mistake.name}: {found} ({verdict.generated:,} states)", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
