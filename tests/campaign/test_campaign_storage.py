"""Disks that are slow, fail, lie and lose their cache do so; checkers of disks report each broken
rule; and nothing is said of what a power cut may have destroyed, for each kind of workload.
"""

from __future__ import annotations

import errno
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from history.events import History, Operation, Poll, Record, Send
from history.ordered.events import Deliver, Handed, Keyed, Put, Settle, Stored

from campaign import table, volatile_disk
from campaign.broken_disk import BLOCK_BYTES, BrokenDisk, build, no_preload
from campaign.checkers.delayed import Arrive, Cancel, Later
from campaign.checkers.storage import FailedCall, Run, Scan, all_kept, runs_of
from campaign.values import Doubt, Evidence
from campaign.volatile_disk import VolatileDisk

QUEUE = "campaign/0@g1"
SECOND = 1_000_000_000
DOUBT = Doubt(since_ns=4 * SECOND, until_ns=5 * SECOND, since_ms=4_000, until_ms=5_000)

# --- a disk whose calls fail ----------------------------------------------------------------------

PROGRAM = """
import errno, os, sys
file = os.open(sys.argv[1], os.O_RDWR)
for call in (
    lambda: os.fdatasync(file),
    lambda: os.fsync(file),
    lambda: os.pwrite(file, b"n", 0),
    lambda: os.pwritev(file, [b"n"], 0),
    lambda: len(os.pread(file, 1, 0)),
    lambda: len(os.pread(file, 1, 4096)),
    lambda: os.pwrite(file, bytes(4096), 4096),
    lambda: len(os.pread(file, 1, 4096)),
):
    try:
        print(call() or 0)
    except OSError as failure:
        print(errno.errorcode[failure.errno])
"""


@pytest.fixture
def calls(tmp_path: Path) -> tuple[BrokenDisk, Path]:
    """A disk, and a file of two blocks below its folder."""
    if no_preload():
        pytest.skip(no_preload())
    folder = tmp_path / "data"
    folder.mkdir()
    file = folder / "file"
    file.write_bytes(bytes(2 * BLOCK_BYTES))
    return BrokenDisk(tmp_path / "page", folder), file


def run_on(disk: BrokenDisk, file: Path) -> list[str]:
    """What the calls of another process return."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(file)],
        env=disk.environment(build(file.parents[1] / "library")),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_a_disk_works_until_something_is_set(calls: tuple[BrokenDisk, Path]) -> None:
    assert run_on(*calls) == ["0", "0", "1", "1", "1", "1", "4096", "1"]


def test_a_disk_fails_as_it_is_told_and_counts_it(calls: tuple[BrokenDisk, Path]) -> None:
    disk, file = calls
    disk.set(sync_errno=errno.EIO)
    assert run_on(disk, file)[:3] == ["EIO", "EIO", "1"]
    disk.work()
    disk.set(write_errno=errno.EIO)
    assert run_on(disk, file)[:5] == ["0", "0", "EIO", "EIO", "1"]
    disk.work()
    disk.set(sync_lies=1, sync_delay_ms=1)
    assert run_on(disk, file)[:3] == ["0", "0", "1"]
    counts = ("syncs_failed", "writes_failed", "syncs_lied", "syncs_slowed")
    assert [disk.count(name) for name in counts] == [2, 3, 2, 2]


def test_a_bad_block_is_unreadable_until_it_is_written_again(
    calls: tuple[BrokenDisk, Path],
) -> None:
    disk, file = calls
    disk.spoil(file, [1])
    assert run_on(disk, file) == ["0", "0", "1", "1", "1", "EIO", "4096", "1"]


def test_files_elsewhere_are_not_concerned(calls: tuple[BrokenDisk, Path]) -> None:
    disk, file = calls
    elsewhere = file.parents[1] / "elsewhere"
    elsewhere.write_bytes(bytes(2 * BLOCK_BYTES))
    disk.set(sync_errno=errno.EIO, write_errno=errno.EIO)
    assert "EIO" not in run_on(disk, elsewhere)


# --- a disk that loses its cache ------------------------------------------------------------------


class Guest:
    """The other side of the protocol, as an emulator speaks it."""

    def __init__(self, at: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(at))
        self._exactly(18)
        self._socket.sendall(struct.pack(">I", 3))
        self._socket.sendall(b"IHAVEOPT" + struct.pack(">II", volatile_disk.GO, 6) + bytes(6))
        self._exactly(20 + 12 + 20)

    def _exactly(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            found += self._socket.recv(size - len(found))
        return found

    def ask(
        self, kind: int, at: int = 0, data: bytes = b"", size: int = 0, flags: int = 0
    ) -> bytes:
        head = volatile_disk.REQUEST.pack(0x25609513, flags, kind, 7, at, size or len(data))
        self._socket.sendall(head + data)
        _, error, handle = volatile_disk.REPLY.unpack(self._exactly(volatile_disk.REPLY.size))
        assert (error, handle) == (0, 7)
        return self._exactly(size)

    def close(self) -> None:
        self._socket.close()


@pytest.mark.parametrize("lies", [False, True])
def test_a_disk_loses_only_what_was_not_flushed_unless_it_lies(tmp_path: Path, lies: bool) -> None:
    image, at, blocks = tmp_path / "image", tmp_path / "socket", 64
    image.write_bytes(bytes(3 * blocks * BLOCK_BYTES))
    with VolatileDisk(image, at, Random(7), lies=lies) as disk:
        guest = Guest(at)
        for number in range(blocks):
            guest.ask(volatile_disk.WRITE, number * BLOCK_BYTES, b"a" * BLOCK_BYTES)
        guest.ask(volatile_disk.FLUSH)
        for number in range(blocks, 2 * blocks):
            guest.ask(volatile_disk.WRITE, number * BLOCK_BYTES, b"b" * BLOCK_BYTES)
        through = 2 * blocks * BLOCK_BYTES
        guest.ask(volatile_disk.WRITE, through, b"c", flags=volatile_disk.FUA)
        assert guest.ask(volatile_disk.READ, blocks * BLOCK_BYTES - 1, size=2) == b"ab"
        guest.close()
        lost, kept = disk.lose_power()
    data = image.read_bytes()
    assert lost
    assert kept
    assert (data[: blocks * BLOCK_BYTES] == b"a" * blocks * BLOCK_BYTES) is not lies
    assert 0 < data[:through].count(b"b") < blocks * BLOCK_BYTES
    assert lies or data[through : through + 1] == b"c"


# --- checkers of disks ----------------------------------------------------------------------------


def found_in(*events: Operation, drained: bool = True) -> dict[str, int]:
    evidence = Evidence(
        history=History(events),  # type: ignore[arg-type]
        is_drained=drained,
        groups=("reader",),
    )
    names = [*table.workloads()["archive"].checkers, "failed_call_stops", "unreadable_goes_on"]
    found = {name: len(list(table.checkers()[name].find(evidence))) for name in names}
    return {name: count for name, count in found.items() if count}


def sent(value: int, sequence: int) -> list[Operation]:
    """A message that is acknowledged and read."""
    send = Send(process="p", type="invoke", subject="campaign", values=(value,), t_ns=1)
    poll = Poll(process="c", type="invoke", group="reader", t_ns=3)
    return [
        send,
        send.ended("ok", queue=QUEUE, sequence=sequence),
        poll,
        poll.ended("ok", queue=QUEUE, records=(Record(sequence, value),)),
    ]


def scanned(*runs: tuple[int, int, int], whole: bool = True) -> list[Operation]:
    begun = Scan(process="s", type="invoke", t_ns=50 * SECOND)
    return [
        begun,
        Scan(
            process="s",
            type="ok",
            t_ns=51 * SECOND,
            queue=QUEUE,
            runs=tuple(Run(*each) for each in runs),
            is_whole=whole,
        ),
    ]


def test_what_was_acknowledged_must_be_in_the_last_scan_at_its_place() -> None:
    log = [*sent(70, 0), *sent(71, 1)]
    assert found_in(*log, *scanned((0, 70, 2))) == {}
    assert found_in(*log, *scanned((0, 70, 1))) == {"still_there": 1}
    assert found_in(*log, *scanned((0, 70, 1), whole=False)) == {}
    assert found_in(*log, *scanned((0, 71, 1), (1, 70, 1))) == {"same_bytes": 2}
    assert found_in(*log, *scanned((0, 70, 3))) == {"no_strange_bytes": 1}


def test_a_run_is_drained_when_a_scan_began_after_the_last_answer() -> None:
    is_drained = all_kept(("reader",))
    log = sent(70, 0)
    assert not is_drained(log)
    assert is_drained([*log, *scanned((0, 70, 1))])
    late = Send(process="p", type="info", subject="campaign", values=(71,), t_ns=60 * SECOND)
    assert not is_drained([*log, *scanned((0, 70, 1)), late])


@pytest.mark.parametrize(
    ("call", "status", "found"),
    [
        ("sync", 70, {}),
        ("write", 70, {}),
        ("sync", None, {"failed_call_stops": 1}),
        ("write", None, {"failed_call_stops": 1}),
        ("sync", 1, {"failed_call_stops": 1}),
        ("sync", 0, {"failed_call_stops": 1}),
        ("read", None, {}),
        ("read", 70, {"unreadable_goes_on": 1}),
    ],
)
def test_failed_writes_and_syncs_end_a_process_and_failed_reads_do_not(
    call: str, status: int | None, found: dict[str, int]
) -> None:
    event = FailedCall(process="g1-a", type="ok", call=call, times=1, status=status)
    assert found_in(event) == found


def test_runs_are_sequences_and_values_that_grow_together() -> None:
    assert runs_of([(0, 5), (1, 6), (2, 9), (5, 10)]) == ((0, 5, 2), (2, 9, 1), (5, 10, 1))


# --- what a power cut may have destroyed ----------------------------------------------------------


def doubting(name: str, events: Sequence[Operation]) -> tuple[list[Operation], int]:
    found = table.workloads()[name].doubting
    assert found is not None
    known, count = found(events, [DOUBT])
    return list(known), count


def test_doubtful_values_are_in_no_scan() -> None:
    early = sent(70, 0)
    late = [
        Send(process="p", type="invoke", subject="campaign", values=(71,), t_ns=4 * SECOND),
        Send(
            process="p",
            type="ok",
            subject="campaign",
            values=(71,),
            queue=QUEUE,
            sequence=1,
            t_ns=4 * SECOND + 1,
        ),
    ]
    known, count = doubting("archive", [*early, *late, *scanned((0, 70, 2))])
    assert count == 1
    assert found_in(*known) == {}
    missing = scanned((0, 70, 1))
    assert found_in(*early, *late, *missing) == {"still_there": 1, "no_loss": 1}


def test_doubtful_keyed_messages_are_neither_stored_nor_given_nor_settled() -> None:
    key = (Keyed("k", 1),)
    other = Put(process="p", type="invoke", subject="s", t_ns=SECOND, messages=(Keyed("j", 1),))
    deliver = Deliver(
        process="c",
        type="ok",
        group="strict",
        partition=1,
        first=0,
        end=64,
        token=1,
        version=1,
        t_ns=6 * SECOND,
        handed=(Handed(0, "j", "p", 1), Handed(1, "k", "p", 1)),
    )
    settle = Settle(
        process="c",
        type="ok",
        group="strict",
        partition=1,
        token=1,
        sequences=(0, 1),
        t_ns=7 * SECOND,
    )
    events: list[Operation] = [
        other,
        Put(
            process="p",
            type="ok",
            subject="s",
            t_ns=2 * SECOND,
            messages=(Keyed("j", 1),),
            places=(Stored(1, 0),),
        ),
        Put(process="p", type="invoke", subject="s", t_ns=4 * SECOND, messages=key),
        Put(
            process="p",
            type="ok",
            subject="s",
            t_ns=4 * SECOND + 5,
            messages=key,
            places=(Stored(1, 1),),
        ),
        deliver,
        settle,
    ]
    known, count = doubting("ordered-split", events)
    assert count == 1
    ends = [each.type for each in known if isinstance(each, Put)]
    assert ends == ["invoke", "ok", "invoke", "info"]
    assert [each.handed for each in known if isinstance(each, Deliver)] == [
        (Handed(0, "j", "p", 1),)
    ]
    assert [each.sequences for each in known if isinstance(each, Settle)] == [(0,)]


@pytest.mark.parametrize(
    ("sent_s", "due_ms", "stored_ms", "cancelled_s", "is_doubtful"),
    [
        (1, 2_000, 2_100, 0.0, False),
        (1, 9_000, 9_100, 0.0, False),
        (1, 9_000, 0, 0.0, False),
        (4, 9_000, 9_100, 0.0, True),
        (1, 4_500, 4_600, 0.0, True),
        (1, 3_000, 0, 0.0, True),
        (1, 9_000, 0, 4.5, True),
    ],
)
def test_doubtful_delayed_messages_were_sent_due_or_cancelled_then(
    sent_s: int, due_ms: int, stored_ms: int, cancelled_s: float, is_doubtful: bool
) -> None:
    later = Later(process="p", type="invoke", values=(7,), due_ms=(due_ms,), t_ns=sent_s * SECOND)
    events: list[Operation] = [
        later,
        Later(process="p", type="ok", values=(7,), due_ms=(due_ms,), t_ns=sent_s * SECOND + 1),
    ]
    if cancelled_s:
        at_ns = int(cancelled_s * SECOND)
        events.append(Cancel(process="p", type="ok", value=7, t_ns=at_ns))
    if stored_ms:
        events.append(
            Arrive(
                process="c",
                type="ok",
                value=7,
                queue=QUEUE,
                sequence=0,
                stored_ms=stored_ms,
                t_ns=10 * SECOND,
            )
        )
    known, count = doubting("delayed", events)
    assert count == is_doubtful
    assert any(isinstance(each, Arrive | Cancel) for each in known) is (
        not is_doubtful and bool(stored_ms or cancelled_s)
    )
