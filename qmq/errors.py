"""Every error that QMQ raises, in one tree with stable codes.

    QmqError
    ├── CallerError                 fix the request; sending it again will not help
    │   ├── InvalidName             E101  a subject, group or consumer name breaks the grammar
    │   ├── InvalidArgument         E102  a value has the wrong type or is out of range
    │   ├── MessageTooLarge         E103  body or batch over the limit
    │   ├── ClientClosed            E104  the client, producer or consumer was closed before the
    │   │                                 call
    │   ├── UnknownSubject          E105  the subject does not exist and may not be created by
    │   │                                 sending
    │   ├── UnknownGroup            E106  the group has never consumed this subject
    │   ├── SubjectExists           E107  the subject exists with other settings
    │   ├── UnknownConsumer         E108  the broker knows no such consumer session: attach again
    │   ├── StaleDelivery           E109  the messages were handed to another consumer since (lease
    │   │                                 lost, group reset)
    │   ├── MessagesExpired         E110  retention deleted the group's next messages
    │   ├── MessageNotFound         E111  no stored message has this id
    │   ├── BufferFull              E112  the producer's buffer is full: await drain() first
    │   ├── OrderMismatch           E113  an ordered subject was used as an unordered one, or the
    │   │                                 other way round
    │   ├── RouteConflict           E114  another change is in progress, or the route has changed
    │   │                                 since the request was prepared
    │   ├── LaneLost                E115  the lane belongs to another consumer now, or its lease has
    │   │                                 ended: attach again
    │   ├── UnknownPartition        E116  the subject has no such partition
    │   ├── DelayTooLong            E117  a delay beyond what the delay servers keep (two years by
    │   │                                 default)
    │   ├── TooLate                 E118  the delayed message is being delivered or was delivered:
    │   │                                 it can no longer be cancelled or moved
    │   ├── ProducerFenced          E121  a newer session of this producer has written to the
    │   │                                 partition: the older session can store nothing
    │   ├── NumberTaken             E122  another batch of this producer has the number: send this
    │   │                                 one under a new number
    │   ├── AccessDenied            E123  no rule allows the request, or a rule denies it: an
    │   │                                 operator can allow it (`qmq acl allow`)
    │   ├── NotAuthenticated        E124  neither the certificate nor the token identifies the
    │   │                                 caller
    │   ├── QuotaExceeded           E125  the quota is used up: delete some, or raise it (`qmq quota
    │   │                                 set`)
    │   ├── BackupNotFound          E126  there is no such backup, or it was not finished
    │   ├── NotEmpty                E127  a restore goes into an empty folder and an empty
    │   │                                 coordination store only
    │   ├── SchemaMismatch          E128  a body does not fit its subject's schema
    │   ├── IncompatibleSchema      E129  a new version of a schema breaks the subject's
    │   │                                 compatibility
    │   └── NeverReached            the client never reached a server, and waiting does not help
    │       ├── UnknownHost         E130  the name of a server has no address: correct the name, or
    │       │                             add it to DNS
    │       └── TlsRefused          E131  no TLS with a server: correct the certificate that the
    │                                     text names, or the settings for TLS
    ├── PeerError                   the other side broke the protocol; the connection is closed
    │   ├── ProtocolViolation       E201  bytes that are not a frame, or a frame that is not allowed
    │   │                                 here
    │   └── CorruptBatch            E202  a checksum is wrong
    ├── Unavailable                 try again after retry_after_ms
    │   ├── NotConnected            E301  the server cannot be reached
    │   │   ├── WrongServer         E315  another server has the address now
    │   │   └── NameUnresolved      E316  the name of a server has no address now
    │   ├── Overloaded              E302  a limit of the server is reached for now
    │   ├── DiskFull                E303  the broker refuses writes until there is space again
    │   ├── Stopping                E304  the server is shutting down
    │   ├── DeadlineExceeded        E305  no answer in time; `outcome` says whether the messages may
    │   │                                 be stored
    │   ├── NotMaster               E306  this replica is not the master of its group: ask a
    │   │                                 metaserver for the master
    │   ├── NoQuorum                E307  the master reaches no majority of its group
    │   ├── ReadOnly                E308  the broker group takes no messages for now (drained): send
    │   │                                 to another group
    │   ├── RouteChanged            E309  the partition is sealed, or not known there yet: ask for
    │   │                                 the route, send to the successor
    │   ├── OutOfSequence           E310  an earlier batch of this producer is missing: send that
    │   │                                 one first
    │   ├── LaneHeld                E311  another consumer still holds the lane or a part of it
    │   ├── LaneNotOpen             E312  the group has not finished the partitions before the lane
    │   ├── RightLapsed             E313  the master may not take ordered messages: its lease in the
    │   │                                 coordination store has run out
    │   └── TlsFailed               E314  no TLS with the server: a certificate is not trusted, or
    │       │                             only one side speaks TLS
    │       └── TlsEnded            E317  the server ended the handshake without a reason: it
    │                                     refuses this side's certificate, or is away
    ├── StorageError                the server's own data
    │   ├── LogDamaged              E401  the log is damaged in a place that recovery must not cut
    │   │                                 away
    │   ├── FlushFailed             E402  fsync failed: the log stops, and the broker must be
    │   │                                 restarted
    │   ├── FolderInUse             E403  another process uses this data folder
    │   ├── BackupDamaged           E404  an object of a backup is missing or damaged: use another
    │   │                                 backup
    │   └── BackupVersion           E405  a newer release of QMQ wrote the backup: use that release
    └── CoordinationError           the coordination store
        ├── Compacted               E501  the revision is compacted away: list again, then watch
        │                                 from there
        ├── LeaseNotFound           E502  the lease has ended, and its keys are deleted
        ├── CoordinationUnavailable E503  no member of the coordination store answers
        │   ├── CoordinationTlsFailed E505  no TLS with the coordination store: one side does not
        │   │                               trust the other's certificate
        │   └── WrongCoordinationStore E506  etcd's addresses lead to another etcd cluster than
        │                                    before: correct them
        └── CoordinationUnknown     E504  the answer to a change was lost: read back the outcome

Each error says what happened, to what, and what to do next. `outcome` is the outcome of the message
that was sent: stored, not stored, or unknown; an error never guesses.

Invariants that hold for all input from clients. A replica that finds one broken stops with an
error, instead of continuing with a wrong state.

A check here stays on under `python -O`, which removes each `assert`, so that replicas would differ.
A check never tests a condition that a client or the content of the log can cause: brokers refuse
such input before they store it, or all replicas skip it (docs/REPLICATION.md).
"""

from __future__ import annotations

from enum import Enum


class Outcome(Enum):
    """The outcome of a failed request."""

    NOT_STORED = 0
    UNKNOWN = 1
    STORED = 2


class QmqError(Exception):
    """The base of all errors. `code` is stable across releases and languages; `outcome` is that of
    the failed request.
    """

    code = 100
    retry_after_ms: int | None = None

    def __init__(self, message: str, *, outcome: Outcome = Outcome.NOT_STORED) -> None:
        super().__init__(message)
        self.message = message
        self.outcome = outcome

    def __str__(self) -> str:
        return f"[E{self.code}] {self.message}"


class CallerError(QmqError):
    """The request itself is at fault; sending it again will not help."""


class InvalidName(CallerError):
    code = 101


class InvalidArgument(CallerError):
    code = 102


class MessageTooLarge(CallerError):
    code = 103


class ClientClosed(CallerError):
    code = 104


class UnknownSubject(CallerError):
    code = 105


class UnknownGroup(CallerError):
    code = 106


class SubjectExists(CallerError):
    code = 107


class UnknownConsumer(CallerError):
    code = 108


class StaleDelivery(CallerError):
    code = 109


class MessagesExpired(CallerError):
    code = 110


class MessageNotFound(CallerError):
    code = 111


class BufferFull(CallerError):
    code = 112


class OrderMismatch(CallerError):
    code = 113


class RouteConflict(CallerError):
    code = 114


class LaneLost(CallerError):
    code = 115


class UnknownPartition(CallerError):
    code = 116


class DelayTooLong(CallerError):
    code = 117


class TooLate(CallerError):
    code = 118


class ProducerFenced(CallerError):
    """Not stored, and never will be: the producer abandoned the batch and began a newer session."""

    code = 121


class NumberTaken(CallerError):
    """Not stored: another batch is stored under the same number."""

    code = 122


class AccessDenied(CallerError):
    """No rule allows the request, or a rule denies it.
    The message names the principal and the operation.
    """

    code = 123


class NotAuthenticated(CallerError):
    """Neither the certificate nor the token identifies the caller."""

    code = 124


class QuotaExceeded(CallerError):
    """A quota does not allow creating more. `qmq quota list` shows the quotas."""

    code = 125


class BackupNotFound(CallerError):
    code = 126


class NotEmpty(CallerError):
    """A restore goes into an empty folder and an empty coordination store only."""

    code = 127


class SchemaMismatch(CallerError):
    """A body does not fit its subject's schema. `qmq subject schema show` shows the schema."""

    code = 128


class IncompatibleSchema(CallerError):
    """A new version of a subject's schema breaks the subject's compatibility.
    The message names the fields.
    """

    code = 129


class NeverReached(CallerError):
    """For as long as the client has run,
    every try to connect has failed in a way that looks like a mistake.
    """


class UnknownHost(NeverReached):
    """The names of servers never had an address since the client began: they are wrong, not away
    for a moment.
    """

    code = 130


class TlsRefused(NeverReached):
    """TLS with the servers has failed since the client began: certificates or settings are wrong,
    not being replaced at this moment.
    """

    code = 131


class PeerError(QmqError):
    """The other side broke the protocol; the connection is closed."""


class ProtocolViolation(PeerError):
    code = 201


class CorruptBatch(PeerError):
    code = 202


class Unavailable(QmqError):
    """Nothing is wrong with the request: try again after `retry_after_ms`."""

    code = 300
    retry_after_ms: int | None = 200

    def __init__(
        self,
        message: str,
        *,
        outcome: Outcome = Outcome.NOT_STORED,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message, outcome=outcome)
        if retry_after_ms is not None:
            self.retry_after_ms = retry_after_ms


class NotConnected(Unavailable):
    code = 301


class WrongServer(NotConnected):
    """Another server has the address of the meant one. It did nothing: resolve the address again,
    or look up the server.
    """

    code = 315
    retry_after_ms = 50


class NameUnresolved(NotConnected):
    """DNS has no address for the name of a server, or does not answer."""

    code = 316

    @classmethod
    def of(cls, address: str, why: object) -> NameUnresolved:
        return cls(f"the host of {address} cannot be resolved ({why})")


class Overloaded(Unavailable):
    code = 302


class DiskFull(Unavailable):
    code = 303
    retry_after_ms = 1000


class Stopping(Unavailable):
    code = 304


class DeadlineExceeded(Unavailable):
    """Of messages that were sent: with `outcome` UNKNOWN they may be stored, or be stored for a
    while yet, and sending them again may store them twice; with NOT_STORED they are not stored.
    """

    code = 305


class NotMaster(Unavailable):
    """The message ends with the master's address, if it is known.
    A client asks the metaserver again.
    """

    code = 306
    retry_after_ms = 50


class NoQuorum(Unavailable):
    code = 307


class ReadOnly(Unavailable):
    code = 308
    retry_after_ms = 1000


class RouteChanged(Unavailable):
    """Not stored in this partition, and never will be: the newer route says where to send."""

    code = 309
    retry_after_ms = 20


class OutOfSequence(Unavailable):
    code = 310
    retry_after_ms = 20


class LaneHeld(Unavailable):
    code = 311
    retry_after_ms = 50


class LaneNotOpen(Unavailable):
    code = 312
    retry_after_ms = 20


class RightLapsed(Unavailable):
    code = 313
    retry_after_ms = 200


class TlsFailed(Unavailable):
    code = 314


class TlsEnded(TlsFailed):
    """The server ended the connection within the handshake of TLS, or right behind it. One that
    refuses the client's certificate does that, and so does a balancer whose servers are away.
    """

    code = 317


class StorageError(QmqError):
    """The server's data is damaged or cannot be written; an operator has to act."""


class LogDamaged(StorageError):
    """`log` (0 the message log, 1 the action log) and `position` say where the damage is; both are
    -1 if there is more than one place.
    """

    code = 401

    def __init__(
        self,
        message: str,
        *,
        outcome: Outcome = Outcome.NOT_STORED,
        log: int = -1,
        position: int = -1,
    ) -> None:
        super().__init__(message, outcome=outcome)
        self.log = log
        self.position = position


class FlushFailed(StorageError):
    code = 402


class FolderInUse(StorageError):
    code = 403


class BackupDamaged(StorageError):
    """An object of a backup is missing, or has other bytes than its checksum says."""

    code = 404


class BackupVersion(StorageError):
    """A newer release of QMQ wrote the backup."""

    code = 405


class CoordinationError(QmqError):
    """The coordination store refused the request."""


class Compacted(CoordinationError):
    code = 501


class LeaseNotFound(CoordinationError):
    code = 502


class CoordinationUnavailable(CoordinationError):
    code = 503
    retry_after_ms = 200


class CoordinationTlsFailed(CoordinationUnavailable):
    """The client tries again all the same, because it reads renewed certificates."""

    code = 505


class WrongCoordinationStore(CoordinationUnavailable):
    """Nothing was read or changed there. The client tries again all the same, because addresses may
    be corrected.
    """

    code = 506


class CoordinationUnknown(CoordinationError):
    """The change may have been made or not. Never repeat the request blindly: read the value back,
    then decide.
    """

    code = 504

    def __init__(self, message: str, *, outcome: Outcome = Outcome.UNKNOWN) -> None:
        super().__init__(message, outcome=outcome)


def _leaves(root: type[QmqError]) -> list[type[QmqError]]:
    found = [root]
    for child in root.__subclasses__():
        found.extend(_leaves(child))
    return found


BY_CODE: dict[int, type[QmqError]] = {
    kind.code: kind for kind in _leaves(QmqError) if "code" in vars(kind)
}


def from_wire(code: int, message: str, outcome: int, retry_after_ms: int) -> QmqError:
    """Rebuild the error that a peer sent. An unknown code, from a newer release, becomes a plain
    QmqError with that code.
    """
    kind = BY_CODE.get(code, QmqError)
    error = kind(message, outcome=Outcome(outcome))
    if kind is QmqError:
        error.code = code
    if retry_after_ms:
        error.retry_after_ms = retry_after_ms
    return error


class InvariantBroken(AssertionError):
    """An invariant is broken: the process must stop before it does anything else."""


def check(condition: object, text: str) -> None:
    """Raise InvariantBroken, which ends the process, unless the condition holds."""
    if not condition:
        raise InvariantBroken(text)
