"""Login, and protection against other sites: the console has no rights of its own."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from urllib.parse import urlencode

import pytest
from support import eventually
from support.console import COOKIE, KEY, PlainBrowser, clients_of, csrf_of, site_of

from qmq.console import app as console_app
from qmq.console.app import ConsoleServer, own_path
from qmq.console.config import ConsoleConfig, LoginMode, check
from qmq.console.guard import FORM_BYTES_MAX
from qmq.console.sessions import (
    IDLE_S,
    LIFE_S,
    SESSIONS_EACH_MAX,
    SESSIONS_MAX,
    ConsoleCaller,
    Sessions,
)
from qmq.errors import InvalidArgument
from qmq.testing import TestCluster

HOST = "127.0.0.1"


@pytest.fixture
async def stranger(cluster: TestCluster) -> AsyncIterator[PlainBrowser]:
    """A browser that has not logged in."""
    site = site_of(cluster)
    yield PlainBrowser(site)
    await site.close()


@pytest.mark.parametrize(
    "path", ["/", "/history.json", "/subjects", "/subjects/orders", "/subjects/orders/tail"]
)
async def test_nothing_is_shown_to_who_is_not_logged_in(path: str, stranger: PlainBrowser) -> None:
    answer = await stranger.ask("GET", path)
    assert answer.status == 303
    assert answer.headers["location"].startswith("/login")


async def test_a_wrong_key_is_refused(stranger: PlainBrowser) -> None:
    answer = await stranger.get("/login?key=guessed")
    assert answer.status == 403
    assert COOKIE not in stranger.cookies


async def test_the_cookie_is_kept_from_scripts_and_other_sites(stranger: PlainBrowser) -> None:
    answer = await stranger.ask("GET", f"/login?key={KEY}")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert KEY not in cookie


async def test_every_answer_forbids_inline_scripts_foreign_sources_and_frames(
    browser: PlainBrowser,
) -> None:
    for path in ("/", "/login", "/nowhere", "/static/app.js", "/subjects/none"):
        headers = (await browser.ask("GET", path)).headers
        policy = headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
    page = (await browser.get("/")).text
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|style=|<style", page)
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//", page)


async def test_a_host_of_another_name_is_not_served(browser: PlainBrowser) -> None:
    assert (await browser.ask("GET", "/", {"host": "evil.example:20888"})).status == 421
    assert (await browser.ask("GET", "/", {"host": "localhost:20888"})).status == 200
    assert (await browser.ask("GET", "/", {"host": ""})).status == 421


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "", "origin": "http://evil.example"},
    ],
)
async def test_a_form_of_another_site_is_refused(
    headers: dict[str, str], browser: PlainBrowser
) -> None:
    assert (await browser.ask("POST", "/logout", headers)).status == 403


async def test_a_large_form_or_one_of_unknown_size_is_refused(browser: PlainBrowser) -> None:
    assert (await browser.ask("POST", "/logout", {"content-length": "999999"})).status == 413
    assert (await browser.ask("POST", "/logout", {"content-length": ""})).status == 413
    assert (await browser.ask("DELETE", "/")).status == 405


async def test_who_logs_out_is_out(browser: PlainBrowser) -> None:
    old = dict(browser.cookies)
    await browser.post("/logout", {})
    browser.cookies = old
    assert (await browser.ask("GET", "/")).status == 303


async def test_a_logout_without_the_form_s_token_does_nothing(browser: PlainBrowser) -> None:
    assert csrf_of((await browser.get("/")).text)
    kept = dict(browser.cookies)
    await browser.ask("POST", "/logout")
    browser.cookies = kept
    assert (await browser.ask("GET", "/")).status == 200


async def secured(cluster: TestCluster) -> dict[str, str]:
    """Tokens of an administrator and of a user who may see one subject, in a cluster that enforces
    rules.
    """
    mq = cluster.client()
    await mq.send("orders", b"seen")
    await mq.send("secrets", b"hidden")
    tokens = {name: (await mq.access.create_token(name)).token for name in ("op:alice", "op:bob")}
    for kind in ("cluster", "subject", "group"):
        await mq.access.put_rule("op:alice", (), kind)
    await mq.access.put_rule("op:bob", ("browse", "describe"), "subject", "orders")
    await cluster.client(token=tokens["op:alice"]).access.set_mode("enforce")
    return tokens


async def test_who_logs_in_by_token_sees_what_the_rules_allow_that_token(
    cluster: TestCluster,
) -> None:
    tokens = await secured(cluster)
    site = site_of(cluster, login=LoginMode.TOKEN)
    seen = {}
    for name, token in tokens.items():
        browser = PlainBrowser(site)
        page = await browser.post("/login", {"token": token, "csrf": ""})
        assert page.status == 200, page.text
        assert name in page.text
        seen[name] = [
            (await browser.get(f"/subjects/{subject}")).text for subject in ("orders", "secrets")
        ]
        assert token not in page.text
        assert token not in str(browser.cookies)
    assert "seen" in seen["op:alice"][0]
    assert "hidden" in seen["op:alice"][1]
    assert "seen" in seen["op:bob"][0]
    assert "hidden" not in seen["op:bob"][1]
    await site.close()


async def test_a_token_that_the_cluster_does_not_know_opens_no_session(
    cluster: TestCluster,
) -> None:
    await secured(cluster)
    site = site_of(cluster, login=LoginMode.TOKEN)
    browser = PlainBrowser(site)
    for token in ("qmq-nonsense", "two words", ""):
        page = await browser.post("/login", {"token": token, "csrf": ""})
        assert page.status == 403, page.text
        assert not site.sessions.callers()
    await site.close()


async def test_a_token_by_a_proxy_counts_only_from_the_trusted_one(cluster: TestCluster) -> None:
    tokens = await secured(cluster)
    site = site_of(cluster, login=LoginMode.PROXY, proxies=("10.9.9.9",))
    header = {"x-forwarded-access-token": tokens["op:alice"]}
    assert (await PlainBrowser(site).ask("GET", "/", header)).status == 401
    assert (await PlainBrowser(site, peer="10.9.9.9").ask("GET", "/")).status == 401
    browser = PlainBrowser(site, peer="10.9.9.9")
    assert "op:alice" in (await browser.ask("GET", "/", header)).text
    assert (
        "op:bob"
        in (await browser.ask("GET", "/", {"x-forwarded-access-token": tokens["op:bob"]})).text
    )
    await site.close()


async def test_of_a_proxy_s_header_only_one_token_counts_in_one_form(cluster: TestCluster) -> None:
    tokens = await secured(cluster)
    alice, bob = (tokens[name].encode() for name in ("op:alice", "op:bob"))
    server = ConsoleServer(
        ConsoleConfig("", port=0, login=LoginMode.PROXY, proxies=(HOST,)),
        lambda token: cluster.client(token=token),
    )
    await server.start()
    header = b"x-forwarded-access-token: "
    statuses = {
        200: [
            header + alice,
            header.upper() + alice,
            header + b"Bearer " + alice,
            header + b"bearer " + alice,
        ],
        400: [
            *(
                header + alice + b"\r\n" + header + bob,
                header + b"\r\n" + header + alice,
                header + alice + b", " + bob,
            ),
            *(
                header + b"a\x01b",
                header + b"a\xffb",
                header + "\ud800".encode("utf-8", "surrogatepass"),
                header + b"x" * 15_000,
                header + b"a\x00b",
            ),
        ],
        401: [
            *(
                b"x_forwarded_access_token: " + alice,
                b"X-Forwarded_Access-Token: " + alice,
                b"authorization: Bearer " + alice,
                header,
            ),
            *(header + b"node:broker0", header + b"op:alice", header + b"Bearer "),
        ],
    }
    try:
        for status, heads in statuses.items():
            for each in heads:
                answer = await answered(server.port, each)
                assert answer.startswith(b"HTTP/1.1 %d " % status), (each[:100], answer[:200])
                assert (b"op:alice" in answer) is (status == 200)
        assert len(server.site.sessions.callers()) == len(statuses[200])
    finally:
        await server.stop()


async def answered(port: int, head: bytes) -> bytes:
    """The answer to a request with these lines in its head."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(
            b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n" + head + b"\r\n\r\n"
        )
        return await reader.read()
    finally:
        writer.close()


async def test_a_token_that_the_proxy_renews_keeps_the_session_its_forms_and_its_jobs(
    cluster: TestCluster,
) -> None:
    mq = cluster.client()
    await mq.send("orders", b"one")
    async with mq.consumer("orders", "billing", ack="explicit") as consumer:
        (await anext(consumer)).reject("broken")
    await eventually(lambda: mq.metadata.dead_letter_queues("billing"))
    old, new, other = [
        await mq.access.create_token(name) for name in ("op:alice", "op:alice", "op:bob")
    ]
    site = site_of(cluster, login=LoginMode.PROXY, proxies=("10.9.9.9",), is_writable=True)
    alice = PlainBrowser(site, peer="10.9.9.9")
    shown = {"x-forwarded-access-token": old.token}
    csrf = csrf_of((await alice.ask("GET", "/", shown)).text)
    form = urlencode({"csrf": csrf, "verb": "replay", "rate": "1"}).encode()
    job = (await alice.ask("POST", "/dead-letters/billing", shown, form)).headers["location"]
    await mq.access.delete_tokens(token_id=old.info.id)
    shown = {"x-forwarded-access-token": new.token}
    page = await alice.ask("GET", job, shown)
    assert (page.status, csrf_of(page.text)) == (200, csrf)
    assert "Replay" in page.text
    again = await alice.ask("POST", "/dead-letters/billing", shown, form)
    assert again.status == 303
    assert (await alice.ask("GET", again.headers["location"], shown)).status == 200
    assert (await alice.ask("GET", "/", {"x-forwarded-access-token": old.token})).status == 401
    assert (await alice.ask("GET", "/", shown)).status == 200
    (caller,) = site.sessions.callers()
    bob = await alice.ask("GET", job.partition("?")[0], {"x-forwarded-access-token": other.token})
    assert bob.status == 404
    assert caller not in site.sessions.callers(), (
        "the session of another person ends, and its jobs with it"
    )
    await site.close()


async def test_two_consoles_of_one_host_share_a_browser(cluster: TestCluster) -> None:
    cookies: dict[str, str] = {}
    browsers = [
        PlainBrowser(site_of(cluster), cookies, host=f"localhost:{port}") for port in (20888, 20889)
    ]
    for browser in browsers:
        await browser.log_in()
    assert [(await browser.ask("GET", "/")).status for browser in browsers] == [200, 200]
    await browsers[0].post("/logout", {})
    assert [(await browser.ask("GET", "/")).status for browser in browsers] == [303, 200]
    for browser in browsers:
        await browser.site.close()


@pytest.mark.parametrize(
    ("listens", "host"),
    [
        ("fd00::1", "[fd00::1]:20888"),
        ("[fd00::1]", "[fd00::1]"),
        ("fd00:0:0::1", "[fd00::1]:443"),
        ("127.0.0.1", "[::1]:20888"),
    ],
)
async def test_a_console_on_an_ipv6_address_serves_the_host_that_browsers_send(
    cluster: TestCluster, listens: str, host: str
) -> None:
    site = site_of(cluster, host=listens)
    assert (await PlainBrowser(site, host=host).ask("GET", "/login")).status == 200
    assert (await PlainBrowser(site, host="[fd00::2]:20888").ask("GET", "/login")).status == 421
    await site.close()


def test_after_a_login_only_paths_of_the_console_are_gone_to() -> None:
    for own in ("/", "/subjects/a?content=b"):
        assert own_path(own) == own
    for other in (
        "https://evil.example",
        "//evil.example",
        "/\\evil.example",
        "javascript:1",
        "",
        "/a\\b",
        "/a\r\nset-cookie: x",
    ):
        assert own_path(other) == "/"


def test_sessions_end_when_they_are_idle_old_or_too_many() -> None:
    now_s = [0.0]
    sessions = Sessions(lambda: now_s[0])
    first = sessions.open(None, None)  # type: ignore[arg-type]  # nothing is asked of it here
    now_s[0] = IDLE_S - 1
    assert sessions.find(first.id) is first
    now_s[0] += IDLE_S + 1
    assert sessions.find(first.id) is None
    assert sessions.ended() == [first]
    second = sessions.open(None, None)  # type: ignore[arg-type]
    for _ in range(int(LIFE_S / IDLE_S) + 1):
        now_s[0] += IDLE_S - 1
        sessions.find(second.id)
    assert sessions.find(second.id) is None
    sessions.ended()
    many = [sessions.open(None, None) for _ in range(SESSIONS_MAX + 1)]  # type: ignore[arg-type]
    assert sessions.ended() == [many[0]]


async def test_a_body_longer_than_its_content_length_says_is_refused(cluster: TestCluster) -> None:
    site = site_of(cluster, login=LoginMode.TOKEN)
    answer = await PlainBrowser(site).ask(
        "POST",
        "/login",
        {"content-length": "10", "transfer-encoding": "chunked"},
        bytes(FORM_BYTES_MAX + 1),
    )
    assert answer.status == 413
    await site.close()


def test_logins_of_one_principal_end_no_session_of_another() -> None:
    sessions = Sessions(lambda: 0.0)
    victim = sessions.open("v", None, None, "op:victim")  # type: ignore[arg-type]  # nothing is asked of it here
    many = [sessions.open("m", None, None, "app:mallory") for _ in range(SESSIONS_MAX + 1)]  # type: ignore[arg-type]
    assert sessions.ended() == many[:-SESSIONS_EACH_MAX]
    assert sessions.find(victim.id) is victim


def test_when_all_places_are_taken_the_principal_with_the_most_sessions_pays() -> None:
    sessions = Sessions(lambda: 0.0)
    first = sessions.open("v", None, None, "op:first")  # type: ignore[arg-type]
    two = [sessions.open("t", None, None, "op:two") for _ in range(2)]  # type: ignore[arg-type]
    for number in range(SESSIONS_MAX - 2):
        sessions.open("o", None, None, f"op:other-{number}")  # type: ignore[arg-type]
    assert sessions.ended() == two[:1]
    assert sessions.find(first.id) is first


def test_a_console_is_not_opened_to_strangers_by_accident() -> None:
    assert check(ConsoleConfig("s"), is_insecure=False) == ()
    for config in (
        ConsoleConfig("s", host="10.0.0.1"),
        ConsoleConfig("s", host="0.0.0.0", login=LoginMode.TOKEN),
    ):
        with pytest.raises(InvalidArgument, match="--insecure"):
            check(config, is_insecure=False)
        assert check(config, is_insecure=True)
    with pytest.raises(InvalidArgument, match="--trusted-proxy"):
        check(ConsoleConfig("s", login=LoginMode.PROXY), is_insecure=True)
    for name in ("proxy.local", "10.0.0.0/8", "[::1]", "0:0::1", ""):
        with pytest.raises(InvalidArgument, match="is an IP address"):
            check(ConsoleConfig("s", login=LoginMode.PROXY, proxies=(name,)), is_insecure=True)


async def test_one_principal_that_fills_the_places_leaves_room_for_another(
    cluster: TestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console_app, "REQUESTS_MAX", 4)
    await cluster.client().send("orders", b"x")
    server = ConsoleServer(ConsoleConfig(cluster.address, port=0), clients_of(cluster))
    await server.start()
    cookies = {}
    for name in ("mallory", "alice"):
        caller = ConsoleCaller(cluster.client(), time.monotonic, time.time)
        cookies[name] = (
            f"{COOKIE.rpartition('_')[0]}_{server.port}={server.site.sessions.open(None, caller, principal=f'app:{name}').id}"  # noqa: E501
        )

    async def answer(
        name: str, path: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
        reader, writer = await asyncio.open_connection(HOST, server.port)
        writer.write(
            (
                f"GET {path} HTTP/1.1\r\nhost: {HOST}:{server.port}\r\ncookie: "
                f"{cookies[name]}\r\n\r\n"
            ).encode()
        )
        return reader, writer, await reader.readline()

    held = [await answer("mallory", "/subjects/orders/tail") for _ in range(4)]
    found = await answer("alice", "/subjects")
    assert [line for _, _, line in (*held, found)] == [b"HTTP/1.1 200 OK\r\n"] * 5
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await held[0][0].readuntil(b"\r\n0\r\n")
    for _, writer, _ in (*held, found):
        writer.close()
    await server.stop()
