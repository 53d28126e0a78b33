"""FastAPI on QMQ: the client's life, listeners beside the web server, the outbox as a dependency,
server-sent events.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

fastapi = pytest.importorskip("fastapi", reason="needs FastAPI: pip install 'qmq[fastapi]'")
import httpx  # noqa: E402
from sqlalchemy import text  # noqa: E402
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine  # noqa: E402

import qmq  # noqa: E402
from qmq.errors import ClientClosed, InvalidArgument, QmqError, UnknownSubject  # noqa: E402
from qmq.integrations.fastapi import outbox  # noqa: E402
from qmq.integrations.starlette import (  # noqa: E402
    QmqLifespan,
    event,
    position_text,
    positions_of,
)
from qmq.rpc.web_server import WebServer  # noqa: E402
from qmq.sql.outbox import Outbox, create_tables_async  # noqa: E402
from qmq.testing import TestCluster  # noqa: E402

SOON_S = 30


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TestCluster]:
    async with TestCluster(delay=False) as made:
        monkeypatch.setattr(qmq, "connect", lambda _addresses, **options: made.client(**options))
        yield made


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    made = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/shop.db")
    await create_tables_async(made)
    async with made.begin() as connection:
        await connection.execute(text("CREATE TABLE orders (id INTEGER PRIMARY KEY)"))
    yield made
    await made.dispose()


@asynccontextmanager
async def calling(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of the running application, which shares the test's event loop."""
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://app") as http:
            yield http


async def test_a_path_function_sends_and_a_listener_beside_it_receives(
    cluster: TestCluster,
) -> None:
    messaging, heard = QmqLifespan(), asyncio.Queue[dict[str, int]]()
    app, client = fastapi.FastAPI(lifespan=messaging), fastapi.Depends(messaging.client)

    @app.post("/orders/{number}")
    async def order(number: int, mq: qmq.Client = client) -> None:
        await mq.send("orders", {"id": number})

    @messaging.listener("orders", group="billing")
    async def bill(order: dict[str, int]) -> None:
        await heard.put(order)

    async with calling(app) as http, asyncio.timeout(SOON_S):
        assert (await http.post("/orders/7")).status_code == 200
        assert await heard.get() == {"id": 7}
    with pytest.raises(ClientClosed, match="lifespan"):
        messaging.client()


async def test_a_listener_that_fails_ends_the_web_server(cluster: TestCluster) -> None:
    failed = asyncio.Queue[QmqError]()
    messaging = QmqLifespan(failed=failed.put_nowait, create_subjects=False)

    @messaging.listener("nowhere", group="billing")
    async def bill(body: bytes) -> None: ...

    with pytest.raises(UnknownSubject):
        async with messaging(object()), asyncio.timeout(SOON_S):
            assert isinstance(await failed.get(), UnknownSubject)


def shop(messaging: QmqLifespan, engine: AsyncEngine) -> Any:
    app, box_of_call = fastapi.FastAPI(lifespan=messaging), outbox(messaging, engine)

    @app.post("/orders/{number}")
    async def order(number: int, box: Outbox = box_of_call) -> None:
        await box.connection.execute(text("INSERT INTO orders VALUES (:id)"), {"id": number})
        box.send("orders", b"%d" % number)
        if number == 13:
            raise fastapi.HTTPException(409, "no such luck")

    return app


async def orders_in(engine: AsyncEngine) -> list[int]:
    async with engine.connect() as connection:
        return [
            row[0] for row in await connection.execute(text("SELECT id FROM orders ORDER BY id"))
        ]


async def test_the_outbox_commits_before_the_answer_and_rolls_back_with_an_error(
    cluster: TestCluster, engine: AsyncEngine
) -> None:
    async with calling(shop(QmqLifespan(), engine)) as http:
        assert (await http.post("/orders/13")).status_code == 409
        assert (await http.post("/orders/7")).status_code == 200
        assert await orders_in(engine) == [7]
        async with cluster.client().consumer("orders", "shop") as consumer, asyncio.timeout(SOON_S):
            assert (await anext(consumer)).body == b"7"


async def test_a_commit_that_fails_is_an_error_for_the_caller(
    cluster: TestCluster, engine: AsyncEngine
) -> None:
    async with engine.begin() as connection:
        await connection.execute(text("DROP TABLE qmq_outbox"))
    async with calling(shop(QmqLifespan(), engine)) as http:
        assert (await http.post("/orders/7")).status_code == 500
    assert await orders_in(engine) == []


def news(**options: Any) -> fastapi.FastAPI:
    """An application with the events of subject news, of its messages with a tag, and of another
    subject.
    """
    messaging = QmqLifespan(**options)
    app = fastapi.FastAPI(lifespan=messaging)

    @app.get("/events")
    async def events(request: fastapi.Request, tag: str = "", subject: str = "news") -> Any:
        return await messaging.events(request, subject, tags_any=[tag] if tag else [])

    return app


async def test_a_browser_sees_messages_from_now_on_and_after_a_gap_those_it_missed(
    cluster: TestCluster,
) -> None:
    app = news()
    mq = cluster.client()
    await mq.send("news", b"before")
    async with served(app) as http:
        first, _ = await heard(http, {}, 0)
        await mq.send("news", "two\nlines")
        last, seen = await heard(http, {"last-event-id": first}, 1)
        assert seen == ["two\nlines"]
        await mq.send("news", b"after")
        assert (await heard(http, {"last-event-id": last}, 1))[1] == ["after"]


async def test_a_browser_continues_at_another_process_with_the_same_key(
    cluster: TestCluster,
) -> None:
    mq = cluster.client()
    await mq.send("news", b"before")
    apps = [
        news(event_key="a secret of the application"),
        news(event_key=b"a secret of the application"),
        news(),
    ]
    async with served(apps[0]) as one, served(apps[1]) as two, served(apps[2]) as other:
        first, _ = await heard(one, {}, 0)
        await mq.send("news", b"missed")
        assert (await heard(two, {"last-event-id": first}, 1))[1] == ["missed"]
        assert await is_reset(other, first)


async def test_a_browser_cannot_choose_where_its_stream_begins(cluster: TestCluster) -> None:
    mq = cluster.client()
    for subject in ("news", "secrets"):
        await mq.send(subject, b"old")
    async with served(news()) as http:
        last, _ = await heard(http, {}, 0)
        told, _, seal = last.rpartition("~")
        queues = [each.rpartition("/")[0] for each in told.split(",")]
        oldest = ",".join(f"{queue}/0" for queue in queues)
        for forged in (
            oldest,
            f"{oldest}~{seal}",
            f"{oldest}~",
            f"{told}~{seal[:-1]}",
            told,
            "?",
            "~",
            "é",
        ):
            assert await is_reset(http, forged), forged
        assert await is_reset(http, last, "?tag=public")
        assert await is_reset(http, last, "?subject=secrets")
        assert not await is_reset(http, last)


def test_a_short_key_for_ids_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="16 bytes"):
        QmqLifespan(event_key="short")


async def is_reset(http: httpx.AsyncClient, last: str, query: str = "") -> bool:
    """Whether the stream begins now for a browser that sends this id, and says so."""
    async with http.stream(
        "GET", f"/events{query}", headers={"last-event-id": last.encode()}
    ) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            return line == "event: reset"
    raise AssertionError("the stream has no line")


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of the application behind a real socket: streams end when their reader
    closes.
    """
    server = WebServer(app, "127.0.0.1", 0, requests_max=10)
    async with app.router.lifespan_context(app):
        port = await server.start()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=SOON_S) as http:
            yield http
        await server.stop()


async def heard(
    http: httpx.AsyncClient, headers: dict[str, str], count: int
) -> tuple[str, list[str]]:
    """The id of the last event, and the data of this many events."""
    last, seen = "", [list[str]()]
    async with http.stream("GET", "/events", headers=headers) as answer:
        async for line in answer.aiter_lines():
            if found := re.fullmatch("id: (.+)", line):
                last = found[1]
            elif found := re.fullmatch("data: (.*)", line):
                seen[-1].append(found[1])
            elif not line and seen[-1]:
                seen.append([])
            if not line and len(seen) == count + 1:
                break
    return last, ["\n".join(lines) for lines in seen[:-1]]


def test_an_events_id_says_how_far_each_queue_was_read() -> None:
    positions = {("group-1", 0): 7, ("group-2", -1): 9}
    assert positions_of(position_text(positions)) == positions
    assert positions_of("") == {}
    with pytest.raises(InvalidArgument, match="Last-Event-ID"):
        positions_of("group-1/0")
    assert event("x", "a\r\nb\u2028c\rd") == "id: x\ndata: a\ndata: b\u2028c\ndata: d\n\n"
