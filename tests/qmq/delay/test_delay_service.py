"""The administration of delayed messages over gRPC, with an admin that is a dictionary, and a
schedule that is a folder of bytes.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from qmq.delay.admin import Listing, ListMark
from qmq.delay.batches import DueMessage, SchedulePlace
from qmq.delay.buckets import BucketInfo
from qmq.delay.engine import DeliveryStatus
from qmq.delay.files import SCHEDULE, ReplicaScheduleFiles
from qmq.delay.service import PAGE_BYTES_MAX, READ_BYTES_MAX, DelayIdentity, DelayService
from qmq.errors import (
    CallerError,
    DelayTooLong,
    InvalidArgument,
    InvalidName,
    MessageNotFound,
    NotMaster,
    Outcome,
    QmqError,
    TooLate,
)
from qmq.limits import HEADER_BYTES_MAX
from qmq.model import DelayedId, MessageId
from qmq.proto.v1 import delay_pb2 as pb
from qmq.proto.v1 import delay_pb2_grpc
from qmq.rpc.channel import CHANNEL_OPTIONS, typed_error
from qmq.wire.batch_columns import BatchFlag

HOUR = 3_600_000
GROUP = "d1"


def message(number: int, due_ms: int, **fields: Any) -> DueMessage:
    """The `number`-th of producer 7."""
    known = {
        "place": SchedulePlace(due_ms // HOUR, number),
        "due_ms": due_ms,
        "subject": "orders",
        "body": b"body",
        "key": b"key",
        "tags": ("a", "b"),
        "headers": {"who": b"me"},
        "create_time_ms": 5,
        "message_id": MessageId(7, 1, number).to_bytes(),
        "flags": 0,
    }
    return DueMessage(**(known | fields))


class FakeDelayAdmin:
    """Messages by id, with their states; what is in `failure` is raised instead of an answer."""

    def __init__(self) -> None:
        self.messages: dict[str, tuple[DueMessage, str]] = {}
        self.failure: QmqError | None = None

    def add(self, *messages: DueMessage, state: str = "pending") -> list[str]:
        ids = [str(self.id_of(each)) for each in messages]
        self.messages |= {text: (each, state) for text, each in zip(ids, messages, strict=True)}
        return ids

    def id_of(self, message: DueMessage) -> DelayedId:
        return DelayedId(MessageId.parse(message.message_id.hex()), message.due_ms, 1, GROUP)

    async def show(self, delayed: DelayedId) -> tuple[DueMessage, str]:
        if str(delayed) not in self.messages:
            raise MessageNotFound("no such message")
        return self.messages[str(delayed)]

    async def cancel(self, delayed: DelayedId) -> DueMessage:
        if self.failure is not None:
            raise self.failure
        found, state = await self.show(delayed)
        if state != "pending":
            raise TooLate(f"it is {state}")
        self.messages[str(delayed)] = found, "cancelled"
        return found

    async def move(self, delayed: DelayedId, due_ms: int) -> DueMessage:
        if self.failure is not None:
            raise self.failure
        moved = replace((await self.show(delayed))[0], due_ms=due_ms)
        self.messages[str(delayed)] = moved, "pending"
        return moved

    async def listed(self, wanted: Listing) -> tuple[list[DueMessage], ListMark | None]:
        subject, from_ms, to_ms, after, most, is_half = wanted
        found = [
            (each.due_ms, text, each)
            for text, (each, state) in self.messages.items()
            if state == "pending"
            and (not is_half or each.flags & BatchFlag.HALF)
            and subject in ("", each.subject)
            and from_ms <= each.due_ms < (to_ms or 1 << 62)
        ]
        behind = sorted(each for each in found if each[:2] > after)
        last = ListMark(*behind[most - 1][:2]) if len(behind) > most else None
        return [each[2] for each in behind[:most]], last

    def status(self) -> DeliveryStatus:
        buckets = [BucketInfo(10, 5, 0, 100), BucketInfo(11, 7, 4, 200), BucketInfo(30, 2, 2, 300)]
        return DeliveryStatus(
            buckets,
            6,
            96,
            12 * HOUR,
            1,
            2,
            250,
            490,
            99,
            [("gone", 1, "[E105] there is no subject 'gone'")],
            11 * HOUR,
            -3,
        )


class FakeFiles:
    """One file."""

    def __init__(self) -> None:
        self.read_in: set[str] = set()
        self.state = b"\x80"
        self.described = 0

    def describe(self) -> tuple[bytes, int]:
        self.read_in.add(threading.current_thread().name)
        self.described += 1
        return self.state, 42

    def read(self, file: str, offset: int, bytes_max: int) -> bytes:
        self.read_in.add(threading.current_thread().name)
        if file != "20261121T130000Z.log":
            raise FileNotFoundError(file)
        return (bytes(range(256)) * (1 << 15))[offset : offset + bytes_max]


class Service:
    """A served admin, and calls as a metaserver makes them."""

    def __init__(self) -> None:
        self.admin, self.files = FakeDelayAdmin(), FakeFiles()
        self.is_serving = True
        self.server = grpc.aio.server()
        DelayService(
            DelayIdentity(GROUP, "d1-a", HOUR),
            lambda: self.admin if self.is_serving else None,
            self.files,
        ).add_to(self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.channel = grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        self.stub: Any = delay_pb2_grpc.DelayControlStub(self.channel)

    async def __call__(self, method: str, request: Any) -> Any:
        call: Callable[..., Awaitable[Any]] = getattr(self.stub, method)
        try:
            return await call(request, timeout=30)
        except grpc.aio.AioRpcError as cause:
            raise typed_error(cause, self.address) from cause


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    found = Service()
    await found.server.start()
    yield found
    await found.channel.close()
    await found.server.stop(None)


# --- one message ----------------------------------------------------------------------------------


async def test_a_message_is_shown_whole_with_its_outcome(service: Service) -> None:
    (name,) = service.admin.add(message(1, 11 * HOUR), state="planned")
    shown = await service("ShowDelayed", pb.ShowDelayedRequest(id=name))
    assert (shown.id, shown.subject, shown.group, shown.state) == (name, "orders", GROUP, "planned")
    assert (shown.message_id, shown.due_ms, shown.create_time_ms) == (
        str(MessageId(7, 1, 1)),
        11 * HOUR,
        5,
    )
    assert (shown.key, list(shown.tags), shown.body, shown.body_bytes) == (
        b"key",
        ["a", "b"],
        b"body",
        4,
    )
    assert [(each.name, each.value) for each in shown.headers] == [("who", b"me")]
    assert (shown.cron, shown.zone) == ("", "")


async def test_a_recurring_message_says_when_it_comes_again(service: Service) -> None:
    headers = {"qmq-cron": b"0 9 * * *", "qmq-zone": b"Europe/Warsaw"}
    recurring = message(
        1, HOUR, headers=headers, flags=int(BatchFlag.RECURRING | BatchFlag.ORDERED)
    )
    names = service.admin.add(recurring, message(2, HOUR, headers=headers))
    found = [await service("ShowDelayed", pb.ShowDelayedRequest(id=name)) for name in names]
    assert [(each.cron, each.zone) for each in found] == [("0 9 * * *", "Europe/Warsaw"), ("", "")]


async def test_a_cancelled_message_is_reported_as_cancelled_at_every_request(
    service: Service,
) -> None:
    (name,) = service.admin.add(message(1, HOUR))
    answers = [await service("CancelDelayed", pb.CancelDelayedRequest(id=name)) for _ in range(2)]
    assert answers[0] == answers[1]
    assert (answers[0].id, answers[0].state, answers[0].body, answers[0].body_bytes) == (
        name,
        "cancelled",
        b"",
        4,
    )


@pytest.mark.parametrize(
    "failure",
    [
        NotMaster("lost it", outcome=Outcome.UNKNOWN),
        DelayTooLong("over two years"),
        TooLate("on its way"),
    ],
)
async def test_what_the_administration_raises_arrives_with_its_outcome(
    service: Service, failure: QmqError
) -> None:
    (name,) = service.admin.add(message(1, HOUR))
    service.admin.failure = failure
    for method, request in (
        ("CancelDelayed", pb.CancelDelayedRequest(id=name)),
        ("MoveDelayed", pb.MoveDelayedRequest(id=name, due_ms=1)),
    ):
        with pytest.raises(type(failure), match=failure.message) as caught:
            await service(method, request)
        assert caught.value.outcome is failure.outcome


NO_ID = f"{MessageId(7, 1, 1)}-1-1-{GROUP}"
"""The id of a message that the group does not have."""
FILE = "20261121T130000Z.log"


@pytest.mark.parametrize(
    ("method", "fields", "kind", "says"),
    [
        ("CancelDelayed", {"id": "x"}, InvalidArgument, "use the receipt's `delayed_id`"),
        ("ShowDelayed", {"id": f"{NO_ID[:-1]}2"}, InvalidArgument, "kept by delay group 'd2'"),
        ("ShowDelayed", {"id": NO_ID}, MessageNotFound, "no such message"),
        ("CancelDelayed", {"id": NO_ID}, MessageNotFound, "no such message"),
        ("MoveDelayed", {"id": NO_ID}, InvalidArgument, "give the due time"),
        ("MoveDelayed", {"id": NO_ID, "due_ms": -1}, InvalidArgument, "give the due time"),
        ("ListDelayed", {"subject": "a b"}, InvalidName, "may hold only"),
        ("ListDelayed", {"from_ms": -5}, InvalidArgument, "not -5"),
        ("ListDelayed", {"to_ms": -5}, InvalidArgument, "not -5"),
        ("ListDelayed", {"from_ms": 5, "to_ms": 5}, InvalidArgument, "not after its beginning"),
        ("ListDelayed", {"after": "yesterday"}, InvalidArgument, "`next` of the previous page"),
        ("ReadSchedule", {"file": "../secret"}, InvalidArgument, "not a file of a schedule"),
        ("ReadSchedule", {"file": FILE + "\n"}, InvalidArgument, "not a file of a schedule"),
        (
            "ReadSchedule",
            {"file": FILE, "offset": -1},
            InvalidArgument,
            "offset in a file must be 0 or more",
        ),
        ("ReadSchedule", {"file": "20261121T130000Z.idx"}, InvalidArgument, "restart the transfer"),
    ],
)
async def test_an_impossible_request_gets_a_reason(
    service: Service, method: str, fields: dict[str, Any], kind: type[CallerError], says: str
) -> None:
    with pytest.raises(kind, match=says):
        await service(method, getattr(pb, f"{method}Request")(**fields))


# --- many -----------------------------------------------------------------------------------------


async def pages(service: Service, **fields: Any) -> list[list[str]]:
    """All pages of a list: ids."""
    found, after = [], ""
    while True:
        page = await service("ListDelayed", pb.ListDelayedRequest(**fields, after=after))
        found.append([each.id for each in page.messages])
        after = page.next
        if not after:
            return found


async def test_pending_messages_are_listed_by_due_time_in_pages_that_miss_none(
    service: Service,
) -> None:
    same_time = [message(number, HOUR + number // 3) for number in range(10)]
    names = service.admin.add(*same_time)
    service.admin.add(message(20, HOUR), state="delivered")
    service.admin.add(message(21, HOUR, subject="other"))
    assert await pages(service, subject="orders", messages_max=4) == [
        names[:4],
        names[4:8],
        names[8:],
    ]
    assert await pages(service, subject="orders", messages_max=5) == [names[:5], names[5:]]
    assert await pages(service, subject="orders", from_ms=HOUR + 1, to_ms=HOUR + 2) == [names[3:6]]
    assert await pages(service, subject="nothing") == [[]]
    assert len((await pages(service))[0]) == 11
    page = await service("ListDelayed", pb.ListDelayedRequest(subject="orders", messages_max=1))
    assert (page.messages[0].body, page.messages[0].body_bytes, page.messages[0].state) == (
        b"",
        4,
        "pending",
    )


async def test_a_page_of_large_messages_ends_early_and_the_next_continues_there(
    service: Service,
) -> None:
    headers = {"h": b"x" * (HEADER_BYTES_MAX - 1)}
    names = service.admin.add(
        *[message(number, HOUR + number, headers=headers) for number in range(100)]
    )
    found = await pages(service, messages_max=1000)
    assert [name for page in found for name in page] == names
    assert [len(page) for page in found] == [
        PAGE_BYTES_MAX // HEADER_BYTES_MAX - 1,
        100 - (PAGE_BYTES_MAX // HEADER_BYTES_MAX - 1),
    ]


async def test_a_description_tells_buckets_with_anything_pending_and_the_delivery(
    service: Service,
) -> None:
    found = await service("DescribeDelay", pb.DescribeDelayRequest())
    assert [
        (each.start_ms, each.length_ms, each.messages, each.pending, each.stored_bytes)
        for each in found.buckets
    ] == [
        (11 * HOUR, HOUR, 7, 4, 200),
        (30 * HOUR, HOUR, 2, 2, 300),
    ]
    assert (found.group, found.replica, found.pending, found.wheel_messages, found.wheel_bytes) == (
        GROUP,
        "d1-a",
        6,
        6,
        96,
    )
    assert (found.horizon_ms, found.waiting, found.planned, found.delivered) == (
        12 * HOUR,
        1,
        2,
        99,
    )
    assert (found.lateness_p50_ms, found.lateness_p99_ms, found.time_ms, found.clock_step_ms) == (
        250,
        490,
        11 * HOUR,
        -3,
    )
    (trouble,) = found.troubles
    assert (trouble.subject, trouble.waiting, trouble.reason) == (
        "gone",
        1,
        "[E105] there is no subject 'gone'",
    )


# --- replicas -------------------------------------------------------------------------------------


async def test_a_replica_that_does_not_serve_answers_only_copies_of_its_schedule(
    service: Service,
) -> None:
    (name,) = service.admin.add(message(1, HOUR))
    service.is_serving = False
    asked = [
        ("CancelDelayed", pb.CancelDelayedRequest(id=name)),
        ("MoveDelayed", pb.MoveDelayedRequest(id=name, due_ms=1)),
        ("ShowDelayed", pb.ShowDelayedRequest(id=name)),
        ("ListDelayed", pb.ListDelayedRequest()),
        ("DescribeDelay", pb.DescribeDelayRequest()),
    ]
    for method, request in asked:
        with pytest.raises(NotMaster, match="d1-a of delay group d1 does not serve") as caught:
            await service(method, request)
        assert caught.value.outcome is Outcome.NOT_STORED
    assert service.admin.messages[name][1] == "pending"
    found = await service("DescribeSchedule", pb.DescribeScheduleRequest())
    assert (found.state, found.index) == (b"\x80", 42)
    read = await service(
        "ReadSchedule", pb.ReadScheduleRequest(file="20261121T130000Z.log", offset=1, bytes_max=3)
    )
    assert read.data == b"\x01\x02\x03"


async def test_a_long_state_is_read_once_for_all_of_its_pieces(service: Service) -> None:
    service.files.state = bytes(range(256)) * (READ_BYTES_MAX // 256 * 3) + b"end"
    got = b""
    while len(got) < len(service.files.state):
        found = await service("DescribeSchedule", pb.DescribeScheduleRequest(offset=len(got)))
        assert (found.index, found.state_bytes) == (42, len(service.files.state))
        got += found.state
    assert (got, service.files.described) == (service.files.state, 1)
    await service("DescribeSchedule", pb.DescribeScheduleRequest(offset=0))
    assert service.files.described == 2


async def test_a_schedule_file_is_read_outside_the_loop_and_in_bounded_parts(
    service: Service,
) -> None:
    for most in (0, 1 << 31):
        read = await service(
            "ReadSchedule", pb.ReadScheduleRequest(file="20261121T130000Z.log", bytes_max=most)
        )
        assert len(read.data) == READ_BYTES_MAX
    end = await service(
        "ReadSchedule", pb.ReadScheduleRequest(file="20261121T130000Z.log", offset=1 << 23)
    )
    assert end.data == b""
    await service("DescribeSchedule", pb.DescribeScheduleRequest())
    assert threading.main_thread().name not in service.files.read_in


@pytest.mark.parametrize("offset", [4, 1 << 40, (1 << 63) - 1])
async def test_behind_the_end_of_a_file_there_is_nothing(
    tmp_path: Path, service: Service, offset: int
) -> None:
    file = tmp_path / SCHEDULE / "20261121T130000Z.log"
    file.parent.mkdir()
    file.write_bytes(b"data")
    service.files.read = ReplicaScheduleFiles(tmp_path, lambda: True).read  # type: ignore[method-assign]
    assert (
        await service("ReadSchedule", pb.ReadScheduleRequest(file=file.name, offset=offset))
    ).data == b""


async def test_an_error_that_repeats_a_long_request_arrives_as_it_is(service: Service) -> None:
    with pytest.raises(InvalidArgument, match="x" * 500):
        await service("ShowDelayed", pb.ShowDelayedRequest(id="x" * 100_000))
