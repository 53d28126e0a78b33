"""Sends the departures to an ordered subject. A load that was killed continues where it stopped.

The departures go in chunks, and a chunk begins when the one before is stored. So all chunks before
the newest stored message are complete, and only of its chunk some messages may be missing. What is
missing of an aircraft is the end of what was sent for it, so its order stays.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import qmq
from qmq.errors import SubjectExists
from qmq.model import Order, SchemaFormat, SubjectConfig

from .alerts import ALERTS
from .departures import SCHEMA, SUBJECT, Departure

CHUNK: Final = 5_000
PARTITIONS: Final = 4


async def load(mq: qmq.Client, departures: Sequence[Departure]) -> int:
    """Send what is not stored yet. Returns how many messages that were."""
    for config, partitions in (
        (SubjectConfig(SUBJECT, order=Order.STRICT, logical_partitions=1_024), PARTITIONS),
        (SubjectConfig(ALERTS), 0),
    ):
        with suppress(SubjectExists):
            await mq.metadata.create_subject(config, partitions=partitions)
    await mq.metadata.set_subject_schema(SUBJECT, SchemaFormat.JSON_SCHEMA, SCHEMA)
    stored = await _newest(mq)
    complete = max(stored, default=0) // CHUNK * CHUNK
    sent = 0
    async with mq.ordered_producer(SUBJECT) as producer:
        for begin in range(complete, len(departures), CHUNK):
            end = min(begin + CHUNK, len(departures))
            missing = [departures[number] for number in range(begin, end) if number not in stored]
            if missing:
                await producer.send_many(
                    [each.body for each in missing], [each.key for each in missing]
                )
                sent += len(missing)
    return sent


async def _newest(mq: qmq.Client) -> set[int]:
    """The numbers of the newest stored messages, of at least a chunk."""
    await mq.queue_ends(SUBJECT)  # decides what a killed load had sent
    return {json.loads(message.body)["number"] async for message in mq.browse(SUBJECT, last=CHUNK)}
