"""The options of a listener, and which of them go together. Checked at registration. Pure.

The option `idempotent` is a store of finished messages, for effects that happen exactly once;
`qmq.sql.SqlDedup` is one. The listener handles each message inside `once`, a transaction that holds
the handler's writes and the record that this message is done:

    async with idempotent.once(message, group) as once:      an `async def` handler
        if once.is_new:
            await handler(..., context)                      context.connection is once.connection
    await message.ack()                                      after the commit, never before

    with idempotent.once_sync(message, group) as once:       a plain `def` handler: the whole block
                                                             in one worker thread
        if once.is_new:
            handler(..., context)

* Leaving the block normally commits the record and the writes together. An exception rolls both
  back and reaches the listener, which nacks the message; so do exceptions on entering and leaving.
* `is_new` is False if the message's effect is committed already, as after a crash between commit
  and acknowledgement: the handler is not called, and the message is acknowledged.
* Entering raises `Unavailable` if the store cannot be reached, or another transaction is handling
  the message: try again later. It never means "already done".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Final, Protocol, TypedDict

from qmq.client.consuming.message import retry_ms
from qmq.client.listening.context import Policy
from qmq.errors import InvalidArgument
from qmq.model import BROADCAST, MessageId, check_name, texts


class Named(Protocol):
    """The name of a message: its subject and id, and when it was stored. `Message` and
    `OrderedMessage` have all of it.
    """

    @property
    def subject(self) -> str:
        """The subject that the message was sent to."""
        ...

    @property
    def id(self) -> MessageId:
        """The message's id, which is the same at every delivery."""
        ...

    @property
    def append_time_ms(self) -> int:
        """When the broker stored it, milliseconds since 1970. The present is not earlier, also if
        another clock says so.
        """
        ...


@dataclass(frozen=True, slots=True)
class IdempotentRun:
    """One message inside its transaction."""

    is_new: bool
    """False if the message's effect is committed already: do not call the handler, acknowledge the
    message.
    """
    connection: Any
    """The transaction's connection or session, for the handler's writes; None if the handler must
    not run.
    """


class Idempotent(Protocol):
    """Records finished messages in the transaction of their effects."""

    def check_handler(self, *, is_async: bool) -> None:
        """Called once, when a handler is registered. Raises InvalidArgument if the store does not
        suit it: an `async def` handler needs a store that does not block the event loop, a plain
        `def` handler one that works in a thread.
        """
        ...

    def once(self, message: Named, group: str) -> AbstractAsyncContextManager[IdempotentRun]:
        """A message's transaction, for an `async def` handler. The module describes it."""
        ...

    def once_sync(self, message: Named, group: str) -> AbstractContextManager[IdempotentRun]:
        """A message's transaction, for a plain `def` handler:
        entered, used and left in one thread.
        """
        ...


_PREFETCH: Final = 2_000
"""The consumer's default."""


class ListenerOptions(TypedDict, total=False):
    """The keywords of `mq.listener` and `mq.listen`."""

    concurrency: int
    """How many handlers run at a time; on an ordered subject, for how many keys. Default 1."""
    name: str
    """The consumer's name; the default is made of host and process."""
    tags_any: Sequence[str]
    tags_all: Sequence[str]
    start: str
    """Where a new group begins: "earliest" or "latest" (default of broadcast groups)."""
    prefetch: int
    """The most unsettled messages that the consumer may hold."""
    prefetch_bytes: int
    lease: timedelta
    """How long this process may be silent before its messages go to others."""
    expired: str
    """"skip" continues with the oldest stored message where retention deleted some; "raise"
    (default) ends the listener.
    """
    timeout: timedelta
    """How long a handler may take."""
    retry_delays: Sequence[timedelta]
    """How long a message waits after its first failure, the second, and so on; the last one
    repeats. Default: the group's settings.
    """
    most_once: bool
    """Acknowledge before the handler is called: a message is handled at most once."""
    broadcast: bool
    """Every consumer gets every message."""
    batch: tuple[int, timedelta]
    """The handler takes a list of this many messages,
    or of fewer if they take longer than this to arrive.
    """
    idempotent: Idempotent
    """Record the message in the transaction of the handler's writes, so that the effect happens
    exactly once.
    """
    on_undecodable: str
    """For a body that cannot be decoded: "reject" (default) to the dead-letter queue, "retry", or
    "skip" (acknowledge).
    """
    on_failure: str
    """For an ordered subject: "block" (default) the lane while a message fails, or "park" the key
    after `attempts_max` failures.
    """
    attempts_max: int
    """For "park"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Checked options; the fields are those of `ListenerOptions`.
    Raises InvalidName, InvalidArgument.
    """

    subject: str
    group: str
    concurrency: int = 1
    name: str | None = None
    tags_any: Sequence[str] = ()
    tags_all: Sequence[str] = ()
    start: str | None = None
    prefetch: int | None = None
    prefetch_bytes: int | None = None
    lease: timedelta | None = None
    expired: str | None = None
    timeout: timedelta | None = None
    retry_delays: Sequence[timedelta] = ()
    most_once: bool = False
    broadcast: bool = False
    batch: tuple[int, timedelta] | None = None
    idempotent: Idempotent | None = None
    on_undecodable: str = "reject"
    on_failure: str | None = None
    attempts_max: int | None = None

    def __post_init__(self) -> None:
        check_name("subject", self.subject)
        check_name("group", self.group)
        for tags in ("tags_any", "tags_all"):
            texts(tags, getattr(self, tags))
        _check(self.concurrency >= 1, f"concurrency is 1 or more, not {self.concurrency}")
        _check(
            self.on_undecodable in ("reject", "retry", "skip"),
            "on_undecodable is 'reject', 'retry' or 'skip'",
        )
        _check(self.start in (None, "earliest", "latest"), "start is 'earliest' or 'latest'")
        for each in self.retry_delays:
            retry_ms(each)
        for name, span in (("timeout", self.timeout), ("lease", self.lease)):
            _check(
                span is None or (isinstance(span, timedelta) and span > timedelta(0)),
                f"{name} is a timedelta over 0, not {span!r}",
            )
        if self.batch is not None:
            self._check_batch(*self.batch)
        _check(
            not self.broadcast or self.idempotent is None or self.name is not None,
            (
                "each consumer of a broadcast group has its own effects: give it a `name` under "
                "which it finds what it did"
            ),
        )
        _check(
            not (self.most_once and (self.idempotent is not None or self.retry_delays)),
            (
                "with most_once a message is never handed out again: neither `idempotent` nor "
                "`retry_delays` go with it"
            ),
        )

    def _check_batch(self, count: int, wait: timedelta) -> None:
        _check(
            isinstance(wait, timedelta) and wait >= timedelta(0),
            f"batch is (messages, timedelta), not {self.batch!r}",
        )
        held = self.prefetch or _PREFETCH
        _check(1 <= count <= held, f"a batch of {count} messages never fills: prefetch is {held}")
        _check(
            self.idempotent is None,
            (
                "`idempotent` is for one message at a time: leave out `batch`, or record the "
                "messages yourself"
            ),
        )

    @property
    def record_group(self) -> str:
        """The group under which a finished message is recorded: each consumer of a broadcast group
        has separate effects.
        """
        return self.group + BROADCAST + (self.name or "") if self.broadcast else self.group

    @property
    def policy(self) -> Policy:
        """The options about failures."""
        return Policy(tuple(self.retry_delays), self.on_undecodable)

    def consumer(self) -> dict[str, Any]:
        """The keywords for `Client.consumer`; options that were not given are left to it."""
        _check(
            self.on_failure is None and self.attempts_max is None,
            self._of_ordered("on_failure and attempts_max are", is_ordered=False),
        )
        chosen: dict[str, Any] = {
            "ack": "explicit",
            "tags_any": self.tags_any,
            "tags_all": self.tags_all,
        }
        if self.most_once:
            chosen["consume_most_once"] = True
        if self.broadcast:
            chosen["broadcast"] = True
        for name in ("expired",):
            if getattr(self, name) is not None:
                chosen[name] = getattr(self, name)
        return chosen | self._common()

    def ordered_consumer(self, *, is_async: bool) -> dict[str, Any]:
        """The keywords for `Client.ordered_consumer`. Raises InvalidArgument for options that do
        not go with ordered subjects.
        """
        _check(
            not self.tags_any and not self.tags_all, self._of_ordered("tags_any and tags_all are")
        )
        _check(
            not self.most_once and not self.broadcast,
            self._of_ordered("most_once and broadcast are"),
        )
        _check(
            self.prefetch_bytes is None and self.expired is None,
            self._of_ordered("prefetch_bytes and expired are"),
        )
        _check(
            is_async or self.timeout is None,
            f"subject {self.subject!r} is ordered, and a thread cannot be cancelled: "
            "its key's next try would overtake it. Use an `async def` handler, or no timeout",
        )
        chosen: dict[str, Any] = {"ack": "explicit"}
        if self.retry_delays:
            chosen["retry_delays_s"] = [each.total_seconds() for each in self.retry_delays]
        for name in ("on_failure", "attempts_max"):
            if getattr(self, name) is not None:
                chosen[name] = getattr(self, name)
        return chosen | self._common()

    def _common(self) -> dict[str, Any]:
        found = {
            name: getattr(self, name) for name in ("name", "start", "prefetch", "prefetch_bytes")
        }
        chosen = {name: value for name, value in found.items() if value is not None}
        if self.lease is not None:
            chosen["lease_ms"] = math.ceil(self.lease.total_seconds() * 1000)
        return chosen

    def _of_ordered(self, what: str, *, is_ordered: bool = True) -> str:
        kinds = ("unordered", "ordered") if is_ordered else ("ordered", "unordered")
        return f"{what} of {kinds[0]} subjects, and {self.subject!r} is {kinds[1]}"


def options_of(subject: str, group: str, given: ListenerOptions) -> Options:
    """The options of a listener. Raises InvalidName, InvalidArgument."""
    unknown = set(given) - {each.name for each in fields(Options)}
    _check(not unknown, f"a listener has no option {', '.join(sorted(unknown))}")
    return Options(subject=subject, group=group, **given)


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InvalidArgument(otherwise)
