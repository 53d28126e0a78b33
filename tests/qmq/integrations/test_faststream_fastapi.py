"""FastStream's base cases about its router for FastAPI, in memory and on a node."""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Any

import pytest

faststream = pytest.importorskip(
    "faststream", reason="needs FastStream: pip install 'qmq[faststream]'"
)
pytest.importorskip("fastapi", reason="needs FastAPI: pip install 'qmq[fastapi]'")

import httpx  # noqa: E402
from fastapi import BackgroundTasks, Depends, FastAPI, Header  # noqa: E402
from fastapi.exceptions import RequestValidationError  # noqa: E402
from faststream import Context as PlainContext  # noqa: E402
from faststream import Depends as PlainDepends  # noqa: E402
from faststream import Response  # noqa: E402
from faststream._internal.fastapi.route import StreamMessage  # noqa: E402
from faststream.exceptions import SetupError  # noqa: E402
from faststream_places import Place, Seen  # noqa: E402

from qmq.integrations.faststream import QmqRouter, TestQmqBroker  # noqa: E402
from qmq.integrations.faststream.fastapi import Context, FastApiQmqRouter  # noqa: E402


@asynccontextmanager
async def living(app: FastAPI) -> AsyncIterator[Mapping[str, Any]]:
    """The state of the application while it runs."""
    async with app.router.lifespan_context(app) as state:
        yield state or {}


def router_of(place: Place, **options: Any) -> FastApiQmqRouter:
    return FastApiQmqRouter(place.address or "127.0.0.1:1", state_dir=False, **options)


async def test_handlers_and_publishers_of_an_application_work(place: Place, subject: str) -> None:
    router, seen = router_of(place), Seen()

    @router.subscriber(subject, group="g")
    @router.subscriber(f"{subject}-2", group="g")
    @router.publisher(f"{subject}-answers")
    async def handle(body: str) -> str:
        return f"{body}!"

    @router.subscriber(f"{subject}-answers", group="g")
    async def get(body: Any) -> None:
        seen(body)

    async with place.started(router.broker):
        await router.broker.publish("one", subject)
        await router.broker.publish("two", f"{subject}-2")
        assert sorted(await seen.next(2)) == ["one!", "two!"]


async def test_background_tasks_run_after_the_handler(place: Place, subject: str) -> None:
    router, seen = router_of(place), Seen()

    @router.subscriber(subject, group="g")
    async def handle(body: Any, tasks: BackgroundTasks) -> None:
        tasks.add_task(seen, body)

    async with place.started(router.broker):
        await router.broker.publish("hello", subject)
        assert await seen.next() == ["hello"]


async def test_a_handler_gets_fastapis_request_and_faststreams_context(
    place: Place, subject: str
) -> None:
    router, seen = router_of(place), Seen()

    @router.subscriber(subject, group="g")
    async def handle(
        request: StreamMessage,
        headers: Annotated[Any, Context("message.headers")],
        numbers: set[int] = Context(subject, initial=set),  # noqa: B008 - as in FastStream
    ) -> None:
        numbers.add(len(numbers))
        seen(("app" in request.scope, headers["h"], sorted(numbers)))

    async with place.started(router.broker):
        for expected in ([0], [0, 1]):
            await router.broker.publish("", subject, headers={"h": "1"})
            assert await seen.next() == [(True, "1", expected)]
    router.context.reset_global(subject)


async def test_the_broker_starts_and_stops_with_the_application(
    memory: Place, subject: str
) -> None:
    calls: list[str] = []

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        calls.append("begin")
        yield {"lifespan": True}
        calls.append("end")

    router, app = router_of(memory, lifespan=lifespan), FastAPI()

    @router.after_startup
    def started(app: FastAPI) -> None:
        calls.append("started")

    @router.after_startup
    async def started_too(app: FastAPI) -> dict[str, Any]:
        calls.append("started, async")
        return {"more": 1}

    @router.on_broker_shutdown
    def stopping(app: FastAPI) -> None:
        calls.append("stopping")

    @router.subscriber(subject, group="g")
    async def handle() -> Response:
        return Response("hi", headers={"x-header": "test"})

    app.include_router(router)
    transport = httpx.ASGITransport(app)
    async with (
        TestQmqBroker(router.broker, connect_only=False) as broker,
        living(app) as state,
        httpx.AsyncClient(transport=transport, base_url="http://app") as client,
    ):
        assert (state["broker"], state["lifespan"], state["more"]) == (broker, True, 1)
        answer = await broker.request("hi", subject)
        assert (await answer.decode(), answer.headers["x-header"]) == ("hi", "test")
        described = (await client.get("/asyncapi.json")).json()
        assert subject in {each["address"] for each in described["channels"].values()}
        tried = await client.post(
            "/asyncapi/try", json={"channelName": f"{subject}:Handle", "message": {"message": 1}}
        )
        assert tried.json() == "hi"
    assert calls == ["begin", "started", "started, async", "stopping", "end"]


async def test_a_router_may_keep_its_broker_out_of_the_state(memory: Place) -> None:
    router, app = router_of(memory, setup_state=False), FastAPI()
    app.include_router(router)
    async with TestQmqBroker(router.broker, connect_only=False), living(app) as state:
        assert "broker" not in state


async def test_a_body_of_another_type_is_fastapis_error(memory: Place, subject: str) -> None:
    router = router_of(memory)

    @router.subscriber(subject, group="g")
    async def handle(body: int) -> None: ...

    async with TestQmqBroker(router.broker, connect_only=False) as broker:
        with pytest.raises(RequestValidationError):
            await broker.publish("hi", subject)


async def test_dependencies_of_router_subscriber_and_handler_are_fastapis(
    memory: Place, subject: str
) -> None:
    calls: list[str] = []

    def noting(name: str) -> Any:
        return Depends(lambda: calls.append(name), use_cache=False)

    def opened(a: str) -> Iterator[str]:
        calls.append("open")
        yield a
        calls.append("closed")

    def replaced() -> str:
        raise AssertionError("overridden")

    router, app = router_of(memory, dependencies=[noting("router")]), FastAPI()
    app.dependency_overrides[replaced] = lambda: "override"
    app.include_router(router)

    @router.subscriber(subject, group="g", dependencies=[noting("subscriber")])
    async def handle(
        a: str,
        b: Annotated[str, Depends(opened), PlainDepends(replaced)],
        c: str = Depends(replaced),
        w: str = Header(),
    ) -> list[str]:
        calls.append("handler")
        return [a, b, c, w]

    async with TestQmqBroker(router.broker, connect_only=False) as broker, living(app):
        answer = await broker.request({"a": "hi"}, subject, headers={"w": "header"})
    assert await answer.decode() == ["hi", "hi", "override", "header"]
    assert sorted(calls) == ["closed", "handler", "open", "router", "subscriber"]


@pytest.mark.parametrize(
    ("hint", "is_refused"),
    [
        (Annotated[Any, PlainDepends(lambda: 1)], True),
        (Annotated[Any, PlainContext()], True),
        (Annotated[Any, PlainDepends(lambda: 1), Depends(lambda: 1)], False),
        (Annotated[Any, Context("message.headers"), PlainContext("message.headers")], False),
        (
            Annotated[Annotated[Any, PlainContext("message.headers")], Context("message.headers")],
            False,
        ),
    ],
    ids=["depends", "context", "both-depends", "both-contexts", "nested-contexts"],
)
async def test_faststreams_own_hints_need_fastapis_beside_them(
    memory: Place, subject: str, hint: Any, is_refused: bool
) -> None:
    router, app = router_of(memory), FastAPI()

    @router.subscriber(subject, group="g")
    async def handle(value: hint) -> None: ...

    app.include_router(router)

    async def start() -> None:
        async with TestQmqBroker(router.broker, connect_only=False), living(app):
            pass

    if is_refused:
        with pytest.raises(SetupError):
            await start()
    else:
        await start()


@pytest.mark.parametrize(
    "default", [PlainDepends(lambda: 1), PlainContext()], ids=["depends", "context"]
)
async def test_faststreams_own_defaults_are_refused(
    memory: Place, subject: str, default: Any
) -> None:
    router = router_of(memory)

    @router.subscriber(subject, group="g")
    async def handle(value: Any = default) -> None: ...

    with pytest.raises(SetupError):
        async with TestQmqBroker(router.broker, connect_only=False):
            pass


async def test_a_router_includes_only_routers_of_the_broker(memory: Place, subject: str) -> None:
    router, plain = router_of(memory), QmqRouter(f"{subject}-")
    publisher = router.publisher(f"{subject}-out")

    @plain.subscriber("in", group="g")
    @publisher
    async def handle(body: Any) -> str:
        return "hi"

    router.include_router(plain)
    async with TestQmqBroker(router.broker, connect_only=False) as broker:
        answer = await broker.request("hello", f"{subject}-in")
        assert await answer.decode() == "hi"
        handle.mock.assert_called_once_with("hello")
        publisher.mock.assert_called_once_with("hi")
    with pytest.raises(TypeError, match="StreamRouter"):
        router.include_router(router_of(memory))
