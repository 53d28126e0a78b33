"""Producers and consumers of an ordered subject that record in a history (tests/history/ordered) what they do.

A message's body is its producer and its serial, `p0 17`, and after a newline the payload. The recorders do not rely on brokers for the
names of messages: a producer counts its messages, and a consumer reads the names in the bodies.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

from history import Recorder
from history.events import Type
from history.ordered import Deliver, Handed, Keyed, Part, Put, Rerouted, Sealed, Settle, Stored

from qmq import OrderedMessage, OrderedProducer
from qmq.client.consuming.ordered.lane import Cell, LaneState
from qmq.client.consuming.ordered.message import LaneMessage, OrderedMessages
from qmq.client.metadata.service import MetadataClient
from qmq.client.producing.receipts import BatchReceipt, CutReceipt, Ticket
from qmq.errors import LaneLost, Outcome, QmqError


class Item(NamedTuple):
    """A message to send."""

    key: str
    payload: bytes


def body_of(producer: str, serial: int, payload: bytes) -> bytes:
    """The body as sent."""
    return b"%s %d\n%s" % (producer.encode(), serial, payload)


def parse(body: bytes) -> tuple[str, int, bytes]:
    """Producer, serial, payload."""
    head, _, payload = body.partition(b"\n")
    producer, serial = head.split()
    return producer.decode(), int(serial), payload


def id_of(id: object) -> int:
    """A message id as a number that is short enough for a history."""
    return crc32(str(id).encode())


# --- producers ---------------------------------------------------------------------------------------------------------------


class PutRecorder:
    """One producer's sends. `name` is the only producer of that name, for all of the history."""

    def __init__(self, recorder: Recorder, name: str, subject: str) -> None:
        self.acked: Counter[str] = Counter()
        """Messages that were acknowledged, by key."""
        self.failures: Counter[str] = Counter()
        """By outcome and code."""
        self._recorder = recorder
        self._name = name
        self._subject = subject
        self._serials: Counter[str] = Counter()

    async def send(self, producer: OrderedProducer, items: Sequence[Item]) -> None:
        """Send the messages in this order, and record the outcome of each. Failures are recorded, not raised."""
        messages = [self._next(item.key) for item in items]
        begun = self._recorder.record(Put(process=self._name, type="invoke", subject=self._subject, messages=tuple(messages)))
        chosen: defaultdict[Ticket, list[tuple[Keyed, int]]] = defaultdict(list)
        for message, item in zip(messages, items, strict=True):
            ticket = producer.send(body_of(self._name, message.serial, item.payload), item.key)
            chosen[ticket].append((message, producer.place_of_last(ticket)))
        # Each end is written when it comes: partitions answer in their own time.
        await asyncio.gather(*[self._end(begun, ticket, found) for ticket, found in chosen.items()])

    def _next(self, key: str) -> Keyed:
        self._serials[key] += 1
        return Keyed(key, self._serials[key])

    async def _end(self, begun: Put, ticket: Ticket, found: Sequence[tuple[Keyed, int]]) -> None:
        try:
            receipt = await ticket
        except QmqError as failure:
            self.failures[f"{failure.outcome.name.lower()} E{failure.code}"] += len(found)
            end = begun.ended("info" if failure.outcome is Outcome.UNKNOWN else "fail", messages=tuple(name for name, _ in found))
            self._recorder.record(end)
            return
        for is_resent in (False, True):
            stored = [(name, place) for name, place in found if _is_resent(receipt, place) is is_resent]
            if stored:
                places = tuple(_stored(receipt, place) for _, place in stored)
                names = tuple(name for name, _ in stored)
                self._recorder.record(begun.ended("ok", messages=names, places=places, resent=is_resent or None))
        self.acked.update(name.key for name, _ in found)


def _stored(receipt: BatchReceipt, place: int) -> Stored:
    found = receipt.receipt(place)
    return Stored(found.partition, found.sequence, id_of(found.id))


def _is_resent(receipt: BatchReceipt, place: int) -> bool:
    """Whether the message was sent again after a fence. Such a message keeps its first id, so its batch has a column of ids."""
    if isinstance(receipt, CutReceipt):
        return any(place in places and part.ids is not None for places, part in receipt.parts)
    return receipt.ids is not None


# --- consumers ---------------------------------------------------------------------------------------------------------------


class DeliveryRecorder:
    """One consumer's deliveries and acknowledgements. `process` is one life of the consumer. Deliveries are written immediately, before
    they can be acknowledged. Acknowledgements that were answered together are one line. If a lane is lost while an acknowledgement is on
    its way, the outcome is unknown: the acknowledgement may have been committed before. It was certainly not committed if the lane was lost
    before any verdict.
    """

    def __init__(self, recorder: Recorder, process: str, group: str) -> None:
        self._recorder = recorder
        self._process = process
        self._group = group
        self._answered: defaultdict[tuple[int, int, Type], list[tuple[int, int]]] = defaultdict(list)
        self._is_flushing = False

    def delivered(self, message: OrderedMessage) -> bytes:
        """The handler is given it. The payload."""
        return self._deliver([message])[0]

    def delivered_in_bulk(self, messages: OrderedMessages) -> list[bytes]:
        """The same for many of one lane."""
        return self._deliver(list(messages))

    def _deliver(self, messages: Sequence[LaneMessage]) -> list[bytes]:
        rows, payloads = list[Handed](), list[bytes]()
        for message in messages:
            producer, serial, payload = parse(message.body)
            rows.append(Handed(message.sequence, message.key or "", producer, serial, message.attempt, id_of(message.id)))
            payloads.append(payload)
        first = messages[0]
        lps = first.lane.lane.range  # type: ignore[attr-defined]
        self._recorder.record(
            Deliver(
                process=self._process,
                type="ok",
                group=self._group,
                partition=first.partition,
                first=lps.first,
                end=lps.end,
                token=first.token,
                version=first.route_version,
                handed=tuple(rows),
            )
        )
        return payloads

    async def ack(self, message: OrderedMessage) -> None:
        """Acknowledge it, and write down what is known of that. Raises nothing."""
        await self._ack(message.ack_sync, [message.cell], message.partition, message.token, [message.sequence])

    async def ack_in_bulk(self, messages: OrderedMessages) -> None:
        """The same for many of one lane."""
        cells = [run.cell for run in messages.runs]
        await self._ack(messages.ack_sync, cells, messages.partition, messages.token, [each.sequence for each in messages])

    async def _ack(
        self, ack: Callable[[], Awaitable[None]], cells: Sequence[Cell], partition: int, token: int, sequences: Sequence[int]
    ) -> None:
        is_void = all(cell.state is LaneState.VOID for cell in cells)
        began_ns = time.monotonic_ns()
        end: Type = "ok"
        try:
            await ack()
        except LaneLost:
            end = "fail" if is_void else "info"
        except QmqError:
            end = "info"
        self._answered[partition, token, end] += [(sequence, began_ns) for sequence in sequences]
        if not self._is_flushing:
            self._is_flushing = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Write down what was answered since."""
        self._is_flushing = False
        answered, self._answered = self._answered, defaultdict(list)
        for (partition, token, end), found in answered.items():
            self._recorder.record(
                Settle(
                    process=self._process,
                    type=end,
                    group=self._group,
                    partition=partition,
                    token=token,
                    sequences=tuple(sequence for sequence, _ in found),
                    began_ns=min(began_ns for _, began_ns in found),
                )
            )


# --- the route ---------------------------------------------------------------------------------------------------------------


class RouteRecorder:
    """The versions of a subject's route. `look` may be called any number of times; a version is recorded when more is known about it than
    before.
    """

    def __init__(self, recorder: Recorder, metadata: MetadataClient, subject: str) -> None:
        self.latest = 0
        self.logical_partitions = 0
        self._recorder = recorder
        self._metadata = metadata
        self._subject = subject
        self._written: dict[int, Rerouted] = {}
        self._fenced: set[int] = set()

    async def look(self) -> None:
        """Write down what is new. Raises QmqError."""
        described = await self._metadata.describe_route(self._subject)
        changes = {change.to_version: change for change in await self._metadata.route_history(self._subject)}
        self._fenced.update(described.route.fenced)
        for version in range(1, described.latest_version + 1):
            await self._look_at(version, changes.get(version))
        self.latest = described.latest_version

    async def _look_at(self, version: int, change: Any) -> None:
        known = self._written.get(version)
        if known is not None and not known.sources:
            return
        event = self._event(version, known.partitions if known is not None else await self._parts(version), change)
        if known is None or (event.sealed, event.fenced) != (known.sealed, known.fenced):
            self._written[version] = event
            self._recorder.record(event)

    async def _parts(self, version: int) -> tuple[Part, ...]:
        route = (await self._metadata.describe_route(self._subject, version)).route
        self.logical_partitions = route.logical_partitions
        return tuple(Part(each.number, each.lps.first, each.lps.end, each.broker_group) for each in route.partitions)

    def _event(self, version: int, parts: tuple[Part, ...], change: Any) -> Rerouted:
        sources, sealed, times = (), {}, {}
        if change is not None:
            sources, sealed, times = tuple(change.sources), dict(change.sealed), dict(change.times_ms)
            self._fenced.update(number for number, sequence in sealed.items() if sequence < 0)
        return Rerouted(
            process="nemesis",
            type="ok",
            version=version,
            logical_partitions=self.logical_partitions,
            partitions=parts,
            sources=sources,
            sealed=tuple(sorted(Sealed(*each) for each in sealed.items())),
            fenced=tuple(sorted(self._fenced & set(sources))),
            began_ns=_monotonic_ns(times, "prepared"),
            published_ns=_monotonic_ns(times, "published"),
        )


def _monotonic_ns(times_ms: Mapping[str, int], phase: str) -> int | None:
    """A wall clock's time on the history's clock; exact to a millisecond where one machine has both."""
    if phase not in times_ms:
        return None
    rounded_ms = times_ms[phase] + (phase == "published")
    return time.monotonic_ns() - (time.time_ns() - rounded_ms * 1_000_000)


async def is_drained(metadata: MetadataClient, subject: str, groups: Iterable[str]) -> bool:
    """Whether these groups have finished everything, according to the brokers. Raises QmqError."""
    described = await metadata.describe_route(subject)
    found = {group.group: group for group in described.groups}
    is_complete = not described.silent_groups and not described.route.fenced
    return is_complete and all(name in found and not found[name].backlog and not found[name].parked_keys for name in groups)
