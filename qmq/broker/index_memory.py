"""Whether the consume logs have too many entries in memory. Pure.

Adding up goes over all queues, idle ones too, so it is done only when the sum may have reached the limit: since the last time, at most one
entry was added for each entry of the logs.
"""

from __future__ import annotations

from qmq.log.consume_log import ENTRY_BYTES
from qmq.log.store import Store


class IndexMemory:
    """Remembers the bytes of entries in memory at the last addition."""

    def __init__(self) -> None:
        self._store: Store | None = None
        self._bytes = self._index = 0

    def exceeds(self, store: Store, bytes_max: int) -> bool:
        """Whether the consume logs of the store have more than `bytes_max` bytes of entries in memory."""
        if store is self._store:
            added = store.applied_index - self._index
            if self._bytes + added * ENTRY_BYTES <= bytes_max:
                return False
        self._store, self._index = store, store.applied_index
        self._bytes = sum([queue.index.tail_bytes for queue in store.queues.values()])
        return self._bytes > bytes_max
