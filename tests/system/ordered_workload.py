"""The plan of a run of ordered faults: which changes of the route, which faults, and when. Pure,
drawn from a seed before the run.

Changes follow one another, and so do faults; both continue beside each other. A fault ends, and its
damage is healed, before the next fault.

| fault | action |
|---|---|
| kill-master, kill-slave, kill-meta, kill-consumer | SIGKILL, then a new start |
| stop-master, stop-consumer | SIGSTOP, for longer than its lease, then SIGCONT |
| freeze-group | SIGSTOP to all replicas of a broker group for longer than the master's lease, while its partitions are moved away |
| cut-group | all replicas are cut off from the coordination store and the metaservers for as long (needs network namespaces) |

Load for tests of ordered subjects: producers and consumers on the real client, which record
everything in a history.

    work = OrderedWorkload(server, subject, folder / "history.jsonl", sources=flight_sources(2),
    consumers={"g": 2}) await work.start() await work.wait_for_acks(10_000) report = await
    work.stop() assert report.ok, report

Each producer uses different keys, so order is promised for a key as a whole. `sources` gives their
messages:

    flight_sources    all flights of the examples' data, repeated endlessly; the key is the aircraft
    binlog_sources    the changes of a generated table, any number; `Follower` applies them, and must end with the same bytes

Consumers run here as tasks, or as processes (this module as a program), which a test can kill.

A consumer of an ordered subject in a separate process, which a test can kill and stop.

    python -m system.ordered_workload --server A --subject S --group G --name N --history FILE

It appends its deliveries to the history, which other processes write too (each line is appended
whole), and closes cleanly on SIGTERM.

Producers and consumers of an ordered subject that record in a history (tests/history/ordered) what
they do.

A message's body is its producer and its serial, `p0 17`, and after a newline the payload. The
recorders do not rely on brokers for the names of messages: a producer counts its messages, and a
consumer reads the names in the bodies.
"""  # noqa: E501

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from zlib import crc32

from binlog import Change, MemoryReplica, Source
from flights import flights
from history.events import Note, Operation, Recorder, Type, load
from history.ordered.checkers import OrderedReport, check_ordered
from history.ordered.events import (
    Deliver,
    Handed,
    Keyed,
    Part,
    Put,
    Rerouted,
    Sealed,
    Settle,
    Stored,
)
from qmq_ordering.hashing import logical_partition

import qmq
from qmq import OrderedMessage, OrderedProducer
from qmq.client.consuming.ordered.lane import Cell, LaneState
from qmq.client.consuming.ordered.message import LaneMessage, OrderedMessages
from qmq.client.metadata.service import MetadataClient
from qmq.client.producing.receipts import BatchReceipt, CutReceipt, Ticket
from qmq.errors import LaneLost, Outcome, QmqError
from qmq.proto.v1 import meta_pb2 as pb


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


# --- producers ------------------------------------------------------------------------------------


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
        """Send the messages in this order, and record the outcome of each. Failures are recorded,
        not raised.
        """
        messages = [self._next(item.key) for item in items]
        begun = self._recorder.record(
            Put(process=self._name, type="invoke", subject=self._subject, messages=tuple(messages))
        )
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
            end = begun.ended(
                "info" if failure.outcome is Outcome.UNKNOWN else "fail",
                messages=tuple(name for name, _ in found),
            )
            self._recorder.record(end)
            return
        for is_resent in (False, True):
            stored = [
                (name, place) for name, place in found if _is_resent(receipt, place) is is_resent
            ]
            if stored:
                places = tuple(_stored(receipt, place) for _, place in stored)
                names = tuple(name for name, _ in stored)
                self._recorder.record(
                    begun.ended("ok", messages=names, places=places, resent=is_resent or None)
                )
        self.acked.update(name.key for name, _ in found)


def _stored(receipt: BatchReceipt, place: int) -> Stored:
    found = receipt.receipt(place)
    return Stored(found.partition, found.sequence, id_of(found.id))


def _is_resent(receipt: BatchReceipt, place: int) -> bool:
    """Whether the message was sent again after a fence. Such a message keeps its first id, so its
    batch has a column of ids.
    """
    if isinstance(receipt, CutReceipt):
        return any(place in places and part.ids is not None for places, part in receipt.parts)
    return receipt.ids is not None


# --- consumers ------------------------------------------------------------------------------------


class DeliveryRecorder:
    """One consumer's deliveries and acknowledgements. `process` is one life of the consumer.
    Deliveries are written immediately, before they can be acknowledged. Acknowledgements that were
    answered together are one line. If a lane is lost while an acknowledgement is on its way, the
    outcome is unknown: the acknowledgement may have been committed before. It was certainly not
    committed if the lane was lost before any verdict.
    """

    def __init__(self, recorder: Recorder, process: str, group: str) -> None:
        self._recorder = recorder
        self._process = process
        self._group = group
        self._answered: defaultdict[tuple[int, int, Type], list[tuple[int, int]]] = defaultdict(
            list
        )
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
            rows.append(
                Handed(
                    message.sequence,
                    message.key or "",
                    producer,
                    serial,
                    message.attempt,
                    id_of(message.id),
                )
            )
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
        found = message.lane_run.working.get(message.sequence)
        cells = [] if found is None else [found]
        await self._ack(
            message.ack_sync, cells, message.partition, message.token, [message.sequence]
        )

    async def ack_in_bulk(self, messages: OrderedMessages) -> None:
        """The same for many of one lane."""
        cells = [run.cell for run in messages.runs]
        await self._ack(
            messages.ack_sync,
            cells,
            messages.partition,
            messages.token,
            [each.sequence for each in messages],
        )

    async def _ack(
        self,
        ack: Callable[[], Awaitable[None]],
        cells: Sequence[Cell],
        partition: int,
        token: int,
        sequences: Sequence[int],
    ) -> None:
        is_void = bool(cells) and all(cell.state is LaneState.VOID for cell in cells)
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


# --- the route ------------------------------------------------------------------------------------


class RouteRecorder:
    """The versions of a subject's route. `look` may be called any number of times; a version is
    recorded when more is known about it than before.
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
        changes = {
            change.to_version: change
            for change in await self._metadata.route_history(self._subject)
        }
        self._fenced.update(described.route.fenced)
        for version in range(1, described.latest_version + 1):
            await self._look_at(version, changes.get(version))
        self.latest = described.latest_version

    async def _look_at(self, version: int, change: Any) -> None:
        known = self._written.get(version)
        if known is not None and not known.sources:
            return
        event = self._event(
            version, known.partitions if known is not None else await self._parts(version), change
        )
        if known is None or (event.sealed, event.fenced) != (known.sealed, known.fenced):
            self._written[version] = event
            self._recorder.record(event)

    async def _parts(self, version: int) -> tuple[Part, ...]:
        route = (await self._metadata.describe_route(self._subject, version)).route
        self.logical_partitions = route.logical_partitions
        return tuple(
            Part(each.number, each.lps.first, each.lps.end, each.broker_group)
            for each in route.partitions
        )

    def _event(self, version: int, parts: tuple[Part, ...], change: Any) -> Rerouted:
        sources, sealed, times = (), {}, {}
        if change is not None:
            sources, sealed, times = (
                tuple(change.sources),
                dict(change.sealed),
                dict(change.times_ms),
            )
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
    """A wall clock's time on the history's clock; exact to a millisecond where one machine has
    both.
    """
    if phase not in times_ms:
        return None
    rounded_ms = times_ms[phase] + (phase == "published")
    return time.monotonic_ns() - (time.time_ns() - rounded_ms * 1_000_000)


async def is_drained(metadata: MetadataClient, subject: str, groups: Iterable[str]) -> bool:
    """Whether these groups have finished everything, according to the brokers. Raises QmqError."""
    described = await metadata.describe_route(subject)
    found = {group.group: group for group in described.groups}
    is_complete = not described.silent_groups and not described.route.fenced
    return is_complete and all(
        name in found and not found[name].backlog and not found[name].parked_keys for name in groups
    )


KILLS = {
    "kill-master": 3,
    "kill-slave": 1,
    "kill-meta": 2,
    "kill-consumer": 3,
    "stop-consumer": 2,
    "stop-master": 2,
}
CHANGES = {"split": 4, "merge": 3, "move": 3, "drain": 1}
PARTITIONS_MAX = 8
LONG = ("freeze-group", "cut-group")


class Step(NamedTuple):
    """A step, at the earliest this many seconds after the beginning."""

    at_s: float
    kind: str


def plan(
    seed: int, *, changes: int, kills: int, freezes: int, seconds: float, can_cut: bool
) -> tuple[list[Step], list[Step]]:
    """Changes and faults, each spread over the time at random. However few there are, the first
    ones are one of each kind.
    """
    coin = Random(seed)
    kinds = list(CHANGES)[:3][: min(changes, 3)]
    kinds += coin.choices(list(CHANGES), list(CHANGES.values()), k=changes - len(kinds))
    faults = list(KILLS)[: min(kills, len(KILLS))]
    faults += coin.choices(list(KILLS), list(KILLS.values()), k=kills - len(faults))
    faults += [LONG[number % 2 if can_cut else 0] for number in range(freezes)]
    coin.shuffle(kinds)
    coin.shuffle(faults)
    return _spread(coin, kinds, seconds), _spread(coin, faults, seconds)


def _spread(coin: Random, kinds: Sequence[str], seconds: float) -> list[Step]:
    times = sorted(coin.uniform(0.0, seconds) for _ in kinds)
    return [Step(at_s, kind) for at_s, kind in zip(times, kinds, strict=True)]


def held_by(route: pb.OrderedRoute, group: str) -> frozenset[int]:
    """The logical partitions that a broker group has in a route."""
    parts = [part for part in route.partitions if part.broker_group == group]
    return frozenset(lp for part in parts for lp in range(part.lps.first, part.lps.end))


def is_share(lps: Collection[int], route: pb.OrderedRoute, groups: Sequence[str]) -> bool:
    """Whether these are at least half of each group's share in an even route, so that a fault of
    them affects writers.
    """
    return 2 * len(groups) * len(lps) >= route.logical_partitions


def worth_harming(route: pb.OrderedRoute, groups: Sequence[str]) -> list[str]:
    """The broker groups with such a share. There is always one."""
    return [group for group in groups if is_share(held_by(route, group), route, groups)]


def operation(
    coin: Random, kind: str, route: pb.OrderedRoute, groups: Sequence[str]
) -> dict[str, object]:
    """A change of this kind, or of another one where this is not possible: the arguments of
    `change_route`.
    """
    parts = list(route.partitions)
    if kind == "merge" and len(parts) > 1:
        at = coin.randrange(len(parts) - 1)
        return {
            "merge": pb.MergeOperation(
                partitions=[parts[at].number, parts[at + 1].number],
                broker_group=coin.choice(groups),
            )
        }
    wide = [part for part in parts if part.lps.end - part.lps.first > 1]
    if kind in ("split", "merge") and wide and len(parts) < PARTITIONS_MAX:
        part = coin.choice(wide)
        at = coin.randrange(part.lps.first + 1, part.lps.end)
        return {
            "split": pb.SplitOperation(
                partition=part.number,
                at=[at],
                broker_groups=[coin.choice(groups) for _ in range(2)],
            )
        }
    if kind == "split" and len(parts) > 1:
        return operation(coin, "merge", route, groups)
    part = coin.choice(parts)
    others = [group for group in groups if group != part.broker_group] or list(groups)
    return {"move": pb.MoveOperation(partition=part.number, broker_group=coin.choice(others))}


def evacuation(
    route: pb.OrderedRoute, group: str, groups: Sequence[str], coin: Random
) -> list[pb.MoveOperation]:
    """The changes that move everything away from a broker group."""
    others = [name for name in groups if name != group]
    return [
        pb.MoveOperation(partition=part.number, broker_group=coin.choice(others))
        for part in route.partitions
        if part.broker_group == group
    ]


BATCH = 50
UNDER_WAY_MAX = 20
"""Batches of one producer: a slow partition must not stop the others for long, nor be flooded."""
PAUSE_S = 0.01
LOOK_S = 0.2
LEASE_MS = 5_000
CONCURRENCY = 256
BULK = 200


def share_of(key: str, shares: int) -> int:
    """The producer that owns a key."""
    return crc32(key.encode()) % shares


def reads_in_bulk(name: str) -> bool:
    """Consumers are named group-0, group-1, ...: every second one reads in bulk."""
    return int(name.rpartition("-")[2]) % 2 == 1


def flight_sources(producers: int) -> list[Iterator[Item]]:
    """All flights again and again, each producer with its own aircraft."""
    rows = [Item(row.tail_number, row.line.encode()) for row in flights()]
    return [
        itertools.cycle([row for row in rows if share_of(row.key, producers) == number])
        for number in range(producers)
    ]


def binlog_sources(producers: int, source: Source, count: int) -> list[Iterator[Item]]:
    """Changes of a table, each producer with its own keys. After all of them the table is in its
    final state.
    """
    changes = [Item(change.key, change.encode()) for change in source.changes(count)]
    return [
        iter([change for change in changes if share_of(change.key, producers) == number])
        for number in range(producers)
    ]


class Follower:
    """A table built from the messages that a group gets. Raises OutOfOrder from the handler: the
    consumer's lane stops, and `stop` reports why.
    """

    def __init__(self) -> None:
        self.replica = MemoryReplica()
        self.failure: Exception | None = None

    def __call__(self, payload: bytes) -> None:
        """Apply one change."""
        try:
            self.replica.apply(Change.decode(payload))
        except Exception as failure:
            self.failure = self.failure or failure
            raise


def followed(events: Iterable[Operation], changes: Iterable[Change], group: str) -> bytes:
    """The table built from the changes in the order in which, by the history, a group got them. A
    change's serial is the message's, since each key has one producer that sends all its changes.
    Raises OutOfOrder.
    """
    known = {(change.key, change.serial): change for change in changes}
    replica = MemoryReplica()
    for event in events:
        if isinstance(event, Deliver) and event.group == group:
            for handed in event.handed:
                replica.apply(known[handed.key, handed.serial])
    return replica.dump()


class OrderedWorkload:
    """Producers and consumers of one ordered subject. `consumers` is how many of each group run
    here; other groups are only checked.
    """

    def __init__(
        self,
        server: str,
        subject: str,
        path: Path,
        *,
        sources: Sequence[Iterator[Item]],
        consumers: Mapping[str, int],
        elsewhere: Sequence[str] = (),
        followers: Mapping[str, Follower] | None = None,
        gate: str = "",
        pause_s: float = PAUSE_S,
    ) -> None:
        self.server = server
        self.subject = subject
        self.path = path
        self.groups = (*consumers, *elsewhere)
        self.puts: list[PutRecorder] = []
        self.recorder = Recorder(path)
        self._sources, self._consumers = sources, consumers
        self._followers = followers or {}
        self._gate, self._pause_s = gate, pause_s
        self._clients: list[qmq.Client] = []
        self._producing: list[asyncio.Task[None]] = []
        self._consuming: list[asyncio.Task[None]] = []
        self._looking: asyncio.Task[None] | None = None
        self._is_closed = False
        self._stops = asyncio.Event()
        self.client = self._new_client()
        self.routes = RouteRecorder(self.recorder, self.client.metadata, subject)

    def _new_client(self) -> qmq.Client:
        client = qmq.connect(self.server)
        self._clients.append(client)
        return client

    @property
    def acked(self) -> int:
        """Messages that were acknowledged to producers."""
        return sum(put.acked.total() for put in self.puts)

    def acked_in(self, lps: Collection[int]) -> int:
        """The same for some logical partitions."""
        acked = sum((put.acked for put in self.puts), start=Counter[str]())
        count = self.routes.logical_partitions
        return sum(
            number for key, number in acked.items() if logical_partition(key.encode(), count) in lps
        )

    @property
    def failures(self) -> dict[str, int]:
        """Messages that failed, by outcome and code."""
        return dict(
            sum([put.failures for put in self.puts], start=type(self.puts[0].failures)())
            if self.puts
            else {}
        )

    async def start(self) -> None:
        """Begin. One client for each producer and consumer, as separate processes would have."""
        await self.routes.look()
        self._looking = asyncio.create_task(self._look())
        for group, count in self._consumers.items():
            for number in range(count):
                self._consuming.append(
                    asyncio.create_task(self._consume(group, f"{group}-{number}"))
                )
        for number, source in enumerate(self._sources):
            self.puts.append(PutRecorder(self.recorder, f"p{number}", self.subject))
            self._producing.append(asyncio.create_task(self._produce(self.puts[-1], source)))

    def note(self, text: str) -> None:
        """Write a fault into the history, for people."""
        self.recorder.record(Note(process="nemesis", type="info", f="fault", text=text))

    async def _look(self) -> None:
        while True:
            with suppress(QmqError):
                await self.routes.look()
            await asyncio.sleep(LOOK_S)

    # --- producing --------------------------------------------------------------------------------

    async def _produce(self, put: PutRecorder, source: Iterator[Item]) -> None:
        under_way: set[asyncio.Task[None]] = set()
        async with self._new_client().ordered_producer(
            self.subject, delivery_timeout_s=120.0
        ) as producer:
            while not self._stops.is_set():
                items = list(itertools.islice(source, BATCH))
                if not items:
                    break
                if len(under_way) >= UNDER_WAY_MAX:
                    _, under_way = await asyncio.wait(
                        under_way, return_when=asyncio.FIRST_COMPLETED
                    )
                under_way.add(asyncio.create_task(put.send(producer, items)))
                await asyncio.sleep(self._pause_s)
            await asyncio.gather(*under_way)

    # --- consuming --------------------------------------------------------------------------------

    async def _consume(self, group: str, name: str) -> None:
        follower, in_bulk = self._followers.get(group), reads_in_bulk(name)
        await consume(
            self._new_client(),
            self.recorder,
            self.subject,
            group,
            name,
            gate=self._gate,
            follower=follower,
            in_bulk=in_bulk,
        )

    # --- the end ----------------------------------------------------------------------------------

    async def wait_for_acks(
        self, count: int, *, within_s: float = 240.0, lps: Collection[int] = ()
    ) -> None:
        """Wait for this many more acknowledged messages, of these logical partitions or of any."""

        def acked() -> int:
            return self.acked_in(lps) if lps else self.acked

        goal = acked() + count
        async with asyncio.timeout(within_s):
            while acked() < goal:
                await asyncio.sleep(0.05 if lps else 0.005)
                self._raise_failures()

    async def wait_for_end(self, *, within_s: float = 600.0) -> None:
        """Wait until the sources are empty and every message has an outcome."""
        async with asyncio.timeout(within_s):
            await asyncio.gather(*self._producing)

    def _raise_failures(self) -> None:
        for task in (*self._producing, *self._consuming):
            if task.done():
                task.result()
        for follower in self._followers.values():
            if follower.failure is not None:
                raise follower.failure

    async def stop(
        self,
        *,
        within_s: float = 120.0,
        strict: Sequence[str] = (),
        slow_s: float = 1.0,
        after_s: float = 2.0,
    ) -> OrderedReport:
        """Stop sending; drain; check the whole history."""
        self._stops.set()
        async with asyncio.timeout(within_s):
            await asyncio.gather(*self._producing)
            await self._drained()
            await self.routes.look()
        await self.close()
        events = await asyncio.to_thread(load, self.path)
        return check_ordered(
            events,
            drained=True,
            groups=self.groups,
            strict=strict,
            slow_ns=int(slow_s * 1e9),
            after_ns=int(after_s * 1e9),
        )

    async def _drained(self) -> None:
        while True:
            self._raise_failures()
            with suppress(QmqError):
                if await is_drained(self.client.metadata, self.subject, self.groups):
                    return
            await asyncio.sleep(0.1)

    async def close(self) -> None:
        """End everything, in any state. May be repeated."""
        if self._is_closed:
            return
        self._is_closed = True
        tasks = [*self._consuming, *self._producing, *([self._looking] if self._looking else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in self._clients:
            await client.close()
        self.recorder.close()


async def consume(
    client: qmq.Client,
    recorder: Recorder,
    subject: str,
    group: str,
    name: str,
    *,
    gate: str = "",
    follower: Follower | None = None,
    lease_ms: int = LEASE_MS,
    in_bulk: bool = False,
) -> None:
    """Run one consumer until it is cancelled: record each delivery, then process it, then
    acknowledge it.
    """
    async with client.ordered_consumer(
        subject, group, name=name, ack="explicit", gate=gate, lease_ms=lease_ms
    ) as consumer:
        log = DeliveryRecorder(recorder, f"{name}.{consumer.incarnation}", group)
        follow = follower or (lambda payload: None)
        try:
            await (
                _read_in_bulk(consumer, log, follow)
                if in_bulk
                else _read_one_by_one(consumer, log, follow)
            )
        finally:
            log.flush()


async def _read_one_by_one(
    consumer: qmq.OrderedConsumer, log: DeliveryRecorder, follow: Callable[[bytes], None]
) -> None:
    async def handle(message: qmq.OrderedMessage) -> None:
        follow(log.delivered(message))
        await log.ack(message)

    await consumer.run(handle, concurrency=CONCURRENCY)


async def _read_in_bulk(
    consumer: qmq.OrderedConsumer, log: DeliveryRecorder, follow: Callable[[bytes], None]
) -> None:
    while True:
        found = await consumer.pull(BULK)
        if found:
            for payload in log.delivered_in_bulk(found):
                follow(payload)
            await log.ack_in_bulk(found)


TESTS = Path(__file__).resolve().parents[1]
GRACE_S = 20.0


class ConsumerProcess:
    """One consumer. Each process of the consumer has its own name in the history: the
    incarnation.
    """

    def __init__(
        self,
        server: str,
        subject: str,
        group: str,
        name: str,
        history: Path,
        *,
        lease_ms: int = LEASE_MS,
        gate: str = "",
    ) -> None:
        self.name = name
        self.group = group
        self._words = [
            *("--server", server),
            *("--subject", subject),
            *("--group", group),
            *("--name", name),
            *("--history", str(history)),
            *("--lease-ms", str(lease_ms)),
            *("--gate", gate),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin a life."""
        path = os.pathsep.join(
            [
                str(TESTS),
                str(TESTS.parent / "examples"),
                str(TESTS.parent / "scripts"),
                os.environ.get("PYTHONPATH", ""),
            ]
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "system.ordered_workload", *self._words],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
        )

    @property
    def is_alive(self) -> bool:
        """Whether the process exists, running or stopped."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP: the consumer holds its lanes until their leases end, and does not notice."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL if the process does not end."""
        self._end(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        self._signal(number)
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


async def run(chosen: argparse.Namespace) -> None:
    """Consume until SIGTERM, or until the parent process ends."""
    with Recorder(chosen.history) as recorder:
        async with qmq.connect(chosen.server) as client:
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
            orphaned = asyncio.create_task(end_with_parent(task))
            await consume(
                client,
                recorder,
                chosen.subject,
                chosen.group,
                chosen.name,
                gate=chosen.gate,
                lease_ms=chosen.lease_ms,
                in_bulk=reads_in_bulk(chosen.name),
            )
            orphaned.cancel()


async def end_with_parent(task: asyncio.Task[None]) -> None:
    """Cancel the task when the parent process has ended, since no other process would end this
    one.
    """
    parent = os.getppid()
    while os.getppid() == parent:
        await asyncio.sleep(1.0)
    task.cancel()


def main() -> int:
    """The command line; the exit status."""
    options = argparse.ArgumentParser(description=__doc__)
    for name in ("--server", "--subject", "--group", "--name"):
        options.add_argument(name, required=True)
    options.add_argument("--history", type=Path, required=True)
    options.add_argument("--lease-ms", type=int, default=LEASE_MS)
    options.add_argument("--gate", default="")
    try:
        asyncio.run(run(options.parse_args()))
    except asyncio.CancelledError:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
