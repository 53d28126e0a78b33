"""The addresses of services. The default network is the loopback interface, which needs no
privileges.

All of 127.0.0.0/8 is this machine, so every service gets its own address and keeps the port numbers
of the file. A cluster owns a slot of 32 addresses, 127.77.N.M; which of the 2048 slots follows from
the state folder, so that two clusters of one machine (two checkouts, two workers of a test run) do
not meet, and one cluster comes back where it was: etcd's members remember their addresses.
"""

from __future__ import annotations

import hashlib
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

from cluster_runner.errors import ClusterError

SLOTS: Final = 2048
SLOT_ADDRESSES: Final = 32
SERVICES_MAX: Final = SLOT_ADDRESSES - 2
LISTEN: Final = "0A"
"""The state of a listening socket in /proc/net/tcp."""


class Network(Protocol):
    """The interface of a network. All methods except `claim` are idempotent."""

    name: str
    slot: int

    @property
    def addresses(self) -> dict[str, str]:
        """Every service's address, started or not."""

    def claim(self) -> None:
        """Take the slot, or choose one. Raises ClusterError."""

    def is_there(self) -> bool:
        """Whether what was claimed is still there:
        a restart of the machine takes namespaces away.
        """

    def attach(self, service: str) -> None:
        """Make the service's place on the network."""

    def own(self, service: str) -> str:
        """The replacements of "localhost" and "0.0.0.0" for the service;
        empty if they need none.
        """

    def prefix(self, service: str) -> list[str]:
        """The prefix of a command that runs at the service's place."""

    def cut(self, source: str, target: str) -> None:
        """Silently drop packets from `source` to `target`."""

    def heal(self, source: str, target: str) -> None: ...

    def release(self) -> None: ...


class Loopback:
    """An address in 127.77.0.0/16 for each service."""

    name = "loopback"

    def __init__(self, folder: Path, services: Sequence[str], slot: int = -1) -> None:
        check_size(services)
        self._folder, self._services, self.slot = folder, services, slot

    @property
    def addresses(self) -> dict[str, str]:
        high, low = divmod(self.slot * SLOT_ADDRESSES, 256)
        return {name: f"127.77.{high}.{low + at}" for at, name in enumerate(self._services, 1)}

    def claim(self) -> None:
        """Take the slot that follows from the folder, or the next one without a listener."""
        listeners = set(listening())
        for slot in [self.slot] if self.slot >= 0 else candidates(self._folder, SLOTS):
            self.slot = slot
            if not listeners & set(self.addresses.values()):
                return
        raise ClusterError(
            "something else listens on this cluster's addresses, "
            f"{', '.join(listeners & set(self.addresses.values()))}"
        )

    def is_there(self) -> bool:
        return True

    def attach(self, service: str) -> None:
        """Does nothing: the addresses exist."""

    def own(self, service: str) -> str:
        """All services share one network stack, so each must keep to its address."""
        return self.addresses[service]

    def prefix(self, service: str) -> list[str]:
        """None."""
        return []

    def cut(self, source: str, target: str) -> None:
        raise ClusterError("one network stack cannot be partitioned: use --network netns")

    def heal(self, source: str, target: str) -> None: ...

    def release(self) -> None: ...


def check_size(services: Sequence[str]) -> None:
    """Raises ClusterError if a slot is too small."""
    if len(services) > SERVICES_MAX:
        raise ClusterError(
            f"{len(services)} services are more than the {SERVICES_MAX} addresses of a cluster"
        )


def candidates(folder: Path, count: int) -> Iterator[int]:
    """Every slot once, from the one that the folder's name leads to."""
    first = int.from_bytes(hashlib.sha256(str(folder).encode()).digest()[:4], "big")
    return ((first + step) % count for step in range(count))


def listening() -> Iterator[str]:
    """The IPv4 addresses with a listening socket."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state = line.split()[:4]
        if state == LISTEN:
            yield socket.inet_ntoa(struct.pack("=I", int(local.split(":")[0], 16)))
