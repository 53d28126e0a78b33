"""The interfaces between a producer, its pipes and a pipe: batches go down, decisions come up.

Producer (a PipesOwner)  --put-->  Pipes (a PipeOwner)  --transmit-->  Pipe
                         <--stored, failed, answered--  <--stored, failed, give_back, answered--
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from qmq.client.open_batch import Batch
from qmq.errors import QmqError
from qmq.wire.frame_payloads import Produced


class PipesOwner(Protocol):
    """What pipes need of the producer."""

    target: str
    """The target under which the locator knows the subject (route_book.py)."""
    kind: int
    """See `PipeOwner`."""

    def usable(self, groups: Mapping[str, bool]) -> Mapping[str, bool]:
        """Of the broker groups (and whether each is writable), those that this producer uses."""
        ...

    @property
    def inflight_max(self) -> int:
        """How many batches may be in flight to one broker group."""
        ...

    def encode(self, batch: Batch) -> tuple[bytes, bytes]:
        """The encoded batch. Raises QmqError."""
        ...

    def stored(self, group: str, batch: Batch, produced: Produced) -> None: ...

    def failed(self, batch: Batch, failure: QmqError) -> None: ...

    def answered(self) -> None:
        """An answer came: time to close the open batch."""
        ...

    def look_again(self) -> None:
        """Another group may be ready for the open batch."""
        ...


class PipeOwner(Protocol):
    """What a pipe needs of `qmq.client.pipes.Pipes`."""

    target: str
    """See `PipesOwner`."""
    kind: int
    """PRODUCE, or one of the frames of other `acks`."""

    @property
    def has_waiting(self) -> bool:
        """Whether batches wait for a pipe."""
        ...

    def encode(self, batch: Batch) -> tuple[bytes, bytes]:
        """The encoded batch. Raises QmqError."""
        ...

    def stored(self, group: str, batch: Batch, produced: Produced) -> None: ...

    def failed(self, batch: Batch, failure: QmqError) -> None: ...

    def give_back(self, batch: Batch) -> None:
        """The batch is certainly not stored at this group: any pipe may send it."""
        ...

    def give_up(self, failure: QmqError) -> None:
        """Nothing can be sent: the subject is gone, or the client is closed."""
        ...

    def answered(self) -> None:
        """There may be room."""
        ...

    def pump(self) -> None:
        """Something changed: send what can be sent."""
        ...
