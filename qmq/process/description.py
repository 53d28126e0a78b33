"""How a server's process is described (qmq/node/process.py does it), and how its shards are named:
the broker group `g1.2` is the second shard of the broker `g1` (docs/SHARDS.md). Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qmq.errors import InvalidArgument
from qmq.proto.v1 import control_pb2 as pb

DescribeProcess = Callable[[], pb.ProcessStatus]
"""Describes the process as it is now. `pb.ProcessStatus` itself is such a function: its description
is empty.
"""


def shard_name(group: str, shard: int) -> str:
    """The broker group of a shard, from 1 on."""
    return f"{group}.{shard}"


def family_of(group: str) -> str:
    """The common name of the shards of one broker. A group that is not a shard keeps its name."""
    family, dot, number = group.rpartition(".")
    return family if dot and number.isascii() and number.isdigit() else group


def shards_of(name: str, groups: Sequence[str]) -> list[str]:
    """The broker groups that a name means: the group of that name, or its shards in order. Raises
    InvalidArgument if there are none.
    """
    if name in groups:
        return [name]
    found = [each for each in groups if each != name and family_of(each) == name]
    if not found:
        raise InvalidArgument(
            f"there is no broker group {name!r}: there are {', '.join(groups) or 'none'}"
        )
    return sorted(found, key=lambda each: int(each.rpartition(".")[2]))
