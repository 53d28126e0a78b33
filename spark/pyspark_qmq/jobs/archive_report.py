"""The reports of the archive job. Pure, except that it reads the tables' metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark_qmq.jobs.archive_verify import ComparedTable
from pyspark_qmq.jobs.plot_data import Plot
from pyspark_qmq.jobs.report import Report, ReportTable
from pyspark_qmq.lake.lake_table import LakeTable
from pyspark_qmq.lake.lake_writer import RoundResult
from pyspark_qmq.lake.table_maintenance import totals
from pyspark_qmq.source_model import QueueKey

SUBJECTS_SHOWN = 6
"""Subjects with their own colour; the others share a bar."""

Day = tuple[str, str, int, int, int]
"""Subject, day, messages, bytes, files."""


@dataclass(slots=True)
class Taken:
    """The rows and files that a run added, of any duration."""

    rows: int = 0
    files: int = 0
    commits: int = 0
    refused: int = 0
    """Commits for which another writer was faster."""

    def add(self, done: RoundResult) -> None:
        """Count a round."""
        if done.is_refused:
            self.refused += 1
            return
        self.rows, self.files, self.commits = self.rows + done.rows, self.files + done.files, self.commits + 1


def taken(tables: Sequence[LakeTable], made: Taken, waiting: Mapping[QueueKey, int]) -> Report:
    """The report of a run that archived messages."""
    left, days = sum(waiting.values()), _days(tables)
    facts = {
        **_holdings(tables, days),
        "archived now": made.rows,
        "files now": made.files,
        "commits now": made.commits,
        "commits of another writer": made.refused,
        "waiting in the log": left,
    }
    positions = {key: at for each in tables for key, at in each.positions().items()}
    queues = tuple((key.subject, key.within, positions.get(key, 0), count) for key, count in sorted(waiting.items()))
    listed = (
        ReportTable("By subject and day", ("subject", "day", "messages", "bytes", "files"), tuple(days), "days"),
        ReportTable("Queues", ("subject", "queue", "archived up to", "waiting"), queues, "queues"),
    )
    headline = f"{_messages(made.rows)} archived; {_messages(left) if left else 'none'} left in the log."
    return Report("archive", headline, True, facts, listed, _plots(days))


def verified(tables: Sequence[LakeTable], found: Sequence[ComparedTable]) -> Report:
    """The report of a comparison with the log."""
    queues = [each for table in found for each in table.queues]
    bad, rows = [each for each in queues if not each.is_same], sum(each.in_table.rows for each in queues)
    wrong = tuple((each.subject, each.rows, each.listed) for each in found if each.rows != each.listed)
    facts = {
        **_holdings(tables, _days(tables)),
        "rows compared": rows,
        "queues": len(queues),
        "queues that differ": len(bad),
        "tables with other rows than their snapshots say": len(wrong),
    }
    lines = tuple(
        (
            each.queue.subject,
            each.queue.within,
            each.first,
            each.end,
            each.in_table.rows,
            each.in_log.rows,
            each.in_table.repeated,
            each.is_same,
        )
        for each in queues
    )
    listed = (
        ReportTable("Queues", ("subject", "queue", "from", "to", "table", "log", "repeated", "same"), lines, "verified"),
        ReportTable("Wrong tables", ("subject", "rows in files", "rows of the snapshot"), wrong, "wrong_tables"),
    )
    is_clean = all(each.is_same for each in found)
    headline = (
        f"{_messages(rows)} are identical in table and log."
        if is_clean
        else f"{len(bad):,} of {len(queues):,} queues and {len(wrong):,} tables differ."
    )
    return Report("archive", headline, is_clean, facts, listed, counterexample=_example(found))


def _example(found: Sequence[ComparedTable]) -> str:
    table = next((each for each in found if each.differing), None)
    if table is None:
        return ""
    first = table.differing[0]
    lines = [f"{first.queue}, sequences {first.first} to {first.end - 1}"]
    if first.is_log_shorter:
        lines.append("  the log ends before the table: it is another log, or its end was lost")
    return "\n".join(lines + [f"  {sequence:>12}  {how}" for sequence, how in table.example])


def _days(tables: Sequence[LakeTable]) -> list[Day]:
    return [(each.subject, day, rows, size, files) for each in tables for day, files, rows, size in totals(each)]


def _holdings(tables: Sequence[LakeTable], days: Sequence[Day]) -> dict[str, object]:
    dates = [each[1] for each in days]
    return {
        "tables": [".".join(each.iceberg.name()) for each in tables],
        "days": f"{min(dates)} to {max(dates)}" if dates else "none yet",
        "messages": sum(each[2] for each in days),
        "bytes": sum(each[3] for each in days),
        "files": sum(each[4] for each in days),
    }


def _plots(found: Sequence[Day]) -> tuple[Plot, ...]:
    rows = {(subject, day): count for subject, day, count, _, _ in found}
    days, sums = sorted({day for _, day in rows}), dict[str, int]()
    for (subject, _), count in rows.items():
        sums[subject] = sums.get(subject, 0) + count
    by_rows = sorted(sums, key=lambda each: -sums[each])
    series = {subject: [float(rows.get((subject, day), 0)) for day in days] for subject in by_rows[:SUBJECTS_SHOWN]}
    others = by_rows[SUBJECTS_SHOWN:]
    if others:
        series["all others"] = [float(sum(rows.get((subject, day), 0) for subject in others)) for day in days]
    return (Plot("Messages per day", "bar", days, series, "", "messages"),)


def _messages(number: int) -> str:
    return f"{number:,} message" if number == 1 else f"{number:,} messages"
