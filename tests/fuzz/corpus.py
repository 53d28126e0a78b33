"""The corpus: for each target inputs that take different ways through the code, one a line, in base64; and how many inputs were tried."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent / "corpus"
COUNTS: Final = FOLDER / "counts.json"
TARGET_BYTES_MAX: Final = 40 << 10
"""The limit for the inputs of one target. The longest inputs are left out."""


def inputs_of(target: str) -> list[bytes]:
    """The kept inputs of a target."""
    path = FOLDER / f"{target}.txt"
    return [base64.b64decode(line) for line in path.read_text().splitlines()] if path.exists() else []


def keep(target: str, inputs: list[bytes]) -> None:
    """Replace the inputs of a target, shortest first."""
    lines, size = [], 0
    for each in sorted(set(inputs), key=lambda each: (len(each), each)):
        line = base64.b64encode(each).decode()
        size += len(line) + 1
        if size > TARGET_BYTES_MAX:
            break
        lines.append(line + "\n")
    (FOLDER / f"{target}.txt").write_text("".join(lines))


def counts() -> dict[str, int]:
    """How many inputs each target was given, over all runs of tools/run fuzz."""
    return dict(json.loads(COUNTS.read_text())) if COUNTS.exists() else {}


def add_count(target: str, tried: int) -> None:
    """Add the inputs of one run."""
    found = counts()
    found[target] = found.get(target, 0) + tried
    COUNTS.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
