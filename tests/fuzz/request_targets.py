"""Targets that read requests: gRPC of RocketMQ's clients and of the administration, texts, and the command line's arguments."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache
from typing import Any, Final

import typer
from google.protobuf.message import DecodeError
from qmq_coordination.etcd.channel import parse_endpoint
from typer._click.exceptions import ClickException

from qmq.cli.app import app
from qmq.cli.arguments import parse_delays, parse_duration, parse_when
from qmq.cli.help_pages import CommandGroup
from qmq.delay import recurrence
from qmq.delay.admin import ListMark
from qmq.errors import QmqError
from qmq.gateway.client_settings import check_client_type, settings_for_consumer, settings_for_producer
from qmq.gateway.filters import filter_of_request
from qmq.gateway.messages import group_of_resource, message_from_client, subject_of_topic
from qmq.gateway.sending import parse_recall_handle
from qmq.gateway.status import Refused
from qmq.meta.access import kind_of, operation_of
from qmq.model import DelayedId, GroupSettings, MessageId, check_client, check_group, check_name
from qmq.operations.text import parse_key
from qmq.proto.rocketmq import definition_pb2 as api
from qmq.proto.rocketmq import service_pb2 as calls
from qmq.proto.v1 import meta_pb2 as pb
from qmq.security.access_rules import check_pattern, check_principal_pattern
from qmq.security.principal import Principal
from qmq.wire.subject_settings import config_of

BODY_BYTES_MAX: Final = 1 << 20
TEXTS: Final[tuple[Callable[[str], Any], ...]] = (
    parse_duration,
    parse_delays,
    parse_when,
    parse_key,
    parse_recall_handle,
    MessageId.parse,
    DelayedId.parse,
    ListMark.parse,
    Principal.parse,
    check_principal_pattern,
    check_client,
    check_group,
    operation_of,
    kind_of,
    lambda text: check_name("subject", text),
    lambda text: check_pattern("subject", text),
    lambda text: parse_endpoint(text, has_tls_files=False),
    lambda text: recurrence.check(text, "Europe/Berlin"),
    lambda text: recurrence.check("0 9 * * *", text),
)
"""The first byte of an input chooses one."""


def texts(data: bytes) -> None:
    """Texts that people and clients write: durations, times, ids, keys, patterns."""
    with suppress(QmqError):
        TEXTS[(data[0] if data else 0) % len(TEXTS)](data[1:].decode(errors="replace"))


def filters(data: bytes) -> None:
    """A subscription's filter: tags, or SQL92, as the first byte says."""
    kind = api.SQL if data[:1] == b"S" else api.TAG
    with suppress(Refused):
        filter_of_request(api.FilterExpression(type=kind, expression=data[1:].decode(errors="replace")))


def sends(data: bytes) -> None:
    """Messages that RocketMQ's clients send."""
    with suppress(DecodeError):
        for message in calls.SendMessageRequest.FromString(data).messages:
            with suppress(QmqError, Refused):
                message_from_client(message, BODY_BYTES_MAX)


def settings(data: bytes) -> None:
    """The settings that RocketMQ's clients send."""
    with suppress(DecodeError):
        told = api.Settings.FromString(data)
        for read in (
            lambda: check_client_type(told.client_type),
            lambda: settings_for_producer(told, BODY_BYTES_MAX),
            lambda: settings_for_consumer(told, GroupSettings(), is_fifo=True),
            lambda: [subject_of_topic(each) for each in told.publishing.topics],
            lambda: [filter_of_request(each.expression) for each in told.subscription.subscriptions],
            lambda: group_of_resource(told.subscription.group),
        ):
            with suppress(QmqError, Refused):
                read()


def subjects(data: bytes) -> None:
    """Settings of a subject that an operator asks for."""
    with suppress(DecodeError, QmqError):
        config_of(pb.SubjectSettings.FromString(data))


@cache
def _command() -> Any:
    return typer.main.get_command(app)


def arguments(data: bytes) -> None:
    """Arguments of the command line, separated by line ends. The command is parsed but does not run."""
    words = data.decode(errors="replace").split("\n")
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), suppress(ClickException, typer.Exit, typer.Abort, QmqError):
        command, context = _command(), None
        name = "qmq"
        while True:
            context = command.make_context(name, words, parent=context)
            if not isinstance(command, CommandGroup):
                return
            words = [*context._protected_args, *context.args]
            if not words:  # as after "--": no command is named
                return
            found_name, found, words = command.resolve_command(context, words)
            if found is None:
                return
            name, command = found_name or "", found


REQUEST_TARGETS: Final[Mapping[str, Callable[[bytes], None]]] = {
    each.__name__: each for each in (texts, filters, sends, settings, subjects, arguments)
}
