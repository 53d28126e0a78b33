"""What must hold whatever anybody sends: a replica for which it does not hold stops loudly, instead of going on with a wrong state.

A check here stays on under `python -O`, where an `assert` is removed and replicas would differ. It never guards what a client or the log's
content can bring about: that is refused before it is stored, or passed over by every replica alike (docs/REPLICATION.md).
"""

from __future__ import annotations


class InvariantBroken(AssertionError):
    """A promise of our own is broken: the process must stop, loudly, before it does more."""


def check(condition: object, text: str) -> None:
    """Raises InvariantBroken, which ends the process, unless the condition holds."""
    if not condition:
        raise InvariantBroken(text)
