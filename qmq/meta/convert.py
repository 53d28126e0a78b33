"""Subjects as protobuf messages and back."""

from __future__ import annotations

from qmq.limits import BODY_BYTES_MAX
from qmq.model import SubjectConfig
from qmq.proto.v1 import meta_pb2 as pb


def settings_of(config: SubjectConfig) -> pb.SubjectSettings:
    """A subject's settings as a protobuf message."""
    return pb.SubjectSettings(
        name=config.name, retention_ms=config.retention_ms, retention_bytes=config.retention_bytes,
        body_bytes_max=config.body_bytes_max, broker_groups=config.groups,
    )  # fmt: skip


def config_of(settings: pb.SubjectSettings) -> SubjectConfig:
    """The inverse. Raises InvalidName, InvalidArgument."""
    return SubjectConfig(
        settings.name,
        settings.retention_ms if settings.HasField("retention_ms") else None,
        settings.retention_bytes if settings.HasField("retention_bytes") else None,
        settings.body_bytes_max or BODY_BYTES_MAX,
        tuple(settings.broker_groups),
    )
