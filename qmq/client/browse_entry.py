"""`Client.browse`: reading stored messages without a group (docs/BROWSE.md)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING

from qmq.client.connection.pool import ConnectionPool
from qmq.client.producing import delayed
from qmq.client.producing.batch import key_bytes, texts
from qmq.errors import InvalidArgument, NotConnected, PeerError, Unavailable, UnknownSubject
from qmq.model import check_name

if TYPE_CHECKING:
    from qmq.client.browsing import BrowsedMessage, BrowsedQueue, BrowseProgress
    from qmq.client.metadata.service import MetadataClient

log = logging.getLogger("qmq.client")


class BrowsingClient:
    """The part of `qmq.Client` that reads stored messages without a group."""

    _links: ConnectionPool

    @property
    def metadata(self) -> MetadataClient:
        raise NotImplementedError

    def browse(
        self,
        subject: str,
        *,
        start: datetime | None = None,
        end: datetime | None = None,
        last: int | None = None,
        key: str | bytes | None = None,
        tags_any: Sequence[str] = (),
        tags_all: Sequence[str] = (),
        follow: bool = False,
        partial: bool = False,
        positions: Mapping[tuple[str, int], int] | None = None,
        sequences: tuple[int, int | None] = (0, None),
        broker_group: str = "",
        content: bytes = b"",
        progress: BrowseProgress | None = None,
    ) -> AsyncIterator[BrowsedMessage]:
        """Read stored messages of a subject without a consumer group: messages stored from `start` on (default: the oldest) and before
        `end`, or, with `last`, the newest messages of each queue. With `follow` the iterator then waits for messages that are stored later,
        and does not end.

        Messages of one queue come in its order; those of several queues come in the order in which they were stored. `partial=True` skips
        broker groups that cannot be read. With `broker_group`, only what that one has. With `content`, only messages whose body holds these
        bytes. `progress` is kept up to date with how far was read.

        Raises InvalidName, InvalidArgument, UnknownSubject, AccessDenied, NotConnected, LogDamaged, ClientClosed.
        """
        from qmq.client.browsing import BrowseSelection, browse

        check_name("subject", subject)
        if last is not None and (last < 0 or start is not None):
            raise InvalidArgument("last is a number of messages, and cannot be given with a start")
        selection = BrowseSelection(
            start_ms=0 if start is None else max(delayed.time_ms(start, "start"), 1),
            end_ms=0 if end is None else max(delayed.time_ms(end, "end"), 1),
            last=last,
            key=None if key is None else key_bytes(key),
            tags_any=texts("tags_any", tags_any),
            tags_all=texts("tags_all", tags_all),
            first_sequence=sequences[0],
            end_sequence=sequences[1],
            content=content,
            positions=dict(positions or {}),
        )

        def queues() -> Awaitable[list[BrowsedQueue]]:
            return self._queues(subject, partial=partial, broker_group=broker_group)

        return browse(self._links, queues, selection, follow=follow, partial=partial, progress=progress)

    async def queue_ends(self, subject: str) -> dict[tuple[str, int], int]:
        """Where each queue of a subject ends: by broker group and partition, the sequence of its next message. Everything sent to the
        brokers before this call is decided: stored messages lie before the ends, and no other message is stored later.

        Needs `produce` and `browse` on the subject. Raises InvalidName, UnknownSubject, AccessDenied, NotConnected, ClientClosed.
        """
        from qmq.client.browsing import end_of

        queues = await self._queues(check_name("subject", subject), partial=False)
        ends = await asyncio.gather(*[end_of(self._links, each) for each in queues])
        return {each.key: end for each, end in zip(queues, ends, strict=True)}

    def _directed(self, subject: str, since_ms: int, positions: Mapping[tuple[str, int], int]) -> AsyncIterator[BrowsedMessage]:
        """Messages to single consumer groups, stored since a time; in each queue from a position on. Raises as `browse`."""
        from qmq.client.browsing import BrowseSelection, browse

        selection = BrowseSelection(start_ms=max(since_ms, 1), positions=positions, is_directed=True)
        return browse(self._links, lambda: self._queues(subject, partial=False), selection, follow=False, partial=False)

    async def _queues(self, subject: str, *, partial: bool, broker_group: str = "") -> list[BrowsedQueue]:
        """The queues to read. Waits for broker groups that have no master, except with `partial`."""
        from qmq.client.browsing import BrowsedQueue, ReadPatience

        patience = ReadPatience(self._links.timing)
        while True:
            found = await self.metadata.find_subject(subject)
            if found is None:
                raise UnknownSubject(f"there is no subject {subject!r}: `qmq subject list` shows all")
            silent = {name: why for name, why in found.silent.items() if broker_group in ("", name)}
            if not silent or partial:
                break
            missing = f"messages of {', '.join(sorted(silent))} are missing: {'; '.join(silent.values())}"
            if patience.is_over:
                raise NotConnected(missing)
            log.debug("%s: %s", subject, missing)
            for name in silent:
                with suppress(Unavailable, PeerError):
                    await self._links.reach(subject, name)  # raises NeverReached, which waiting does not mend
            await patience.rest()
        queues = [each for each in found.description.queues if broker_group in ("", each.broker_group)]
        return [BrowsedQueue(subject, each.broker_group, each.partition, each.next_sequence) for each in queues]
