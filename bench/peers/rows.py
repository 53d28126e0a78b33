"""The rows of the comparison. A new row is one entry."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """What producers and consumers do. `phase` has fields of `clients/phases.py`, for both sides.

    producer: the work of the producer, "publish", "awaited" or "paced". consumers: processes that
    consume meanwhile, or, with `is_backlog`, when the producer has ended. With 0, one process reads
    everything afterwards, to compare, and is not measured. fresh: the server is a new one. filled:
    bytes that are stored, and not read, before the row begins. needs: what a system must offer.
    """

    name: str
    producer: str
    phase: dict[str, Any] = field(default_factory=dict)
    consumers: int = 0
    is_backlog: bool = False
    fresh: bool = False
    filled: int = 0
    needs: str = ""

    @property
    def is_flushed(self) -> bool:
        return bool(self.phase.get("flushed"))


ORDERED: Final = {"ordered": True, "partitions": 8}
ROWS: Final = (
    Row("one task awaits each send", "awaited"),
    Row("256 tasks await each send", "awaited", {"tasks": 256}),
    Row("publish, 100 B", "publish"),
    Row("end to end, in batches, 100 B", "publish", consumers=1),
    Row("end to end, one by one, 100 B", "publish", {"each": True}, consumers=1),
    Row("backlog, in batches, 100 B", "publish", consumers=1, is_backlog=True),
    Row("backlog, one by one, 100 B", "publish", {"each": True}, consumers=1, is_backlog=True),
    Row(
        "backlog, three consumers, 100 B",
        "publish",
        {"partitions": 3},
        consumers=3,
        is_backlog=True,
    ),
    Row("ordered, 8 partitions, in batches", "publish", ORDERED, consumers=1, needs="ordered"),
    Row(
        "ordered, 8 partitions, one by one",
        "publish",
        {**ORDERED, "each": True},
        consumers=1,
        needs="ordered",
    ),
    Row("lone message at 1,000/s", "paced", {"per_s": 1_000}, consumers=1),
    Row(
        "500 consumers of a group at 1,000/s",
        "paced",
        {"per_s": 1_000, "consumers": 500},
        consumers=1,
        needs="shared",
    ),
    Row(
        "50 groups at 1,000/s", "paced", {"per_s": 1_000, "groups": 50}, consumers=1, needs="groups"
    ),
    Row("end to end, 1 MiB", "publish", {"size": MIB}, consumers=1, needs="large"),
    Row("end to end, 1 KB, fresh server", "publish", {"size": 1024}, consumers=1, fresh=True),
    Row(
        "end to end, 1 KB, after 3 GB",
        "publish",
        {"size": 1024},
        consumers=1,
        fresh=True,
        filled=3 << 30,
        needs="disk",
    ),
    Row("flushed, one task", "awaited", {"flushed": True}, needs="flush"),
    Row("flushed, 256 tasks", "awaited", {"flushed": True, "tasks": 256}, needs="flush"),
    Row("flushed, publish", "publish", {"flushed": True}, needs="flush"),
)
