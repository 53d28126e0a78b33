"""Finds out whether the machine at a connection's other end can still be reached. The peer's kernel
acknowledges what it receives, even if the process behind it is slow, stopped or busy. A slow
process therefore never counts as lost, and a machine without power or network is found within
seconds.

    bytes are on their way     they were sent more than once without any acknowledgement:
                               `silent_ms` (TCP_INFO)
    none are on their way      the kernel sends keepalive probes, and ends the connection: `watch`

`acknowledged_bytes` says whether a peer reads: a kernel whose buffer is full acknowledges no more.

TCP_USER_TIMEOUT is not used: it also ends a connection whose peer acknowledges everything, but
takes no more for now.
"""

from __future__ import annotations

import socket
import sys
from struct import Struct
from typing import Final

KEEPALIVE_IDLE_S: Final = 1
KEEPALIVE_INTERVAL_S: Final = 1
KEEPALIVE_PROBES: Final = 2

_RETRANSMITS: Final = 2
_UNACKED: Final = 24
_LAST_ACK: Final = 56
_BYTES_ACKED: Final = 120
"""The offsets of four fields (a u8, two u32, a u64) in Linux's struct tcp_info. Linux only appends
to this struct.
"""
_WORDS: Final = Struct("=I")
_LONGS: Final = Struct("=Q")


def watch(found: socket.socket | None) -> None:
    """Turn keepalive on: the kernel probes an idle TCP peer."""
    if found is None or found.family not in (socket.AF_INET, socket.AF_INET6):
        return
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
    ):
        if hasattr(socket, name):  # a system without these options uses its own times
            found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def silent_ms(found: socket.socket | None) -> int:
    """The time in which the peer's kernel acknowledged nothing although data was sent to it twice;
    0 if it did, or if that is unknown.
    """
    info = _info(found, _LAST_ACK + _WORDS.size)
    if not info:
        return 0
    unacked, last_ack_ms = (
        _WORDS.unpack_from(info, _UNACKED)[0],
        _WORDS.unpack_from(info, _LAST_ACK)[0],
    )
    return last_ack_ms if unacked and info[_RETRANSMITS] else 0


def acknowledged_bytes(found: socket.socket | None) -> int:
    """Bytes that the peer's kernel has acknowledged; 0 if that is unknown."""
    info = _info(found, _BYTES_ACKED + _LONGS.size)
    acknowledged: int = _LONGS.unpack_from(info, _BYTES_ACKED)[0] if info else 0
    return acknowledged


def _info(found: socket.socket | None, size: int) -> bytes:
    """The beginning of a TCP socket's tcp_info; empty if the kernel has no such struct, or a
    shorter one.
    """
    if (
        found is None
        or found.family not in (socket.AF_INET, socket.AF_INET6)
        or not sys.platform.startswith("linux")  # the struct of others has other fields
    ):
        return b""
    try:
        info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    except (OSError, ValueError):  # ValueError: uvloop has closed the socket
        return b""
    return info if len(info) == size else b""
