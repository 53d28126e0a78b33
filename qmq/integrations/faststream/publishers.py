"""Publishers of FastStream on QMQ: they send messages one by one, or in batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from faststream._internal.configs import PublisherUsecaseConfig
from faststream._internal.endpoint.publisher import PublisherUsecase
from faststream.response import PublishCommand
from faststream.response.publish_type import PublishType

import qmq
from qmq.integrations.faststream.descriptions import DescribedPublisher
from qmq.integrations.faststream.sending import REQUEST_S, QmqPublishCommand


@dataclass(kw_only=True)
class PublisherConfig(PublisherUsecaseConfig):
    headers: Mapping[str, str]
    reply_to: str = ""


class SubjectPublisher(PublisherUsecase):
    """Sends to one subject: what a decorated handler returns, and what `publish` is given."""

    is_batch = False

    def __init__(self, config: PublisherConfig, specification: DescribedPublisher) -> None:
        super().__init__(config, specification)  # type: ignore[arg-type]  # the parameters of its types are invariant
        self._own, self._described = config, specification

    @property
    def subject(self) -> str:
        """The subject, with the prefixes of its routers."""
        return self._described.subject

    def _command(
        self,
        bodies: Sequence[Any],
        subject: str,
        headers: Mapping[str, str] | None,
        correlation_id: str | None,
        reply_to: str,
        **named: Any,
    ) -> QmqPublishCommand:
        return QmqPublishCommand(
            *bodies,
            destination=subject or self.subject,
            headers=dict(self._own.headers) | dict(headers or {}),
            correlation_id=correlation_id or self._outer_config.id_generator(),
            reply_to=reply_to or self._own.reply_to,
            **named,
        )

    async def publish(
        self,
        message: Any,
        subject: str = "",
        *,
        key: str | bytes | None = None,
        tags: Sequence[str] = (),
        delay: timedelta | None = None,
        headers: Mapping[str, str] | None = None,
        correlation_id: str | None = None,
        reply_to: str = "",
    ) -> qmq.Receipt:
        """Send a message; returns when it is stored. Raises as `qmq.Client.send`."""
        sent = {"key": key, "tags": tags, "delay": delay, "_publish_type": PublishType.PUBLISH}
        command = self._command((message,), subject, headers, correlation_id, reply_to, **sent)
        return await self._basic_publish(command, producer=self._outer_config.producer, _extra_middlewares=())  # type: ignore[no-any-return]

    async def request(
        self,
        message: Any,
        subject: str = "",
        *,
        key: str | bytes | None = None,
        tags: Sequence[str] = (),
        headers: Mapping[str, str] | None = None,
        correlation_id: str | None = None,
        timeout: float = REQUEST_S,
    ) -> Any:
        """Send a message, and return the answer of its handler. Raises as `QmqBroker.request`."""
        sent = {"key": key, "tags": tags, "timeout_s": timeout, "_publish_type": PublishType.REQUEST}
        command = self._command((message,), subject, headers, correlation_id, "", **sent)
        return await self._basic_request(command, producer=self._outer_config.producer)

    async def _publish(self, cmd: PublishCommand, *, _extra_middlewares: Iterable[Any]) -> Any:
        command = self._completed(QmqPublishCommand.from_cmd(cmd))
        return await self._basic_publish(command, producer=self._outer_config.producer, _extra_middlewares=_extra_middlewares)

    def _completed(self, command: QmqPublishCommand) -> QmqPublishCommand:
        command.destination = command.destination or self.subject
        command.reply_to = command.reply_to or self._own.reply_to
        command.add_headers(dict(self._own.headers), override=False)
        return command


class BatchPublisher(SubjectPublisher):
    """Sends several messages together. A decorated handler returns a list of them."""

    is_batch = True

    async def publish(  # type: ignore[override]  # many messages
        self,
        *messages: Any,
        subject: str = "",
        key: str | bytes | None = None,
        tags: Sequence[str] = (),
        delay: timedelta | None = None,
        headers: Mapping[str, str] | None = None,
        correlation_id: str | None = None,
        reply_to: str = "",
    ) -> qmq.Receipts:
        """Send messages; returns when all are stored. A `QmqResponse` has its own key, tags and delay. Raises as `qmq.Client.send_many`."""
        sent = {"key": key, "tags": tags, "delay": delay, "_publish_type": PublishType.PUBLISH}
        command = self._command(messages or (None,), subject, headers, correlation_id, reply_to, **sent)
        return await self._basic_publish_batch(command, producer=self._outer_config.producer, _extra_middlewares=())  # type: ignore[no-any-return]

    async def _publish(self, cmd: PublishCommand, *, _extra_middlewares: Iterable[Any]) -> Any:
        command = self._completed(QmqPublishCommand.from_cmd(cmd, batch=True))
        return await self._basic_publish_batch(command, producer=self._outer_config.producer, _extra_middlewares=_extra_middlewares)
