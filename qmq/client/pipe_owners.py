"""What a producer's pipes need of the producer, and a pipe of the pipes: batches go down, decisions come up.

Producer (a PipesOwner)  --put-->  Pipes (a PipeOwner)  --transmit-->  Pipe
         <--stored, failed, answered--        <--stored, failed, give_back, answered--
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from qmq.client.open_batch import Batch
from qmq.errors import QmqError
from qmq.wire.frame_payloads import Produced


class PipesOwner(Protocol):
    """Whose batches these are: the producer."""

    target: str
    """Under what the locator knows where they go (route_book.py)."""
    kind: int
    """See `PipeOwner`."""

    def usable(self, groups: Mapping[str, bool]) -> Mapping[str, bool]:
        """Broker groups and whether each is writable, as a metaserver says it; and which of them this producer uses."""
        ...

    @property
    def inflight_max(self) -> int:
        """How many batches may be on their way to one broker group."""
        ...

    def encode(self, batch: Batch) -> tuple[bytes, bytes]:
        """The batch as it travels. Raises QmqError."""
        ...

    def stored(self, group: str, batch: Batch, produced: Produced) -> None: ...

    def failed(self, batch: Batch, failure: QmqError) -> None: ...

    def answered(self) -> None:
        """An answer came: it is time to close the open batch."""
        ...

    def look_again(self) -> None:
        """Another group may be ready for the open batch."""
        ...


class PipeOwner(Protocol):
    """Who feeds pipes: `qmq.client.pipes.Pipes`."""

    target: str
    """See `PipesOwner`."""
    kind: int
    """PRODUCE, or one of the frames of other `acks`."""

    @property
    def has_waiting(self) -> bool:
        """Whether batches wait for any pipe."""
        ...

    def encode(self, batch: Batch) -> tuple[bytes, bytes]:
        """The batch as it travels. Raises QmqError."""
        ...

    def stored(self, group: str, batch: Batch, produced: Produced) -> None: ...

    def failed(self, batch: Batch, failure: QmqError) -> None: ...

    def give_back(self, batch: Batch) -> None:
        """Certainly not stored here: any pipe may have it."""
        ...

    def give_up(self, failure: QmqError) -> None:
        """Nothing can be sent anywhere: the subject is gone, or the client is closed."""
        ...

    def answered(self) -> None:
        """There may be room."""
        ...

    def pump(self) -> None:
        """Something changed: look what can be sent."""
        ...
