"""Secrets in configuration and credentials are where they belong, and nowhere else, after
everything has worked with them.

One run: a node with TLS and enforced rules, the RocketMQ gateway, the console and a Spark job, as
processes with all they log. The search covers what they print and log, audit logs, metrics, errors,
answers, the console's pages and JSON, what commands print, Spark's pages and event logs, and every
file that is left, state files included.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import re
import sqlite3
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import grpc
import pytest
from access_support import EC, ISSUER, Papers, jwks
from access_support import token as jwt_of
from cryptography.hazmat.primitives import serialization
from fast_session import MESSAGES, drive, variables
from support import NodeProcess, cli_process
from support.secret_scan import plant

import qmq
from qmq.errors import QmqError
from qmq.proto.rocketmq import definition_pb2 as api
from qmq.proto.rocketmq import service_pb2 as calls
from qmq.proto.rocketmq.service_pb2_grpc import MessagingServiceStub
from qmq.security.principal import Principal
from qmq.security.tls import Credentials, Tls
from qmq.security.tokens import new_token

pytestmark = [pytest.mark.longest, pytest.mark.xdist_group("drivers")]

PAGES_MAX = 80
LINK = re.compile(r'(?:href|data-url|src)="(/[^"#]*)"')


@dataclass
class Secrets:
    """Planted secrets by name, as the bytes that are looked for, and the files in which each
    belongs.
    """

    folder: Path
    values: dict[str, bytes] = field(default_factory=dict)
    homes: dict[str, set[str]] = field(default_factory=dict)

    def plant(self, name: str, secret: str, *homes: Path) -> str:
        """Look for a secret from here on. Its telling part must not be in a file other than its
        homes.
        """
        self.values[name] = plant(_telling(secret)).encode()
        self.homes[name] = {str(each.relative_to(self.folder)) for each in homes}
        return secret

    def in_files(self) -> dict[str, set[str]]:
        """Where each secret is, of all files in the folder."""
        found: dict[str, set[str]] = {name: set() for name in self.values}
        for path in self.folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                content = path.read_bytes()
                for name, value in self.values.items():
                    if value in content:
                        found[name].add(str(path.relative_to(self.folder)))
        return found

    def in_text(self, text: str) -> list[str]:
        """The names of the secrets in a text."""
        content = text.encode()
        return [name for name, value in self.values.items() if value in content]


def _telling(secret: str) -> str:
    """The part of a secret that is secret: a token has a public id, a JWT public claims, a key's
    file a public frame.
    """
    if "PRIVATE KEY" in secret:
        return secret.splitlines()[1]
    if secret.startswith("qmq_"):
        return secret.split("_", 2)[2]
    return secret.rpartition(".")[2]


@asynccontextmanager
async def started(
    *words: str, folder: Path, ready: str, environment: Mapping[str, str]
) -> AsyncIterator[str]:
    """A command as a process, which writes to FOLDER/NAME.log and .err; yields the line that says
    it is ready. It stops cleanly.
    """
    out, errors = folder / f"{words[0]}.log", folder / f"{words[0]}.err"
    with out.open("wb") as to_out, errors.open("wb") as to_errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "qmq.cli",
            *words,
            stdout=to_out,
            stderr=to_errors,
            env=dict(environment),
        )
    try:
        async with asyncio.timeout(120):
            while not (found := [line for line in out.read_text().splitlines() if ready in line]):
                assert process.returncode is None, errors.read_text()
                await asyncio.sleep(0.05)
        yield found[0]
        process.terminate()
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def environment_of(tls: Tls, **more: str) -> dict[str, str]:
    """The environment of one process: nothing of this one's settings, and the given files and
    secrets.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("QMQ_")}
    return {**clean, "QMQ_STATE_DIR": os.environ["QMQ_STATE_DIR"], **variables(tls), **more}


async def refusals(server: str, tls: Tls, tokens: Iterable[str]) -> AsyncIterator[str]:
    """The answers to clients with these tokens: to known clients without the permission, and to
    unknown clients.
    """
    for token in tokens:
        async with qmq.connect(server, tls=tls, token=token) as mq:
            for attempt in (mq.send("forbidden", b"1"), mq.metadata.cluster(), mq.access.rules()):
                try:
                    await asyncio.wait_for(attempt, 60)
                except (QmqError, TimeoutError) as failure:
                    yield f"{failure} {failure!r} {failure.__cause__!r} {mq!r}"


# --- the gateway ----------------------------------------------------------------------------------


def signed(access_key: str, secret_key: str) -> tuple[tuple[str, str], ...]:
    """The headers of RocketMQ's clients."""
    when = "20261127T000000Z"
    signature = hmac.new(secret_key.encode(), when.encode(), hashlib.sha1).hexdigest().upper()
    shown = (
        f"MQv2-HMAC-SHA1 Credential={access_key}, SignedHeaders=x-mq-date-time, "
        f"Signature={signature}"
    )
    return (("authorization", shown), ("x-mq-date-time", when), ("x-mq-client-id", "stub@1@1"))


async def use_gateway(
    address: str, ca: bytes, known: tuple[str, str], wrong: tuple[str, str]
) -> AsyncIterator[str]:
    """Send through the gateway, as a known client and as an unknown client. Yields the gateway's
    answers.
    """
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(
        address, grpc.ssl_channel_credentials(ca), options=options
    ) as channel:
        stub: Any = MessagingServiceStub(channel)
        for keys, topic, code in (
            (known, "shop", api.OK),
            (known, "payments", api.FORBIDDEN),
            (wrong, "shop", api.UNAUTHORIZED),
        ):
            about = api.SystemProperties(
                message_id=uuid.uuid4().hex.upper(),
                message_type=api.NORMAL,
                body_encoding=api.IDENTITY,
                born_host="here",
            )
            sent = api.Message(topic=api.Resource(name=topic), body=b"1", system_properties=about)
            answer = await stub.SendMessage(
                calls.SendMessageRequest(messages=[sent]),
                metadata=signed(*keys),
                wait_for_ready=True,
            )
            assert answer.status.code == code, answer
            yield str(answer)


# --- the console ----------------------------------------------------------------------------------


def browse(address: str, token: str, wrong: str, context: Any) -> Iterator[str]:
    """Log in with a token that is wrong, and with one that is right; then follow every link. Yields
    pages, JSON and headers.
    """
    opener = urllib.request.build_opener(
        urllib.request.HTTPCookieProcessor(CookieJar()),
        urllib.request.HTTPSHandler(context=context),
    )

    def ask(path: str, form: Mapping[str, str] | None = None) -> tuple[int, str]:
        body = None if form is None else urllib.parse.urlencode(form).encode()
        request = urllib.request.Request(address + path, body, {"sec-fetch-site": "same-origin"})
        try:
            with opener.open(request, timeout=60) as answer:
                return answer.status, answer.read().decode("utf-8", "replace") + str(answer.headers)
        except urllib.error.HTTPError as failure:
            return failure.code, failure.read().decode("utf-8", "replace") + str(failure.headers)

    status, page = ask("/login", {"token": wrong, "csrf": ""})
    assert status == 403, page
    yield page
    status, page = ask("/login", {"token": token, "csrf": ""})
    assert status == 200, page
    yield page
    seen = {"/", "/login", "/logout"}
    waiting = [
        "/",
        "/history.json",
        "/subjects/orders/history.json",
        "/subjects",
        "/cluster",
        "/dead-letters",
        "/delays",
        "/nowhere",
    ]
    shown = set()
    while waiting and len(seen) < PAGES_MAX:
        path = waiting.pop(0)
        seen.add(path)
        status, page = ask(path)
        shown.add((path, status))
        yield page
        waiting += [
            each
            for each in LINK.findall(page)
            if each not in seen and each not in waiting and not each.endswith("/tail")
        ]
    assert {
        ("/", 200),
        ("/history.json", 200),
        ("/subjects/orders", 200),
        ("/cluster", 200),
        ("/delays", 200),
    } <= shown, shown


# --- the whole ------------------------------------------------------------------------------------


async def test_secrets_stay_where_they_belong_while_everything_works_with_them(
    tmp_path: Path,
) -> None:
    secrets, papers = Secrets(tmp_path), Papers(tmp_path / "papers")
    own = {"node": papers.server, **{name: papers.of(name, kind) for name, kind in _HOLDERS}}
    for key in papers.folder.glob("*.key"):
        secrets.plant(f"key of {key.stem}", key.read_text(), key)
    keys = tmp_path / "jwks.json"
    keys.write_bytes(jwks(one=EC))
    provider = EC.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    secrets.plant("key of the identity provider", provider.decode())
    texts, trusted = list[str](), Credentials(papers.ca_only).pem.ca
    node = NodeProcess(
        tmp_path / "data", *_tls_options(papers.server), "--admins", "op:admin", "--verbose"
    )
    node.options += ("--metrics-port", "0", "--audit-log", str(tmp_path / "audit.jsonl"))
    node.variables = {
        "QMQ_TLS_CLIENTS": "optional",
        "QMQ_AUDIT_SUBJECT": "audit",
        "QMQ_JWT_ISSUER": ISSUER,
        "QMQ_JWT_KEYS": str(keys),
    }
    await asyncio.to_thread(node.start)
    try:
        async with AsyncExitStack() as stack:
            admin = await stack.enter_async_context(qmq.connect(node.address, tls=own["admin"]))
            tokens = await _close(admin, secrets)
            credentials = tmp_path / "gateway.json"
            shop = {
                "access_key": "shop",
                "secret_key": secrets.plant(
                    "the gateway's secret key", "Opensesame77", credentials
                ),
            }
            credentials.write_text(json.dumps([{**shop, "token": tokens["app:shop"]}]))
            secrets.homes["token of app:shop"] = {credentials.name}
            unknown = secrets.plant(
                "a token that nobody was given",
                new_token(Principal("app", "ghost"), by="", now_ms=1).token,
            )
            wrong_key = secrets.plant("a secret key that is wrong", "Guessedwrong88")
            of_provider = secrets.plant("a JWT", jwt_of(sub="people", exp=int(time.time()) + 3600))
            outdated = secrets.plant(
                "a JWT that has ended", jwt_of(sub="people", exp=int(time.time()) - 3600)
            )

            await _work(node.address, papers.ca_only, tokens["app:orders"])
            shown = (unknown, of_provider, outdated, tokens["app:shop"], tokens["app:gone"])
            texts += [each async for each in refusals(node.address, papers.ca_only, shown)]
            words = ("--server", node.address, "--port", "0", "--metrics-port", "0", "--verbose")
            words += (
                "--tls-cert",
                str(papers.server.cert),
                "--tls-key",
                str(papers.server.key),
                "--audit-log",
                str(tmp_path / "audit-gateway"),
            )
            environment = {
                **environment_of(own["gateway"]),
                "QMQ_GATEWAY_CREDENTIALS": str(credentials),
            }
            of_gateway = started(
                "gateway", *words, folder=tmp_path, ready="is ready at", environment=environment
            )
            async with of_gateway as line:
                gateway = line.split("ready at ")[1].split()[0]
                known, wrong = ("shop", shop["secret_key"]), ("shop", wrong_key)
                texts += [each async for each in use_gateway(gateway, trusted, known, wrong)]
                texts.append(
                    await asyncio.to_thread(
                        _read, f"http://{line.partition('metrics at ')[2].rstrip(')')}/metrics"
                    )
                )
            words = (
                "--server",
                node.address,
                "--port",
                "0",
                "--login",
                "token",
                "--writable",
                "--verbose",
            )
            words += ("--tls-cert", str(papers.server.cert), "--tls-key", str(papers.server.key))
            of_console = started(
                "console",
                *words,
                folder=tmp_path,
                ready="console is at",
                environment=environment_of(papers.ca_only),
            )
            async with of_console as line:
                context = Credentials(papers.ca_only).client_context()
                context.set_alpn_protocols(["http/1.1"])
                site = line.split("is at ")[1].strip().rstrip("/")
                texts += await asyncio.to_thread(
                    lambda: list(browse(site, tokens["op:viewer"], unknown, context))
                )
            for command in _COMMANDS:
                given = environment_of(
                    own["admin"],
                    QMQ_TOKEN=tokens["op:viewer"],
                    QMQ_SERVER=node.address,
                    QMQ_ETCD_PASSWORD=wrong_key,
                )
                done = await asyncio.to_thread(
                    cli_process.run, command, {**given, "XDG_CONFIG_HOME": str(tmp_path / "config")}
                )
                texts.append((done.stdout + done.stderr).decode())
            given = {**variables(papers.ca_only), "QMQ_TOKEN": tokens["app:reports"]}
            conf = {f"spark.executorEnv.{name}": value for name, value in given.items()}
            read, of_spark = await asyncio.to_thread(
                drive, tmp_path, "local[2]", node.address, given, conf
            )
            assert read["read"] == MESSAGES
            texts.append(of_spark)
            texts.append(await asyncio.to_thread(_read, f"http://{node.metrics_address}/metrics"))
    finally:
        await asyncio.to_thread(node.stop)
    texts.append(node.errors)
    database = node.data / "coordination.db"
    with sqlite3.connect(database) as rows:
        [(servers,)] = rows.execute(
            "SELECT value FROM kv WHERE key LIKE '%/server-token'"
        ).fetchall()
    secrets.plant("the servers' token", servers.decode(), database)
    assert sorted({name for text in texts for name in secrets.in_text(text)}) == []
    found = secrets.in_files()
    assert found == secrets.homes, "each is where it belongs, and nowhere else"


_HOLDERS = (("admin", "op"), ("gateway", "app"))
_COMMANDS = (
    ("config",),
    ("whoami",),
    ("user", "list", "--json"),
    ("acl", "list"),
    ("doctor", "--interval", "0"),
    ("context", "add", "here", "--server", "nowhere:1"),
    ("subject", "list"),
    ("message", "show", "nothing"),
)


def _tls_options(tls: Tls) -> tuple[str, ...]:
    return ("--tls-ca", str(tls.ca), "--tls-cert", str(tls.cert), "--tls-key", str(tls.key))


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        text: str = answer.read().decode()
    assert "qmq_" in text
    return text


async def _close(admin: qmq.Client, secrets: Secrets) -> dict[str, str]:
    """Fill the cluster, make tokens and rules, and enforce the rules. Returns the tokens by
    principal.
    """
    await admin.send_many("orders", [b"%d" % number for number in range(MESSAGES)])
    for subject in ("payments", "copies", "shop", "work"):
        await admin.metadata.create_subject(qmq.SubjectConfig(subject))
    tokens = {}
    for name in ("app:orders", "app:shop", "app:reports", "app:gone", "op:viewer"):
        tokens[name] = secrets.plant(
            f"token of {name}", (await admin.access.create_token(name)).token
        )
    for principal, operations, kind, pattern in (
        ("app:orders", ["produce", "consume"], "subject", "work"),
        ("app:orders", ["consume"], "group", "workers"),
        ("app:shop", ["produce", "describe"], "subject", "shop"),
        ("app:reports", ["browse"], "subject", "orders"),
        ("app:reports", ["produce", "browse"], "subject", "copies"),
        *[("op:viewer", [], kind, "*") for kind in ("subject", "group")],
        ("op:viewer", [], "cluster", ""),
    ):
        await admin.access.put_rule(principal, operations, kind, *[pattern] * bool(pattern))
    await admin.access.set_mode("enforce")
    await admin.access.delete_tokens(principal="app:gone")
    return tokens


async def _work(server: str, tls: Tls, token: str) -> None:
    """Send, delay, fail and receive."""
    async with qmq.connect(server, tls=tls, token=token) as mq:
        await mq.send_many("work", [b"1", b"2", b"3"])
        await mq.send("work", b"later", delay=timedelta(hours=1))
        async with mq.consumer("work", "workers") as consumer:
            assert len((await consumer.pull(3, timedelta(seconds=30))).bodies) > 0


def test_the_search_finds_a_secret_in_any_file(tmp_path: Path) -> None:
    secrets = Secrets(tmp_path)
    token = secrets.plant(
        "token", new_token(Principal("app", "orders"), by="", now_ms=1).token, tmp_path / "token"
    )
    (tmp_path / "token").write_text(token)
    (tmp_path / "state").write_bytes(b"\x00" + token.encode() + b"\x00")
    assert secrets.in_files() == {"token": {"token", "state"}}
    assert secrets.in_text(f"refused: {token}") == ["token"]
