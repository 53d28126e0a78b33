"""The messages between the replicas of a group. They are plain values; the driver encodes them (wire.py).

    sender         message          answer
    any            Probe            ProbeReply     before an election: who is ahead, who still hears the master
    a candidate    PromiseRequest   Promise        fencing: from now on accept nothing from an older epoch
    the master     Append           Ack            entries, or none (a heartbeat); the answer says what is stored
                                    Mismatch       "my log does not match there; this is its history"
    the master     Reset            Ack            "the entries that you lack are deleted here: start over from my oldest entry"
    any            Refusal                         "I promised a higher epoch than yours"
    the master     TakeOver                        "you are up to date: campaign now"

Any message may be lost, late, repeated or out of order; the core tolerates that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from qmq_replication.history import EpochRun

Place = Any
"""The position of an index in the logs' files; opaque to the core."""


class Probe(NamedTuple):
    """Asks a replica for its state. It changes nothing in the receiver."""

    epoch: int


class ProbeReply(NamedTuple):
    """The state of a replica. `epoch` is the highest promised epoch. `hears_master`: the replica would not campaign now."""

    epoch: int
    master: str
    hears_master: bool
    last_epoch: int
    last_index: int
    is_whole: bool


class PromiseRequest(NamedTuple):
    """Asks for a promise: the sender won `epoch` in the coordination store."""

    epoch: int


class Promise(NamedTuple):
    """The sender accepts nothing older than `epoch` from now on, and holds its log up to (last_epoch, last_index)."""

    epoch: int
    last_epoch: int
    last_index: int
    is_whole: bool


class Append(NamedTuple):
    """Entries (prev_index, last_index], or none. `cut`: what the receiver holds behind prev_index is not in the master's log.

    `round` numbers the master's attempts to get in step with this peer; a Mismatch of an earlier round says nothing new.
    `flush_wanted`: a client waits until everything up to that index is flushed; the receiver flushes immediately and then reports it.
    """

    epoch: int
    round: int
    prev_epoch: int
    prev_index: int
    runs: tuple[EpochRun, ...]
    last_index: int
    commit: int
    cut: bool
    payload: Any
    flush_wanted: int = 0


class Ack(NamedTuple):
    """The sender holds the entries up to `stored` durably, and they equal those of the master of `epoch`. Its log ends at `last_index`,
    which lies at `place`.

    `stored` is as durable as the sender's flush policy asks; up to `flushed` the log survives a power cut, with every policy. `round` is
    the latest that the sender received. An Ack of an earlier round may report entries that were lost since.
    """

    epoch: int
    round: int
    stored: int
    last_index: int
    place: Place
    flushed: int = 0


class Mismatch(NamedTuple):
    """The sender's log does not continue at the Append's prev_index. The message contains the shape of that log,
    so that the master needs one answer only to get in step.
    """

    epoch: int
    round: int
    last_index: int
    start_index: int
    start_epoch: int
    runs: tuple[EpochRun, ...]
    place: Place


class LogReset(NamedTuple):
    """The receiver must delete its log and start over after (start_epoch, start_index) at `place`. It is whole again at `until_index`."""

    epoch: int
    round: int
    start_epoch: int
    start_index: int
    place: Place
    until_index: int


class Refusal(NamedTuple):
    """The sender promised `epoch`, which is higher than the epoch of the message that it refuses."""

    epoch: int


class TakeOver(NamedTuple):
    """The receiver may campaign immediately."""

    epoch: int


Message = Probe | ProbeReply | PromiseRequest | Promise | Append | Ack | Mismatch | LogReset | Refusal | TakeOver
