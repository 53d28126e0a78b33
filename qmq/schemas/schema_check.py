"""Refuses messages that do not fit their subject's schema, before they are sent.

check = await SchemaCheck.load("localhost:20880", ["orders"])
async with qmq.connect("localhost:20880", interceptors=[check]) as mq:
    await mq.send("orders", b"{}")  # SchemaMismatch: Object missing required field `id`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from qmq.client.client import Client
from qmq.client.interceptors import BaseInterceptor, Headers, Outgoing
from qmq.errors import SchemaMismatch
from qmq.model import DeclaredSchema
from qmq.schemas.body_decoder import decoder_of, reason_of


class SchemaCheck(BaseInterceptor):
    """An interceptor. Messages of subjects without a schema here pass.

    `schemas`: by subject, all versions, the newest one last: messages must fit that one. Raises
    InvalidArgument.
    """

    def __init__(self, schemas: Mapping[str, Sequence[DeclaredSchema]]) -> None:
        self._newest = {subject: versions[-1].version for subject, versions in schemas.items()}
        self._decoders = {subject: decoder_of(versions) for subject, versions in schemas.items()}

    @classmethod
    async def load(cls, addresses: str | Sequence[str], subjects: Iterable[str]) -> SchemaCheck:
        """Read the schemas as they are now. Raises UnknownSubject; InvalidArgument for a subject
        without a schema; NotConnected.
        """
        async with Client(addresses) as mq:
            return cls({each: await mq.metadata.subject_schemas(each) for each in subjects})

    def sending(self, outgoing: Outgoing) -> Headers:
        decode = self._decoders.get(outgoing.subject)
        if decode is not None:
            for place, body in enumerate(outgoing.bodies):
                try:
                    decode(body)
                except Exception as failure:
                    which = (
                        f"message {place} of {outgoing.count}"
                        if outgoing.is_batch
                        else "the message"
                    )
                    raise SchemaMismatch(
                        f"{which} does not fit version {self._newest[outgoing.subject]} of the "
                        f"schema of {outgoing.subject!r} and was not sent: {reason_of(failure)}"
                    ) from failure
        return {}
