"""FastStream's base cases about routers, middlewares, parsers and codecs, in memory and on a
node.
"""

from typing import Annotated, Any

import pytest

faststream = pytest.importorskip(
    "faststream", reason="needs FastStream: pip install 'qmq[faststream]'"
)

from faststream import BaseMiddleware, Context, ExceptionMiddleware  # noqa: E402
from faststream._internal.parser import DefaultCodec  # noqa: E402
from faststream.exceptions import SkipMessage  # noqa: E402
from faststream_places import Place, Seen  # noqa: E402

from qmq.integrations.faststream import QmqBroker, QmqPublisher, QmqRoute, QmqRouter  # noqa: E402

# --- routers --------------------------------------------------------------------------------------


async def test_prefixes_of_nested_routers_come_before_subjects(place: Place, subject: str) -> None:
    outer, inner = QmqRouter(f"{subject}-1-"), QmqRouter("2-")
    broker, seen = place.broker(), Seen()
    by_hand = inner.publisher("by-hand")

    @inner.subscriber("in", group="g")
    @inner.publisher("out")
    def handle(body: Any) -> Any:
        seen(("in", body))
        return body

    @inner.subscriber("out", group="g")
    async def pass_on(body: Any) -> None:
        await by_hand.publish(body)

    @broker.subscriber(f"{subject}-1-2-by-hand", group="g")
    async def get(body: Any) -> None:
        seen(("by-hand", body))

    outer.include_routers(inner)
    broker.include_router(outer)
    async with place.started(broker):
        await broker.publish("hello", f"{subject}-1-2-in")
        assert sorted(await seen.next(2)) == [("by-hand", "hello"), ("in", "hello")]
    assert by_hand.subject == f"{subject}-1-2-by-hand"


async def test_a_router_gets_its_prefix_when_it_is_included(place: Place, subject: str) -> None:
    router, broker, seen = QmqRouter(), place.broker(), Seen()
    outgoing = router.publisher("orders")

    @broker.subscriber(f"{subject}-orders", group="g")
    async def handle(body: Any) -> None:
        seen(body)

    broker.include_router(router, prefix=f"{subject}-")
    async with place.started(broker):
        await outgoing.publish("hello")
        assert await seen.next() == ["hello"]


async def test_a_subscriber_of_a_nested_router_comes_late(place: Place, subject: str) -> None:
    inner = QmqRouter("2-")
    broker, seen = place.broker(routers=[QmqRouter(f"{subject}-", routers=[inner])]), Seen()
    async with place.started(broker):
        late = inner.subscriber("late", group="g")
        late(lambda body: seen(body))
        await late.start()
        await broker.publish("hello", f"{subject}-2-late")
        assert await seen.next() == ["hello"]
        await late.stop()


async def test_routes_are_given_as_values_with_their_publishers(place: Place, subject: str) -> None:
    broker, seen = place.broker(), Seen()
    publishers = [QmqPublisher("out", headers={"by": "route"})]
    broker.include_router(
        QmqRouter(
            f"{subject}-",
            [QmqRoute(lambda body: body, "in", group="g", publishers=publishers, max_workers=2)],
        )
    )

    @broker.subscriber(f"{subject}-out", group="g")
    async def handle(body: Any, message: Annotated[Any, Context()]) -> None:
        seen((body, message.headers["by"]))

    async with place.started(broker):
        await broker.publish("hello", f"{subject}-in")
        assert await seen.next() == [("hello", "route")]


@pytest.mark.parametrize("of_router", [True, False, None])
@pytest.mark.parametrize("of_include", [True, False])
def test_a_subject_is_described_unless_hidden(of_router: bool | None, of_include: bool) -> None:
    broker, router = QmqBroker(), QmqRouter(include_in_schema=of_router)
    made = [router.subscriber("x", group="g"), router.publisher("x")]
    broker.include_router(router, include_in_schema=of_include)
    wanted = of_include and of_router is not False
    assert [each.specification.include_in_schema for each in made] == [wanted, wanted]


def test_every_option_of_the_broker_is_one_of_routers_and_of_routes() -> None:
    """Routes are written out by hand, so they are the ones that fall behind."""

    def options(call: Any, without: set[str]) -> set[str]:
        import inspect

        return set(inspect.signature(call).parameters) - {"self", *without}

    assert options(QmqRoute.__init__, {"call", "publishers"}) == options(
        QmqBroker.subscriber, set()
    )
    assert options(QmqPublisher.__init__, set()) == options(QmqBroker.publisher, set())


# --- parsers, decoders, codecs --------------------------------------------------------------------


def reporting(seen: Seen, name: str) -> Any:
    """A parser or decoder that reports, and does what FastStream does."""

    async def report(msg: Any, original: Any) -> Any:
        seen(name)
        return await original(msg)

    return report


@pytest.mark.parametrize("level", ["broker", "router", "subscriber", "handler"])
async def test_the_nearest_parser_and_decoder_are_used(
    place: Place, subject: str, level: str
) -> None:
    seen = Seen()
    levels = ("broker", "router", "subscriber", "handler")
    given = {
        each: {
            "parser": reporting(seen, f"{each} parser"),
            "decoder": reporting(seen, f"{each} decoder"),
        }
        for each in levels[: levels.index(level) + 1]
    }
    broker, router = place.broker(**given["broker"]), QmqRouter(**given.get("router", {}))
    subscriber = router.subscriber(subject, group="g", **given.get("subscriber", {}))

    @subscriber(**given.get("handler", {}))
    def handle(body: Any) -> None:
        seen(body)

    broker.include_router(router)
    async with place.started(broker):
        await broker.publish(b"hello", subject)
        assert await seen.next(3) == [f"{level} parser", f"{level} decoder", b"hello"]


async def test_a_parser_of_one_subscriber_or_handler_is_not_the_others(
    place: Place, subject: str
) -> None:
    broker, seen = place.broker(), Seen()
    two = broker.subscriber(f"{subject}-3", group="g")

    @broker.subscriber(subject, group="g", parser=reporting(seen, "parsed"))
    @broker.subscriber(f"{subject}-2", group="g")
    async def handle(body: Any) -> None:
        seen(body)

    @two(filter=lambda message: message.content_type == "application/json")
    async def for_json(body: Any) -> None:
        seen(body)

    @two(parser=reporting(seen, "parsed for others"))
    async def for_others(body: Any) -> None:
        seen(body)

    async with place.started(broker):
        await broker.publish(b"two", f"{subject}-2")
        assert await seen.next() == [b"two"]
        await broker.publish({"id": 3}, f"{subject}-3")
        assert await seen.next() == [{"id": 3}]
        await broker.publish(b"three", f"{subject}-3")
        assert await seen.next(2) == ["parsed for others", b"three"]


async def test_a_subscriber_that_is_asked_decodes_when_the_application_wants(
    node: Place, subject: str
) -> None:
    broker, seen = node.broker(), Seen()
    subscriber = broker.subscriber(subject, group="g", decoder=reporting(seen, "decoded"))
    async with node.started(broker):
        await broker.publish(b"one", subject)
        message = await subscriber.get_one(timeout=60)
        assert seen.is_empty
        assert (await message.decode(), await seen.next()) == (b"one", ["decoded"])
        await message.ack()
        await broker.publish(b"two", subject)
        async for each in subscriber:
            assert seen.is_empty
            assert (await each.decode(), await seen.next()) == (b"two", ["decoded"])
            await each.ack()
            break


class Reversed(DefaultCodec):
    """Writes texts backwards, and reads them backwards."""

    async def encode(self, msg: Any, serializer: Any = None) -> tuple[bytes, str | None]:
        body, content_type = await super().encode(msg, serializer)
        return body[::-1], content_type

    async def decode(self, msg: Any) -> Any:
        msg.body = msg.body[::-1]
        return await super().decode(msg)


class ReversedBatches(Reversed):
    async def encode_batch(
        self, msgs: Any, serializer: Any = None
    ) -> list[tuple[bytes, str | None]]:
        return [await self.encode(each, serializer) for each in msgs]

    async def decode_batch(self, msg: Any) -> list[Any]:
        return [each[::-1].decode() for each in msg.body]


async def test_a_codec_writes_and_reads_bodies(place: Place, subject: str) -> None:
    broker, seen = place.broker(codec=Reversed()), Seen()

    @broker.subscriber(subject, group="g")
    async def handle(body: Any) -> None:
        seen(body)

    @broker.subscriber(f"{subject}-2", group="g", codec=DefaultCodec())
    async def handle_as_stored(body: Any) -> None:
        seen(body)

    async with place.started(broker):
        await broker.publish("hello", subject)
        await broker.publish("hello", f"{subject}-2")
        assert sorted(await seen.next(2)) == ["hello", "olleh"]


async def test_a_codec_for_batches_writes_and_reads_them(place: Place, subject: str) -> None:
    broker, seen = place.broker(codec=ReversedBatches()), Seen()

    @broker.subscriber(subject, group="g", batch=True)
    async def handle(bodies: list[str]) -> None:
        seen(bodies)

    async with place.started(broker):
        await broker.publish_batch("one", "two", subject=subject)
        assert await seen.next() == [["one", "two"]]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"codec": DefaultCodec(), "decoder": lambda message: message.body}, "codec"),
        ({"codec": DefaultCodec(), "batch": True}, "BatchCodecProto"),
    ],
    ids=["codec-and-decoder", "batch-without-batch-codec"],
)
async def test_a_codec_that_cannot_be_used_is_refused_at_the_start(
    place: Place, subject: str, options: Any, says: str
) -> None:
    broker = place.broker()

    @broker.subscriber(subject, group="g", **options)
    async def handle(body: Any) -> None: ...

    with pytest.raises(ValueError, match=says):
        async with place.started(broker):
            pass


# --- middlewares ----------------------------------------------------------------------------------


def noting(seen: list[str], name: str) -> type[BaseMiddleware]:
    """A middleware that notes what goes through it."""

    class Noting(BaseMiddleware):
        async def __aenter__(self) -> Any:
            seen.append(f"enter {name}")
            return await super().__aenter__()

        async def __aexit__(self, *error: Any) -> Any:
            seen.append(f"exit {name}")
            return await super().__aexit__(*error)

        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            seen.append(f"consume {name}")
            return await call_next(msg)

        async def publish_scope(self, call_next: Any, cmd: Any) -> Any:
            seen.append(f"publish {name}")
            return await call_next(cmd)

    return Noting


async def test_middlewares_of_broker_and_routers_run_from_the_outside_in(
    place: Place, subject: str
) -> None:
    notes: list[str] = []
    seen = Seen()
    broker, middle = (
        place.broker(middlewares=[noting(notes, "outer")]),
        QmqRouter(middlewares=[noting(notes, "middle")]),
    )
    inner = QmqRouter(middlewares=[noting(notes, "inner")])
    publisher = inner.publisher(subject)

    @inner.subscriber(subject, group="g")
    async def handle(body: Any) -> None:
        seen(body)

    middle.include_router(inner)
    broker.include_router(middle)
    async with place.started(broker):
        await publisher.publish("hello")
        await seen.next()
    levels = ["outer", "middle", "inner"]
    for what in ("publish", "enter", "consume"):
        assert [each for each in notes if each.startswith(what)] == [
            f"{what} {level}" for level in levels
        ]
    assert [each for each in notes if each.startswith("exit")] == [
        f"exit {level}" for level in reversed(levels)
    ]


async def test_a_middleware_sees_message_result_and_error(place: Place, subject: str) -> None:
    seen = Seen()

    class Watching(BaseMiddleware):
        async def on_receive(self) -> Any:
            seen("received")
            return await super().on_receive()

        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            seen(await msg.decode())
            try:
                return await call_next(msg)
            except LookupError as error:
                seen(error.args)
                raise SkipMessage from error

        async def after_processed(self, *error: Any) -> Any:
            seen("processed")
            return await super().after_processed(*error)

    broker = place.broker()

    @broker.subscriber(subject, group="g")
    async def handle(body: Any) -> None:
        if body == "bad":
            raise LookupError(body)
        seen("handled")

    broker.add_middleware(Watching)  # also of the subscriber that is there already
    async with place.started(broker):
        await broker.publish("good", subject)
        assert await seen.next(4) == ["received", "good", "handled", "processed"]
        await broker.publish("bad", subject)
        assert await seen.next(4) == ["received", "bad", ("bad",), "processed"]


class Wrong(Exception):
    pass


class VeryWrong(Wrong):
    pass


async def test_an_exception_becomes_the_answer_of_its_nearest_handler(
    place: Place, subject: str
) -> None:
    seen, answers = Seen(), ExceptionMiddleware()

    @answers.add_handler(Wrong, publish=True)
    async def say_wrong(error: Exception) -> str:
        return "wrong"

    @answers.add_handler(VeryWrong, publish=True)
    async def say_very_wrong(error: Exception) -> str:
        return "very wrong"

    @answers.add_handler(KeyError, publish=True)
    async def skip(error: Exception) -> str:
        seen("skipped")
        raise SkipMessage

    broker = place.broker(middlewares=[answers])

    @broker.subscriber(subject, group="g")
    @broker.publisher(f"{subject}-2")
    async def fail(body: str) -> Any:
        raise {"wrong": Wrong, "very wrong": VeryWrong, "key": KeyError}[body]

    @broker.subscriber(f"{subject}-2", group="g")
    async def get(body: Any) -> None:
        seen(body)

    async with place.started(broker):
        for body, said in (("wrong", "wrong"), ("very wrong", "very wrong"), ("key", "skipped")):
            await broker.publish(body, subject)
            assert await seen.next() == [said]
    assert seen.is_empty


async def test_an_exception_handler_gets_decoding_errors_and_no_skipped_messages(
    place: Place, subject: str
) -> None:
    seen, answers = Seen(), ExceptionMiddleware()

    @answers.add_handler(Exception)
    async def report(error: Exception) -> None:
        seen(type(error))

    async def decoder(message: Any, original: Any) -> Any:
        if message.body == b"bad":
            raise Wrong
        return await original(message)

    broker = place.broker(middlewares=[answers], decoder=decoder)

    @broker.subscriber(subject, group="g")
    async def handle(body: Any) -> None:
        seen(body)
        raise SkipMessage

    async with place.started(broker):
        await broker.publish("bad", subject)
        assert await seen.next() == [Wrong]
        await broker.publish("skipped", subject)
        assert await seen.next() == ["skipped"]
    assert seen.is_empty
