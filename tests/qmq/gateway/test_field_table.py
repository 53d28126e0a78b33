"""The table of fields in docs/reference/rocketmq_fields.md, held to RocketMQ's API."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from google.protobuf.descriptor import Descriptor

from qmq.proto.rocketmq import definition_pb2, service_pb2

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "rocketmq_fields.md"


def fields_of(kind: Descriptor) -> list[str]:
    return [f"{kind.name}.{each.name}" for each in kind.fields if not kind.GetOptions().map_entry]


def test_the_page_has_every_field_of_every_message_once() -> None:
    messages = [
        each
        for file in (definition_pb2, service_pb2)
        for each in file.DESCRIPTOR.message_types_by_name.values()
    ]
    rows = re.findall(r"^\| (\w+) \| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)
    documented = Counter(
        f"{name}.{field}" for name, cell in rows for field in re.findall(r"`(\w+)`", cell)
    )
    assert documented == Counter(field for each in messages for field in fields_of(each))
