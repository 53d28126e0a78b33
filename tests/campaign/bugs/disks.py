"""Bugs of disks: what a replica takes its own disk for, and what it does when a call fails."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from typing import Any

from google_crc32c import value as crc32c
from qmq_replication import identity
from qmq_replication.identity import ReplicaIdentity
from qmq_replication.leader import Leader
from qmq_replication.ready import ReplicaState

from campaign.bugs.storing import replacing
from campaign.values import Bug
from qmq.log.disk import Disk
from qmq.log.scrub import Scrubber
from qmq.log.store import Store
from qmq.wire.batch import ENVELOPE_BYTES

REGION_CRC = slice(12, 16)
ENVELOPE_CRC = slice(60, 64)
_load = identity.load


def _load_as_after_a_kill(*given: Any, **options: Any) -> Any:
    found = _load(*given, **options)
    return found and replace(found, boot=identity.boot_id())


def _sync_and_forget(self: Disk, fd: int) -> None:
    with suppress(OSError):
        os.fdatasync(fd)


def _flushed_when_committed(self: Leader) -> None:
    self.flushed = max(self.flushed, self.state.commit)
    self.state.flushed_to(self.flushed)


def _read_unchecked(self: Store, queue: Any, entry: Any) -> tuple[bytes, bytes]:
    data = self.messages.read(entry.position, entry.total_bytes)
    envelope, region = bytearray(data[:ENVELOPE_BYTES]), bytes(data[ENVELOPE_BYTES:])
    envelope[REGION_CRC] = int(crc32c(region)).to_bytes(4, "little")
    envelope[ENVELOPE_CRC] = int(crc32c(bytes(envelope[:60]))).to_bytes(4, "little")
    return bytes(envelope), region


BUGS = (
    Bug(
        name="forget-nothing",
        what="a replica that lost its data, or a part of it, votes at once",
        plant=replacing((ReplicaState, "may_count", property(lambda self: True))),
        found_by="archive-disk-empty",
        finds=("still_there", "no_loss", "stable_positions", "same_bytes"),
    ),
    Bug(
        name="trust-old-disk",
        what="a replica does not notice that its folder is an older copy",
        plant=replacing((ReplicaIdentity, "is_older_than", lambda *_: False)),
        found_by="archive-disk-old",
        finds=("still_there", "no_loss", "stable_positions", "same_bytes"),
    ),
    Bug(
        name="ignore-boot",
        what="a machine that lost power counts as a process that was killed",
        plant=replacing((identity, "load", _load_as_after_a_kill)),
        found_by="archive-power-behind",
        finds=("still_there", "no_loss", "stable_positions", "same_bytes"),
    ),
    Bug(
        name="ignore-failed-sync",
        what="a sync that fails counts as one that succeeded",
        plant=replacing(
            (Disk, "kernel_call", lambda _: None),
            (Disk, "sync", _sync_and_forget),
        ),
        found_by="log-fsync-fails-master",
        finds=("failed_call_stops",),
    ),
    Bug(
        name="stop-at-unreadable",
        what="a block that cannot be read ends the process",
        plant=replacing((Disk, "read_around", Disk.read)),
        found_by="archive-read-fails-follower",
        finds=("unreadable_goes_on",),
    ),
    Bug(
        name="flushed-when-committed",
        what="what is committed counts as flushed by a majority",
        plant=replacing((Leader, "advance_flushed", _flushed_when_committed)),
        found_by="archive-power-all-slow-flushed",
        finds=("no_loss", "stable_positions", "stored_once"),
    ),
    Bug(
        name="trust-the-disk",
        what="what a broker reads gets a checksum that fits, and nothing is scrubbed",
        plant=replacing(
            (Store, "read", _read_unchecked),
            (Scrubber, "slice", lambda *_: None),
        ),
        found_by="archive-flip-messages-two",
        finds=("same_bytes", "no_strange_bytes", "no_phantom"),
    ),
)
