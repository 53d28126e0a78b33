"""The client: one door to a QMQ cluster for an asyncio program."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from qmq.client.consumer import Consumer
from qmq.client.link import Links
from qmq.client.locator import Locator, Pushed
from qmq.client.producer import Identity, Producer
from qmq.client.receipts import Receipt, Receipts
from qmq.client.routes import Route
from qmq.compression import Compression
from qmq.errors import ClientClosed, InvalidArgument
from qmq.model import check_name

if TYPE_CHECKING:
    from qmq.client.metadata import MetadataClient

DEFAULT_PORT: Final = 20880


def parse_addresses(addresses: str | Sequence[str]) -> list[str]:
    """"host:port", or several, as a list or with commas. Raises InvalidArgument."""
    found = addresses.split(",") if isinstance(addresses, str) else list(addresses)
    parsed: list[str] = []
    for each in found:
        host, separator, port = each.strip().rpartition(":")
        if not separator:
            host, port = port, str(DEFAULT_PORT)
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise InvalidArgument(f"{each!r} is no address: write host:port, such as localhost:{DEFAULT_PORT}")
        parsed.append(f"{host}:{port}")
    if not parsed:
        raise InvalidArgument("give at least one metaserver's address")
    return parsed


class Client:
    """Sends and consumes. Make it with `qmq.connect`; use it with `async with`."""

    def __init__(self, addresses: str | Sequence[str], *, create_subjects: bool = True) -> None:
        self._addresses = parse_addresses(addresses)
        self._create_subjects = create_subjects
        self._metadata: MetadataClient | None = None
        self._links = Links(Locator(self._locate, self._watch, self._turn), f"qmq-python/{os.getpid()}")
        self._identity = Identity()
        self._producers: dict[str, Producer] = {}
        self._owned: list[Producer] = []
        self._consumers: list[Consumer] = []

    @property
    def metadata(self) -> MetadataClient:
        """Administration."""
        if self._links.is_closed:
            raise ClientClosed("the client is closed: make a new one with qmq.connect()")
        if self._metadata is None:
            from qmq.client.metadata import MetadataClient

            self._metadata = MetadataClient(self._addresses)
        return self._metadata

    async def _locate(self, subject: str) -> list[Route]:
        return await self.metadata.routes(subject, create=self._create_subjects)

    def _watch(self) -> AsyncIterator[Pushed]:
        return self.metadata.watch()

    def _turn(self) -> None:
        self.metadata.turn()

    # --- sending -------------------------------------------------------------------------------------------------------

    async def send(
        self, subject: str, body: bytes, *, key: str | bytes | None = None, tags: Iterable[str] | None = None,
        headers: Mapping[str, str | bytes] | None = None,
    ) -> Receipt:  # fmt: skip
        """Send a message and wait until it is stored.

        Raises InvalidName, InvalidArgument, MessageTooLarge, UnknownSubject, DeadlineExceeded (see its `outcome`), ClientClosed.
        """
        producer = self._shared_producer(subject)
        if producer.full:
            await producer.drain()
        ticket = producer.send(body, key, tags, headers)
        index = producer.place_of_last(ticket)
        return (await ticket).receipt(index)

    async def send_many(
        self, subject: str, bodies: Sequence[bytes], *, keys: Sequence[str | bytes | None] | None = None,
        tags: Sequence[Iterable[str]] | None = None, headers: Sequence[Mapping[str, str | bytes]] | None = None,
    ) -> Receipts:  # fmt: skip
        """Send many messages and wait until all are stored; keys, tags and headers, where given, have one item a message."""
        producer = self._shared_producer(subject)
        if producer.full:
            await producer.drain()
        return await producer.send_many(bodies, keys, tags, headers)

    def _shared_producer(self, subject: str) -> Producer:
        producer = self._producers.get(subject)
        if producer is None:
            producer = self._producers[subject] = self._new_producer(subject)
        return producer

    def _new_producer(self, subject: str, **options: Any) -> Producer:
        if self._links.is_closed:
            raise ClientClosed("the client is closed: make a new one with qmq.connect()")
        return Producer(self._links, self._identity, check_name("subject", subject), **options)

    def producer(
        self, subject: str, *, batch_messages: int = 1_000, batch_bytes: int = 256 * 1024,
        delivery_timeout_s: float = 120.0, compression: str | None = None, acks: str = "quorum",
    ) -> Producer:  # fmt: skip
        """A batching producer for one subject. `compression` is "zstd" or "lz4".

        `acks="master"` has messages acknowledged when the master alone has them: faster, and the last ones may be lost with it.
        Raises InvalidName, InvalidArgument.
        """
        if compression not in (None, "zstd", "lz4"):
            raise InvalidArgument(f"compression is 'zstd' or 'lz4', not {compression!r}")
        kind = Compression[compression.upper()] if compression else Compression.NONE
        producer = self._new_producer(
            subject, batch_messages=batch_messages, batch_bytes=batch_bytes, delivery_timeout_s=delivery_timeout_s,
            compression=kind, acks=acks,
        )  # fmt: skip
        self._owned.append(producer)
        return producer

    # --- consuming -----------------------------------------------------------------------------------------------------

    def consumer(
        self, subject: str, group: str, *, name: str | None = None, start: str = "earliest",
        tags_any: Sequence[str] = (), tags_all: Sequence[str] = (), ack: str = "auto",
        consume_most_once: bool = False, prefetch: int = 2_000, pull_bytes: int = 1024 * 1024,
        lease_ms: int = 30_000, expired: str = "raise",
    ) -> Consumer:  # fmt: skip
        """A consumer of a group: iterate over it, or `pull`.

        A group that is new begins at `start`: "earliest" (default) or "latest". `prefetch` messages may be unsettled at once.
        `expired="skip"` goes on with the oldest messages that are left where retention took some; the default raises MessagesExpired.
        Raises InvalidName, InvalidArgument, ClientClosed.
        """
        if self._links.is_closed:
            raise ClientClosed("the client is closed: make a new one with qmq.connect()")
        consumer = Consumer(
            self._links, self._reset_to_earliest, subject, group, name=name, start=start, tags_any=list(tags_any),
            tags_all=list(tags_all), ack=ack, most_once=consume_most_once, prefetch=prefetch, pull_bytes=pull_bytes,
            lease_ms=lease_ms, expired=expired,
        )  # fmt: skip
        self._consumers.append(consumer)
        return consumer

    async def _reset_to_earliest(self, subject: str, group: str, broker_group: str | None) -> None:
        await self.metadata.reset_group(subject, group, to="earliest", broker_group=broker_group)

    # --- the end -------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Flush producers, let consumers leave, end connections. Harmless to call again."""
        if self._links.is_closed:
            return
        try:
            for consumer in self._consumers:
                await consumer.close()
            for producer in [*self._producers.values(), *self._owned]:
                await producer.close()
        finally:
            for producer in [*self._producers.values(), *self._owned]:
                producer.abort()
            await self._links.close()
            if self._metadata is not None:
                await self._metadata.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
