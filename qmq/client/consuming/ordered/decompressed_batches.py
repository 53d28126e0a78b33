"""Which batches of an ordered consumer stay decompressed.

A message that is handed out has its own body; the rest of its batch stays decompressed for the messages that follow. But one of them may
wait for its key while messages of other batches are handed out: then each of these batches would stay decompressed.

    batch 1: a b      batch 2: c b      batch 3: d b      a, c and d are handed out and finished; the messages of b wait
"""

from __future__ import annotations

from weakref import ref

from qmq.client.consuming.message import DecodedBatch


class DecompressedBatches:
    """The batches that were used last stay decompressed, up to `bytes_max` bytes. An older one is decompressed again for its next message.
    A batch whose messages are all finished is forgotten.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._sizes: dict[ref[DecodedBatch], int] = {}
        """The one that was used last is last."""
        self.bytes = 0

    def used(self, batch: DecodedBatch) -> None:
        """A message of the batch was decompressed."""
        key = ref(batch, self._forget)
        size = self._sizes.pop(key, None)
        if size is None:
            size = batch.view.bodies_bytes
            self.bytes += size
        self._sizes[key] = size
        while self.bytes > self._bytes_max and len(self._sizes) > 1:
            oldest = next(iter(self._sizes))
            self._forget(oldest)
            if (older := oldest()) is not None:
                older.decoded = None

    def _forget(self, key: ref[DecodedBatch]) -> None:
        self.bytes -= self._sizes.pop(key, 0)
