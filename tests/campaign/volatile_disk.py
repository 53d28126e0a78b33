"""A disk with a cache that loses power: what a guest wrote since its last flush is in this process,
and when the power goes, each block of it is on the disk or not, by chance. A network block device
(NBD) for an emulator, on a socket of this machine.

    with VolatileDisk(image, folder / "disk.sock", Random(seed)) as disk:
        ... an emulator with file=nbd+unix:///?socket=disk.sock; kill it ...
        lost = disk.lose_power()

A block is 4 KiB, and is never torn. With `lies` a flush counts as done, and all stays in the cache.
What the guest wrote through (FUA) is on the disk at once.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Final, Self

BLOCK_BYTES: Final = 4096
HELLO: Final = b"NBDMAGIC" + b"IHAVEOPT"
OPTION: Final = struct.Struct(">QII")
OPTION_REPLY: Final = struct.Struct(">QIII")
OPTION_REPLY_MAGIC: Final = 0x3E889045565A9
REQUEST: Final = struct.Struct(">IHHQQI")
REPLY: Final = struct.Struct(">IIQ")
REPLY_MAGIC: Final = 0x67446698
EXPORT_NAME, ABORT, INFO, GO = 1, 2, 6, 7
ACK, IS_INFO, UNKNOWN = 1, 3, (1 << 31) + 1
READ, WRITE, DISCONNECT, FLUSH = 0, 1, 2, 3
FLAGS: Final = 1 | 4 | 8
"""There are flags; it takes flushes; it takes writes that go through."""
FUA: Final = 1
INVALID: Final = 22


class VolatileDisk:
    """One image and its cache. One emulator at a time."""

    def __init__(self, image: Path, at: Path, random: Random, *, lies: bool = False) -> None:
        self.flushes = self.writes = 0
        self._image = os.open(image, os.O_RDWR)
        self._size = os.fstat(self._image).st_size
        self._random, self._lies = random, lies
        self._cache: dict[int, bytes] = {}
        """By the number of the block: its newest content, which the disk may lack."""
        self._idle = threading.Event()
        self._idle.set()
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(at))
        self._listening.listen(1)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()
        os.close(self._image)

    def lose_power(self) -> tuple[int, int]:
        """The emulator is dead. Returns how many blocks of the cache are lost, and how many are on
        the disk.
        """
        if not self._idle.wait(30.0):
            raise OSError("the emulator still holds its disk")
        lost = kept = 0
        for number, data in self._cache.items():
            if self._random.random() < 0.5:
                lost += 1
            else:
                kept += 1
                os.pwrite(self._image, data, number * BLOCK_BYTES)
        self._cache.clear()
        return lost, kept

    # --- the protocol -----------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self._idle.clear()
            try:
                with connection:
                    if _agree(connection, self._size):
                        while self._answer(connection):
                            pass
            except OSError:  # the emulator was killed
                pass
            finally:
                self._idle.set()

    def _answer(self, connection: socket.socket) -> bool:
        """One request. False at the end of the connection."""
        head = _exactly(connection, REQUEST.size)
        if not head:
            return False
        _, flags, kind, handle, at, size = REQUEST.unpack(head)
        data, error = b"", 0
        if kind == WRITE:
            self._write(at, _exactly(connection, size), is_through=bool(flags & FUA))
        elif kind == READ:
            data = self._read(at, size)
        elif kind == FLUSH:
            self._flush()
        elif kind == DISCONNECT:
            return False
        else:
            error = INVALID
        connection.sendall(REPLY.pack(REPLY_MAGIC, error, handle) + data)
        return True

    def _read(self, at: int, size: int) -> bytes:
        first, end = at // BLOCK_BYTES, -(-(at + size) // BLOCK_BYTES)
        found = bytearray(os.pread(self._image, (end - first) * BLOCK_BYTES, first * BLOCK_BYTES))
        for number in range(first, end):
            if number in self._cache:
                begin = (number - first) * BLOCK_BYTES
                found[begin : begin + BLOCK_BYTES] = self._cache[number]
        skip = at - first * BLOCK_BYTES
        return bytes(found[skip : skip + size])

    def _write(self, at: int, data: bytes, *, is_through: bool) -> None:
        self.writes += 1
        first, end = at // BLOCK_BYTES, -(-(at + len(data)) // BLOCK_BYTES)
        whole = bytearray(self._read(first * BLOCK_BYTES, (end - first) * BLOCK_BYTES))
        skip = at - first * BLOCK_BYTES
        whole[skip : skip + len(data)] = data
        for number in range(first, end):
            begin = (number - first) * BLOCK_BYTES
            self._cache[number] = bytes(whole[begin : begin + BLOCK_BYTES])
        if is_through and not self._lies:
            self._put(range(first, end))

    def _flush(self) -> None:
        self.flushes += 1
        if not self._lies:
            self._put(list(self._cache))

    def _put(self, numbers: range | list[int]) -> None:
        for number in numbers:
            os.pwrite(self._image, self._cache.pop(number), number * BLOCK_BYTES)


def _agree(connection: socket.socket, size: int) -> bool:
    """The beginning of a connection. False if the client wants nothing."""
    connection.sendall(HELLO + struct.pack(">H", 3))
    has_zeros = not int.from_bytes(_exactly(connection, 4), "big") & 2
    while head := _exactly(connection, OPTION.size):
        _, option, length = OPTION.unpack(head)
        _exactly(connection, length)
        if option == EXPORT_NAME:
            connection.sendall(struct.pack(">QH", size, FLAGS) + bytes(124 * has_zeros))
            return True
        if option in (GO, INFO):
            _reply(connection, option, IS_INFO, struct.pack(">HQH", 0, size, FLAGS))
            _reply(connection, option, ACK)
            if option == GO:
                return True
        elif option == ABORT:
            _reply(connection, option, ACK)
            return False
        else:
            _reply(connection, option, UNKNOWN)
    return False


def _reply(connection: socket.socket, option: int, kind: int, data: bytes = b"") -> None:
    head = OPTION_REPLY.pack(OPTION_REPLY_MAGIC, option, kind, len(data))
    connection.sendall(head + data)


def _exactly(connection: socket.socket, size: int) -> bytes:
    """So many bytes; none at the end of the connection."""
    found = bytearray()
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            return b""
        found += part
    return bytes(found)
