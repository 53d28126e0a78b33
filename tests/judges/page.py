"""The blocks of docs/JUDGES.md that runs of suites write, and the record that they come from,
docs/judges.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from textwrap import fill
from typing import Any, Final

from judges.outcomes import Difference, Verdict
from judges.runner import Report, differences
from judges.suite import ROOT, Suite
from judges.suites import SUITES

RECORD: Final = ROOT / "docs" / "judges.json"
PAGE: Final = ROOT / "docs" / "JUDGES.md"
BLOCK: Final = re.compile(r"(<!-- suites: (\w+) -->\n).*?(<!-- end of suites -->)", re.DOTALL)

Record = Mapping[str, Mapping[str, Any]]


def counted(found: Verdict, source: str, date: str) -> dict[str, Any]:
    """What the record keeps of a run."""
    return {
        "source": source,
        "date": date,
        "ran": len(found.passed) + len(found.different) + len(found.failed),
        "passed": len(found.passed),
        "different": len(found.different),
        "failed": len(found.failed),
        "skipped": len(found.skipped),
    }


def counts(record: Record) -> str:
    """A line for each suite that was run."""
    lines = [
        "| suite | what runs | from | run | passed | differ | fail | skipped | date |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, each in record.items():
        suite = SUITES[name]
        numbers = (str(each[key]) for key in ("ran", "passed", "different", "failed", "skipped"))
        lines.append(
            f"| {suite.project or 'QMQ'} (`{name}`) | {suite.about} | {each['source']} | "
            f"{' | '.join(numbers)} | {each['date']} |"
        )
    return "\n".join(lines)


def reasons(documented: Mapping[str, Sequence[Difference]]) -> str:
    """A line for each reason."""
    lines = ["| suite | tests | why they fail |", "|---|---|---|"]
    for name, found in documented.items():
        for each in found:
            tests = ", ".join(f"`{test}`" for test in sorted(each.tests))
            at_times = " (at times)" if each.sometimes else ""
            lines.append(f"| {name} | {tests}{at_times} | {each.why} |")
    return "\n".join(lines)


def changes(suites: Mapping[str, Suite]) -> str:
    """What is changed in each suite."""
    return "\n".join(
        fill(f"* **{name}**: {each.changes}.", 100, subsequent_indent="  ", break_on_hyphens=False)
        for name, each in suites.items()
    )


def filled(text: str, record: Record, documented: Mapping[str, Sequence[Difference]]) -> str:
    """The page with its blocks. Raises KeyError for a block that there is not."""
    blocks = {
        "changes": changes(SUITES),
        "counts": counts(record),
        "differences": reasons(documented),
    }
    return BLOCK.sub(lambda found: f"{found[1]}{blocks[found[2]]}\n{found[3]}", text)


def current(record: Record) -> str:
    """The page as the record and the documented differences make it."""
    documented = {name: differences(suite) for name, suite in SUITES.items()}
    return filled(PAGE.read_text(), record, documented)


def write(report: Report) -> None:
    """Put a run into the record, and write the page."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    today = datetime.now(UTC).date().isoformat()
    record[report.suite.name] = counted(report.verdict, report.source, today)
    ordered = {name: record[name] for name in SUITES if name in record}
    RECORD.write_text(json.dumps(ordered, indent=2) + "\n")
    PAGE.write_text(current(ordered))
