"""The reports of the archive job, made from the archive and the changes of a run. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from pyspark_qmq.jobs.archive_files import totals
from pyspark_qmq.jobs.archive_manifest import Archive, Manifest
from pyspark_qmq.jobs.archive_verify import Compared
from pyspark_qmq.jobs.plot_data import Plot
from pyspark_qmq.jobs.report import Report, ReportTable
from pyspark_qmq.source_model import QueueKey

FOLDER: Final = "report"
"""The folder of reports in an archive."""
SUBJECTS_SHOWN: Final = 6
"""Subjects with their own colour; the others share a bar."""


def taken(root: Path, archive: Archive, made: Sequence[Manifest], lag: Mapping[QueueKey, int]) -> Report:
    """The report of a run that archived messages."""
    files = [file for each in made for file in each.files]
    rows = sum(each.rows for each in files)
    left = sum(lag.values())
    facts = {
        **_holdings(root, archive),
        "archived now": rows,
        "files now": len(files),
        "bytes now": sum(each.size for each in files),
        "manifests now": len(made),
        "waiting in the log": left,
    }
    queues = tuple((key.subject, key.within, archive.reached.get(key, 0), waiting) for key, waiting in lag.items())
    table = ReportTable("Queues", ("subject", "queue", "archived up to", "waiting"), queues, "queues")
    headline = f"{_messages(rows)} archived; {_messages(left) if left else 'none'} left in the log."
    return Report("archive", headline, True, facts, (*_days(archive), table), _plots(archive), folder=FOLDER)


def compacted(root: Path, archive: Archive, made: Sequence[Manifest]) -> Report:
    new = sum(len(each.files) for each in made)
    old = sum(len(each.gone) for each in made)
    facts = {**_holdings(root, archive), "days rewritten": len(made), "files before": old, "files behind": new}
    headline = f"{old:,} files became {new:,}, with the same rows." if made else "No files needed compaction."
    return Report("archive", headline, True, facts, _days(archive), _plots(archive), folder=FOLDER)


def swept(root: Path, archive: Archive, deleted: Sequence[str]) -> Report:
    facts = {**_holdings(root, archive), "files deleted": len(deleted), "old files kept for readers": len(archive.kept)}
    return Report("archive", f"{len(deleted):,} files that are no longer read were deleted.", True, facts, folder=FOLDER)


def verified(
    root: Path, archive: Archive, found: Sequence[Compared], wrong: Sequence[tuple[str, str]], example: Sequence[tuple[int, str]]
) -> Report:
    """The report of a comparison with the log. `example`: a counterexample from the first queue that differs."""
    bad = [each for each in found if not each.is_same]
    rows = sum(each.in_archive.rows for each in found)
    facts = {
        **_holdings(root, archive),
        "rows compared": rows,
        "queues": len(found),
        "queues that differ": len(bad),
        "wrong files": len(wrong),
    }
    columns = ("subject", "queue", "from", "to", "archive", "log", "gaps", "repeated", "same")
    lines = tuple(
        (
            each.queue.subject,
            each.queue.within,
            each.first,
            each.end,
            each.in_archive.rows,
            each.in_log.rows,
            each.gaps,
            each.repeated,
            each.is_same,
        )
        for each in found
    )
    files = ReportTable("Wrong files", ("file", "what is wrong"), tuple(wrong), "wrong_files")
    tables = (ReportTable("Queues", columns, lines, "verified"), files)
    headline = (
        f"{_messages(rows)} are identical in archive and log."
        if not bad and not wrong
        else f"{len(bad):,} of {len(found):,} queues and {len(wrong):,} files differ."
    )
    return Report("archive", headline, not bad and not wrong, facts, tables, counterexample=_example(bad, example), folder=FOLDER)


def _example(bad: Sequence[Compared], example: Sequence[tuple[int, str]]) -> str:
    if not bad:
        return ""
    first = bad[0]
    lines = [f"{first.queue}, sequences {first.first} to {first.end - 1}"]
    if first.is_log_shorter:
        lines.append("  the log ends before the archive: it is another log, or its end was lost")
    if first.archived != first.listed:
        lines.append(f"  the archive's files hold {first.archived} rows, its manifests say {first.listed}")
    return "\n".join(lines + [f"  {sequence:>12}  {how}" for sequence, how in example])


def _holdings(root: Path, archive: Archive) -> dict[str, object]:
    days = [day for _, day in totals(archive)]
    subjects = sorted({file.subject for file in archive.files.values()})
    return {
        "archive": str(root),
        "subjects": subjects,
        "days": f"{min(days)} to {max(days)}" if days else "none yet",
        "messages": archive.rows,
        "files": len(archive.files),
        "bytes": sum(each.size for each in archive.files.values()),
    }


def _days(archive: Archive) -> tuple[ReportTable, ...]:
    rows = tuple((subject, day, *figures) for (subject, day), figures in totals(archive).items())
    return (ReportTable("By subject and day", ("subject", "day", "messages", "bytes", "files"), rows, "days"),)


def _plots(archive: Archive) -> tuple[Plot, ...]:
    found = totals(archive)
    days = sorted({day for _, day in found})
    sums: dict[str, int] = {}
    for (subject, _), (rows, _, _) in found.items():
        sums[subject] = sums.get(subject, 0) + rows
    by_rows = sorted(sums, key=lambda each: -sums[each])
    series = {subject: [float(found.get((subject, day), (0,))[0]) for day in days] for subject in by_rows[:SUBJECTS_SHOWN]}
    others = by_rows[SUBJECTS_SHOWN:]
    if others:
        series["all others"] = [float(sum(found.get((subject, day), (0,))[0] for subject in others)) for day in days]
    return (Plot("Messages per day", "bar", days, series, "", "messages"),)


def _messages(number: int) -> str:
    return f"{number:,} message" if number == 1 else f"{number:,} messages"
