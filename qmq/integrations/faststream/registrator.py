"""Makes subscribers and publishers: the common part of broker and router, and routes as values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from faststream._internal.broker.registrator import Registrator
from faststream._internal.broker.router import ArgsContainer, BrokerRouter, SubscriberRoute
from faststream._internal.constants import EMPTY
from faststream._internal.endpoint.subscriber.call_item import CallsCollection
from faststream.middlewares import AckPolicy

from qmq.integrations.faststream.endpoints import (
    BatchPublisher,
    BatchSubscriber,
    DescribedPublisher,
    DescribedSubscriber,
    PublisherConfig,
    PublisherDescription,
    SubjectPublisher,
    SubjectSubscriber,
    SubscriberConfig,
    SubscriberDescription,
)
from qmq.integrations.faststream.messages import Raw
from qmq.integrations.faststream.sending import QmqBrokerConfig

BATCH_MESSAGES: Final = 1_000


class QmqRegistrator(Registrator[Raw, QmqBrokerConfig]):
    """The common part of broker and router."""

    def subscriber(  # type: ignore[override]
        self,
        subject: str,
        *,
        group: str,
        batch: bool = False,
        messages_max: int = BATCH_MESSAGES,
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
    ) -> SubjectSubscriber:
        """Decorate a handler of a subject's messages. All subscribers of one `group` share the
        messages, in all processes. With `batch` the handler gets a list of at most `messages_max`.
        `options` are those of `qmq.Client.consumer`, of an ordered subject those of
        `ordered_consumer`.
        """
        config = SubscriberConfig(
            group=group,
            workers=max_workers,
            messages_max=messages_max,
            options=options,
            no_reply=no_reply,
            _outer_config=self.config,  # type: ignore[arg-type]
            _ack_policy=ack_policy,
        )
        about = SubscriberDescription(
            subject=subject,
            title_=title,
            description_=description,
            include_in_schema=include_in_schema,
        )
        calls: CallsCollection[Any] = CallsCollection()
        made = (BatchSubscriber if batch else SubjectSubscriber)(
            config, DescribedSubscriber(self.config, about, calls), calls
        )
        super().subscriber(made, persistent=persistent)
        return made.add_call(
            parser_=parser or self._parser,
            decoder_=decoder or self._decoder,
            codec_=codec,
            dependencies_=dependencies,
        )

    def publisher(  # type: ignore[override]
        self,
        subject: str,
        *,
        batch: bool = False,
        headers: Mapping[str, str] | None = None,
        reply_to: str = "",
        persistent: bool = True,
        title: str | None = None,
        description: str | None = None,
        schema: Any = None,
        include_in_schema: bool = True,
    ) -> SubjectPublisher:
        """A publisher to a subject, also a decorator: what the handler returns is sent. Return a
        `QmqResponse` to give it a key. With `batch`, `publish` takes many messages, and the handler
        returns a list.
        """
        about = PublisherDescription(
            subject=subject,
            schema_=schema,
            title_=title,
            description_=description,
            include_in_schema=include_in_schema,
        )
        config = PublisherConfig(
            headers=headers or {},
            reply_to=reply_to,
            _outer_config=self.config,  # type: ignore[arg-type]
        )
        made = (BatchPublisher if batch else SubjectPublisher)(
            config, DescribedPublisher(self.config, about)
        )
        super().publisher(made, persistent=persistent)
        return made


class QmqPublisher(ArgsContainer):
    """A publisher of a `QmqRoute`: the arguments of `QmqRouter.publisher`."""

    def __init__(
        self,
        subject: str,
        *,
        batch: bool = False,
        headers: Mapping[str, str] | None = None,
        reply_to: str = "",
        persistent: bool = True,
        title: str | None = None,
        description: str | None = None,
        schema: Any = None,
        include_in_schema: bool = True,
    ) -> None:
        super().__init__(
            subject,
            batch=batch,
            headers=headers,
            reply_to=reply_to,
            persistent=persistent,
            title=title,
            description=description,
            schema=schema,
            include_in_schema=include_in_schema,
        )


class QmqRoute(SubscriberRoute):
    """A handler with its subject, as a value for `QmqRouter(handlers=...)`:
    the arguments of `QmqRouter.subscriber`.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        subject: str,
        *,
        group: str,
        publishers: Iterable[QmqPublisher] = (),
        batch: bool = False,
        messages_max: int = BATCH_MESSAGES,
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
    ) -> None:
        super().__init__(
            call,
            subject,
            publishers=publishers,
            group=group,
            batch=batch,
            messages_max=messages_max,
            max_workers=max_workers,
            ack_policy=ack_policy,
            no_reply=no_reply,
            dependencies=dependencies,
            parser=parser,
            decoder=decoder,
            codec=codec,
            persistent=persistent,
            title=title,
            description=description,
            include_in_schema=include_in_schema,
            **options,
        )


class QmqRouter(QmqRegistrator, BrokerRouter[Raw, QmqBrokerConfig]):
    """Subscribers and publishers that a broker includes; `prefix` comes before their subjects."""

    def __init__(
        self,
        prefix: str = "",
        handlers: Iterable[QmqRoute] = (),
        *,
        routers: Sequence[QmqRegistrator] = (),
        dependencies: Sequence[Any] = (),
        middlewares: Sequence[Any] = (),
        parser: Any = None,
        decoder: Any = None,
        ack_policy: AckPolicy = EMPTY,
        include_in_schema: bool | None = None,
    ) -> None:
        config = QmqBrokerConfig(
            prefix=prefix,
            broker_dependencies=dependencies,
            broker_middlewares=middlewares,
            broker_parser=parser,
            broker_decoder=decoder,
            ack_policy=ack_policy,
            include_in_schema=include_in_schema,
        )
        super().__init__(handlers=handlers, config=config, routers=routers)
