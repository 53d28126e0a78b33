"""Fault runs of Spark on three broker groups: the rows of the archive, and the messages of the log,
while drivers are killed.

A stream that copies a subject exactly once, while its driver, executors and tasks' processes are
killed, and its source changes.

The sizes of the messages change by a factor of eighty, so the average that cuts tasks never stays.
The source begins in one broker group and gets the others one by one. It is purged: when everything
is copied and committed, or with messages that nobody has read. Then the stream must end with
MessagesExpired, and only its next life may skip the purged messages.

A Spark driver in a separate process, with its JVM, and a way to kill both.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog import Catalog, load_catalog
from pyspark_qmq.lake.catalog import table_name
from support import eventually_sync
from system.group import OrderedCluster, Shape, running_cluster
from system.spark_parts import DRIVER, EXECUTOR, TASK, spark_parts
from system.spark_workload import (
    Row,
    anomalies,
    change_now_and_then,
    create,
    publish,
    read_log,
    source_rows,
)

import qmq
from qmq.errors import MessagesExpired, QmqError
from qmq.model import Order, SubjectConfig

QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""A compiler and a collector of Java for short lives."""
ROOT = Path(__file__).resolve().parents[2]
END_S = 900.0
ENDED = "it had ended"


class DriverProcess:
    """Python, and what it starts: one process group, killed as one, as when a machine goes."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        self.words = list(words)
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin."""
        path = os.pathsep.join(
            [str(ROOT / "tests"), str(ROOT / "tests" / "spark"), os.environ.get("PYTHONPATH", "")]
        )
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, *self.words],
                stdout=out,
                stderr=out,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": path, "JAVA_TOOL_OPTIONS": QUICK},
            )

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Send SIGKILL to all processes of the driver, and wait until they have ended."""
        process, self._process = self._process, None
        if process is not None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()

    def kill_part(self, coin: Random) -> str:
        """Send SIGKILL to an executor, or to a Python process in which a task runs. Returns which,
        or ""; Spark repeats the tasks.
        """
        process = self._process
        parts = spark_parts(process.pid) if process is not None else {}
        found = {kind: pids for kind, pids in parts.items() if kind != DRIVER}
        if not found:
            return ""
        kind = coin.choice(sorted(found))
        try:
            os.kill(coin.choice(found[kind]), signal.SIGKILL)
        except ProcessLookupError:
            return ""
        return kind

    def finish(self) -> int:
        """Wait until the process ends; return the exit status. Raises AssertionError if it does not
        end.
        """
        assert self._process is not None
        try:
            return self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the driver did not end: {self.tail()}") from None

    @property
    def written(self) -> int:
        """The bytes of its output."""
        return self.log.stat().st_size if self.log.exists() else 0

    def said(self, since: int) -> str:
        """Its output since it had written so many bytes."""
        return self.log.read_bytes()[since:].decode(errors="replace")

    def tail(self) -> str:
        """The end of its output."""
        return self.log.read_text(errors="replace")[-3000:]


def kill_at_random(
    driver: DriverProcess,
    kills: int,
    coin: Random,
    progress: Callable[[], int],
    done: Callable[[str], None] = lambda _: None,
    parts: Callable[[], int] = lambda: 0,
) -> dict[str, int]:
    """Start it again and again, and kill it each time at another moment; which moments those were.

    Half of the deaths come some time behind the first sign of progress of that life, the others at
    any time, its start included. Before a death, `parts` says how many executors and processes of
    tasks are killed.
    """
    moments = {"while it started": 0, "while it worked": 0, ENDED: 0, TASK: 0, EXECUTOR: 0}
    for _ in range(kills):
        before = progress()
        driver.start()
        if coin.random() < 0.75:
            eventually_sync(
                lambda before=before: progress() > before or not driver.is_running,
                within_s=END_S,
            )
            for _ in range(parts()):
                _pause(coin.uniform(0.0, 1.2))
                if kind := driver.kill_part(coin):
                    moments[kind] += 1
                    done(kind)
            _pause(coin.uniform(0.0, 2.0))
        else:
            _pause(coin.uniform(1.0, 9.0))
        moment = (
            ENDED
            if not driver.is_running
            else "while it worked"
            if progress() > before
            else "while it started"
        )
        driver.kill()
        moments[moment] += 1
        done(moment)
    return moments


def _pause(seconds: float) -> None:
    time.sleep(seconds)  # a random moment is the point


SHAPE = Shape(etcds=1, metas=1, groups=3, replicas=1)
SECURED_SHAPE = Shape(etcds=3, metas=1, groups=2, replicas=3)
"""The shape of docker-compose.secure.yml."""
TESTS = Path(__file__).resolve().parents[1]
FILES_PER_KILL = 20
COMMITS_PER_KILL = 10
"""Enough that no life comes to the end of them."""

Step = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The findings of a proof."""

    rows: int
    changes: int
    moments: dict[str, int]
    anomalies: list[str] = field(default_factory=list)
    figures: dict[str, int] = field(default_factory=dict)


@contextmanager
def cluster(folder: Path, *, secure: bool = False) -> Iterator[OrderedCluster]:
    """Broker groups on loopback: drivers die here, not brokers. With `secure` everybody shows a
    certificate, and rules are enforced.
    """
    with running_cluster(
        folder, SECURED_SHAPE if secure else SHAPE, "loopback", secure=secure
    ) as found:
        yield found


class Beside:
    """Runs a coroutine in a thread with its own loop."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, int]]) -> None:
        self._work = work
        self._found = 0
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = asyncio.run(self._work())
        except BaseException as failure:
            self._failure = failure

    def join(self) -> int:
        """Wait for its end, and what it gave. Raises what it ended with."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._found


def archive_run(
    found: OrderedCluster,
    folder: Path,
    *,
    rows: int,
    changes: int,
    kills: int,
    seed: int,
    step: Step = lambda _: None,
) -> Outcome:
    """A stream into the archive, its driver killed so often, beside a publisher; then what is in
    the archive.
    """
    subject, table = f"flights.archive.{seed}", source_rows(rows)
    asyncio.run(create(found.server, subject))
    lake = {"uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}/warehouse"}
    words = [
        "-m",
        "pyspark_qmq.jobs.archive",
        "--servers",
        found.server,
        "--subject",
        subject,
        "--catalog-uri",
        lake["uri"],
        "--warehouse",
        lake["warehouse"],
        "--master",
        "local[2]",
        "-o",
        f"maxOffsetsPerTrigger={rows // (COMMITS_PER_KILL * (kills + 1))}",
    ]
    publisher = Beside(lambda: publish(found.server, subject, table, changes, seed))
    driver = DriverProcess([*words, "--continuous", "0.2"], folder / "archive.log")
    try:
        moments = kill_at_random(
            driver,
            kills,
            Random(seed),
            lambda: len(list(folder.glob("warehouse/**/*.parquet"))),
            step,
        )
        made = publisher.join()
        last = DriverProcess(words, folder / "archive.log")
        last.start()
        status = last.finish()
    finally:
        driver.kill()
    wrong = [] if status == 0 else [f"the last driver ended with {status}: {last.tail()}"]
    with closing(load_catalog("lake", **lake)) as catalog:
        wrong += archive_anomalies(catalog, subject, table)
    return Outcome(rows, made, moments, wrong)


def archive_anomalies(catalog: Catalog, subject: str, table: list[Row]) -> list[str]:
    """Anomalies that any reader of Iceberg finds: each row must exist once, and each key's rows in
    the order of sending.
    """
    columns = ("route_version", "partition", "sequence", "key", "body")
    found = (
        catalog.load_table(("qmq", table_name(subject))).scan(selected_fields=columns).to_arrow()
    )
    lines = [body.decode() for body in found["body"].to_pylist()]
    wrong = anomalies(list(Counter(lines).items()), table)
    return wrong + order_anomalies(found)


def order_anomalies(found: pa.Table) -> list[str]:
    """Keys whose rows are not in the order of their numbers."""
    wrong: list[str] = []
    newest: dict[bytes, int] = {}
    for each in found.sort_by(
        [("route_version", "ascending"), ("partition", "ascending"), ("sequence", "ascending")]
    ).to_pylist():
        number = int(each["body"].split(b",", 1)[0])
        if number <= newest.get(each["key"], -1):
            wrong.append(f"key {each['key']!r}: {number} behind {newest[each['key']]}")
        newest[each["key"]] = number
    return wrong


def sink_run(
    found: OrderedCluster,
    folder: Path,
    *,
    rows: int,
    changes: int,
    kills: int,
    seed: int,
    step: Step = lambda _: None,
) -> Outcome:
    """A stream from files into an ordered subject, its driver killed so often, while partitions are
    changed; then what is in the log.
    """
    subject, table = f"flights.sink.{seed}", source_rows(rows)
    asyncio.run(create(found.server, subject))
    files = folder / "files"
    files.mkdir()
    count = FILES_PER_KILL * (kills + 1)  # enough that no life comes to the end of them
    for at in range(count):
        some = table[at * len(table) // count : (at + 1) * len(table) // count]
        columns = {name: [getattr(row, name) for row in some] for name in Row._fields}
        pq.write_table(pa.table(columns), files / f"{at:03d}.parquet")
    checkpoint = folder / "checkpoint"
    driver = DriverProcess(
        [
            str(TESTS / "spark" / "driver_programs.py"),
            "sink",
            "--server",
            found.server,
            "--files",
            str(files),
            "--subject",
            subject,
            "--checkpoint",
            str(checkpoint),
            "--per-trigger",
            "2",
        ],
        folder / "sink.log",
    )
    changer = Beside(lambda: change_now_and_then(found.server, subject, changes, seed))
    try:
        moments = kill_at_random(
            driver, kills, Random(seed), lambda: len(list(checkpoint.glob("commits/[0-9]*"))), step
        )
        made = changer.join()
        driver.start()
        status = driver.finish()
    finally:
        driver.kill()
    wrong = [] if status == 0 else [f"the last driver ended with {status}: {driver.tail()}"]
    log, _ = read_log(found.server, subject)
    wrong += anomalies(
        list(Counter(body.decode() for body in log["body"].to_pylist()).items()), table
    )
    return Outcome(rows, made, moments, wrong)


SIZES: Final = (50, 400, 4_000)
WAITING_MAX: Final = 600
"""Messages that are not copied yet: the publisher waits, so that the run ends."""
GROUP_EVERY: Final = 1_500
"""Messages before the next broker group gets some."""
COPY_LOOK_S: Final = 0.2


def copy_run(
    found: OrderedCluster,
    folder: Path,
    *,
    rows: int,
    changes: int,
    kills: int,
    seed: int,
    step: Step = lambda _: None,
    files: bool = False,
) -> Outcome:
    """`rows` and `changes` are what other runs take: this one publishes as long as drivers are
    killed.
    """
    del rows, changes
    coin, subject = Random(seed), f"copy.{seed}"
    checkpoint = Checkpoint(folder / "checkpoint", subject)
    source = Source(found, subject, checkpoint, seed)
    asyncio.run(source.create())
    publisher = Beside(source.publish)
    driver = DriverProcess([], folder / "copy.log")
    paths = ",".join(str(each) for each in data_folders(found)) if files else ""

    def words(*more: str) -> list[str]:
        """Each life has another size of tasks."""
        size = str(coin.choice([20_000, 60_000, 200_000]))
        asked = [
            "--server",
            found.server,
            "--path",
            paths,
            "--subject",
            subject,
            "--checkpoint",
            str(checkpoint.folder),
            "--task-bytes",
            size,
        ]
        return [str(TESTS / "spark" / "driver_programs.py"), "copy", *asked, *more]

    moments: Counter[str] = Counter()
    wrong: list[str] = []
    try:
        while (left := kills - moments.total() + moments[ENDED]) > 0:
            driver.words = words(*source.skips(), *coin.choice([[], ["--executors"]]))
            before = driver.written
            life = kill_at_random(
                driver,
                1,
                coin,
                checkpoint.committed,
                step,
                lambda left=left: min(coin.randrange(24), left - 1),
            )
            moments.update(life)
            if life[ENDED]:
                wrong += source.heard(driver.said(before), was_hurt=life[TASK] > 0)
        source.is_over.set()
        sent = publisher.join()
        status, lives = 1, 0
        while status and lives < 3:  # One may have to say what was purged.
            driver.words, before = (
                words("--once", "--slowness", "1", *source.skips()),
                driver.written,
            )
            driver.start()
            status, lives = driver.finish(), lives + 1
            wrong += source.heard(driver.said(before)) if status else []
        wrong += [f"the last driver ended with {status}"] if status else []
    finally:
        source.is_over.set()
        driver.kill()
    wrong += copy_anomalies(found.server, subject, sent, source)
    return Outcome(sent, source.shrinks, dict(moments), wrong, source.figures())


def copy_anomalies(server: str, subject: str, sent: int, source: Source) -> list[str]:
    """Each message must be in one copy, once, unless the stream said that it was purged."""
    heads: Counter[int] = Counter()
    wrong: list[str] = []
    for name in ("plain", "ordered"):
        log, _ = read_log(server, f"{subject}.{name}")
        numbers = [int(body[:7]) for body in log["body"].to_pylist()]
        heads.update(numbers)
        wrong += [f"{number} in {name}" for number in numbers if number % 2 != (name == "ordered")]
    source.lost = {number for number in range(sent) if not heads[number]}
    said = set[int]().union(*source.said)
    wrong += [source.story(source.lost - said)] if source.lost - said else []
    return wrong + [f"{count} times: {number}" for number, count in heads.items() if count > 1]


def data_folders(found: OrderedCluster) -> list[Path]:
    """The data folders of the broker groups' replicas."""
    services = found.cluster.services
    volumes = [
        volume
        for names in found.replicas.values()
        for name in names
        for volume in services[name].volumes.values()
    ]
    return [found.cluster.folder.volume(volume) for volume in volumes]


class Checkpoint:
    """The stream's checkpoint, as its files say."""

    def __init__(self, folder: Path, subject: str) -> None:
        self.folder, self._subject = folder, subject

    def committed(self) -> int:
        """The number of committed micro-batches."""
        return len(self._numbers("commits"))

    def is_between(self) -> bool:
        """Whether no micro-batch is under way."""
        return max(self._numbers("offsets"), default=-1) == max(
            self._numbers("commits"), default=-1
        )

    def read_up_to(self) -> dict[str, int]:
        """Queue → the sequence up to which micro-batches are committed."""
        number = max(self._numbers("commits"), default=-1)
        try:
            found = json.loads((self.folder / "offsets" / str(number)).read_text().splitlines()[-1])
        except (OSError, ValueError, IndexError):
            return {}
        return {within: at for within, at in found.get(self._subject, {}).items() if "@" in within}

    def _numbers(self, what: str) -> list[int]:
        return [
            int(each.name) for each in self.folder.glob(f"{what}/[0-9]*") if each.name.isdigit()
        ]


class Source:
    """The subject that is copied. `shrinks`: how often it was purged."""

    def __init__(
        self, found: OrderedCluster, subject: str, checkpoint: Checkpoint, seed: int
    ) -> None:
        self._server, self._groups, self._used = found.server, sorted(found.replicas), 1
        self._subject, self._checkpoint, self._coin = subject, checkpoint, Random(seed + 1)
        self.is_over = threading.Event()
        self.shrinks = self.rude = self.expired = 0
        """Purges; those that took messages which no committed micro-batch had read; lives of the
        stream that said so and ended.
        """
        self._purges: list[tuple[dict[str, int], dict[str, int]]] = []
        """Of the latter: the sequences up to which was read, and the ends of the queues."""
        self._places: dict[int, tuple[str, int]] = {}
        self.said: list[set[int]] = []
        """The messages of those purges that the stream named."""
        self.lost: set[int] = set()
        self._purged: set[int] | None = None
        """The messages of a purge that the stream has not spoken of, nor passed."""
        self._purged_at = self._skips_from = -1
        """The committed micro-batches at that purge; when the stream spoke of it, -1 if it did
        not.
        """

    def figures(self) -> dict[str, int]:
        return {
            "purges of read messages": self.shrinks - self.rude,
            "purges of unread messages": self.rude,
            "streams ended with MessagesExpired": self.expired,
            "messages purged unread, which the stream said": len(self.lost),
            "broker groups added": self._used - 1,
        }

    async def create(self) -> None:
        async with qmq.connect(self._server) as mq:
            create = mq.metadata.create_subject
            await create(SubjectConfig(self._subject, groups=tuple(self._groups[:1])))
            await create(SubjectConfig(f"{self._subject}.plain", groups=tuple(self._groups)))
            ordered = SubjectConfig(
                f"{self._subject}.ordered",
                order=Order.STRICT,
                logical_partitions=64,
                groups=tuple(self._groups),
            )
            await create(ordered, partitions=2)

    # --- what the stream says ---------------------------------------------------------------------

    def heard(self, said: str, *, was_hurt: bool = False) -> list[str]:
        """A driver ended by itself with this output. Returns what is wrong about it. `was_hurt`:
        one of its processes was killed; Spark does not repeat the work of those that commit or plan
        a micro-batch.
        """
        if was_hurt and "qmq.errors" not in said:
            return []
        if MessagesExpired.__name__ not in said or self._purged is None:
            return [f"a driver ended by itself: {said[-3000:]}", f"the purges: {self._purges}"]
        self.expired += 1
        self.said.append(self._purged)
        self._skips_from = self._checkpoint.committed()
        return []

    def skips(self) -> list[str]:
        """The option of the driver's next life: skip what is lost, after the stream has said it,
        until it has passed it.
        """
        if self._skips_from >= 0 and self._has_passed(self._skips_from):
            self._skips_from, self._purged = -1, None
        return ["--skip-lost"] if self._skips_from >= 0 else []

    def _has_passed(self, committed: int) -> bool:
        """Whether the stream has committed micro-batches since then, and all that was there at the
        purge.
        """
        up_to = self._checkpoint.read_up_to()
        return self._checkpoint.committed() > committed and all(
            up_to.get(queue, 0) >= end for queue, end in self._purges[-1][1].items()
        )

    def story(self, numbers: set[int]) -> str:
        """Where messages are or were, and what was purged and read."""
        self._look({})
        places = sorted((*self._places.get(number, ("", -1)), number) for number in numbers)
        return (
            f"missing, and nothing said so: {places}; purges: {self._purges}; read: "
            f"{self._checkpoint.read_up_to()}"
        )

    # --- the publisher ----------------------------------------------------------------------------

    async def publish(self) -> int:
        """Send until it is over. Returns the number of messages."""
        coin, sent = self._coin, 0
        async with qmq.connect(self._server) as mq:
            while not self.is_over.is_set():
                if await self._waiting(mq) < WAITING_MAX:
                    count, size = coin.randrange(20, 300), coin.choice(SIZES)
                    await mq.send_many(
                        self._subject,
                        [b"%07d" % number + bytes(size) for number in range(sent, sent + count)],
                    )
                    sent += count
                    if self._used < len(self._groups) and sent > self._used * GROUP_EVERY:
                        self._used += 1
                        await mq.metadata.place_subject(self._subject, self._groups[: self._used])
                else:
                    await asyncio.sleep(COPY_LOOK_S)
                if coin.random() < 0.1:
                    await (self._purge_unread(mq) if coin.random() < 0.4 else self._purge_read(mq))
        return sent

    async def _ends(self, mq: Any) -> dict[str, int]:
        ends = await mq.queue_ends(self._subject)
        return {f"{partition}@{group}": end for (group, partition), end in ends.items()}

    async def _waiting(self, mq: Any) -> int:
        return sum((await self._ends(mq)).values()) - sum(self._checkpoint.read_up_to().values())

    async def _purge_read(self, mq: Any) -> None:
        """Purge the source if everything is copied, and the checkpoint says so, within some
        seconds.
        """
        for _ in range(40):
            ends = await self._ends(mq)
            if (
                ends
                and self._checkpoint.is_between()
                and sorted(self._checkpoint.read_up_to().values()) == sorted(ends.values())
            ):
                await self._purge(mq)
                return
            await asyncio.sleep(COPY_LOOK_S)

    async def _purge_unread(self, mq: Any) -> None:
        """Purge the source, read or not, unless the stream has still to speak of an earlier
        purge.
        """
        committed = self._checkpoint.committed()
        if self._purged is not None and self._skips_from < 0 and self._has_passed(self._purged_at):
            self._purged = None  # The stream had read all of it, and only had to commit.
        if self._purged is None and committed:
            up_to = self._checkpoint.read_up_to()
            unread = await asyncio.to_thread(self._look, up_to)
            if unread:
                self._purges.append((up_to, await self._ends(mq)))
                self._purged, self._purged_at = unread, committed
                self.rude += await self._purge(mq)

    def _look(self, since: dict[str, int]) -> set[int]:
        """The messages that the source keeps from there on."""
        log, _ = read_log(self._server, self._subject, since)
        numbers = [int(body[:7]) for body in log["body"].to_pylist()]
        self._places |= zip(
            numbers,
            zip(log["broker_group"].to_pylist(), log["sequence"].to_pylist(), strict=True),
            strict=True,
        )
        return set(numbers)

    async def _purge(self, mq: Any) -> int:
        with suppress(QmqError):
            await mq.metadata.purge_subject(self._subject)
            self.shrinks += 1
            return 1
        return 0
