"""Measures how long no send succeeded: the time between one acknowledged send and the next.

The first gap begins at the first attempt, and the last one ends at the last line of a send, so a broker that did not come back is visible.

    t_ns   0 invoke   5 ok   9 ok   30 ok   33 invoke (no end)
    gaps   21 (9..30), 5 (0..5), 4 (5..9), 3 (30..33)
"""

from __future__ import annotations

import heapq
from itertools import pairwise
from typing import NamedTuple

from history.past import History


class Gap(NamedTuple):
    """A time without an acknowledged send; its beginning is there to be compared with the notes about faults."""

    gap_ns: int
    from_ns: int


def availability(history: History, longest: int = 10) -> list[Gap]:
    """The longest gaps, longest first. The test decides which gap is too long."""
    times_ns = sorted(send.t_ns for send, _, _ in history.acked_sends)
    edges_ns = [send.t_ns for send in history.sends]
    if not edges_ns:
        return []
    moments = [min(edges_ns), *times_ns, max(edges_ns)]
    return heapq.nlargest(longest, (Gap(until - since, since) for since, until in pairwise(moments) if until > since))
