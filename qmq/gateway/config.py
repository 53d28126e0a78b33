"""The settings of a gateway, in milliseconds, and the settings that it answers a client with in a
Telemetry stream.

The gateway returns the client's part of the settings unchanged, and fills in the rest:

    producer          the largest body; that types are checked; how to send again
    push consumer     whether it is FIFO; batch size; length of a long poll; when a failed message
                      comes again (the group's settings)
    simple consumer   when a failed message comes again
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Final

from qmq.gateway.messages import duration_of, name_of
from qmq.gateway.sending import TIMING, TransactionTiming
from qmq.gateway.status import Refused
from qmq.model import GroupSettings
from qmq.proto.rocketmq import definition_pb2 as api

DEFAULT_PORT: Final = 8081


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    """0: a free one."""
    advertise: str = ""
    """HOST:PORT that the gateway gives to clients; empty:
    the address by which the client connected.
    """
    creates_topics: bool = True
    """Whether a message to an unknown topic creates it."""
    all_ordered: bool = False
    """Whether topics that are created so are ordered,
    also if their first message has no message group.
    """
    shares_port: bool = False
    """Whether other gateways of this machine may listen at the same port."""
    takes_plaintext: bool = False
    """Whether a port with TLS also serves clients without TLS."""
    _: KW_ONLY  # what follows is no option: only tests set it
    invisible_ms_min: int = 10_000
    """As in RocketMQ's own proxy."""
    renewed_invisible_ms: int = 60_000
    """For a push consumer, which gives no time: its messages are renewed while it is alive."""
    transactions: TransactionTiming = TIMING
    sweep_ms: int = 100
    """So late may a message be visible again."""


RECEIVE_BATCH: Final = 32
LONG_POLL_MS: Final = 20_000
SEND_ATTEMPTS: Final = 3
_FIRST_RESEND_MS: Final = 10
_LAST_RESEND_MS: Final = 1_000
ATTEMPTS_MAX: Final = 16
"""The attempts that the gateway announces for a group without a limit in QMQ:
RocketMQ's default.
"""

CONSUMERS: Final = (api.PUSH_CONSUMER, api.SIMPLE_CONSUMER, api.PULL_CONSUMER)


def check_client_type(kind: api.ClientType.ValueType) -> None:
    """Raises Refused for a client type that the gateway does not serve."""
    if kind not in (api.PRODUCER, *CONSUMERS):
        raise Refused(
            api.UNRECOGNIZED_CLIENT_TYPE,
            (
                f"clients of type {name_of(api.ClientType, kind)} are not served here: "
                "docs/ROCKETMQ.md"
            ),
        )


def settings_for_producer(told: api.Settings, body_bytes_max: int) -> api.Settings:
    """The settings that the gateway answers to a producer."""
    settings = _copy(told)
    settings.publishing.max_body_size = body_bytes_max
    settings.publishing.validate_message_type = True
    backoff = settings.backoff_policy
    backoff.max_attempts = SEND_ATTEMPTS
    backoff.exponential_backoff.initial.CopyFrom(duration_of(_FIRST_RESEND_MS))
    backoff.exponential_backoff.max.CopyFrom(duration_of(_LAST_RESEND_MS))
    backoff.exponential_backoff.multiplier = 2
    return settings


def settings_for_consumer(
    told: api.Settings, group: GroupSettings, *, is_fifo: bool
) -> api.Settings:
    """The settings that the gateway answers to a consumer of the group."""
    settings = _copy(told)
    settings.subscription.fifo = is_fifo
    settings.subscription.receive_batch_size = RECEIVE_BATCH
    if not settings.subscription.HasField("long_polling_timeout"):
        settings.subscription.long_polling_timeout.CopyFrom(duration_of(LONG_POLL_MS))
    backoff = settings.backoff_policy
    backoff.max_attempts = group.attempts_max or ATTEMPTS_MAX
    backoff.customized_backoff.next.extend([duration_of(each) for each in group.retry_delays_ms])
    return settings


def _copy(told: api.Settings) -> api.Settings:
    settings = api.Settings()
    settings.CopyFrom(told)
    settings.ClearField("backoff_policy")
    settings.metric.on = False
    return settings
