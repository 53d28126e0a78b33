"""An error that says "not stored" is true, wherever in a request the coordination store falls
silent, and however the change ends later.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
from meta_support import Caller, FakeBroker, brokers, metaserver
from qmq_coordination.coordination_store import KeyListing
from qmq_coordination.ordered_records import LEADER
from qmq_coordination.view import PROBE, ROOT
from support.stores import SharedStore

from qmq.errors import CoordinationUnavailable, CoordinationUnknown, Outcome, QmqError
from qmq.proto.v1 import control_pb2 as control
from qmq.proto.v1 import meta_pb2 as pb
from qmq.rpc.channel import answering
from qmq.rpc.request_changes import note_change

CHANGES = ("put", "delete", "txn")
CALLS = ("get", "list", "grant", "keep_alive", "revoke", *CHANGES)


@dataclass
class Silence:
    """A store that is silent after `left` more calls of the request. Of the last of these calls, if
    it is a change, the answer is lost; `arrives` says whether the change itself is made: at once,
    never, or later, when `deliver` is called.
    """

    inner: SharedStore
    arrives: str = "at once"
    left: float = float("inf")
    late: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        if name not in CALLS:
            return getattr(self.inner, name)

        async def call(*arguments: Any, **named: Any) -> Any:
            if arguments and (arguments[0] == PROBE or LEADER in str(arguments)):
                return await getattr(self.inner, name)(*arguments, **named)
            return await self._call(name, arguments, named)

        return call

    async def _call(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self.left <= 0:
            raise CoordinationUnavailable("no answer (in this test)")
        self.left -= 1
        if self.left > 0:
            return await getattr(self.inner, name)(*arguments, **named)
        if name not in CHANGES:
            raise CoordinationUnavailable("no answer (in this test)")
        if self.arrives == "at once":
            await getattr(self.inner, name)(*arguments, **named)
        elif self.arrives == "later":
            self.late.append((name, arguments, named))
        note_change()
        raise CoordinationUnknown("the answer was lost (in this test)")

    async def heal(self) -> None:
        self.left = float("inf")
        for name, arguments, named in self.late:
            await getattr(self.inner, name)(*arguments, **named)
        self.late.clear()


class Broker(FakeBroker):
    """A master that closes partitions."""

    @answering
    async def DescribeLanes(self, request: Any) -> Any:
        return control.DescribeLanesResponse()

    @answering
    async def Seal(self, request: Any) -> Any:
        return control.SealResponse(sequence=0)

    @answering
    async def DropSubject(self, request: Any) -> Any:
        return control.DropSubjectResponse(queues=1)


ORDERED = pb.SubjectSettings(name="new", order="strict", logical_partitions=8, partitions=3)
MOVE = pb.MoveOperation(partition=1, broker_group="b")
OBJECT = '{"type": "object", "properties": {"a": {"type": "string"}}}'
PAUSE = pb.Pause(kind="group", subject="u", group="g")
PAUSED = pb.Pause(kind="group", subject="u", group="paused")
REQUESTS: dict[str, Any] = {
    "create": pb.CreateSubjectRequest(settings=pb.SubjectSettings(name="new")),
    "create an ordered one": pb.CreateSubjectRequest(settings=ORDERED),
    "locate": pb.LocateRequest(subject="new", create_if_missing=True),
    "place": pb.PlaceSubjectRequest(subject="u", broker_groups=["b"]),
    "flush": pb.SetSubjectFlushRequest(subject="u", flush="sync"),
    "alter": pb.AlterSubjectRequest(subject="u", retention_ms=3_600_000),
    "delete": control.DropSubjectRequest(subject="u"),
    "drain": pb.SetGroupModeRequest(broker_group="b", mode="read-only"),
    "pause": pb.SetPauseRequest(is_paused=True, pause=PAUSE),
    "resume": pb.SetPauseRequest(pause=PAUSED),
    "settings": pb.SetGroupSettingsRequest(subject="u", group="g", attempts_max=3),
    "policy": pb.SetReshardPolicyRequest(policy=pb.ReshardPolicy(subject="o", partitions_max=9)),
    "schema": pb.SetSubjectSchemaRequest(subject="u", format="json-schema", text=OBJECT),
    "move": pb.ChangeRouteRequest(subject="o", move=MOVE),
    "move once": pb.ChangeRouteRequest(subject="o", move=MOVE, from_version=1, change_id="mine"),
    "join": pb.SyncMemberRequest(
        subject="o", group="g", consumer="c", incarnation="1", lease_ms=30_000
    ),
}


async def stored(store: SharedStore) -> dict[str, bytes]:
    """All that requests change."""
    listing: KeyListing = await store.list(ROOT)
    return {item.key: item.value for item in listing.items if item.key != LEADER}


async def lies(name: str, arrives: str) -> list[str]:
    """Send the request once for each of its calls to the store, which is silent from that call on.
    Returns the false denials.
    """
    request = REQUESTS[name]
    method = "DeleteSubject" if name == "delete" else type(request).__name__.removesuffix("Request")
    found: list[str] = []
    for calls in range(1, 40):
        async with AsyncExitStack() as stack:
            inner = SharedStore()
            stack.push_async_callback(inner.end)
            store: Any = Silence(inner, arrives)
            await stack.enter_async_context(brokers(store, "a", "b", kind=Broker))
            call, _ = await stack.enter_async_context(metaserver(store, change_wait_s=0.2))
            await prepare(call)
            before = await stored(inner)
            store.left = calls
            failure = await told(call, method, request)
            is_whole = store.left > 0
            await store.heal()
            if failure is not None and failure.outcome is Outcome.NOT_STORED:
                await asyncio.sleep(0)
                after = await stored(inner)
                if after != before or "may be made" in failure.message:
                    found.append(
                        f"call {calls}: {failure}: {sorted(after.items() ^ before.items())}"
                    )
            if is_whole:
                assert failure is None or failure.outcome is not Outcome.NOT_STORED, failure
                return found
    raise AssertionError(f"{name} makes more calls to the store than were tried")


async def prepare(call: Caller) -> None:
    await call(
        "CreateSubject",
        pb.CreateSubjectRequest(settings=pb.SubjectSettings(name="u", broker_groups=["a"])),
    )
    ordered = pb.SubjectSettings(
        name="o", order="strict", logical_partitions=8, broker_groups=["a"]
    )
    await call("CreateSubject", pb.CreateSubjectRequest(settings=ordered))
    await call("SetPause", pb.SetPauseRequest(is_paused=True, pause=PAUSED))


async def told(call: Caller, method: str, request: Any) -> QmqError | None:
    try:
        await call(method, request)
    except QmqError as failure:
        return failure
    return None


@pytest.mark.parametrize("arrives", ["at once", "later"])
@pytest.mark.parametrize("name", REQUESTS)
async def test_not_stored_is_never_said_of_a_change_that_is_or_will_be_made(
    name: str, arrives: str
) -> None:
    assert await lies(name, arrives) == []


@pytest.mark.parametrize("name", ["pause", "resume"])
async def test_the_judge_sees_a_request_that_forgets_what_it_may_have_changed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("qmq_coordination.embedded", "qmq.meta.calls", __name__):
        monkeypatch.setattr(f"{place}.note_change", lambda: None)
    assert await lies(name, "at once")
