"""Reads the committed entries of broker groups from their stores' files, each once, in order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from qmq.log.envelopes import Entry, walk
from qmq.log.segments import Segments
from qmq.log.store import Store


class CommittedLogs:
    def __init__(self) -> None:
        self._places: dict[str, list[int]] = {}

    def read(self, group: str, store: Store, until: int) -> Iterator[Entry]:
        """The entries of a group up to a committed index that were not read before. Its replicas' files are the same."""
        places = self._places.setdefault(group, [0, 0])
        entries = [_entries(segments, place, until) for segments, place in zip(store.logs, places, strict=True)]
        both = [[(entry.envelope.index, log, entry) for entry in each] for log, each in enumerate(entries)]
        for _, log, entry in heapq.merge(*both, key=lambda each: each[0]):
            places[log] = entry.end
            yield entry


def _entries(segments: Segments, position: int, until: int) -> list[Entry]:
    found: list[Entry] = []
    for entry in walk(segments, position):
        if entry.envelope.index > until:
            break
        found.append(entry)
    return found
