"""The type of a function that describes a server's process (qmq/node/process_status.py makes it)."""

from __future__ import annotations

from collections.abc import Callable

from qmq.proto.v1 import control_pb2 as pb

DescribeProcess = Callable[[], pb.ProcessStatus]
"""Describes the process as it is now. `pb.ProcessStatus` itself is such a function: its description is empty."""
