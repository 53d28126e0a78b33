"""Schemas at metaservers: versions, compatibility, races on one store, lost answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from qmq_coordination.embedded import EmbeddedStore
from qmq_coordination.subjects import SubjectCatalog
from qmq_coordination.view import ClusterView
from support import ManualClock
from support.stores import Fault, FaultyStore

from qmq.errors import IncompatibleSchema, InvalidArgument, UnknownSubject
from qmq.meta.catalog import ClusterCatalog, SchemaService
from qmq.model import SubjectConfig
from qmq.proto.v1 import meta_pb2 as pb

INT = {"type": "integer", "format": "int32"}


def text(required: tuple[str, ...] = (), **properties: Any) -> str:
    return json.dumps({"type": "object", "properties": properties, "required": required})


class Meta:
    def __init__(self, store: FaultyStore) -> None:
        view = ClusterView(store)
        self.service = SchemaService(
            store, ClusterCatalog(store, view, auto_create=False), ManualClock()
        )

    async def declare(self, schema: str, mode: str = "", *, dry_run: bool = False) -> int:
        request = pb.SetSubjectSchemaRequest(
            subject="a", format="json-schema", text=schema, compatibility=mode, dry_run=dry_run
        )
        return (await self.service.declare(request)).version

    async def versions(self) -> list[tuple[int, str, str]]:
        found = await self.service.list(pb.ListSubjectSchemasRequest(subject="a"))
        return [(each.version, each.text, each.compatibility) for each in found.schemas]


@pytest.fixture
async def store() -> FaultyStore:
    found = FaultyStore(EmbeddedStore())
    await SubjectCatalog(found).create(SubjectConfig("a", groups=("g1",)))
    return found


async def test_versions_count_up_and_the_same_schema_adds_none(store: FaultyStore) -> None:
    here, there = Meta(store), Meta(store)
    first, second = text(x=INT), text(x=INT, y=INT)
    assert [
        await here.declare(first),
        await there.declare(first),
        await there.declare(second),
        await here.declare(second),
    ] == [1, 1, 2, 2]
    assert await here.versions() == [(1, first, "backward"), (2, second, "backward")]


async def test_an_incompatible_version_is_refused_and_a_dry_run_stores_nothing(
    store: FaultyStore,
) -> None:
    meta = Meta(store)
    await meta.declare(text(x=INT), "full")
    with pytest.raises(IncompatibleSchema, match="field 'y' is new and required"):
        await meta.declare(text(("y",), x=INT, y=INT))
    assert await meta.declare(text(x=INT, z=INT), dry_run=True) == 2
    assert [version for version, _, _ in await meta.versions()] == [1]
    assert await meta.declare(text(x=INT, z=INT)) == 2
    assert (await meta.versions())[-1][2] == "full"  # as the version before
    assert await meta.declare(text(x={"type": "string"}), "none") == 3


async def test_of_two_at_the_same_time_the_second_is_compared_with_the_first(
    store: FaultyStore,
) -> None:
    metas = [Meta(store) for _ in range(8)]
    schemas = [text(x=INT, **{f"y{number}": INT}) for number in range(8)]
    found = await asyncio.gather(
        *[meta.declare(each) for meta, each in zip(metas, schemas, strict=True)]
    )
    assert sorted(found) == list(range(1, 9))
    clash = [text(x=INT, z={"type": "string"}), text(x=INT, z=INT)]
    outcomes = await asyncio.gather(
        *[meta.declare(each) for meta, each in zip(metas, clash, strict=False)],
        return_exceptions=True,
    )
    assert {type(each) for each in outcomes} == {int, IncompatibleSchema}


@pytest.mark.parametrize("fault", [Fault.UNANSWERED, Fault.LOST])
async def test_after_a_lost_answer_the_version_is_there_once(
    store: FaultyStore, fault: Fault
) -> None:
    meta = Meta(store)
    store.faults[store.count + 1] = fault
    assert await meta.declare(text(x=INT)) == 1
    assert len(await meta.versions()) == 1


async def test_deleting_forgets_all_versions(store: FaultyStore) -> None:
    meta = Meta(store)
    await meta.declare(text(x=INT))
    await meta.declare(text(x=INT, y=INT))
    assert (await meta.service.delete(pb.DeleteSubjectSchemasRequest(subject="a"))).versions == 2
    assert await meta.versions() == []
    assert await meta.declare(text(x={"type": "string"})) == 1


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (
            pb.SetSubjectSchemaRequest(subject="b", format="json-schema", text=text(x=INT)),
            UnknownSubject,
        ),
        (pb.SetSubjectSchemaRequest(subject="a", format="xml", text="<a/>"), InvalidArgument),
        (pb.SetSubjectSchemaRequest(subject="a", format="avro", text="{"), InvalidArgument),
        (
            pb.SetSubjectSchemaRequest(
                subject="a", format="avro", text=text(x=INT), compatibility="sideways"
            ),
            InvalidArgument,
        ),
        (
            pb.SetSubjectSchemaRequest(subject="a", format="json-schema", text=" " * (257 << 10)),
            InvalidArgument,
        ),
    ],
    ids=["unknown subject", "unknown format", "no JSON", "unknown compatibility", "too large"],
)
async def test_what_cannot_be_a_schema_is_refused(
    store: FaultyStore, request_: pb.SetSubjectSchemaRequest, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await Meta(store).service.declare(request_)
