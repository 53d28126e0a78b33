"""Declares, lists and deletes subjects' schemas at a metaserver (docs/SCHEMAS.md).

Each request reads the schemas from the store, since requests are rare. A new version is one transaction, which requires that the version
used for the comparison is still the newest one. If two versions are declared at the same time, the second is compared with the first.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from qmq_coordination.coordination_store import CoordinationStore, KeyValue, Put, absent, unchanged
from qmq_coordination.schema_keys import schema_key, schemas_prefix

from qmq.clock import Clock
from qmq.errors import CoordinationUnknown, InvalidArgument
from qmq.meta.cluster_catalog import ClusterCatalog
from qmq.model import is_dead_letters
from qmq.proto.v1 import meta_pb2 as pb
from qmq.schemas import compatibility
from qmq.schemas.declared_schema import Compatibility, DeclaredSchema, compatibility_of, format_of


class SchemaService:
    def __init__(self, store: CoordinationStore, cluster: ClusterCatalog, clock: Clock) -> None:
        self._store = store
        self._cluster = cluster
        self._clock = clock

    async def declare(self, request: pb.SetSubjectSchemaRequest) -> pb.SubjectSchema:
        """Store the next version. Declaring the newest version again stores nothing.

        Raises InvalidName, InvalidArgument, UnknownSubject, IncompatibleSchema, CoordinationError.
        """
        await self._require(request.subject)
        new = DeclaredSchema(format_of(request.format), request.text)
        if not new.struct().fields:
            raise InvalidArgument("the schema has no fields")
        while True:
            item = await self._newest(request.subject)
            old = None if item is None else DeclaredSchema.decode(item.value)
            wanted = self._next(request, new, old)
            if old is not None and (old.format, old.text, old.compatibility) == (wanted.format, wanted.text, wanted.compatibility):
                return _message(old)
            if old is not None:
                compatibility.require(request.subject, old, wanted)
            if request.dry_run:
                return _message(wanted)
            compares = [absent(schema_key(request.subject, wanted.version)), *([] if item is None else [unchanged(item)])]
            with suppress(CoordinationUnknown):  # if the put was done, this version is the newest one now
                put = Put(schema_key(request.subject, wanted.version), wanted.encode())
                if (await self._store.txn(compares, [put])).succeeded:
                    return _message(wanted)

    def _next(self, request: pb.SetSubjectSchemaRequest, new: DeclaredSchema, old: DeclaredSchema | None) -> DeclaredSchema:
        held = Compatibility.BACKWARD if old is None else old.compatibility
        chosen = compatibility_of(request.compatibility) if request.compatibility else held
        version = 1 if old is None else old.version + 1
        return replace(new, compatibility=chosen, version=version, created_ms=self._clock.time_ms())

    async def list(self, request: pb.ListSubjectSchemasRequest) -> pb.ListSubjectSchemasResponse:
        """All versions. Raises InvalidName, UnknownSubject, CoordinationError."""
        await self._require(request.subject)
        found = await self._store.list(schemas_prefix(request.subject))
        return pb.ListSubjectSchemasResponse(schemas=[_message(DeclaredSchema.decode(each.value)) for each in found.items])

    async def delete(self, request: pb.DeleteSubjectSchemasRequest) -> pb.DeleteSubjectSchemasResponse:
        """Delete all versions. Raises InvalidName, UnknownSubject, CoordinationError."""
        await self._require(request.subject)
        return pb.DeleteSubjectSchemasResponse(versions=await self._store.delete(schemas_prefix(request.subject), is_prefix=True))

    async def _require(self, subject: str) -> None:
        if is_dead_letters(subject):
            raise InvalidArgument(f"{subject!r} is a dead-letter queue: its messages have the schemas of their subjects")
        await self._cluster.subject(subject)

    async def _newest(self, subject: str) -> KeyValue | None:
        found = await self._store.list(schemas_prefix(subject))
        return found.items[-1] if found.items else None


def _message(schema: DeclaredSchema) -> pb.SubjectSchema:
    return pb.SubjectSchema(
        version=schema.version,
        format=schema.format.value,
        text=schema.text,
        compatibility=schema.compatibility.value,
        created_ms=schema.created_ms,
    )
