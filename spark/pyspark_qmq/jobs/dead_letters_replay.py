"""Replays dead letters.

* The brokers replay parked keys, oldest partition of a key first, so that its messages come before newer ones of the key.
* Messages of a dead-letter subject are sent as new messages to their original subject, with the same message id and a header that names the
  dead letter (REPLAYED). Letters named by such a header in the original subject are skipped, so a second replay is harmless. If a crashed
  replay and the next one both write a slice, they use the same writer's name, and the slice is stored once.

Messages are sent in slices, in the order of storing (which keeps the order of keys), at a limited rate.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from qmq.client.client import Client
from qmq.errors import UnknownGroup
from qmq.headers import PREFIX

REPLAYED: Final = "replayed-from"
"""Header of a replayed message: the dead letter's subject/partition@group#sequence."""
SLICE_ROWS_MAX: Final = 10_000
_ORDER: Final = ("append_time", "subject", "partition", "broker_group", "sequence")


class ReplayedKey(NamedTuple):
    """A parked key of a group on one partition."""

    subject: str
    group: str
    key: bytes
    partition: int
    messages: int


class Pace:
    """Limits messages per second (0: no limit). `clock` returns seconds, `sleep` waits."""

    def __init__(self, rate: int, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep) -> None:
        self.rate = rate
        self._clock = clock
        self._sleep = sleep
        self._free_s = clock()

    def wait(self) -> None:
        """Wait until more messages may be sent."""
        ahead_s = self._free_s - self._clock()
        if ahead_s > 0:
            self._sleep(ahead_s)

    def went(self, messages: int) -> None:
        """Count sent messages."""
        if self.rate:
            self._free_s = max(self._free_s, self._clock()) + messages / self.rate

    @property
    def slice_rows(self) -> int:
        """The number of messages to send at once."""
        return min(self.rate, SLICE_ROWS_MAX) if self.rate else SLICE_ROWS_MAX


def unpark(servers: str, keys: Iterable[ReplayedKey], pace: Pace) -> int:
    """Replay parked keys, oldest partition of each key first; returns the number of messages. Keys that are no longer parked are skipped.

    Raises NotConnected, UnknownSubject, OrderMismatch.
    """
    return asyncio.run(_unpark(servers, sorted(keys), pace))


async def _unpark(servers: str, keys: list[ReplayedKey], pace: Pace) -> int:
    total = 0
    client = Client(servers.split(","), create_subjects=False)
    try:
        for each in keys:
            pace.wait()
            try:
                given = await client.metadata.unpark(each.subject, each.group, each.partition, each.key, replay=True)
            except UnknownGroup:
                given = 0
            pace.went(given)
            total += given
    finally:
        await client.close()
    return total


def not_replayed(letters: DataFrame, stored: DataFrame) -> DataFrame:
    """The letters that are not named by the REPLAYED header of a message in `stored`, which must have `headers`."""
    back = stored.select(F.decode(F.try_element_at("headers", F.lit(REPLAYED)), "UTF-8").alias("mark")).where("mark is not null")
    return letters.join(back.distinct(), "mark", "left_anti")


def outgoing(letters: DataFrame) -> DataFrame:
    """The letters as new messages, numbered from 0 in the order of storing: the sink's columns and `number`."""
    kept = F.map_filter(F.coalesce("headers", F.create_map().cast("map<string,binary>")), lambda name, _: ~name.startswith(PREFIX))
    own = F.map_filter(kept, lambda name, _: name != REPLAYED)
    headers = F.map_concat(own, F.create_map(F.lit(REPLAYED), F.encode("mark", "UTF-8")))
    number = F.row_number().over(Window.orderBy(*_ORDER)) - 1
    return letters.select(
        number.alias("number"),
        "mark",
        F.col("original_subject").alias("subject"),
        "key",
        "body",
        "tags",
        headers.alias("headers"),
        "create_time",
        "message_id",
    )


def send(rows: DataFrame, servers: str, pace: Pace) -> int:
    """Write the messages of `outgoing`, slice by slice; returns their number."""
    numbered = rows.persist()
    try:
        count = numbered.count()
        for first in range(0, count, pace.slice_rows):
            pace.wait()
            piece = numbered.where((F.col("number") >= first) & (F.col("number") < first + pace.slice_rows))
            _write(piece, servers)
            pace.went(min(pace.slice_rows, count - first))
    finally:
        numbered.unpersist()
    return count


def _write(piece: DataFrame, servers: str) -> None:
    """Write one slice in order, as one task. The writer's name is derived from the slice's letters."""
    name = piece.select(F.md5(F.concat_ws(",", F.sort_array(F.collect_list("mark"))))).collect()[0][0]
    rows = piece.coalesce(1).sortWithinPartitions("number").drop("number", "mark")
    rows.write.format("qmq").mode("append").option("qmq.servers", servers).option("qmq.txnId", f"dead_letters {name}").save()
