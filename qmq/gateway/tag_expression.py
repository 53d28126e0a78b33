"""Parses RocketMQ's tag expressions: the tags that a subscription wants. Pure.

*  or nothing     every message
a || b            messages with tag a or tag b; empty parts, as in `a || || b`, are ignored, as RocketMQ does
"""

from __future__ import annotations

from qmq import limits
from qmq.gateway.status_codes import Refused
from qmq.proto.rocketmq import definition_pb2 as api


def tags_of_expression(text: str) -> tuple[str, ...]:
    """The tags of an expression, sorted; empty if it accepts every message. Raises Refused."""
    stripped = text.strip()
    if stripped in ("", "*"):
        return ()
    tags = sorted({each.strip() for each in stripped.split("||")} - {""})
    if not tags or any("|" in each for each in tags):
        raise Refused(api.ILLEGAL_FILTER_EXPRESSION, f"{text!r} is not a tag expression: write `*`, or tags with `||` between them")
    if any(len(each.encode()) > limits.TAG_BYTES_MAX for each in tags):
        raise Refused(api.ILLEGAL_FILTER_EXPRESSION, f"a tag has at most {limits.TAG_BYTES_MAX} bytes")
    return tuple(tags)
