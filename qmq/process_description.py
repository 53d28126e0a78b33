"""How servers get the description of their own process, which qmq/node/process_status.py makes."""

from __future__ import annotations

from collections.abc import Callable

from qmq.proto.v1 import control_pb2 as pb

DescribeProcess = Callable[[], pb.ProcessStatus]
"""Describes the process now. `pb.ProcessStatus` itself is one: it tells nothing."""
