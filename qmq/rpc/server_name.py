"""The name of a server: its cluster, its group and its replica. Calls and connections carry the
name of the server that they mean.

An address is no name. Containers, pods and machines get each other's addresses, and a caller that
only knows an address then talks to another server, which may answer as if it were meant. So:

    control call, call to a metaserver    the metadata `qmq-server`
    data connection                       the field `server` of HELLO
    replication link                      the field `to` of PeerHello

Another server answers WrongServer (E315) to a call and to HELLO; another replica refuses the link
(qmq_replication/links.py).

The caller then resolves the address again, and looks for the server's latest address. An empty part
of a name matches anything. Callers of release 0.2.0 send no name, and their calls are accepted;
servers of that release ignore a name.

The cluster's part is a random number, which the first server writes into the coordination store. A
client learns it from the first metaserver that answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Final

from qmq.errors import ProtocolViolation, WrongServer

METADATA_KEY: Final = "qmq-server"


@dataclass(frozen=True, slots=True)
class ServerName:
    cluster: str = ""
    group: str = ""
    replica: str = ""

    def pack(self) -> str:
        """CLUSTER/GROUP/REPLICA; empty if nothing is known."""
        parts = astuple(self)
        return "/".join(parts) if any(parts) else ""

    @classmethod
    def unpack(cls, text: str) -> ServerName:
        """Raises ProtocolViolation."""
        parts = text.split("/") if text else ["", "", ""]
        if len(parts) != 3:
            raise ProtocolViolation(
                "the name of a server is CLUSTER/GROUP/REPLICA; each part may be empty"
            )
        return cls(*parts)

    def require(self, meant: ServerName) -> None:
        """Raise WrongServer if this server's name contradicts the meant one."""
        if "" not in (self.cluster, meant.cluster) and self.cluster != meant.cluster:
            raise WrongServer(
                f"this is {self}, and {meant} is meant: was the cluster replaced or "
                "restored? Then restart the client"
            )
        if any(
            own and other and own != other
            for own, other in zip(astuple(self)[1:], astuple(meant)[1:], strict=True)
        ):
            raise WrongServer(
                f"this is {self}, and {meant} is meant: the address belongs to another "
                "server now, so look it up again"
            )

    def __str__(self) -> str:
        parts = (
            f"replica {self.replica}" if self.replica else "a server",
            self.group and f"of broker group {self.group}",
        )
        return " ".join(filter(None, (*parts, self.cluster and f"of cluster {self.cluster}")))


ANY_SERVER: Final = ServerName()

NameSource = Callable[[], ServerName]
"""The name of the meant server, or of this server, at the moment of a call."""


def always(name: ServerName) -> NameSource:
    return lambda: name


def any_server() -> ServerName:
    """Any server will do."""
    return ANY_SERVER
