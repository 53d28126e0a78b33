"""The catalog of subjects and their kinds. The gateway needs a topic's kind before it sends to the
topic or reads from it.

A subject's kind never changes. But answers are cached only for a while, since a subject may be
deleted, and another one created under its name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeVar

from qmq.client.metadata.cache import Placement
from qmq.client.metadata.service import MetadataClient
from qmq.errors import SubjectExists, UnknownSubject
from qmq.model import Order, SubjectConfig

KEPT_MS: Final = 30_000
TOPICS_MAX: Final = 100_000
LOGICAL_PARTITIONS: Final = 1_024


@dataclass(frozen=True, slots=True)
class Topic:
    """A subject with its kind."""

    subject: str
    is_ordered: bool
    broker_groups: tuple[str, ...]


class TopicCatalog:
    """Finds topics. With `creates`, a message to an unknown topic creates it: ordered if it has a
    message group, or with `all_ordered`.
    """

    def __init__(
        self,
        directory: Callable[[], MetadataClient],
        monotonic_ms: Callable[[], int],
        *,
        creates: bool = True,
        all_ordered: bool = False,
    ) -> None:
        self._directory, self._monotonic_ms = directory, monotonic_ms
        self.creates, self._all_ordered = creates, all_ordered
        self._known: dict[str, tuple[int, Topic]] = {}
        """By subject: the time until which the cached answer holds, and the answer."""

    async def find(self, subject: str) -> Topic | None:
        """The topic; None if there is no such subject. Raises NotConnected, AccessDenied."""
        kept = self._known.get(subject)
        if kept is not None and self._monotonic_ms() < kept[0]:
            return kept[1]
        try:
            return self._keep(subject, await self._directory().routes(subject))
        except UnknownSubject:
            self._known.pop(subject, None)
            return None

    async def find_or_create(self, subject: str, *, is_fifo: bool) -> Topic:
        """Find the topic, or create it. Raises UnknownSubject if it may not be created,
        NotConnected, AccessDenied.
        """
        found = await self.find(subject)
        if found is not None:
            return found
        if not self.creates:
            raise UnknownSubject(
                f"there is no topic {subject!r}: create it with `qmq subject create`"
            )
        if not is_fifo and not self._all_ordered:
            return self._keep(subject, await self._directory().routes(subject, create=True))
        # another client may be faster, and may create a subject of the other kind
        with suppress(SubjectExists):
            config = SubjectConfig(
                subject, order=Order.STRICT, logical_partitions=LOGICAL_PARTITIONS
            )
            await self._directory().create_subject(config, at_first_message=True)
        return self._keep(subject, await self._directory().routes(subject))

    def forget(self, subject: str) -> None:
        """Drop the cached answer: it is out of date."""
        self._known.pop(subject, None)

    def _keep(self, subject: str, placement: Placement) -> Topic:
        if len(self._known) >= TOPICS_MAX:
            self._known.clear()
        groups = tuple(sorted({each.group for each in placement.routes}))
        topic = Topic(subject, placement.ordering is not None, groups)
        self._known[subject] = self._monotonic_ms() + KEPT_MS, topic
        return topic


_Entry = TypeVar("_Entry")
_Answer = TypeVar("_Answer")


async def serve_entries(
    serve: Callable[[_Entry], Awaitable[_Answer]], entries: Sequence[_Entry]
) -> list[_Answer]:
    """The answers, in the order of the entries.
    Most calls have one entry, which needs no separate task.
    """
    if len(entries) == 1:
        return [await serve(entries[0])]
    return await asyncio.gather(*[serve(each) for each in entries])
