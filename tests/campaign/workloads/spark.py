"""spark: streams of Spark copy exactly once, each with a driver beside a client.

    spark              a subject into another one; broker groups come and go
    spark-executors    the same, with executors of their own (local-cluster)
    spark-standalone   the same, on a master and a worker that outlive the driver
    spark-ordered      an ordered subject into another one; partitions of both change
    spark-files        files that come and go, into a subject
    spark-tables       two subjects into Parquet files and an Iceberg table
    spark-all          all but the Iceberg table, in one driver

A driver, its JVM and its tasks are beside a client (`campaign.spark_driver`), which starts it again
when it ends; checkpoints stay in the folder of the test.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from history.events import Note, Operation, Send
from system.ordered_nemesis import Changer

from campaign.checkers.fifo import FifoReceive, FifoSend, all_received
from campaign.checkers.mirrored import MirrorCopy, all_copied
from campaign.checkers.spark import KeyedPlace, QueryEnded, all_placed
from campaign.client import Job
from campaign.programs import LEASE_MS, TIMEOUT_S, end_of, queue_of, send
from campaign.spark_driver import FILED, FILES, KEYED, KEYED_TARGET, SOURCE, TABLE, TABLED, TARGET
from campaign.spark_tables import iceberg_rows, parquet_rows
from campaign.values import Program, Role, Workload
from campaign.workloads.children import beside
from campaign.workloads.handling import FEW, RETRY_S
from qmq.errors import QmqError
from qmq.model import Order, SubjectConfig

LAKE: Final = "campaign-lake"
BROKER_GROUPS: Final = ("g1", "g2")
LOGICAL_PARTITIONS: Final = 32
KEYS: Final = 6
BATCH: Final = 5
PAUSE_S: Final = 0.1
CHANGE_S: Final = (2.0, 6.0)
DRAINED_S: Final = (0.5, 2.0)
LOOK_S: Final = 1.0
LINES_MAX: Final = 30
FAULTS: Final = FEW | {"kill-one", "kill-pair", "kill-meta", "kill-driver", "kill-executor"}
SOME: Final = frozenset({"none", "kill-master", "kill-driver", "kill-executor"})
"""For another source or sink than a subject, and for another kind of executor."""
ERROR: Final = re.compile(r"qmq\.errors\.(\w+)")


def folder_of(job: Job) -> Path:
    """Where drivers have their checkpoints, files and tables."""
    found = job.folder / "spark"
    (found / FILES).mkdir(parents=True, exist_ok=True)
    return found


# --- sources --------------------------------------------------------------------------------------


async def _set_up(job: Job) -> None:
    for name in (SOURCE, TARGET, FILED, TABLED, LAKE):
        await job.client.metadata.create_subject(SubjectConfig(name))
    for name in (KEYED, KEYED_TARGET):
        config = SubjectConfig(
            name, order=Order.STRICT, logical_partitions=LOGICAL_PARTITIONS, groups=BROKER_GROUPS
        )
        await job.client.metadata.create_subject(config, partitions=2)


async def _send(job: Job, subject: str = SOURCE) -> None:
    job, values = replace(job, subject=subject), itertools.count(job.first_value)
    async with job.client.producer(
        subject, delivery_timeout_s=TIMEOUT_S, acks=job.acks
    ) as producer:
        while await job.pause(PAUSE_S * job.random.uniform(0.5, 1.5)):
            await send(job, producer, tuple(itertools.islice(values, BATCH)))


async def _send_keyed(job: Job) -> None:
    """Each key's messages one after another, some keys at the same time."""
    serials = Counter[str]()

    async def one(key: str) -> None:
        serials[key] += 1
        begun = job.recorder.record(
            FifoSend(process=job.name, type="invoke", key=key, serial=serials[key])
        )
        body = f"{job.name} {serials[key]}".encode()
        try:
            await job.client.send(KEYED, body, key=key, acks=job.acks)
        except QmqError as failure:
            job.recorder.record(begun.ended(end_of(failure)))
        else:
            job.recorder.record(begun.ended("ok"))

    keys = [f"{job.name}/{number}" for number in range(KEYS)]
    while await job.pause(PAUSE_S * job.random.uniform(0.5, 1.5)):
        await asyncio.gather(*map(one, job.random.sample(keys, 3)))


async def _write_files(job: Job) -> None:
    """A file is there when it has its name."""
    folder, values = folder_of(job) / FILES, itertools.count(job.first_value)
    while await job.pause(3 * PAUSE_S * job.random.uniform(0.5, 1.5)):
        some = tuple(itertools.islice(values, job.random.randrange(1, LINES_MAX)))
        begun = job.recorder.record(
            Send(process=job.name, type="invoke", subject=FILED, values=some)
        )
        made = folder / f".{some[0]}.txt"
        made.write_text("".join(f"{value}\n" for value in some))
        made.rename(folder / f"{some[0]}.txt")
        job.recorder.record(begun.ended("ok", queue=f"files/{some[0]}", sequence=0))


# --- changes --------------------------------------------------------------------------------------


def _note(job: Job, what: str, text: str) -> None:
    job.recorder.record(Note(process=job.name, type="ok", f=what, text=text))


async def _regroup(job: Job) -> None:
    """Add broker groups to the unordered subjects and take them away; drain one, and resume it."""
    metadata = job.client.metadata

    async def regroup() -> None:
        for group in BROKER_GROUPS:
            await _resume(job, group)
        while await job.pause(job.random.uniform(*CHANGE_S)):
            groups = job.random.sample(BROKER_GROUPS, job.random.randrange(1, 3))
            subject = job.random.choice((SOURCE, TARGET))
            with suppress(QmqError):
                await metadata.place_subject(subject, groups)
                _note(job, "regrouped", f"{subject}: {', '.join(groups)}")
            group = job.random.choice(BROKER_GROUPS)
            with suppress(QmqError):
                await metadata.set_group_mode(group, "read-only")
                await asyncio.sleep(job.random.uniform(*DRAINED_S))
            await _resume(job, group)

    await job.until_stopped(regroup())
    for group in BROKER_GROUPS:
        await _resume(job, group)


async def _resume(job: Job, group: str) -> None:
    while True:
        try:
            await job.client.metadata.set_group_mode(group, "read-write")
        except QmqError:
            await asyncio.sleep(RETRY_S)
        else:
            return


async def _reroute(job: Job) -> None:
    changers = [
        Changer(job.client.metadata, subject, BROKER_GROUPS, job.random)
        for subject in (KEYED, KEYED_TARGET)
    ]

    async def change() -> None:
        while await job.pause(job.random.uniform(*CHANGE_S)):
            kind = job.random.choice(("split", "merge", "merge", "move"))
            with suppress(TimeoutError):
                await job.random.choice(changers).change(kind)
                _note(job, "rerouted", kind)

    await job.until_stopped(change())


# --- drivers --------------------------------------------------------------------------------------


def _driving(master: str, *queries: str) -> Program:
    """Starts a driver again and again."""

    async def drive(job: Job) -> None:
        with _cluster(job, master) as url:
            servers = ",".join(job.client.addresses)
            words = ("campaign.spark_driver", servers, str(folder_of(job)), url, ",".join(queries))
            await job.until_stopped(_lives(job, words))

    return drive


@contextmanager
def _cluster(job: Job, master: str) -> Iterator[str]:
    """The address of a master; "standalone": of one that is started, with a worker."""
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    if master != "standalone":
        yield master
        return
    sys.path.append(str(Path(__file__).resolve().parents[2] / "spark"))
    from fast_session import standalone

    with standalone(job.folder / f"{job.name}-standalone") as found:
        yield found.url


async def _archive(job: Job) -> None:
    folder = folder_of(job)
    await job.until_stopped(
        _lives(
            job,
            (
                *("pyspark_qmq.jobs.archive", "--servers", ",".join(job.client.addresses)),
                *("--subject", LAKE, "--catalog-uri", f"sqlite:///{folder}/catalog.db"),
                *("--warehouse", f"file://{folder}/warehouse"),
                *("--master", "local[2]", "--continuous", "0.5"),
            ),
        )
    )


async def _drive_tables(job: Job) -> None:
    """Of two drivers, one writes Parquet files and one an Iceberg table."""
    await (_archive(job) if job.number else _driving("local[2]", "table")(job))


async def _lives(job: Job, words: tuple[str, ...]) -> None:
    log = job.folder / f"{job.name}-{Path(sys.executable).name}.log"
    while True:
        before = log.stat().st_size if log.exists() else 0
        async with beside(job, *words, program=(sys.executable, "-m")) as driver:
            await driver.wait()
        said = log.read_bytes()[before:].decode(errors="replace")
        errors = tuple(sorted(set(ERROR.findall(said))))
        job.recorder.record(QueryEnded(process=job.name, type="info", errors=errors))
        await job.pause(RETRY_S)


# --- readers --------------------------------------------------------------------------------------


def _reading(*subjects: str) -> Program:
    async def read(job: Job) -> None:
        await job.until_stopped(_all(_read(job, each) for each in subjects))

    return read


async def _all(works: Iterator[Awaitable[None]]) -> None:
    await asyncio.gather(*works)


async def _read(job: Job, subject: str) -> None:
    async with job.client.consumer(subject, "auditor", name=job.name, lease_ms=LEASE_MS) as found:
        while True:
            with suppress(QmqError):
                async for message in found:
                    job.recorder.record(
                        MirrorCopy(
                            process=job.name,
                            type="ok",
                            value=int(message.body),
                            queue=queue_of(subject, message.broker_group),
                            sequence=message.sequence,
                        )
                    )
            await asyncio.sleep(RETRY_S)


async def _read_keyed(job: Job) -> None:
    works = (_read_keys(job, each, is_source=each == KEYED) for each in (KEYED, KEYED_TARGET))
    await job.until_stopped(_all(works))


async def _read_keys(job: Job, subject: str, *, is_source: bool) -> None:
    while True:
        with suppress(QmqError):
            async with job.client.ordered_consumer(
                subject, "auditor", name=job.name, lease_ms=LEASE_MS
            ) as consumer:
                async for message in consumer:
                    producer, serial = message.body.decode().split()
                    place = KeyedPlace(
                        process=job.name,
                        type="ok",
                        producer=producer,
                        key=message.key or "",
                        serial=int(serial),
                        queue=f"{subject}/{message.partition}@{message.broker_group}",
                        sequence=message.sequence,
                        is_source=is_source,
                    )
                    job.recorder.record(place)
                    if not is_source:
                        received = FifoReceive(
                            process=job.name,
                            type="ok",
                            producer=producer,
                            key=place.key,
                            serial=place.serial,
                            attempt=message.attempt,
                        )
                        job.recorder.record(received)
        await asyncio.sleep(RETRY_S)


async def _read_tables(job: Job) -> None:
    """What is in the tables' files, each file when it is committed."""
    folder, seen = folder_of(job), set[str]()
    tables: list[Callable[[], Iterator[tuple[str, list[int]]]]] = [
        lambda: parquet_rows(folder / TABLE, seen),
        lambda: iceberg_rows(folder / "catalog.db", folder / "warehouse", LAKE, seen),
    ]

    async def look() -> None:
        while True:
            for table in tables:
                for path, values in await asyncio.to_thread(lambda each=table: list(each())):
                    seen.add(path)
                    for row, value in enumerate(values):
                        copy = MirrorCopy(
                            process=job.name, type="ok", value=value, queue=path, sequence=row
                        )
                        job.recorder.record(copy)
            await asyncio.sleep(LOOK_S)

    await job.until_stopped(look())


# --- workloads ------------------------------------------------------------------------------------


def _lacks() -> str:
    if not find_spec("pyspark"):
        return "Spark: pip install qmq[spark]"
    return "" if os.environ.get("JAVA_HOME") or shutil.which("java") else "Spark: needs Java"


def _both(events: Sequence[Operation]) -> bool:
    return all_copied(events) and all_received(events) and all_placed(events)


COPIED: Final = ("stored_once", "copy_no_loss", "copy_once", "copy_no_phantom", "stream_goes_on")
IN_ORDER: Final = (
    *("fifo_comes", "fifo_order", "fifo_no_phantom"),
    *("keyed_once", "keyed_in_order", "stream_goes_on"),
)
USES: Final = frozenset({"brokers", "etcds", "metas", "drivers", "clients"})


def _workload(
    name: str,
    what: str,
    senders: dict[str, Program],
    others: dict[str, Program],
    checkers: tuple[str, ...],
    gates: dict[str, int],
    is_drained: Callable[[Sequence[Operation]], bool],
    *,
    drivers: int = 1,
    only: frozenset[str] = FAULTS,
) -> Workload:
    return Workload(
        name=name,
        what=what,
        roles=(
            *(Role(name=each, count=1, is_sender=True) for each in senders),
            *(Role(name=each, count=drivers if each == "driver" else 1) for each in others),
        ),
        programs={"setup": _set_up, **senders, **others},
        checkers=checkers,
        groups=(),
        gates=gates,
        is_drained=is_drained,
        uses=USES,
        broker_groups=len(BROKER_GROUPS),
        only=only,
        lacks=_lacks,
    )


def _copying(name: str, what: str, master: str, only: frozenset[str] = FAULTS) -> Workload:
    return _workload(
        name,
        f"{what}, while broker groups come and go",
        {"producer": _send},
        {
            "driver": _driving(master, "copy"),
            "reader": _reading(TARGET),
            "operator": _regroup,
        },
        COPIED,
        {"send": 50, "copied": 50, "regrouped": 1},
        all_copied,
        only=only,
    )


WORKLOADS = (
    _copying("spark", "a stream of Spark copies a subject into another one", "local[2,100]"),
    _copying(
        "spark-executors",
        "a stream with executors of its own copies a subject",
        "local-cluster[2,1,512]",
        SOME,
    ),
    _copying(
        "spark-standalone",
        "a stream on a master and a worker copies a subject",
        "standalone",
        SOME,
    ),
    _workload(
        "spark-ordered",
        "a stream of Spark copies an ordered subject into another one while both change",
        {"keyer": _send_keyed},
        {
            "driver": _driving("local[2,100]", "keyed"),
            "auditor": _read_keyed,
            "router": _reroute,
        },
        IN_ORDER,
        {"fifo": 50, "received": 50, "placed": 50, "rerouted": 2},
        lambda events: all_received(events) and all_placed(events),
        only=SOME,
    ),
    _workload(
        "spark-files",
        "a stream of Spark copies files that come and go into a subject",
        {"writer": _write_files},
        {"driver": _driving("local[2,100]", "files"), "reader": _reading(FILED)},
        ("copy_no_loss", "copy_once", "copy_no_phantom", "stream_goes_on"),
        {"send": 10, "copied": 50},
        all_copied,
        only=SOME,
    ),
    _workload(
        "spark-tables",
        "streams copy a subject into Parquet files, and another one into an Iceberg table",
        {"producer": lambda job: _send(job, TABLED), "laker": lambda job: _send(job, LAKE)},
        {"driver": _drive_tables, "tables": _read_tables},
        COPIED,
        {"send": 50, "copied": 50},
        all_copied,
        drivers=2,
        only=SOME,
    ),
    _workload(
        "spark-all",
        "one driver copies a subject, an ordered one, files and a table; all of them change",
        {
            "producer": _send,
            "keyer": _send_keyed,
            "writer": _write_files,
            "tabler": lambda job: _send(job, TABLED),
        },
        {
            "driver": _driving("local[2,100]", "copy", "keyed", "files", "table"),
            "reader": _reading(TARGET, FILED),
            "auditor": _read_keyed,
            "tables": _read_tables,
            "operator": _regroup,
            "router": _reroute,
        },
        (*COPIED[:-1], *IN_ORDER),
        {"send": 50, "copied": 50, "fifo": 20, "received": 20, "regrouped": 1, "rerouted": 1},
        _both,
        only=frozenset({"none", "kill-any"}),
    ),
)
