"""Classifies failed calls by what they prove. Pure.

A change whose answer is lost may have been made, so the only question is: is it *certain* that the server did nothing? The rules, each from
reading etcd 3.4/3.5 (server/etcdserver, api/v3/rpctypes) or gRPC's core:

    REFUSED     etcd decided against the request: bad argument, compacted, lease not found, permission denied, no space. Final.
    OLD_TOKEN   etcd checks the token before it proposes anything: nothing was done. Authenticate and try again.
    NOT_DONE    "no leader" comes from the interceptor in front of the handler (we send `hasleader`), "too many requests" from the check in
                front of the proposal; "failed to connect" and "DNS resolution failed" mean that there was no connection to send on.
    UNKNOWN     all else. Above all "request timed out", "leader changed" and "server stopped": they look like refusals, but the proposal
                is under way and may still be committed. A broken connection and a passed deadline prove nothing either.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from typing import Final

import grpc

from qmq.errors import Compacted, CoordinationError, CoordinationTlsFailed, CoordinationUnavailable, LeaseNotFound, WrongCoordinationStore


class LeaseExists(CoordinationError):
    """The number of a new lease is taken: by our own first request, if this one is a repetition."""


class UserOrRoleExists(CoordinationError):
    """etcd already has a user or a role of that name."""


class CallVerdict(Enum):
    """What a failure proves; see the module."""

    REFUSED = "refused"
    OLD_TOKEN = "old token"  # noqa: S105
    NOT_DONE = "not done"
    UNKNOWN = "unknown"


_OLD_TOKEN: Final = ("etcdserver: invalid auth token", "etcdserver: revision of auth store is old", "etcdserver: user name is empty")
_NOT_DONE: Final = (
    "failed to connect to all addresses",
    "DNS resolution failed",
    "etcdserver: no leader",
    "etcdserver: too many requests",
)
_REFUSING: Final = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.DATA_LOSS,
    }
)
_SERVER_TOO_LARGE: Final = "grpc: received message larger than max"
"""Texts of etcd's gRPC layer for a call that the handler did not see. The client's own texts begin with "CLIENT: ", are about an answer,
and prove nothing.
"""


def verdict(code: grpc.StatusCode, details: str) -> CallVerdict:
    """The verdict on a call that failed with this status."""
    if details.startswith(_OLD_TOKEN):
        return CallVerdict.OLD_TOKEN
    if details.startswith(_NOT_DONE):
        return CallVerdict.NOT_DONE
    if code is grpc.StatusCode.UNIMPLEMENTED or details.startswith(_SERVER_TOO_LARGE):
        return CallVerdict.REFUSED
    return CallVerdict.REFUSED if code in _REFUSING and details.startswith("etcdserver: ") else CallVerdict.UNKNOWN


_OUR_DOUBT: Final = re.compile(r"CERTIFICATE_VERIFY_FAILED:? ?([a-z][^:\n]*)?|(Hostname Verification Check failed)")
"""gRPC's texts for a member's certificate that this client does not accept."""
_OUT_OF_TIME: Final = re.compile("has expired|not yet valid")
_ITS_DOUBT: Final = re.compile(r"ALERT_(?:BAD_CERTIFICATE|UNKNOWN_CA|UNSUPPORTED_CERTIFICATE|CERTIFICATE_[A-Z]+)")
"""The TLS alerts of a member that does not accept our certificate. The kind of alert says little: Go sends BAD_CERTIFICATE for a missing
one.
"""


def unanswered(
    tried: Sequence[str], asked: str, within_s: float, *, shows_certificate: bool, strangers: Sequence[str] = ()
) -> CoordinationUnavailable:
    """The error of a call that no member answered. `tried` is the failure of each attempt, `asked` are the members' addresses, `strangers`
    the answers of those that belong to another cluster.
    """
    if strangers:
        hint = "correct etcd's addresses (--etcd, DNS); if etcd was restored from a snapshot, restart this process"
        return WrongCoordinationStore(f"{'; '.join(strangers)}: {hint}. Asked: {asked}. Last: {tried[-1]}")
    last = next((each for each in reversed(tried) if _OUR_DOUBT.search(each) or _ITS_DOUBT.search(each)), tried[-1])
    text = f"no etcd member answered within {within_s:g} s. Asked: {asked}. Last: {last}"
    ours = _OUR_DOUBT.search(last)
    if ours is not None and ours[2]:
        hint = "etcd's certificate is not for the address that is asked: name a host that is in it (--etcd), or put the address into it"
    elif ours is not None and _OUT_OF_TIME.search(last) is not None:
        hint = f"etcd's certificate is not valid now ({ours[1]}): replace it, or correct this machine's clock"
    elif ours is not None:
        hint = f"etcd's certificate is not trusted ({ours[1] or 'no reason is given'}): --etcd-ca (QMQ_ETCD_CA) must name its CA"
    elif _ITS_DOUBT.search(last) is None:
        return CoordinationUnavailable(text)
    elif shows_certificate:
        hint = "etcd refuses our certificate: --etcd-cert (QMQ_ETCD_CERT) must be signed by a CA that etcd trusts, and be valid now"
    else:
        hint = "etcd wants a client certificate, and there is none: set --etcd-cert and --etcd-key (QMQ_ETCD_CERT, QMQ_ETCD_KEY)"
    return CoordinationTlsFailed(f"{hint}. {text}")


def refusal(details: str) -> CoordinationError:
    """Convert etcd's refusal to one of our errors."""
    if "lease not found" in details:
        return LeaseNotFound(f"the lease has ended ({details})")
    if "lease already exists" in details:
        return LeaseExists(f"the lease exists ({details})")
    if "name already exists" in details:
        return UserOrRoleExists(f"etcd has it already ({details})")
    if "has been compacted" in details:
        return Compacted(f"the revision is compacted away ({details}): list again and continue from there")
    if "authentication failed" in details:
        return CoordinationError(f"etcd does not know the user or the password ({details}): correct the settings")
    if "permission denied" in details:
        return CoordinationError(f"etcd denies the user this ({details}): grant its role access to the keys under the namespace")
    return CoordinationError(f"etcd refused: {details}")
