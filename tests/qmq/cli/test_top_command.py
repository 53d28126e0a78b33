"""`qmq top` in a terminal, which it leaves as it was, and where there is none."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

import qmq
from qmq.cli import top
from qmq.cli.app import app
from qmq.node.dev_node import Node

WAIT_S = 60


class Terminal:
    """`qmq top` in a pseudo-terminal of 80 by 24."""

    def __init__(self, server: str, term: str) -> None:
        self.master, self.slave = pty.openpty()
        termios.tcsetwinsize(self.slave, (24, 80))
        self.before = termios.tcgetattr(self.slave)
        self.shown = b""
        words = [sys.executable, "-m", "qmq.cli", "top", "--interval", "0.1", "--server", server]
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("COLUMNS", "LINES", "NO_COLOR")
        }
        self.process = subprocess.Popen(
            words,
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env={**environment, "TERM": term},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    async def until(self, text: bytes) -> None:
        """Wait until the screen shows this text, after the text waited for before."""
        async with asyncio.timeout(WAIT_S):
            while text not in self.shown:
                self.shown += await asyncio.to_thread(os.read, self.master, 65536)
        self.shown = self.shown[self.shown.index(text) + len(text) :]

    async def end(self) -> tuple[int, bytes]:
        """Its exit status, and all that it showed until then."""

        def rest() -> bytes:
            os.set_blocking(self.master, False)
            found = b""
            while True:
                select.select([self.master], [], [], 0.05)
                try:
                    found += os.read(self.master, 65536)
                except BlockingIOError:
                    if self.process.poll() is not None:
                        return found

        async with asyncio.timeout(WAIT_S):
            found = await asyncio.to_thread(rest)
        return self.process.returncode, self.shown + found


@contextmanager
def terminal(server: str, term: str = "xterm-256color") -> Iterator[Terminal]:
    found = Terminal(server, term)
    try:
        yield found
    finally:
        found.process.kill()
        found.process.wait()
        os.close(found.master)
        os.close(found.slave)


@pytest.mark.parametrize("how", ["q", "ctrl-c", "SIGTERM"])
async def test_the_terminal_is_as_it_was_however_it_ends(node: Node, how: str) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.send("flights", b"1")
    with terminal(node.address) as shown:
        await shown.until(top.ENTER.encode())
        await shown.until(b"flights")
        assert termios.tcgetattr(shown.slave) != shown.before
        os.write(shown.master, b"g")
        await shown.until(b"consumers")
        if how == "SIGTERM":
            shown.process.send_signal(signal.SIGTERM)
        else:
            os.write(shown.master, {"q": b"q", "ctrl-c": b"\x03"}[how])
        status, rest = await shown.end()
        assert status == (130 if how == "ctrl-c" else 0)
        assert rest.endswith(top.LEAVE.encode())
        assert termios.tcgetattr(shown.slave) == shown.before


async def test_a_dumb_terminal_gets_screens_without_control_sequences(node: Node) -> None:
    with terminal(node.address, "dumb") as shown:
        for _ in range(2):
            await shown.until(b"broker groups read-write")
        assert termios.tcgetattr(shown.slave) == shown.before
        os.write(shown.master, b"\x03")
        status, rest = await shown.end()
    assert status == 130
    assert b"\x1b" not in rest


def test_an_error_gives_the_terminal_back(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    written = io.StringIO()
    with os.fdopen(slave) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", written)
        with pytest.raises(ValueError, match="a defect"), top.full_screen():
            assert termios.tcgetattr(stdin.fileno()) != before
            raise ValueError("a defect")
        assert termios.tcgetattr(stdin.fileno()) == before
    os.close(master)
    assert written.getvalue() == top.ENTER + top.LEAVE


async def test_once_shows_one_screen_with_rates_and_ends(node: Node) -> None:
    async with qmq.connect(node.address) as mq:
        await mq.send("flights", b"1")
    words = ["top", "--once", "--interval", "0.1", "--server", node.address]
    done = await asyncio.to_thread(lambda: CliRunner().invoke(app, words))
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("in 0/s  out 0/s over ")
    assert [line.split()[:2] for line in done.stdout.splitlines()[3:4]] == [["flights", "0"]]
    as_json = await asyncio.to_thread(lambda: CliRunner().invoke(app, [*words, "--json"]))
    (told,) = [json.loads(line) for line in as_json.stdout.splitlines()]
    assert (told["in_per_s"], told["error"], told["missing"]) == (0.0, "", {})
    assert [each["subject"] for each in told["subjects"]] == ["flights"]


@pytest.mark.parametrize(
    ("interval_s", "took_s", "waits_s"),
    [(2.0, 0.01, 2.0), (2.0, 0.5, 4.5), (2.0, 5.0, 10.0), (30.0, 5.0, 30.0)],
)
def test_a_large_cluster_is_asked_less_often(
    interval_s: float, took_s: float, waits_s: float
) -> None:
    assert top.pause_s(interval_s, took_s) == waits_s


def test_once_without_a_metaserver_has_status_three() -> None:
    done = CliRunner().invoke(app, ["top", "--once", "--server", "127.0.0.1:1"])
    assert (done.exit_code, done.stdout) == (3, "")
    assert "metaserver 127.0.0.1:1" in done.stderr
