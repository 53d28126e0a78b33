"""Finds out whether the machine at a connection's other end can still be reached. The peer's kernel
acknowledges what it receives, even if the process behind it is slow, stopped or busy. A slow
process therefore never counts as lost, and a machine without power or network is found within
seconds.

    bytes are on their way     they were sent more than once without any acknowledgement:
                               `silent_ms` (TCP_INFO)
    none are on their way      the kernel sends keepalive probes, and ends the connection: `watch`

TCP_USER_TIMEOUT is not used: it also ends a connection whose peer acknowledges everything, but
takes no more for now.
"""

from __future__ import annotations

import socket
from struct import Struct
from typing import Final

KEEPALIVE_IDLE_S: Final = 1
KEEPALIVE_INTERVAL_S: Final = 1
KEEPALIVE_PROBES: Final = 2

_RETRANSMITS: Final = 2
_UNACKED: Final = 24
_LAST_ACK: Final = 56
_INFO_BYTES: Final = 60
"""The offsets of three fields (a u8, two u32) in Linux's struct tcp_info, and the length to read.
Linux only appends to this struct.
"""
_WORDS: Final = Struct("=I")


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
    if (
        found is None
        or found.family not in (socket.AF_INET, socket.AF_INET6)
        or not hasattr(socket, "TCP_INFO")
    ):
        return 0
    try:
        info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:
        return 0
    if len(info) < _INFO_BYTES:
        return 0
    unacked, last_ack_ms = (
        _WORDS.unpack_from(info, _UNACKED)[0],
        _WORDS.unpack_from(info, _LAST_ACK)[0],
    )
    return last_ack_ms if unacked and info[_RETRANSMITS] else 0
