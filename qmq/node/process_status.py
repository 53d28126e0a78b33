"""The status of a server's process, for operators: its version, who can reach it, when its certificate expires.

Brokers and metaservers put it into the answers to DescribeReplica and DescribeCluster. `qmq doctor` reads it there: an operator's machine
reaches the metaserver's port only, and not the metrics port of every process.
"""

from __future__ import annotations

from collections.abc import Callable

import qmq
from qmq.node.etcd_options import EtcdOptions
from qmq.node.exposure import weaknesses
from qmq.proto.v1 import control_pb2 as pb
from qmq.security.expiry import left_s, now
from qmq.security.tls import Credentials


def process_status(host: str, etcd: EtcdOptions | None = None, credentials: Credentials | None = None) -> Callable[[], pb.ProcessStatus]:
    """Make a function that returns the process's current status. Certificates may be renewed while the process runs."""
    version, is_insecure = qmq.__version__, bool(weaknesses(host, etcd, None if credentials is None else credentials.files))

    def describe() -> pb.ProcessStatus:
        left = None if credentials is None else left_s(credentials, now())
        left_ms = None if left is None else int(left * 1000)
        return pb.ProcessStatus(version=version, is_insecure=is_insecure, certificate_left_ms=left_ms)

    return describe
