"""The broker of FastStream on QMQ: connects, publishes, asks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from fast_depends import dependency_provider
from faststream._internal.broker import BrokerUsecase
from faststream._internal.configs import UnderlyingDriverAnnotation
from faststream._internal.constants import EMPTY
from faststream._internal.context.repository import ContextRepo
from faststream._internal.di import FastDependsConfig
from faststream._internal.logger import DefaultLoggerStorage, make_logger_state
from faststream._internal.logger.logging import get_broker_logger
from faststream.message import gen_cor_id
from faststream.middlewares import AckPolicy
from faststream.response.publish_type import PublishType
from faststream.specification.schema import BrokerSpec

import qmq
from qmq.integrations.faststream.messages import QmqMessage, Raw, RequestAnswers
from qmq.integrations.faststream.registrator import QmqRegistrator, QmqRouter
from qmq.integrations.faststream.sending import (
    REQUEST_S,
    QmqBrokerConfig,
    QmqProducer,
    QmqPublishCommand,
)

ANSWERS: Final = "faststream.answers"
ANNOTATIONS: Final = "qmq.integrations.faststream.annotations"
INSTEAD: Final = {
    kind: UnderlyingDriverAnnotation(type_hint=kind, module=ANNOTATIONS, name=name)
    for kind, name in (
        (qmq.Message, "Message"),
        (qmq.OrderedMessage, "Message"),
        (QmqMessage, "Message"),
        (qmq.Client, "Client"),
    )
}
"""For classes that FastStream would otherwise look for in the body, the annotation to use.
FastStream names it when the broker starts.
"""


class QmqBroker(QmqRegistrator, BrokerUsecase[Raw, qmq.Client, QmqBrokerConfig]):
    """FastStream's broker on QMQ. It reads the answers to its requests from the subject `answers`.
    `connect`: options of `qmq.connect`.
    """

    def __init__(
        self,
        addresses: str | None = None,
        *,
        answers: str = ANSWERS,
        routers: Sequence[QmqRouter] = (),
        dependencies: Sequence[Any] = (),
        middlewares: Sequence[Any] = (),
        parser: Any = None,
        decoder: Any = None,
        codec: Any = None,
        ack_policy: AckPolicy = EMPTY,
        graceful_timeout: float | None = 15.0,
        apply_types: bool = True,
        serializer: Any = EMPTY,
        provider: Any = None,
        context: Any = None,
        id_generator: Any = gen_cor_id,
        logger: Any = EMPTY,
        log_level: int = logging.INFO,
        description: str | None = None,
        specification_url: str | None = None,
        tags: Sequence[Any] = (),
        **connect: Any,
    ) -> None:
        own = QmqBrokerConfig(
            broker_middlewares=middlewares,
            broker_parser=parser,
            broker_decoder=decoder,
            broker_codec=codec,
            broker_dependencies=dependencies,
            graceful_timeout=graceful_timeout,
            ack_policy=ack_policy,
            logger=make_logger_state(
                logger=logger,
                log_level=log_level,
                default_storage_cls=_LoggerStorage,  # type: ignore[type-abstract]  # mypy takes the inherited mark for ours
            ),
            id_generator=id_generator,
            fd_config=FastDependsConfig(
                use_fastdepends=apply_types,
                serializer=serializer,
                provider=provider or dependency_provider,
                context=context or ContextRepo(),
            ),
            extra_context={"broker": self},
            default_driver_annotations=INSTEAD,
        )
        self._own, self._answers = own, RequestAnswers(answers)
        own.producer = QmqProducer(own, parser, decoder, self._answers)
        url = specification_url or f"qmq://{addresses or 'localhost:20880'}"
        about = BrokerSpec(
            description=description,
            url=[url],
            protocol="qmq",
            protocol_version=None,
            tags=tags,
            security=None,
        )
        super().__init__(
            config=own, specification=about, routers=routers, addresses=addresses, **connect
        )

    async def _connect(self) -> qmq.Client:
        options = dict(self._connection_kwargs)
        self._own.mq = qmq.connect(options.pop("addresses"), **options)
        return self._own.mq

    async def start(self) -> None:
        """Connect, and start the subscribers. Raises as `SubjectSubscriber.start`."""
        await self.connect()
        await super().start()

    async def stop(self, exc_type: Any = None, exc_val: Any = None, exc_tb: Any = None) -> None:
        """Stop the subscribers, finish sending, and disconnect."""
        await super().stop(exc_type, exc_val, exc_tb)
        await self._answers.close()
        client, self._connection, self._own.mq = self._connection, None, None
        if client is not None:
            await client.close()

    async def ping(self, timeout: float | None = None) -> bool:
        """Whether a metaserver answers, and knows who this is. That needs no right."""
        if self._connection is None:
            return False
        try:
            async with asyncio.timeout(timeout):
                await self._connection.access.whoami()
        except (qmq.QmqError, TimeoutError):
            return False
        return True

    async def publish(
        self,
        message: Any,
        subject: str,
        *,
        key: str | bytes | None = None,
        tags: Sequence[str] = (),
        delay: timedelta | None = None,
        headers: Mapping[str, str] | None = None,
        correlation_id: str | None = None,
        reply_to: str = "",
    ) -> qmq.Receipt:
        """Send a message; returns when it is stored. Raises as `qmq.Client.send`."""
        sent = {
            "key": key,
            "tags": tags,
            "delay": delay,
            "reply_to": reply_to,
            "_publish_type": PublishType.PUBLISH,
        }
        command = self._command((message,), subject, headers, correlation_id, **sent)
        return await self._basic_publish(command, producer=self.config.producer)  # type: ignore[no-any-return]

    async def publish_batch(  # type: ignore[override]
        self,
        *messages: Any,
        subject: str,
        key: str | bytes | None = None,
        tags: Sequence[str] = (),
        delay: timedelta | None = None,
        headers: Mapping[str, str] | None = None,
        correlation_id: str | None = None,
        reply_to: str = "",
    ) -> qmq.Receipts:
        """Send messages together; returns when all are stored. A `QmqResponse` has its own key,
        tags, delay and headers. Raises as `qmq.Client.send_many`.
        """
        sent = {
            "key": key,
            "tags": tags,
            "delay": delay,
            "reply_to": reply_to,
            "_publish_type": PublishType.PUBLISH,
        }
        command = self._command(messages or (None,), subject, headers, correlation_id, **sent)
        return await self._basic_publish_batch(command, producer=self.config.producer)  # type: ignore[no-any-return]

    async def request(  # type: ignore[override]
        self,
        message: Any,
        subject: str,
        *,
        key: str | bytes | None = None,
        tags: Sequence[str] = (),
        headers: Mapping[str, str] | None = None,
        correlation_id: str | None = None,
        timeout: float = REQUEST_S,
    ) -> Any:
        """Send a message, and return the answer of its handler. Raises TimeoutError if there is
        none `timeout` seconds after the message is stored; the message is handled all the same.
        Raises InvalidArgument if another request waits with the same correlation id.
        """
        sent = {
            "key": key,
            "tags": tags,
            "timeout_s": timeout,
            "_publish_type": PublishType.REQUEST,
        }
        command = self._command((message,), subject, headers, correlation_id, **sent)
        return await self._basic_request(command, producer=self.config.producer)

    def _command(
        self,
        bodies: Sequence[Any],
        subject: str,
        headers: Mapping[str, str] | None,
        correlation_id: str | None,
        **named: Any,
    ) -> QmqPublishCommand:
        found = correlation_id or self.config.id_generator()
        return QmqPublishCommand(
            *bodies, destination=subject, headers=dict(headers or {}), correlation_id=found, **named
        )


class _LoggerStorage(DefaultLoggerStorage):
    """FastStream's logger with the name `qmq`."""

    def get_logger(self, *, context: ContextRepo) -> Any:
        found = self._get_logger_ref()
        if found is None:
            layout = (
                "%(asctime)s %(levelname)-8s - %(subject)s | %(group)s | %(message_id)-32s - "
                "%(message)s"
            )
            found = get_broker_logger(
                name="qmq",
                default_context={"subject": "", "group": ""},
                message_id_ln=32,
                fmt=layout,
                context=context,
                log_level=self.logger_log_level,
            )
            self._logger_ref.add(found)
        return found
