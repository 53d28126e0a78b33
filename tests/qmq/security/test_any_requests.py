"""Requests with any content, to every call of a metaserver, a broker and a delay server: each gets
an answer or a typed error, in time.

A request is the one of rights_table.py, which has a row for each call, with up to two of its fields
changed, or one of its bytes. The seed is printed.
"""

from __future__ import annotations

import time
from inspect import isawaitable
from pathlib import Path
from random import Random
from typing import Any, Final

import grpc
import pytest
from access_support import SERVICES, addresses, world
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from rights_table import CALLS, World
from support import hostile
from support.forms import SEED, examples

from qmq.delay.files import SCHEDULE
from qmq.errors import BY_CODE
from qmq.limits import MIB
from qmq.rpc.channel import CHANNEL_OPTIONS, CODE, metadata_of

SECONDS: Final = 60.0
STREAM_S: Final = 1.0
ANSWER_BYTES_MAX: Final = 5 * MIB
INTEGERS: Final = (0, 1, 2, 3, 100, 1_001, 65_535, 65_536, 1 << 31, 1 << 32, 1 << 53, 1 << 62)
LEAST: Final = {
    FieldDescriptor.CPPTYPE_INT32: -(1 << 31),
    FieldDescriptor.CPPTYPE_INT64: -(1 << 63),
}
MOST: Final = {
    FieldDescriptor.CPPTYPE_INT32: (1 << 31) - 1,
    FieldDescriptor.CPPTYPE_INT64: (1 << 63) - 1,
    FieldDescriptor.CPPTYPE_UINT32: (1 << 32) - 1,
    FieldDescriptor.CPPTYPE_UINT64: (1 << 64) - 1,
}
WORDS: Final = (
    *(
        "0:",
        "9" * 19 + ":x",
        "-" + "9" * 19 + ":",
        f"{1 << 63}:",
        f"{(1 << 63) - 1}:" + "f" * 32,
        "²",
        "9" * 5_000,
        "1e999",
        "x\x00",
        "x" * 5_000,
    ),
    *(
        "0" * 32,
        "f" * 32,
        "0" * 32 + "-0-0-delay",
        "f" * 32 + "-" + "f" * 16 + "-" + "f" * 16 + "-delay",
    ),
    *(
        "f" * 32 + "-7fffffffffffffff-7fffffffffffffff-delay",
        "f" * 32 + "-8000000000000000-1-delay",
    ),
    *(
        "20261121T130000Z.log",
        "99991231T230000Z.log",
        "00010101T000000Z.idx",
        "../secret",
        "%dlq%t.g",
        "t.plain",
        "t.keys",
        "t.g",
    ),
    *(
        "app:else",
        "node:broker0",
        "uid:0",
        "any:anonymous",
        "*",
        "t.*",
        "earliest",
        "{",
        '{"type": 1}',
        "[" * 5_000,
        "strict",
        "off",
    ),
)


class Spoiler:
    """Changes requests by chance."""

    def __init__(self, seed: int, known: list[str]) -> None:
        """`known` are names that exist."""
        self.random = Random(seed)
        self._words = (*WORDS, *hostile.NAMES, *(known * 10))

    def spoilt(self, request: Any) -> bytes:
        """The bytes of a request with up to two changed fields, or one changed byte."""
        made = type(request)()
        made.CopyFrom(request)
        for _ in range(self.random.choice((0, 1, 1, 1, 2, 2))):
            self._change(made)
        whole = bytearray(made.SerializeToString())
        if whole and self.random.random() < 0.1:
            whole[self.random.randrange(len(whole))] = self.random.randrange(256)
        return bytes(whole)

    def _change(self, message: Any) -> None:
        fields = message.DESCRIPTOR.fields
        if not fields:
            return
        field = self.random.choice(fields)
        name = field.name
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields
            if value.message_type is None:
                getattr(message, name)[self._value(key)] = self._value(value)
        elif field.is_repeated:
            values = [self._value(field) for _ in range(self.random.choice((0, 1, 2, 1_500)))]
            del getattr(message, name)[:]
            getattr(message, name).extend(values)
        elif field.message_type is None:
            setattr(message, name, self._value(field))
        else:
            getattr(message, name).SetInParent()
            self._change(getattr(message, name))

    def _value(self, field: FieldDescriptor) -> Any:
        choose, kind = self.random.choice, field.cpp_type
        if field.message_type is not None:
            found = GetMessageClass(field.message_type)()
            self._change(found)
            return found
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return choose((False, True))
        if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return choose((0.0, -1.0, 1e308, float("inf"), float("nan")))
        if kind in MOST:
            least, most = LEAST.get(kind, 0), MOST[kind]
            return min(
                max(choose((*INTEGERS, least, most, -1, int(time.time() * 1000))), least), most
            )
        text = choose(self._words)
        return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text


async def fault_of(
    channel: grpc.aio.Channel, service: str, method: MethodDescriptor, request: bytes, token: str
) -> str:
    """What is wrong with the answer to a request; empty if nothing is."""
    size = 0
    try:
        call = channel.unary_stream(f"/{service}/{method.name}")
        async for each in call(
            request,
            timeout=STREAM_S if method.server_streaming else SECONDS,
            metadata=metadata_of(token, ""),
        ):
            size = max(size, len(each))
    except grpc.aio.AioRpcError as failure:
        trailers = dict(failure.trailing_metadata() or ())
        is_end = method.server_streaming and failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if not is_end and int(trailers.get(CODE, "0")) not in BY_CODE:
            return f"{failure.code().name}: {failure.details()}"
    return f"an answer of {size} bytes" if size > ANSWER_BYTES_MAX else ""


@pytest.mark.parametrize("service", SERVICES)
async def test_any_request_gets_an_answer_or_a_typed_error(tmp_path: Path, service: str) -> None:
    found = set[str]()
    async with world(tmp_path) as (cluster, made, _):
        await made.delayed()
        spoiler = Spoiler(SEED, schedule_files(tmp_path))
        token = cluster.node.view.access.server_token
        for address, _ in await addresses(cluster, service):
            async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
                for name, row in CALLS[service]:
                    method = SERVICES[service].methods_by_name[name]
                    for turn in range(examples(60) if not method.server_streaming else 3):
                        request = spoiler.spoilt(await asked(row.ask(made)))
                        fault = await fault_of(
                            channel, service, method, request, token if turn % 8 else ""
                        )
                        if fault:
                            found.add(f"{name}: {fault} ({shown(method, request)})")
        await cluster.admin.send(World.subject, b"the next one is served")
    assert not found, "\n".join(sorted(found))


def schedule_files(folder: Path) -> list[str]:
    return [each.name for each in folder.rglob(f"{SCHEDULE}/*Z.*")]


async def asked(request: Any) -> Any:
    return await request if isawaitable(request) else request


def shown(method: MethodDescriptor, request: bytes) -> str:
    try:
        return " ".join(str(GetMessageClass(method.input_type).FromString(request)).split())[:300]
    except ValueError:
        return repr(request)[:300]
