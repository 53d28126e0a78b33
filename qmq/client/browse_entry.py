"""`Client.browse`: reading stored messages without a group (docs/BROWSE.md)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from qmq.client import due_times
from qmq.client.links import Links
from qmq.client.message_checks import key_bytes
from qmq.errors import InvalidArgument, NotConnected, UnknownSubject
from qmq.model import check_name

if TYPE_CHECKING:
    from qmq.client.browsing import BrowsedMessage, BrowsedQueue
    from qmq.client.metadata import MetadataClient


class BrowsingClient:
    """The part of `qmq.Client` that reads stored messages without a group."""

    _links: Links

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
    ) -> AsyncIterator[BrowsedMessage]:
        """Stored messages of a subject, without a consumer group: those stored from `start` on (default: the oldest) and before `end`; with
        `last`, that many of the newest messages of each queue. With `follow` the iterator goes on with messages that are stored later,
        and does not end.

        Messages of one queue come in its order; those of several queues come in the order in which they were stored. `partial=True` leaves
        out broker groups that cannot be read. Raises InvalidName, InvalidArgument, UnknownSubject, AccessDenied, NotConnected, LogDamaged,
        ClientClosed.
        """
        from qmq.client.browsing import BrowsedQueue, BrowseSelection, browse

        check_name("subject", subject)
        if last is not None and (last < 0 or start is not None):
            raise InvalidArgument("last is a number of messages, and cannot be given with a start")
        selection = BrowseSelection(
            start_ms=0 if start is None else max(due_times.time_ms(start, "start"), 1),
            end_ms=0 if end is None else max(due_times.time_ms(end, "end"), 1),
            last=last,
            key=None if key is None else key_bytes(key),
            tags_any=tuple(tags_any),
            tags_all=tuple(tags_all),
        )
        metadata = self.metadata

        async def queues() -> list[BrowsedQueue]:
            found = await metadata.list_subjects(subject)
            if found.silent and not partial:
                raise NotConnected(f"messages of {', '.join(sorted(found.silent))} are missing: {'; '.join(found.silent.values())}")
            described = next((each for each in found if each.settings.name == subject), None)
            if described is None:
                raise UnknownSubject(f"there is no subject {subject!r}: `qmq subject list` shows all")
            return [BrowsedQueue(subject, each.broker_group, each.partition, each.next_sequence) for each in described.queues]

        return browse(self._links, queues, selection, follow=follow, partial=partial)
