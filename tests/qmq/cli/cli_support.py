"""Support for the command line's tests: a metaserver that gives prepared answers and records
requests, and the command itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from typer.testing import CliRunner, Result

from qmq.cli.app import app
from qmq.cli.arguments import CliTiming
from qmq.errors import QmqError
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb
from qmq.proto.v1 import meta_pb2_grpc
from qmq.rpc.channel import CODE, OUTCOME

Answer = Any
"""A response; an error to raise; a function of the request that gives one of them; or a list of
these, the last of which stays.
"""


class FakeMeta(meta_pb2_grpc.MetaServicer):
    """A metaserver on loopback. `answers` by the call's name; `asked` is every request with its
    call's name.
    """

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.asked: list[tuple[str, Any]] = []

    def requests(self, call: str) -> list[Any]:
        """The requests of one kind of call."""
        return [request for name, request in self.asked if name == call]

    def _answer(self, call: str, request: Any, context: grpc.ServicerContext) -> Any:
        self.asked.append((call, request))
        answer = self.answers.get(call, NotImplementedError())
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        if callable(answer):
            answer = answer(request)
        if isinstance(answer, QmqError):
            context.set_trailing_metadata(
                ((CODE, str(answer.code)), (OUTCOME, str(answer.outcome.value)))
            )
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, answer.message)
        if isinstance(answer, grpc.StatusCode):
            context.abort(answer, "in this test")
        if isinstance(answer, NotImplementedError):
            context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{call} has no answer in this test")
        return answer


def _call(name: str) -> Callable[[FakeMeta, Any, grpc.ServicerContext], Any]:
    def answered(self: FakeMeta, request: Any, context: grpc.ServicerContext) -> Any:
        return self._answer(name, request, context)

    return answered


for _method in pb.DESCRIPTOR.services_by_name["Meta"].methods:
    if not _method.server_streaming:
        setattr(FakeMeta, _method.name, _call(_method.name))


@contextmanager
def serving() -> Iterator[tuple[FakeMeta, str]]:
    """A metaserver and its address. The metaserver runs in a separate thread, since the command
    runs its own event loop.
    """
    meta = FakeMeta()
    server = grpc.server(ThreadPoolExecutor(4))
    meta_pb2_grpc.add_MetaServicer_to_server(meta, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield meta, f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


QUICK = CliTiming(follow_s=0.001, conflict_s=0.001)


class Command:
    """`qmq`, as typed, against one server; it waits for nothing for long."""

    def __init__(self, address: str) -> None:
        self._address = address

    def __call__(self, *words: str) -> Result:
        return CliRunner().invoke(app, words, env={"QMQ_SERVER": self._address}, obj=QUICK)

    def text(self, *words: str) -> str:
        """Standard output of a command that succeeds."""
        done = self(*words)
        assert done.exit_code == 0, done.output
        return done.stdout

    def json(self, *words: str) -> Any:
        """Run a command with --json and parse its output."""
        return json.loads(self.text(*words, "--json"))

    def error(self, *words: str) -> tuple[int, str]:
        """Exit status and standard error, joined to one line, of a command that fails."""
        done = self(*words)
        return done.exit_code, done.stderr.replace("\n", " ")


def commands(command: Any, name: str = "qmq") -> Iterator[tuple[str, Any]]:
    """The command and all below it that do something, with their full names."""
    below = getattr(command, "commands", {})
    if not below or (command.invoke_without_command and name != "qmq"):
        yield name, command
    for word, each in below.items():
        yield from commands(each, f"{name} {word}")


# --- a subject: orders, [0, 256) 1 on g1, [256, 512) 2 on g1, [512, 1024) 3 on g2 -----------------


def lps(first: int, end: int) -> control.LpRange:
    return control.LpRange(first=first, end=end)


def place(number: int, first: int, end: int, group: str) -> pb.OrderedPartition:
    return pb.OrderedPartition(number=number, lps=lps(first, end), broker_group=group)


def route(
    version: int, *places: pb.OrderedPartition, fenced: tuple[int, ...] = ()
) -> pb.OrderedRoute:
    return pb.OrderedRoute(
        version=version, logical_partitions=places[-1].lps.end, partitions=places, fenced=fenced
    )


def status(
    number: int, group: str, *, start: int = 0, end: int = 100, rate: float = 0.0, **fields: Any
) -> control.PartitionStatus:
    return control.PartitionStatus(
        subject="orders",
        partition=number,
        broker_group=group,
        start_sequence=start,
        next_sequence=end,
        stored_bytes=10 * (end - start),
        messages_per_s=rate,
        **fields,
    )


def done(first: int, end: int, before: int, *, is_finished: bool = False) -> control.LaneProgress:
    return control.LaneProgress(lps=lps(first, end), done_before=before, is_finished=is_finished)


PLACES = (place(1, 0, 256, "g1"), place(2, 256, 512, "g1"), place(3, 512, 1024, "g2"))


def settings(name: str = "orders", order: str = "strict") -> pb.SubjectSettings:
    return pb.SubjectSettings(
        name=name,
        order=order,
        logical_partitions=1024 if order else 0,
        fencing="lease" if order else "",
    )


def group(
    name: str, version: int, *partitions: control.PartitionStatus, **fields: Any
) -> pb.OrderedGroup:
    known = {
        "frontier": [pb.GroupRange(lps=lps(0, 1024), version=version)],
        "gate": "lanes",
        "is_ready": True,
    } | fields
    return pb.OrderedGroup(group=name, version=version, partitions=partitions, **known)


def described(
    version: int = 1, places: tuple[pb.OrderedPartition, ...] = PLACES, **fields: Any
) -> pb.DescribeRouteResponse:
    known = {
        "settings": settings(),
        "route": route(version, *places),
        "latest_version": version,
        "partitions": [status(each.number, each.broker_group) for each in places],
    }
    return pb.DescribeRouteResponse(**(known | fields))


def change(
    kind: str,
    to_version: int,
    sources: tuple[int, ...],
    *targets: pb.OrderedPartition,
    phase: str = "published",
    **fields: Any,
) -> pb.RouteChangeInfo:
    return pb.RouteChangeInfo(
        id=f"change-{to_version}",
        kind=kind,
        to_version=to_version,
        sources=sources,
        targets=targets,
        phase=phase,
        **fields,
    )
