"""Finds the dead letters that were already sent to their subjects, by any process, so that no letter is sent twice.

A replay sends a letter and then settles it. If the process, the connection or the master ends in between, the letter is handed out again.
Each copy names its letter (`headers.REPLAY_OF`), so the copies themselves are the record of earlier replays, and no other record is
needed. Before letters are sent, this module searches the subject's directed messages that were stored since the first letter died.

    FIND on each queue      decides everything that brokers were sent before: stored, or never
    FETCH, directed only    the broker skips other batches by the consume log, without reading them

The next search continues where the last one ended.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from qmq.headers import GROUP, REPLAY_OF

if TYPE_CHECKING:
    from qmq.client.dead_letter import DeadLetter
    from qmq.client.message import StoredMessage

CLOCKS_MS: Final = 60_000
"""How much the clock of the broker that stored a copy may be behind that of the broker where the message died."""

Ends = Mapping[tuple[str, int], int]
ListEnds = Callable[[str], Awaitable[Ends]]
ReadDirected = Callable[[str, int, Ends], "AsyncIterator[StoredMessage]"]
"""(subject, stored since in ms, where to begin in each queue): directed messages."""


@dataclass(slots=True)
class _SubjectSearch:
    """Progress of the search in one subject."""

    since_ms: int
    ends: Ends = field(default_factory=dict)
    names: set[bytes] = field(default_factory=set)


class ReplayedLetters:
    """Finds which dead letters of one consumer group were sent again. Needs `browse` and `produce` on the subjects."""

    def __init__(self, list_ends: ListEnds, read: ReadDirected, group: str) -> None:
        self._list_ends, self._read, self._group = list_ends, read, group
        self._searches: dict[str, _SubjectSearch] = {}

    async def among(self, letters: Iterable[DeadLetter]) -> set[bytes]:
        """The names of those letters that were sent again already. Raises NotConnected, AccessDenied, UnknownSubject, LogDamaged."""
        by_subject: dict[str, list[DeadLetter]] = {}
        for each in letters:
            by_subject.setdefault(each.subject, []).append(each)
        found: set[bytes] = set()
        for subject, its in by_subject.items():
            known = await self._looked(subject, min(each.dead_ms for each in its) - CLOCKS_MS)
            found |= known & {each.name for each in its}
        return found

    async def _looked(self, subject: str, since_ms: int) -> set[bytes]:
        search = self._searches.get(subject)
        if search is None or since_ms < search.since_ms:
            search = self._searches[subject] = _SubjectSearch(since_ms)
        ends = await self._list_ends(subject)
        async for message in self._read(subject, search.since_ms, search.ends):
            headers = message.headers
            if REPLAY_OF in headers and headers.get(GROUP) == self._group.encode():
                search.names.add(message.id.to_bytes() + headers[REPLAY_OF])
        search.ends = ends
        return search.names
