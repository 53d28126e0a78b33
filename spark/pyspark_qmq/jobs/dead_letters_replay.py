"""Giving dead letters back.

* Parked keys by the brokers themselves, the oldest partition of a key first: its messages then come before anything newer of the key.
* Messages of a dead-letter subject as new messages of their original subject, with the same message id, and a header that says which dead
  letter it was (REPLAYED). What the original subject has with that header was given back before: it is left out. So a second replay is
  harmless, whatever else it chooses. A slice that a dying replay and the next one both write has one writer's name, and is stored once.

Messages leave in slices, in the order in which they were stored, so the order of a key is kept, and no faster than a rate.
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
"""Header of a message that was given back: the dead letter's subject/partition@group#sequence."""
SLICE_ROWS_MAX: Final = 10_000
_ORDER: Final = ("append_time", "subject", "partition", "broker_group", "sequence")


class ReplayedKey(NamedTuple):
    """A key that a group set aside on one partition."""

    subject: str
    group: str
    key: bytes
    partition: int
    messages: int


class Pace:
    """Not more than so many messages a second (0: as fast as it goes). `clock` counts seconds, `sleep` waits."""

    def __init__(self, rate: int, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep) -> None:
        self.rate = rate
        self._clock = clock
        self._sleep = sleep
        self._free_s = clock()

    def wait(self) -> None:
        """Until the next may go."""
        ahead_s = self._free_s - self._clock()
        if ahead_s > 0:
            self._sleep(ahead_s)

    def went(self, messages: int) -> None:
        """So many went just now."""
        if self.rate:
            self._free_s = max(self._free_s, self._clock()) + messages / self.rate

    @property
    def slice_rows(self) -> int:
        """How many to send at once."""
        return min(self.rate, SLICE_ROWS_MAX) if self.rate else SLICE_ROWS_MAX


def unpark(servers: str, keys: Iterable[ReplayedKey], pace: Pace) -> int:
    """Give parked keys back, the oldest partition of each first; how many messages. Keys that are parked no more are passed over.

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
    """The letters that no message of their original subject (`stored`, with `headers`) says it was."""
    back = stored.select(F.decode(F.try_element_at("headers", F.lit(REPLAYED)), "UTF-8").alias("mark")).where("mark is not null")
    return letters.join(back.distinct(), "mark", "left_anti")


def outgoing(letters: DataFrame) -> DataFrame:
    """The letters as new messages, numbered from 0 in the order in which they were stored: column `number` besides the sink's."""
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
    """Write what `outgoing` gave, slice by slice; how many messages."""
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
    """One slice, as one task, in order. Its writer's name follows from which letters are in it."""
    name = piece.select(F.md5(F.concat_ws(",", F.sort_array(F.collect_list("mark"))))).collect()[0][0]
    rows = piece.coalesce(1).sortWithinPartitions("number").drop("number", "mark")
    rows.write.format("qmq").mode("append").option("qmq.servers", servers).option("qmq.txnId", f"dead_letters {name}").save()
