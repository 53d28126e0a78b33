"""HTTP: sending in every mode, receiving, settling, tokens, and the OpenAPI description, over a
real socket.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from support import eventually
from support.forms import examples

httpx = pytest.importorskip("httpx", reason="needs httpx: pip install httpx")
pytest.importorskip("starlette", reason="needs starlette: pip install 'qmq[http]'")

import qmq  # noqa: E402
from qmq.client.group_reading import OrderedReading  # noqa: E402
from qmq.errors import QuotaExceeded  # noqa: E402
from qmq.integrations.http import site  # noqa: E402
from qmq.integrations.http.clients import CLIENTS_MAX, HttpClients, settle  # noqa: E402
from qmq.integrations.http.openapi import document  # noqa: E402
from qmq.integrations.http.requests import WAIT_S_MAX, Settle  # noqa: E402
from qmq.integrations.http.site import HttpConfig, HttpServer  # noqa: E402

ACK = Settle((), "ack", None, "")
EVENT = {"id": "1", "source": "/shop", "type": "order.new", "specversion": "1.0"}


def connecting(address: str) -> Callable[[str], qmq.Client]:
    return lambda token: qmq.connect(address, token=lambda: token, state_dir=False)


@pytest.fixture
async def http(address: str) -> AsyncIterator[Any]:
    server = HttpServer(HttpConfig("127.0.0.1", 0), connecting(address))
    await server.start()
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        yield client
    await server.stop()


@pytest.fixture
async def mq(address: str) -> AsyncIterator[qmq.Client]:
    async with qmq.connect(address, state_dir=False) as client:
        yield client


@pytest.fixture
def subject() -> str:
    return f"http-{uuid4().hex}"


async def received(http: Any, subject: str, **ask: object) -> list[Any]:
    answer = await http.post(f"/subjects/{subject}/groups/g/receive", json={"wait_s": 20, **ask})
    assert answer.status_code == 200, answer.text
    return answer.json()["messages"]  # type: ignore[no-any-return]


async def settled(http: Any, subject: str, *receipts: str, **how: object) -> Any:
    return (
        await http.post(f"/subjects/{subject}/groups/g/settle", json={"receipts": receipts, **how})
    ).json()


async def test_a_body_is_a_message_unchanged(http: Any, mq: qmq.Client, subject: str) -> None:
    answer = await http.post(
        f"/subjects/{subject}?key=k&tag=a&tag=b",
        content=b"\x00hello",
        headers={"content-type": "text/plain"},
    )
    message = await anext(aiter(mq.consumer(subject, "g")))
    assert message.body == b"\x00hello"
    assert message.key == "k"
    assert message.tags == ("a", "b")
    assert message.headers == {"content-type": b"text/plain"}
    assert answer.json() == {"messages": [{"id": str(message.id)}]}


async def test_an_event_in_binary_mode_keeps_its_headers(
    http: Any, mq: qmq.Client, subject: str
) -> None:
    headers = {f"ce-{name}": value for name, value in EVENT.items()}
    more = {"ce-partitionkey": "k", "content-type": "application/json"}
    answer = await http.post(f"/subjects/{subject}", content=b"{}", headers={**headers, **more})
    assert answer.status_code == 200, answer.text
    message = await anext(aiter(mq.consumer(subject, "g")))
    assert {name: message.headers[name].decode() for name in headers} == headers
    assert (message.key, message.headers["content-type"]) == ("k", b"application/json")


async def test_events_in_structured_and_batch_mode_are_stored_as_binary_ones(
    http: Any, subject: str
) -> None:
    one = {**EVENT, "data": {"n": 1}}
    await http.post(
        f"/subjects/{subject}", json=one, headers={"content-type": "application/cloudevents+json"}
    )
    batch = [{**EVENT, "id": str(n), "data": {"n": n}} for n in (2, 3)]
    answer = await http.post(
        f"/subjects/{subject}",
        json=batch,
        headers={"content-type": "application/cloudevents-batch+json"},
    )
    assert len(answer.json()["messages"]) == 2
    found: list[Any] = []
    while len(found) < 3:
        found += await received(http, subject)
    assert [each["event"] for each in found] == [
        {**each, "datacontenttype": "application/json"} for each in (one, *batch)
    ]
    assert base64.b64decode(found[0]["body_base64"]) == b'{"n": 1}'


async def test_a_message_belongs_to_the_caller_until_it_is_settled(http: Any, subject: str) -> None:
    await http.post(f"/subjects/{subject}", content=b"x")
    (first,) = await received(http, subject)
    assert await received(http, subject, wait_s=0) == []
    assert await settled(
        http, subject, first["receipt"], verdict="nack", delay_s=0, error="not now"
    ) == {"settled": [first["receipt"]], "over": []}
    (again,) = await received(http, subject)
    assert (again["id"], again["attempt"]) == (first["id"], 2)
    assert (await settled(http, subject, again["receipt"], first["receipt"]))["over"] == [
        first["receipt"]
    ]
    assert await received(http, subject, wait_s=0) == []


async def test_a_message_without_a_verdict_comes_again_when_its_time_is_over(
    http: Any, subject: str
) -> None:
    await http.post(f"/subjects/{subject}", content=b"x")
    (first,) = await received(http, subject, invisible_s=1)
    (again,) = await received(http, subject)
    assert (again["id"], again["attempt"]) == (first["id"], 2)
    assert (await settled(http, subject, first["receipt"]))["over"] == [first["receipt"]]


async def test_a_rejected_message_is_in_the_dead_letter_queue(
    http: Any, mq: qmq.Client, subject: str
) -> None:
    await http.post(f"/subjects/{subject}", content=b"poison")
    answer = await http.post(f"/subjects/{subject}/groups/{subject}/receive", json={"wait_s": 20})
    (found,) = answer.json()["messages"]
    await http.post(
        f"/subjects/{subject}/groups/{subject}/settle",
        json={"receipts": [found["receipt"]], "verdict": "reject", "error": "no"},
    )
    letter = await anext(aiter(mq.consumer(f"%dlq%{subject}", "readers")))
    assert (letter.body, letter.headers["qmq-error"]) == (b"poison", b"no")


async def test_between_requests_unrequested_messages_go_to_others_of_the_group(
    http: Any, mq: qmq.Client, subject: str
) -> None:
    for n in range(3):
        await http.post(f"/subjects/{subject}", content=str(n))
    (first,) = await received(http, subject, messages_max=1)
    consumer = mq.consumer(subject, "g")
    others = [(await anext(aiter(consumer))).body for _ in range(2)]
    assert sorted([base64.b64decode(first["body_base64"]), *others]) == [b"0", b"1", b"2"]


async def test_a_delayed_message_says_its_id(http: Any, mq: qmq.Client, subject: str) -> None:
    (found,) = (await http.post(f"/subjects/{subject}?delay_s=86400", content=b"x")).json()[
        "messages"
    ]
    assert (await mq.delayed.cancel(found["delayed_id"])).state == "cancelled"


@pytest.fixture
async def ordered(mq: qmq.Client) -> str:
    subject = f"http-ordered-{uuid4().hex}"
    await mq.metadata.create_subject(
        qmq.SubjectConfig(subject, order=qmq.Order.STRICT, logical_partitions=16), partitions=2
    )
    return subject


def bodies(messages: list[Any]) -> list[bytes]:
    return [base64.b64decode(each["body_base64"]) for each in messages]


async def until_keys(http: Any, subject: str, count: int) -> list[Any]:
    """Receive until the client holds `count` messages."""
    found: list[Any] = []
    while len(found) < count:
        found += await received(http, subject)
    return sorted(found, key=lambda each: each["key"])  # type: ignore[no-any-return]


async def test_of_each_key_of_an_ordered_subject_one_message_is_in_hand_in_order(
    http: Any, ordered: str
) -> None:
    for n in range(3):
        for key in ("a", "b"):
            answer = await http.post(f"/subjects/{ordered}?key={key}", content=f"{key}{n}")
            assert answer.status_code == 200, answer.text
    for n in range(3):
        found = await until_keys(http, ordered, 2)
        assert bodies(found) == [f"a{n}".encode(), f"b{n}".encode()]
        assert await received(http, ordered, wait_s=0) == []
        assert (await settled(http, ordered, *[each["receipt"] for each in found]))["over"] == []


async def test_an_ordered_message_that_failed_comes_before_later_ones_of_its_key(
    http: Any, ordered: str
) -> None:
    for body in ("1", "2"):
        await http.post(f"/subjects/{ordered}?key=k", content=body)
    (first,) = await received(http, ordered)
    await settled(http, ordered, first["receipt"], verdict="release")
    (released,) = await received(http, ordered)
    await settled(http, ordered, released["receipt"], verdict="nack", delay_s=0, error="not now")
    (failed,) = await received(http, ordered, invisible_s=1)
    (late,) = await received(http, ordered)
    assert [each["attempt"] for each in (first, released, failed, late)] == [1, 1, 2, 3]
    assert {each["id"] for each in (first, released, failed, late)} == {first["id"]}
    assert late["token"] > 0
    await settled(http, ordered, late["receipt"])
    assert bodies(await received(http, ordered)) == [b"2"]


async def test_a_rejected_ordered_message_parks_its_key_and_no_other(
    http: Any, mq: qmq.Client, ordered: str
) -> None:
    for key in ("bad", "bad", "good"):
        await http.post(f"/subjects/{ordered}?key={key}", content=key)
    bad, _ = await until_keys(http, ordered, 2)
    await settled(http, ordered, bad["receipt"], verdict="reject", error="no use")
    while not (parked := list(await mq.metadata.parked(ordered, "g"))):
        await asyncio.sleep(0)
    assert [each.key for each in parked] == [b"bad"]
    assert await received(http, ordered, wait_s=0) == []


async def test_events_of_a_batch_are_in_the_order_of_their_partitionkey(
    http: Any, ordered: str
) -> None:
    batch = [{**EVENT, "id": str(n), "partitionkey": "order-7", "data": n} for n in range(3)]
    answer = await http.post(
        f"/subjects/{ordered}",
        json=batch,
        headers={"content-type": "application/cloudevents-batch+json"},
    )
    assert answer.status_code == 200, answer.text
    for n in range(3):
        (found,) = await received(http, ordered)
        assert (found["event"]["data"], found["key"]) == (n, "order-7")
        await settled(http, ordered, found["receipt"])


async def test_a_message_without_a_key_to_an_ordered_subject_is_a_problem_that_says_so(
    http: Any, ordered: str
) -> None:
    answer = await http.post(f"/subjects/{ordered}", content=b"x")
    assert answer.status_code == 400
    assert "key" in answer.json()["error"]


async def test_keys_go_to_another_gateway_without_requests_here(
    mq: qmq.Client, ordered: str
) -> None:
    reading = OrderedReading(mq, ordered, "g", idle_s=0)
    await mq.send(ordered, b"1", key="k")
    (first,) = await reading.receive(1, 20)
    reading.idle()
    async with mq.ordered_consumer(ordered, "g", ack="explicit") as other:
        settle(first, ACK)
        reading.settled()
        await mq.send(ordered, b"2", key="k")
        message = await anext(aiter(other))
        assert message.body == b"2"
        await message.ack_sync()
    await mq.send(ordered, b"3", key="k")
    (third,) = await reading.receive(1, 20)
    assert third.body == b"3"
    settle(third, ACK)
    reading.settled()
    await reading.close()


@pytest.mark.parametrize(
    ("path", "options", "status"),
    [
        ("/subjects/a b", {}, 400),
        ("/subjects/s?delay_s=-1", {}, 400),
        ("/subjects/s?delay_s=nan", {}, 400),
        (
            "/subjects/s",
            {"headers": {"content-type": "application/cloudevents+json"}, "content": b"{"},
            400,
        ),
        ("/subjects/s/groups/g/receive", {"json": {"messages": 1}}, 400),
        ("/subjects/s/groups/g/receive", {"json": {"messages_max": 1.5}}, 400),
        ("/subjects/s/groups/g/settle", {"json": {"receipts": []}}, 400),
        ("/subjects/s/groups/g/settle", {"json": {"receipts": ["r"], "verdict": "perhaps"}}, 400),
        ("/subjects/s", {"headers": {"authorization": "Basic eDp5"}}, 401),
        ("/subjects/s", {"content": b"x" * (17 << 20)}, 413),
    ],
)
async def test_what_cannot_be_done_is_a_typed_problem(
    http: Any, path: str, options: Any, status: int
) -> None:
    answer = await http.post(path, **options)
    assert (answer.status_code, answer.json().keys()) == (status, {"code", "error", "outcome"})


async def test_a_request_without_a_token_is_refused_where_the_server_says_so(address: str) -> None:
    server = HttpServer(
        HttpConfig("127.0.0.1", 0, allows_anonymous=False),
        lambda token: qmq.connect(address, token=lambda: token, state_dir=False),
    )
    await server.start()
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        answer = await client.post("/subjects/s", content=b"x")
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    await server.stop()


async def test_made_up_tokens_are_answered_before_their_bodies_and_take_no_place(
    http: Any, subject: str
) -> None:
    """More than there are places for callers."""

    async def answered(number: int) -> tuple[bytes, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        token = f"authorization: Bearer made-up-{number}"
        writer.write(
            (
                f"POST /subjects/{subject} HTTP/1.1\r\nhost: h\r\n{token}\r\ncontent-length: "
                "5\r\n\r\n"
            ).encode()
        )
        return await reader.readline(), writer

    found = await asyncio.gather(*map(answered, range(CLIENTS_MAX + 20)))
    assert {line.split()[1] for line, _ in found} <= {b"401", b"429"}
    assert (await http.post(f"/subjects/{subject}", content=b"x")).status_code == 200
    for _, writer in found:
        writer.close()


@pytest.mark.parametrize(
    "headers",
    [{"origin": "http://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "same-origin"}],
)
async def test_a_page_of_a_browser_is_refused_under_any_name(
    http: Any, subject: str, headers: dict[str, str]
) -> None:
    answer = await http.post(
        f"/subjects/{subject}", content=b"x", headers={"host": "evil.example", **headers}
    )
    assert answer.status_code == 403, answer.text


class _FakeClient:
    """A client whose token is its principal. Sends of `mallory` end when they may."""

    def __init__(self, token: str) -> None:
        self.access, self.principal, self.is_open = self, token.partition("-")[0], True
        self.sends, self.may_end = 0, asyncio.Event()

    async def send(self, *_: object, **__: object) -> Any:
        self.sends += 1
        if self.principal == "mallory":
            await self.may_end.wait()
        return SimpleNamespace(id="1", delayed_id=None)

    async def whoami(self) -> Any:
        return self

    async def close(self) -> None:
        self.is_open = False


async def test_the_principal_with_the_most_tokens_makes_room_for_others() -> None:
    made: dict[str, _FakeClient] = {}

    def connect(token: str) -> Any:
        made[token] = _FakeClient(token)
        return made[token]

    clients = HttpClients(connect, allows_anonymous=True)
    async with AsyncExitStack() as under_way:
        await under_way.enter_async_context(clients.caller("Bearer bob-0"))
        for number in range(CLIENTS_MAX - 1):
            await under_way.enter_async_context(clients.caller(f"Bearer mallory-{number}"))
        await under_way.enter_async_context(clients.caller("Bearer alice-0"))
        with pytest.raises(QuotaExceeded):
            await under_way.enter_async_context(clients.caller("Bearer mallory-new"))
        assert [token for token, each in made.items() if not each.is_open] == [
            "mallory-0",
            "mallory-new",
        ]


async def test_one_principal_that_fills_the_places_leaves_room_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(site, "REQUESTS_MAX", 4)
    made = {token: _FakeClient(token) for token in ("mallory", "alice")}
    server = HttpServer(HttpConfig("127.0.0.1", 0), lambda token: made[token])  # type: ignore[arg-type, return-value]
    await server.start()
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:

        def send(token: str) -> Any:
            return asyncio.ensure_future(
                http.post("/subjects/s", content=b"x", headers={"authorization": f"Bearer {token}"})
            )

        sent = []
        for count in range(1, 5):
            sent.append(send("mallory"))
            await eventually(lambda count=count: made["mallory"].sends == count)  # type: ignore[misc]
        assert (await send("alice")).status_code == 200
        cut = await sent[0]
        assert (cut.status_code, cut.json()["code"], cut.json()["outcome"]) == (503, 302, "unknown")
        made["mallory"].may_end.set()
        assert [(await each).status_code for each in sent[1:]] == [200] * 3
    await server.stop()


async def test_the_description_is_not_made_for_each_request(
    http: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "document", None)
    answer = await http.get("/openapi.json")
    assert (answer.headers["content-type"], answer.json()) == ("application/json", document())


@pytest.mark.sampled
@pytest.mark.long
async def test_schemathesis_finds_no_answer_that_the_description_does_not_name(
    http: Any, tmp_path: Path
) -> None:
    pytest.importorskip("schemathesis", reason="needs schemathesis")
    found = (await http.get("/openapi.json")).text
    assert f'"maximum":{WAIT_S_MAX}' in found
    # so that it does not wait for messages
    (tmp_path / "openapi.json").write_text(
        found.replace(f'"maximum":{WAIT_S_MAX}', '"maximum":0.01')
    )
    checks = (
        "not_a_server_error,status_code_conformance,content_type_conformance,"
        "response_schema_conformance"
    )
    command = (
        f"-m schemathesis.cli run openapi.json --url {http.base_url} --checks {checks} "
        f"--max-examples {examples(20)} --generation-database none "
        "--phases examples,coverage,fuzzing"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command.split(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=tmp_path,
    )
    printed, _ = await process.communicate()
    assert process.returncode == 0, printed.decode()


CHANGE = {
    "id": "name:shop;lsn:29274832;txId:565;sequence:[null,29274832]",
    "source": "/debezium/postgresql/shop",
    "specversion": "1.0",
    "type": "io.debezium.connector.postgresql.DataChangeEvent",
    "time": "2026-01-13T13:55:39.738Z",
    "datacontenttype": "application/json",
    "iodebeziumop": "c",
    "iodebeziumversion": "3.4.0.Final",
    "iodebeziumtable": "customers",
    "iodebeziumxmin": None,
    "data": {
        "schema": {"type": "struct"},
        "payload": {"before": None, "after": {"id": 1004, "name": "Anne"}},
    },
}


async def test_a_change_that_debezium_server_posts_as_cloudevent_is_an_event(
    http: Any, subject: str
) -> None:
    answer = await http.post(
        f"/subjects/{subject}",
        json=CHANGE,
        headers={"content-type": "application/cloudevents+json"},
    )
    assert answer.status_code == 200, answer.text
    (found,) = await received(http, subject)
    assert found["event"] == {name: value for name, value in CHANGE.items() if value is not None}
    assert found["headers"]["ce-iodebeziumop"] == "c"


async def test_a_record_that_debezium_server_posts_keeps_its_headers(
    http: Any, mq: qmq.Client, subject: str
) -> None:
    headers = {
        "content-type": "application/json",
        "X-DEBEZIUM-ID": "c25kLTE=",
        "X-DEBEZIUM-EVENTTYPE": "T3JkZXJDcmVhdGVk",
    }
    answer = await http.post(f"/subjects/{subject}", content=b'{"order":7}', headers=headers)
    assert answer.status_code == 200, answer.text
    message = await anext(aiter(mq.consumer(subject, "g")))
    assert message.body == b'{"order":7}'
    assert message.headers == {name.lower(): value.encode() for name, value in headers.items()}


async def test_a_message_that_is_no_event_does_not_hold_up_its_neighbours(
    http: Any, mq: qmq.Client, subject: str
) -> None:
    event = {f"ce-{name}": value for name, value in EVENT.items()} | {
        "content-type": "application/json"
    }
    odd = [b"1e999", b'"\\ud800"', b"[" * 5_000, b"NaN"]
    for each in (*odd, b"1"):
        await mq.send(subject, each, headers=event)
    found: list[Any] = []
    while len(found) < len(odd) + 1:
        found += await received(http, subject)
    assert {base64.b64decode(each["body_base64"]) for each in found} == {*odd, b"1"}
    assert [each["event"]["data"] for each in found if "data" in each["event"]] == [1]


async def test_an_answer_is_bounded_in_bytes(http: Any, mq: qmq.Client, subject: str) -> None:
    async with mq.producer(subject, compression="zstd") as producer:
        for _ in range(12):
            await producer.send(bytes(2 << 20))
    read = 0
    while read < 12:
        found = await received(http, subject, messages_max=12)
        assert len(found) <= 4
        read += len((await settled(http, subject, *[each["receipt"] for each in found]))["settled"])
