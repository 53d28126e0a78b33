"""The rows of a comparison, measured on one server:
client processes, their phases, and what is compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rows import Row
from servers import Peer, Server
from verdict import Figures, compare, figures_of

TIMEOUT_S: Final = 400.0
READY_S: Final = 120.0
SILENCE_S: Final = 20.0
"""What has not arrived for so long is lost."""
POLL_S: Final = 0.01


class Client:
    """A client process, which does one phase after the other."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in close()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        self.pid = self._process.pid

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(self._why()) from None

    def hear(self, name: str, timeout_s: float) -> Any:
        """The value of the next answer, which must have this name."""
        return self.hear_any(timeout_s)[name]

    def hear_any(self, timeout_s: float) -> dict[str, Any]:
        """The next answer."""
        assert self._process.stdout is not None
        late = threading.Timer(timeout_s, self._process.kill)
        late.start()
        try:
            for line in self._process.stdout:
                if line.startswith("{"):
                    found: dict[str, Any] = json.loads(line)
                    return found
        finally:
            late.cancel()
        raise RuntimeError(self._why())

    def _why(self) -> str:
        self._process.kill()
        self._process.wait()
        self._errors.seek(0)
        return f"a client ended: {self._errors.read()[-1500:]}"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for each in (self._process.stdin, self._process.stdout, self._errors):
            if each is not None:
                each.close()


@dataclass(frozen=True, slots=True)
class Times:
    """How long a row warms and runs, in seconds."""

    warm_s: float
    row_s: float


class Session:
    """One system's server, and its client processes of a row."""

    def __init__(
        self,
        peer: Peer,
        server: Server,
        python: Path,
        *,
        is_flushed: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.peer, self._server = peer, server
        self._command = peer.client(python, server.address, is_flushed)
        self._environment = {**os.environ, **(environment or {})}
        self._topics = 0

    def topic(self) -> str:
        self._topics += 1
        return f"bench{self._topics}"

    def measure(self, row: Row, times: Times) -> Figures:
        """Warm the clients and the server by the row's own work on another
        topic, then measure it.
        """
        with ExitStack() as stack:
            started = [
                stack.enter_context(closing(Client(self._command, self._environment)))
                for _ in range(1 + max(row.consumers, 1))
            ]
            if row.filled:
                self._fill(started[0], row.filled)
            self._run(row, started, times.warm_s)
            return self._run(row, started, times.row_s)

    def fill(self, messages: int, size: int) -> None:
        """Store messages without a reader."""
        with closing(Client(self._command, self._environment)) as client:
            self._publish(client, {"messages": messages, "size": size})

    def _fill(self, client: Client, wanted: int) -> None:
        self._publish(client, {"messages": wanted // 1024, "size": 1024})

    def _publish(self, client: Client, phase: dict[str, Any]) -> None:
        topic = self.topic()
        for work in ("make", "publish"):
            client.say(json.dumps({"work": work, "topic": topic, **phase}))
            client.hear("ready", READY_S)
            client.say("begin")
            client.hear("done", TIMEOUT_S)

    def _run(self, row: Row, clients: Sequence[Client], seconds: float) -> Figures:
        producer, *consumers = clients
        topic = self.topic()
        phase = {"topic": topic, "seconds": seconds, **row.phase}
        self._start([producer], {**phase, "work": "make"})
        producer.hear("done", READY_S)
        taking = {**phase, "work": "consume", "prefix": f"g{self._topics}-"}
        if row.consumers and not row.is_backlog:
            for each in consumers:
                each.say(json.dumps(taking))
            for each in consumers:
                each.hear("ready", READY_S)
        producer.say(json.dumps({**phase, "work": row.producer}))
        producer.hear("ready", READY_S)
        before_s = self._server.cpu_s()
        for each in clients if row.consumers and not row.is_backlog else (producer,):
            each.say("begin")
        sent = producer.hear("done", TIMEOUT_S)
        between_s = self._server.cpu_s()
        wanted = [count * int(row.phase.get("groups", 1)) for count in sent["counts"]]
        if row.is_backlog or not row.consumers:
            before_reading_s = between_s
            self._start(consumers, taking)
        else:
            before_reading_s = before_s
        got = self._until_read(consumers, wanted)
        after_s = self._server.cpu_s()
        found = compare(wanted, [each["counts"] for each in got])
        if not row.consumers:
            return figures_of([sent], between_s - before_s, row, found)
        return figures_of(
            [*got] if row.is_backlog else [sent, *got], after_s - before_reading_s, row, found
        )

    def _until_read(self, consumers: Sequence[Client], wanted: Sequence[int]) -> list[Any]:
        """Wait until all messages have arrived, or none does any more, and end the consumers. One
        that came twice is not another.
        """
        seen, since_s, total = -1, time.monotonic(), sum(wanted)
        while time.monotonic() - since_s < SILENCE_S:
            time.sleep(POLL_S)
            found = sum(self._asked(consumers, "seen"))
            if found != seen:
                seen, since_s = found, time.monotonic()
                if seen >= total and not compare(wanted, self._asked(consumers, "counts")).lost:
                    break
        for each in consumers:
            each.say("stop")
        return [each.hear("done", READY_S) for each in consumers]

    @staticmethod
    def _asked(consumers: Sequence[Client], what: str) -> list[Any]:
        for each in consumers:
            each.say(what)
        return [each.hear(what, READY_S) for each in consumers]

    def _start(self, clients: Sequence[Client], phase: dict[str, Any]) -> None:
        """Begin a phase in all of these at once."""
        for each in clients:
            each.say(json.dumps(phase))
        for each in clients:
            each.hear("ready", READY_S)
        for each in clients:
            each.say("begin")
