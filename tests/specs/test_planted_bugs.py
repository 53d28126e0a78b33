"""Each planted bug of a simulator is refused by a specification, or is in what the specification
leaves out.
"""

from __future__ import annotations

import ordersim.bugs
import sim.bugs
from specs import ordering_traces, replication_traces


def test_a_planted_bug_is_either_refused_or_outside() -> None:
    for bugs, refused, outside in (
        (sim.bugs.BUGS, replication_traces.REFUSED_AT, replication_traces.OUTSIDE),
        (ordersim.bugs.BUGS, ordering_traces.REFUSED_AT, ordering_traces.OUTSIDE),
    ):
        assert set(bugs) <= refused.keys() | outside.keys()
        assert not refused.keys() & outside.keys()
