"""`qmq bench` measures a cluster through the public client: publish rate, consume rate, latency."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer

import qmq
from qmq.cli.arguments import COUNT_MAX, RATE_MAX, SECONDS_MAX
from qmq.cli.names import require_subject
from qmq.cli.output import SERVER, Json, Server, counting, run, show
from qmq.errors import InvalidArgument
from qmq.limits import LONG_BODY_BYTES_MAX

if TYPE_CHECKING:
    from qmq.client.consuming.consumer import Consumer
    from qmq.client.consuming.message import Message

app = typer.Typer(
    no_args_is_help=True, help="Measure the cluster from this machine: pub, sub, latency."
)

SUBJECT: Final = "qmq-bench"
GROUP: Final = "qmq-bench"
MB: Final = 1_000_000
BATCH: Final = 1_000
"""Messages per call of the producer."""

Subject = Annotated[
    str,
    typer.Argument(
        help="The subject; created if missing. Delete it afterwards with `qmq subject delete`."
    ),
]
Messages = Annotated[int, typer.Option("--messages", "-n", min=1, max=COUNT_MAX, help="How many.")]
Size = Annotated[
    int, typer.Option("--size", min=0, max=LONG_BODY_BYTES_MAX, help="Body size in bytes.")
]


@dataclass(frozen=True, slots=True)
class Throughput:
    """A number of messages, with the seconds of wall clock and of this process's CPU
    time that they took.
    """

    messages: int
    size: int
    seconds: float
    cpu_s: float

    def row(self) -> tuple[int, float, int, float, float]:
        """The table row that is shown."""
        rate = self.messages / max(self.seconds, 1e-9)
        return (
            self.messages,
            round(self.seconds, 3),
            round(rate),
            round(rate * self.size / MB, 1),
            round(self.cpu_s / self.messages * 1e6, 2),
        )


COLUMNS: Final = ("messages", "seconds", "messages/s", "MB/s", "client us/message")


@app.command("pub")
def pub(
    subject: Subject = SUBJECT,
    messages: Messages = 1_000_000,
    size: Size = 100,
    each: Annotated[
        bool,
        typer.Option("--each", help="Give the producer message by message, not 1,000 at a time."),
    ] = False,
    compression: Annotated[str | None, typer.Option(help="'zstd' or 'lz4'.")] = None,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Publish messages as fast as the cluster accepts them,
    and wait until the last one is stored.
    """
    found = run(_pub(server, subject, messages, size, 1 if each else BATCH, compression, as_json))
    show("published", COLUMNS, [found.row()], as_json=as_json)


@app.command("sub")
def sub(
    subject: Subject = SUBJECT,
    messages: Messages = 1_000_000,
    group: Annotated[
        str,
        typer.Option("--group", "-g", help="The consumer group that acknowledges the messages."),
    ] = GROUP,
    each: Annotated[
        bool,
        typer.Option(
            "--each", help="Consume message by message (async for) instead of in batches."
        ),
    ] = False,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Consume and acknowledge messages as fast as they arrive. Time runs from the first message to
    the last.
    """
    found = run(_sub(server, subject, messages, group, each, as_json))
    show("consumed", COLUMNS, [found.row()], as_json=as_json)


@app.command("latency")
def latency(
    subject: Subject = SUBJECT,
    rate: Annotated[
        int, typer.Option("--rate", min=1, max=RATE_MAX, help="Messages a second.")
    ] = 1_000,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, max=SECONDS_MAX, help="For how long.")
    ] = 10.0,
    size: Size = 100,
    as_json: Json = False,
    server: Server = SERVER,
) -> None:
    """Send messages at a steady rate, and show how long each took to be stored (`acks=quorum`).

    The latency of a message counts from its planned send time, even if earlier messages delayed it.
    """
    took_us = run(_latency(server, subject, rate, seconds, size))
    columns = ("messages", "p50 us", "p90 us", "p99 us", "p99.9 us", "max us")
    row = (len(took_us), *[percentile(took_us, share) for share in (0.5, 0.9, 0.99, 0.999, 1.0)])
    show("latency of sending", columns, [row], as_json=as_json)


def percentile(sorted_us: Sequence[int], share: float) -> int:
    """The value at or below which the given share of the values lies. Raises InvalidArgument if
    there are no values.
    """
    if not sorted_us:
        raise InvalidArgument("no message was measured: run it longer (--seconds)")
    return sorted_us[min(int(share * len(sorted_us)), len(sorted_us) - 1)]


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def _pub(
    server: str,
    subject: str,
    messages: int,
    size: int,
    batch: int,
    compression: str | None,
    quiet: bool,
) -> Throughput:
    body = os.urandom(size)
    async with qmq.connect(server) as mq:
        await mq.send(subject, body)  # Connect and create the subject before the clock starts.
        begin, cpu_s = time.perf_counter(), _cpu_s()
        async with mq.producer(subject, compression=compression) as producer:
            with counting("publishing", messages, quiet=quiet) as completed:
                sent = 0
                while sent < messages:
                    count = min(batch, messages - sent)
                    if count == 1:
                        producer.send(body)
                    else:
                        producer.send_many([body] * count)
                    sent += count
                    completed(sent)
                    if producer.full:
                        await producer.drain()
        return Throughput(messages, size, time.perf_counter() - begin, _cpu_s() - cpu_s)


async def _sub(
    server: str, subject: str, messages: int, group: str, each: bool, quiet: bool
) -> Throughput:
    async with qmq.connect(server, create_subjects=False) as mq:
        await require_subject(mq, subject)
        async with mq.consumer(subject, group) as consumer:
            return await _consumed(consumer, messages, each, quiet)


async def _consumed(consumer: Consumer, messages: int, each: bool, quiet: bool) -> Throughput:
    with counting("consuming", messages, quiet=quiet) as completed:
        count, size = 0, 0
        begin, cpu_s = 0.0, 0.0

        def took(found: int, first: Message) -> bool:
            nonlocal count, size, begin, cpu_s
            if not count:
                begin, cpu_s, size = time.perf_counter(), _cpu_s(), len(first.body)
            count += found
            completed(count)
            return count >= messages

        if each:
            async for message in consumer:
                if took(1, message):
                    break
        else:
            async for batch in consumer.batches():
                if took(len(batch), next(iter(batch))):
                    break
    return Throughput(count, size, time.perf_counter() - begin, _cpu_s() - cpu_s)


async def _latency(server: str, subject: str, rate: int, seconds: float, size: int) -> list[int]:
    """The latency of each message in microseconds, sorted."""
    body, took_us = os.urandom(size), list[int]()
    async with qmq.connect(server) as mq:
        await mq.send(subject, body)
        # perf_counter, because some event loops read their own clock only once per iteration.
        begin_s, count = time.perf_counter(), int(rate * seconds)

        async def send(due_s: float) -> None:
            await mq.send(subject, body)
            took_us.append(round((time.perf_counter() - due_s) * 1e6))

        async with asyncio.TaskGroup() as sending:
            for number in range(count):
                due_s = begin_s + number / rate
                rest_s = due_s - time.perf_counter()
                if rest_s > 0:
                    await asyncio.sleep(rest_s)
                sending.create_task(send(due_s))
    return sorted(took_us)
