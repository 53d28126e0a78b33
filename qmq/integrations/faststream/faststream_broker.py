"""The broker and the router of FastStream on QMQ."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from fast_depends import dependency_provider
from faststream._internal.broker import BrokerUsecase
from faststream._internal.broker.registrator import Registrator
from faststream._internal.broker.router import BrokerRouter
from faststream._internal.constants import EMPTY
from faststream._internal.context.repository import ContextRepo
from faststream._internal.di import FastDependsConfig
from faststream._internal.endpoint.subscriber.call_item import CallsCollection
from faststream._internal.logger import DefaultLoggerStorage, make_logger_state
from faststream._internal.logger.logging import get_broker_logger
from faststream.middlewares import AckPolicy
from faststream.response.publish_type import PublishType
from faststream.specification.schema import BrokerSpec

import qmq
from qmq.client.any_message import AnyMessage
from qmq.integrations.faststream.faststream_endpoints import (
    QmqPublisher,
    QmqPublisherConfig,
    QmqPublisherDescription,
    QmqPublisherSpecification,
    QmqSubscriber,
    QmqSubscriberConfig,
    QmqSubscriberDescription,
    QmqSubscriberSpecification,
)
from qmq.integrations.faststream.faststream_messages import QmqBrokerConfig, QmqProducer, QmqPublishCommand


class QmqRegistrator(Registrator[AnyMessage, QmqBrokerConfig]):
    """What broker and router have in common."""

    def subscriber(  # type: ignore[override]
        self,
        subject: str,
        *,
        group: str,
        max_workers: int = 1,
        ack_policy: AckPolicy = EMPTY,
        no_reply: bool = False,
        dependencies: Sequence[Any] = (),
        parser: Any = None,
        decoder: Any = None,
        codec: Any = None,
        persistent: bool = True,
        title: str | None = None,
        description: str | None = None,
        include_in_schema: bool = True,
        **options: Any,
    ) -> QmqSubscriber:
        """Decorate a handler of a subject's messages. All subscribers of one `group` share the messages, in all processes. `options` are
        those of `qmq.Client.consumer`, of an ordered subject those of `ordered_consumer`.
        """
        config = QmqSubscriberConfig(
            subject=subject,
            group=group,
            workers=max_workers,
            options=options,
            no_reply=no_reply,
            _outer_config=self.config,  # type: ignore[arg-type]
            _ack_policy=ack_policy,
        )
        about = QmqSubscriberDescription(subject=subject, title_=title, description_=description, include_in_schema=include_in_schema)
        calls: CallsCollection[Any] = CallsCollection()
        made = QmqSubscriber(config, QmqSubscriberSpecification(self.config, about, calls), calls)
        super().subscriber(made, persistent=persistent)
        return made.add_call(parser_=parser or self._parser, decoder_=decoder or self._decoder, codec_=codec, dependencies_=dependencies)

    def publisher(  # type: ignore[override]
        self,
        subject: str,
        *,
        headers: Mapping[str, str] | None = None,
        persistent: bool = True,
        title: str | None = None,
        description: str | None = None,
        schema: Any = None,
        include_in_schema: bool = True,
    ) -> QmqPublisher:
        """A publisher to a subject, also a decorator: what the handler returns is sent. Return a `QmqResponse` to give it a key."""
        about = QmqPublisherDescription(
            subject=subject, schema_=schema, title_=title, description_=description, include_in_schema=include_in_schema
        )
        config = QmqPublisherConfig(subject=subject, headers=headers or {}, _outer_config=self.config)  # type: ignore[arg-type]
        made = QmqPublisher(config, QmqPublisherSpecification(self.config, about))
        super().publisher(made, persistent=persistent)
        return made


class QmqRouter(QmqRegistrator, BrokerRouter[AnyMessage, QmqBrokerConfig]):
    """Subscribers and publishers that a broker includes; `prefix` comes before their subjects."""

    def __init__(self, prefix: str = "", *, dependencies: Sequence[Any] = (), middlewares: Sequence[Any] = ()) -> None:
        config = QmqBrokerConfig(prefix=prefix, broker_dependencies=dependencies, broker_middlewares=middlewares)
        super().__init__(handlers=(), config=config, routers=())


class QmqBroker(QmqRegistrator, BrokerUsecase[AnyMessage, qmq.Client, QmqBrokerConfig]):
    """FastStream's broker on QMQ. `connect` are options of `qmq.connect`."""

    def __init__(
        self,
        addresses: str | None = None,
        *,
        routers: Sequence[QmqRouter] = (),
        dependencies: Sequence[Any] = (),
        middlewares: Sequence[Any] = (),
        parser: Any = None,
        decoder: Any = None,
        codec: Any = None,
        ack_policy: AckPolicy = EMPTY,
        graceful_timeout: float | None = 15.0,
        apply_types: bool = True,
        logger: Any = EMPTY,
        log_level: int = logging.INFO,
        description: str | None = None,
        specification_url: str | None = None,
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
            logger=make_logger_state(logger=logger, log_level=log_level, default_storage_cls=_LoggerStorage),  # type: ignore[type-abstract]  # mypy takes the inherited mark for ours
            fd_config=FastDependsConfig(use_fastdepends=apply_types, provider=dependency_provider, context=ContextRepo()),
            extra_context={"broker": self},
        )
        own.producer = QmqProducer(own, parser, decoder)
        self._own = own
        url = specification_url or f"qmq://{addresses or 'localhost:20880'}"
        about = BrokerSpec(description=description, url=[url], protocol="qmq", protocol_version=None, tags=(), security=None)
        super().__init__(config=own, specification=about, routers=routers, addresses=addresses, **connect)

    async def _connect(self) -> qmq.Client:
        options = dict(self._connection_kwargs)
        self._own.mq = qmq.connect(options.pop("addresses"), **options)
        return self._own.mq

    async def start(self) -> None:
        """Connect, and start the subscribers. Raises as `QmqSubscriber.start`."""
        await self.connect()
        await super().start()

    async def stop(self, exc_type: Any = None, exc_val: Any = None, exc_tb: Any = None) -> None:
        """Stop the subscribers, send what is under way, and disconnect."""
        await super().stop(exc_type, exc_val, exc_tb)
        client, self._connection, self._own.mq = self._connection, None, None
        if client is not None:
            await client.close()

    async def ping(self, timeout: float | None = None) -> bool:
        """Whether a metaserver answers."""
        if self._connection is None:
            return False
        try:
            async with asyncio.timeout(timeout):
                await self._connection.metadata.cluster()
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
        command = QmqPublishCommand(
            message,
            key=key,
            tags=tags,
            delay=delay,
            destination=subject,
            headers=dict(headers or {}),
            correlation_id=correlation_id or self.config.id_generator(),
            reply_to=reply_to,
            _publish_type=PublishType.PUBLISH,
        )
        return await self._basic_publish(command, producer=self.config.producer)  # type: ignore[no-any-return]

    async def request(self, message: Any, subject: str, /, timeout: float = 0.5) -> Any:
        """QMQ has no requests. Raises FeatureNotSupportedException."""
        return await self.config.producer.request(QmqPublishCommand(message, destination=subject, _publish_type=PublishType.REQUEST))


class _LoggerStorage(DefaultLoggerStorage):
    """FastStream's logger with the name `qmq`."""

    def get_logger(self, *, context: ContextRepo) -> Any:
        found = self._get_logger_ref()
        if found is None:
            layout = "%(asctime)s %(levelname)-8s - %(message_id)-32s - %(message)s"
            found = get_broker_logger(
                name="qmq", default_context={}, message_id_ln=32, fmt=layout, context=context, log_level=self.logger_log_level
            )
            self._logger_ref.add(found)
        return found
