"""Judges a soak: was every message handled or dead-lettered, and did the processes' memory and files stay constant? Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

RSS_GROWTH_MAX: Final = 1.25
RSS_SPARE_MIB: Final = 48
"""Memory may grow by that much besides: caches fill."""
COUNT_SPARE: Final = 8
"""File handles and threads may be so many more at a glance."""


Runs = npt.NDArray[np.int64]
"""(first, count) of consecutive numbers, one a row."""


class Sample(NamedTuple):
    """A process at one moment."""

    time_s: float
    rss_mib: float
    handles: int
    threads: int


@dataclass(slots=True)
class Verdict:
    """The findings of a soak."""

    sent: int = 0
    handled: int = 0
    handled_again: int = 0
    dead_lettered: int = 0
    """Distinct messages in the dead-letter queue."""
    lost_consumers_dead_lettered: int = 0
    """Those of them that did not fail in the handler: their consumers were lost too often."""
    anomalies: list[str] = field(default_factory=list)


def counts_of(runs: Runs, end: int) -> npt.NDArray[np.int32]:
    """How often each number below `end` is in the runs."""
    edges = np.zeros(end + 1, np.int32)
    firsts, lasts = np.minimum(runs[:, 0], end), np.minimum(runs[:, 0] + runs[:, 1], end)
    np.add.at(edges, firsts, 1)
    np.add.at(edges, lasts, -1)
    return np.cumsum(edges[:-1], dtype=np.int32)


def judge_messages(sent: Runs, handled: Runs, dead_lettered: Runs, *, every: int, fails: int) -> Verdict:
    """Every acknowledged message was handled, or is in the dead-letter queue once; those that always fail (`fails` of `every`) are there
    and were never handled.
    """
    end = int((sent[:, 0] + sent[:, 1]).max(initial=0))
    was_sent = counts_of(sent, end) > 0
    times, letters = counts_of(handled, end), counts_of(dead_lettered, end)
    failing = np.zeros(end, bool)
    failing[fails::every] = True
    verdict = Verdict(int(was_sent.sum()), int((times > 0).sum()), int((times - 1).clip(0).sum()), int((letters > 0).sum()))
    verdict.lost_consumers_dead_lettered = int(((letters > 0) & ~failing).sum())
    for what, found in (
        ("were lost: neither handled nor in the dead-letter queue", was_sent & (times == 0) & (letters == 0)),
        ("always fail, and are not in the dead-letter queue", was_sent & failing & (letters == 0)),
        ("always fail, and count as handled", failing & (times > 0)),
        ("are in the dead-letter queue more than once", letters > 1),
    ):
        if found.any():
            verdict.anomalies.append(f"{int(found.sum())} messages {what}, such as {int(np.argmax(found))}")
    return verdict


def judge_samples(name: str, samples: Sequence[Sample]) -> list[str]:
    """Memory, file handles and threads are flat: what they were after a quarter of the time they are at the end."""
    quarter = len(samples) // 4
    if quarter < 2:
        return [f"{name}: only {len(samples)} samples"]
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    anomalies: list[str] = []
    before, after = median(each.rss_mib for each in early), median(each.rss_mib for each in late)
    if after > before * RSS_GROWTH_MAX and after > before + RSS_SPARE_MIB:
        anomalies.append(f"{name}: memory grew from {before:.0f} to {after:.0f} MiB")
    for what, place in (("file handles", 2), ("threads", 3)):
        low, high = median(each[place] for each in early), median(each[place] for each in late)
        if high > low + COUNT_SPARE:
            anomalies.append(f"{name}: {what} grew from {low:.0f} to {high:.0f}")
    return anomalies
