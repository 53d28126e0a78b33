"""Loading records: each record once over any number of attempts, however an attempt ended
(docs/TRANSFER.md).
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import node_config, running

import qmq
from qmq.cli.transfer.loading import LoadJournal, LoadState, RecordLoader
from qmq.cli.transfer.message_source import TransferRecord, record_of
from qmq.cli.transfer.records import (
    LINE_BYTES_MAX,
    FileSource,
    RecordForm,
    bounded_lines,
    count_of,
    json_line,
    record_of_line,
)
from qmq.errors import InvalidArgument
from qmq.limits import KEY_BYTES_MAX, LONG_BODY_BYTES_MAX
from qmq.model import MessageId, Order, SubjectConfig
from qmq.node.dev_node import Node
from qmq.proto.v1 import meta_pb2 as pb

LOAD = {"subject": "s"}
RECORDS = [TransferRecord(b"%03d" % number, b"k%d" % (number % 3)) for number in range(120)]


class Broken(Exception):
    """The error that ends an attempt in these tests."""


class ListSource:
    """Records of a list, from a place on; it breaks before a place."""

    def __init__(
        self, skip: int, breaks_at: int | None = None, *, records: list[TransferRecord] = RECORDS
    ) -> None:
        self._count, self._breaks_at, self._records = skip, breaks_at, records

    async def records(self) -> AsyncIterator[TransferRecord]:
        for record in self._records[self._count :]:
            if self._count == self._breaks_at:
                raise Broken
            self._count += 1
            yield record

    def mark(self) -> int:
        return self._count


class SilentJournal(LoadJournal):
    """Keeps only the first note and the last one, as if the process had died before it wrote the
    others.
    """

    def save(self, state: LoadState) -> None:
        if self.state is None or state.is_done:
            super().save(state)


async def attempt(
    mq: qmq.Client, path: Path, breaks_at: int | None, journal: type[LoadJournal], note_s: float
) -> RecordLoader:
    held = journal(path, LOAD)
    try:
        loader = RecordLoader(mq, "s", held, note_s=note_s)
        source = ListSource(held.state.mark or 0 if held.state is not None else 0, breaks_at)
        if breaks_at is None:
            await loader.load(source)
        else:
            with pytest.raises(Broken):
                await loader.load(source)
        return loader
    finally:
        held.close()


@pytest.mark.sampled
@pytest.mark.parametrize("order", [Order.NONE, Order.STRICT])
@pytest.mark.parametrize("journal", [LoadJournal, SilentJournal])
async def test_records_are_stored_once_whatever_attempts_end_with(
    node: Node, tmp_path: Path, order: Order, journal: type[LoadJournal]
) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.metadata.create_subject(
            SubjectConfig("s", order=order, logical_partitions=16 if order.value else 0)
        )
        for at in (0, 40, 41, 100):
            await attempt(mq, tmp_path / "state", at, journal, note_s=0.0)
            if at == 41 and order.value:
                await mq.metadata.change_route("s", split=pb.SplitOperation(partition=1))
            await mq.send("s", b"of another", key="k9")
        last = await attempt(mq, tmp_path / "state", None, journal, note_s=0.0)
        assert last.sent <= 20
        stored = [message async for message in mq.browse("s") if message.body != b"of another"]
        assert Counter(message.body for message in stored) == Counter(
            record.body for record in RECORDS
        )
        for key in (b"k0", b"k1", b"k2"):
            bodies = [message.body for message in stored if message.key_bytes == key]
            assert not order.value or bodies == sorted(bodies), "each key's are in order"
        assert len({message.id for message in stored}) == len(RECORDS)


async def test_nothing_is_stored_before_the_first_note(node: Node, tmp_path: Path) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.send("s", b"before")
        await attempt(mq, tmp_path / "state", 0, LoadJournal, note_s=0.0)
        assert [message.body async for message in mq.browse("s")] == [b"before"]
        with_note = LoadJournal(tmp_path / "state", LOAD)
        assert with_note.state is not None
        assert (with_note.state.ends, with_note.state.records) == ({("broker-0", 0): 1}, 0)
        with_note.close()


@given(st.integers(0, 200))
def test_a_torn_note_is_cut_off_and_the_one_before_counts(cut: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state"
        journal = LoadJournal(path, LOAD)
        states = [LoadState(7, number, {("g", 0): number}, number) for number in range(3)]
        for state in states:
            journal.save(state)
        journal.close()
        data = path.read_bytes()
        ends = [end + 1 for end, byte in enumerate(data) if byte == ord("\n")]
        path.write_bytes(data[: max(len(data) - cut, ends[0])])
        again = LoadJournal(path, LOAD)
        whole = sum(end <= max(len(data) - cut, ends[0]) for end in ends)
        assert again.state == states[whole - 1]
        assert path.read_bytes() == data[: ends[whole - 1]]
        again.close()


def test_two_processes_do_not_share_a_state_file(tmp_path: Path) -> None:
    held = LoadJournal(tmp_path / "state", LOAD)
    with pytest.raises(InvalidArgument, match="in use by another process"):
        LoadJournal(tmp_path / "state", LOAD)
    held.close()
    LoadJournal(tmp_path / "state", LOAD).close()


RECORD = st.builds(
    TransferRecord,
    st.binary(max_size=40),
    st.none()
    | st.binary(min_size=1, max_size=10)
    | st.text(min_size=1, max_size=5).map(str.encode),
    st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple),
    st.dictionaries(
        st.text(min_size=1, max_size=5), st.binary(max_size=5) | st.just(b"hex:00"), max_size=3
    ),
    st.none() | st.integers(0, 1 << 45),
    st.none()
    | st.builds(
        MessageId,
        st.integers(0, (1 << 64) - 1),
        st.integers(0, (1 << 48) - 1),
        st.integers(0, 65_535),
    ),
)


@given(RECORD, st.booleans(), st.dictionaries(st.just("sequence"), st.integers(0, 9)))
def test_a_line_says_all_that_a_record_is(
    record: TransferRecord, as_base64: bool, place: dict[str, Any]
) -> None:
    line = json_line(record, place, as_base64=as_base64)
    assert line.count(b"\n") == 1
    assert record_of_line(line, 1) == record


def refusal(line: bytes) -> str:
    """The error for a line that is no record; empty if the line is one."""
    try:
        record_of_line(line, 17)
    except InvalidArgument as failure:
        return failure.message
    return ""


@given(
    st.binary(max_size=60)
    | st.sampled_from(
        [b"[]", b'{"body": 1, "key": 3}', b'{"body": "", "tags": 5}', b'{"body_base64": "?"}']
    )
)
def test_any_bytes_are_a_record_or_an_error_that_names_the_line(line: bytes) -> None:
    assert refusal(line) == "" or refusal(line).startswith("line 17 is not an object")


async def test_a_line_that_no_record_has_is_refused_before_its_end(tmp_path: Path) -> None:
    path = tmp_path / "orders.jsonl"
    path.write_bytes(b'{"body": "one"}\n\n{"body": "two"}\n' + b"x" * 5_000)
    records = aiter(FileSource(RecordForm.JSON_LINES, path, line_bytes_max=1_000).records())
    assert [(await anext(records)).body for _ in range(2)] == [b"one", b"two"]
    with pytest.raises(InvalidArgument, match="line 4 has more than 1,000 bytes"):
        await anext(records)
    assert count_of(RecordForm.JSON_LINES, path) == 3


@given(st.lists(st.sampled_from((b"x", b" ", b"\n", b"\r\n", b"x" * (1 << 20), b" " * (1 << 20)))))
def test_records_are_counted_by_lines_however_long_they_are(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(data)
        assert count_of(RecordForm.JSON_LINES, Path(file.name)) == sum(
            1 for line in data.split(b"\n") if line.strip()
        )


def test_a_pipe_without_newlines_is_read_no_further_than_the_longest_line() -> None:
    with (
        open("/dev/zero", "rb") as zeros,
        pytest.raises(InvalidArgument, match="line 1 has more than"),
    ):
        next(bounded_lines(zeros))


def test_the_longest_record_is_shorter_than_the_longest_line() -> None:
    record = TransferRecord(bytes(LONG_BODY_BYTES_MAX), b"\0" * KEY_BYTES_MAX, (), {}, 0, None)
    assert len(json_line(record, {})) < LINE_BYTES_MAX


async def test_a_client_and_an_import_send_as_long_bodies_as_the_subject_takes(
    tmp_path: Path,
) -> None:
    body = bytes(6 << 20)
    async with running(node_config(tmp_path / "node")) as node, qmq.connect(node.address) as mq:
        for subject in ("long", "copy"):
            await mq.metadata.create_subject(SubjectConfig(subject, body_bytes_max=15 << 20))
        await mq.send("long", body)
        records = [record_of(each).check(1) async for each in mq.browse("long")]
        with closing(LoadJournal(tmp_path / "journal", LOAD)) as journal:
            await RecordLoader(mq, "copy", journal).load(ListSource(0, records=records))
        assert [each.body async for each in mq.browse("copy")] == [body]
