"""The broker's retention of a store, in steps that a test interrupts."""

from __future__ import annotations

from qmq.log.retention import LookUp, Retention
from qmq.log.store import Store


def begin_retention(store: Store, look_up: LookUp) -> Retention:
    """Drop what is too old. Its files stay until a checkpoint is taken."""
    retention = Retention(store)
    for _ in retention.steps(look_up):
        pass
    return retention


def end_retention(retention: Retention) -> None:
    """Delete the dropped files: a checkpoint has recorded the drop."""
    retention.written()
    retention.delete()
    assert retention.deletable == []
