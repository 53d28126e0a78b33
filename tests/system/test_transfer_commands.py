"""`qmq export`, `qmq import` and `qmq copy`, as typed, against a node in its own process
(docs/TRANSFER.md).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest
from support import NodeProcess, cli_process

import qmq.blocking
from qmq.model import Order, SubjectConfig
from qmq.rpc.network import NETWORK
from qmq.rpc.tls_network import network_of
from qmq.security.contexts import ClusterContext


def run(node: NodeProcess, *words: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return cli_process.run(
        words, {**os.environ, "QMQ_SERVER": node.address, "COLUMNS": "200"}, data
    )


def said(node: NodeProcess, *words: str, data: bytes = b"") -> bytes:
    done = run(node, *words, data=data)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def stored(node: NodeProcess, subject: str) -> list[tuple[Any, ...]]:
    """All parts of a message except the place where it is stored."""
    with qmq.blocking.connect(node.address) as mq:
        return [
            (
                str(each.id),
                each.key_bytes,
                each.tags,
                dict(each.headers),
                each.create_time_ms,
                each.body,
            )
            for each in mq.browse(subject)
        ]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node with 61 messages of all kinds in `orders`."""
    node = NodeProcess(tmp_path_factory.mktemp("shop"))
    node.start()
    try:
        _fill(node)
        yield node
    finally:
        node.kill()


@pytest.fixture
def plain(shop: NodeProcess) -> str:
    """An empty subject to load into."""
    return _created(shop, SubjectConfig(f"plain-{token_hex(4)}"))


@pytest.fixture
def ordered(shop: NodeProcess) -> str:
    """An empty ordered subject to load into."""
    return _created(
        shop, SubjectConfig(f"ordered-{token_hex(4)}", order=Order.STRICT, logical_partitions=16)
    )


def _created(node: NodeProcess, config: SubjectConfig) -> str:
    with qmq.blocking.connect(node.address) as mq:
        mq.metadata.create_subject(config)
    return config.name


def _fill(node: NodeProcess) -> None:
    with qmq.blocking.connect(node.address) as mq:
        bodies = [
            b'{"n":%d}' % number if number % 3 else bytes([255, number]) for number in range(60)
        ]
        keys = [f"k{number % 5}" if number % 7 else b"\xff%d" % number for number in range(60)]
        mq.send_many(
            "orders",
            bodies,
            keys=keys,
            tags=[["odd"] if number % 2 else [] for number in range(60)],
        )
        mq.send("orders", b"", headers={"by": "shop", "bin": b"\x00\xfe", "plain": "hex:00"})


@pytest.mark.parametrize("name", ["all.jsonl", "all.parquet"])
def test_exported_and_imported_messages_are_equal(
    shop: NodeProcess, plain: str, tmp_path: Path, name: str
) -> None:
    file = str(tmp_path / name)
    assert json.loads(said(shop, "export", "orders", "--file", file, "--json")) == [
        {"subject": "orders", "messages": 61, "file": file}
    ]
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == [name], (
        "and nothing is left beside it"
    )
    told = {"subject": plain, "messages": 61, "stored_now": 61, "stored_before": 0}
    assert json.loads(said(shop, "import", plain, "--file", file, "--json")) == [told]
    assert stored(shop, plain) == stored(shop, "orders")
    assert json.loads(said(shop, "import", plain, "--file", file, "--json")) == [
        {**told, "stored_now": 0, "stored_before": 61}
    ]
    assert len(stored(shop, plain)) == 61, "an import that is done and run again stores nothing"


def test_pipes_carry_messages_from_one_subject_to_another(shop: NodeProcess, plain: str) -> None:
    lines = said(shop, "export", "orders", "--body", "base64")
    assert {"body" in json.loads(line) for line in lines.splitlines()} == {False}
    assert b"61" in said(shop, "import", plain, data=lines)
    assert stored(shop, plain) == stored(shop, "orders")
    assert said(
        shop, "import", plain, "--json", data=said(shop, "browse", "orders", "--json", "-n", "2")
    )
    said(shop, "import", plain, data=b'{"body": "by hand"}\n\n{"body": {"n": 1}, "key": "k"}\n')
    assert [(each[1], each[5]) for each in stored(shop, plain)[-2:]] == [
        (None, b"by hand"),
        (b"k", b'{"n": 1}'),
    ]


@pytest.mark.parametrize(
    ("options", "count"),
    [
        (("--key", "k1"), 10),
        (("--from-key", "k1", "--until-key", "k3"), 20),
        (("--tag", "odd"), 30),
        (("--from-sequence", "10", "--until-sequence", "25"), 15),
        (("--at", "1h", "--until-sequence", "5"), 5),
        (("--until", "1h"), 0),
        (("--partition", "3"), 0),
        (("--broker-group", "broker-0"), 61),
    ],
)
def test_a_range_is_exported_alone(shop: NodeProcess, options: tuple[str, ...], count: int) -> None:
    assert len(said(shop, "export", "orders", *options).splitlines()) == count


@pytest.mark.parametrize(
    ("words", "data", "says"),
    [
        (("import", "PLAIN"), b'{"body": "x"}\nnonsense\n', "line 2 is not an object"),
        (("import", "PLAIN"), b'{"key": "x"}\n', 'not an object with a "body"'),
        (
            ("import", "PLAIN"),
            b'{"body": "x", "headers": {"qmq-group": "g"}}\n',
            "record 1: the header",
        ),
        (("import", "ORDERED"), b'{"body": "x"}\n', "record 1 has no key"),
        (("import", "order"), b'{"body": "x"}\n', "did you mean 'orders'"),
        (("import", "PLAIN", "--format", "parquet"), b"", "give --file"),
        (("import", "PLAIN", "--file", "nowhere"), b"", "cannot be read"),
        (("export", "orders", "--format", "xml"), b"", "jsonl or parquet"),
        (("export", "orders", "--file", "/nowhere/x"), b"", "cannot be written"),
        (("export", "order"), b"", "did you mean 'orders'"),
    ],
)
def test_what_cannot_be_moved_says_why(
    shop: NodeProcess, plain: str, ordered: str, words: tuple[str, ...], data: bytes, says: str
) -> None:
    names = {"PLAIN": plain, "ORDERED": ordered}
    done = run(shop, *[names.get(word, word) for word in words], data=data)
    assert (done.returncode, says in done.stderr.decode()) == (2, True), done.stderr.decode()


def test_an_import_that_is_killed_continues_and_stores_nothing_twice(
    shop: NodeProcess, ordered: str, tmp_path: Path
) -> None:
    file = tmp_path / "many.jsonl"
    file.write_bytes(
        b"".join(
            b'{"body": "%d", "key": "k%d"}\n' % (number, number % 7) for number in range(20_000)
        )
    )
    command = [
        sys.executable,
        "-m",
        "qmq.cli",
        "import",
        ordered,
        "--file",
        str(file),
        "--server",
        shop.address,
    ]
    with qmq.blocking.connect(shop.address) as mq:
        for least in (1, 8_000):
            with subprocess.Popen(
                [*command, "--rate", "5000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            ) as loading:
                while (
                    sum(
                        queue.next_sequence
                        for queue in mq.metadata.list_subjects(ordered)[0].queues
                    )
                    < least
                ):
                    assert loading.poll() is None
                loading.send_signal(signal.SIGKILL)
        done = json.loads(
            subprocess.run([*command, "--json"], capture_output=True, check=True).stdout
        )
        assert done[0]["messages"] == 20_000
        assert 0 < done[0]["stored_now"] <= 19_999
        by_key: dict[bytes | None, list[int]] = {}
        for message in mq.browse(ordered):
            by_key.setdefault(message.key_bytes, []).append(int(message.body))
    assert {key: list(range(int((key or b"")[1:]), 20_000, 7)) for key in by_key} == by_key, (
        "each once, and in order"
    )
    assert len(by_key) == 7


def test_a_state_file_of_another_load_is_refused(
    shop: NodeProcess, plain: str, tmp_path: Path
) -> None:
    (tmp_path / "one").write_text('{"body": "1"}\n')
    (tmp_path / "two").write_text('{"body": "2"}\n')
    state = str(tmp_path / "state")
    said(shop, "import", plain, "--file", str(tmp_path / "one"), "--state", state)
    done = run(shop, "import", plain, "--file", str(tmp_path / "two"), "--state", state)
    assert (done.returncode, b"the state file of another load" in done.stderr) == (2, True)
    Path(state).write_text("[]\n")
    done = run(shop, "import", plain, "--file", str(tmp_path / "one"), "--state", state)
    assert (done.returncode, b"is not a state file" in done.stderr) == (2, True)


def test_a_copy_goes_to_another_cluster_and_later_takes_what_came_since(
    shop: NodeProcess, node_process: NodeProcess, tmp_path: Path
) -> None:
    node_process.start()
    with (
        qmq.blocking.connect(node_process.address) as there,
        qmq.blocking.connect(shop.address) as here,
    ):
        there.metadata.create_subject(
            SubjectConfig("copies", order=Order.STRICT, logical_partitions=16)
        )
        here.send_many(
            "source",
            [b"%d" % number for number in range(100)],
            keys=[f"k{number % 3}" for number in range(100)],
        )
        environment = {
            **os.environ,
            "QMQ_SERVER": shop.address,
            "XDG_CONFIG_HOME": str(tmp_path / "config"),
            "XDG_STATE_HOME": str(tmp_path / "state"),
        }
        assert (
            cli_process.run(
                ("context", "add", "other", "--server", node_process.address), environment
            ).returncode
            == 0
        )
        environment["QMQ_CONTEXT"] = (
            "other"  # names the target's; the variable QMQ_SERVER goes before it
        )
        words = ("copy", "source", "copies", "--to-context", "other", "--json")
        told = []
        for _ in range(3):
            done = cli_process.run(words, environment)
            assert done.returncode == 0, done.stderr.decode()
            told.append(
                [(each["messages"], each["stored_now"]) for each in json.loads(done.stdout)]
            )
            if len(told) == 1:
                here.send("source", b"100", key="k1")
        assert told == [[(100, 100)], [(101, 1)], [(101, 0)]]
        copied = {
            (str(each.id), each.key_bytes, each.body, each.create_time_ms)
            for each in there.browse("copies")
        }
        assert copied == {
            (str(each.id), each.key_bytes, each.body, each.create_time_ms)
            for each in here.browse("source")
        }
        for key in ("k0", "k1", "k2"):
            bodies = [int(each.body) for each in there.browse("copies", key=key)]
            assert bodies == sorted(bodies)
    assert len(list((tmp_path / "state" / "qmq" / "copies").iterdir())) == 1


def test_a_copy_within_a_cluster_is_of_another_subject(
    shop: NodeProcess, plain: str, tmp_path: Path
) -> None:
    state = str(tmp_path / "state")
    told = json.loads(
        said(
            shop,
            "copy",
            "orders",
            plain,
            "--key",
            "k1",
            "--rate",
            "100",
            "--state",
            state,
            "--json",
        )
    )
    assert told == [{"subject": plain, "messages": 10, "stored_now": 10, "stored_before": 0}]
    assert stored(shop, plain) == [each for each in stored(shop, "orders") if each[1] == b"k1"]
    done = run(shop, "copy", "orders", "orders", "--state", state)
    assert (done.returncode, b"copied into itself" in done.stderr) == (2, True)
    done = run(shop, "copy", "orders", plain, "--state", state)
    assert (done.returncode, b"the state file of another load" in done.stderr) == (2, True)


def test_a_token_of_the_environment_is_not_shown_to_a_context_s_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QMQ_TOKEN", "of-the-source")
    assert network_of() is not NETWORK
    assert network_of(environment=ClusterContext("other", "localhost:1").variables()) is NETWORK


def test_a_subject_is_purged_when_its_name_is_typed(shop: NodeProcess, plain: str) -> None:
    with qmq.blocking.connect(shop.address) as mq:
        mq.send_many(plain, [b"old"] * 5)
    refused = run(shop, "subject", "purge", plain, data=b"another\n")
    assert (
        refused.returncode,
        b"its 5 messages" in refused.stderr,
        b"nothing was deleted" in refused.stderr,
    ) == (2, True, True)
    assert len(stored(shop, plain)) == 5
    assert json.loads(
        said(shop, "subject", "purge", plain, "--json", data=f"{plain}\n".encode())
    ) == [{"subject": plain, "messages": 5}]
    assert stored(shop, plain) == []
    assert json.loads(said(shop, "subject", "purge", plain, "--yes", "--json")) == [
        {"subject": plain, "messages": 0}
    ]


def test_a_bar_ends_full_even_if_less_was_done_than_expected(
    shop: NodeProcess, plain: str, tmp_path: Path
) -> None:
    whole, part = str(tmp_path / "all.jsonl"), str(tmp_path / "part.jsonl")
    for words, count in (
        (("export", "orders", "--file", whole), 61),
        (("export", "orders", "--file", part, "--tag", "odd"), 30),
        (("import", plain, "--file", whole), 61),
        (("bench", "pub", plain, "--messages", "500"), 500),
        (("bench", "sub", plain, "--messages", "500", "--each"), 500),
    ):
        assert last_bar(shop, *words) == (count, count), words


def last_bar(node: NodeProcess, *words: str) -> tuple[int, int]:
    """What the bar of a command counted and its total, at the end."""
    environment = {**os.environ, "QMQ_SERVER": node.address, "TERM": "xterm-256color"}
    environment.pop("COLUMNS", None)
    done = cli_process.run_in_terminal(120, words, environment, is_whole=True)
    assert done.returncode == 0, done.stdout.decode()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.stdout.decode())
    completed, total = re.findall(r"(\d+)/(\d+)", plain)[-1]
    return int(completed), int(total)
