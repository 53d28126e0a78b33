"""Tiered storage on an S3 server that is not ours: copying, reading and deleting, while it fails in
every way that a network allows.

versitygw, an S3 server that is not ours, and a proxy before it that answers errors, loses answers,
cuts uploads and stalls.
"""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from pathlib import Path
from random import Random
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from support import eventually, needs
from support.etcd_process import free_ports
from support.tiered_log import CHUNK_BYTES, grow, log_at

from qmq.broker.reading.cold_reads import through_cold_reads
from qmq.errors import Overloaded
from qmq.log.segment_index import read_indexes
from qmq.log.segments import segment_name
from qmq.log.store import Store
from qmq.tiering.object_store import Objects, StoreAway, open_objects
from qmq.tiering.segment_copier import CopierPace, SegmentCopier, SegmentCopying, sealed_segments
from qmq.tiering.stored_reads import StoredReads
from qmq.tiering.stored_segment import ObjectNames, SealedSegment

BUCKET = "segments"
KEY, SECRET = "qmq", "qmq-secret"

Fault = str
"""`500` to `599` and `429`: that answer. `lost`: the request is done, and its answer never comes.
`cut`: half of the request arrives. `stall`: no answer until the client gives up. Empty: none.
"""


def credentials(address: str) -> dict[str, str]:
    """The environment variables of a client."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT": f"http://{address}",
    }


@contextmanager
def s3_server(folder: Path, port: str = "") -> Iterator[str]:
    """A running server with one bucket, whose objects are files in `folder`; its address."""
    (folder / "data" / BUCKET).mkdir(parents=True, exist_ok=True)
    (folder / "sidecar").mkdir(exist_ok=True)
    address = f"127.0.0.1:{port or free_ports(1)[0]}"
    command = [str(needs.find_s3_server()), "--port", address, "--health", "/health", "--quiet"]
    where = ["posix", "--sidecar", str(folder / "sidecar"), str(folder / "data")]
    environment = {**os.environ, "ROOT_ACCESS_KEY": KEY, "ROOT_SECRET_KEY": SECRET}
    with subprocess.Popen(
        [*command, *where], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            while not _answers(f"http://{address}/health"):
                assert process.poll() is None, "the S3 server ended"
            yield address
        finally:
            process.terminate()


def _answers(url: str) -> bool:
    with suppress(URLError, OSError), urlopen(url, timeout=5) as answer:
        return bool(answer.status == 200)
    return False


@contextmanager
def faulty(address: str, fault_of: Callable[[str, int], Fault]) -> Iterator[str]:
    """A proxy before the server; its address. `fault_of` gets the method and the number of the
    request, from 1.
    """
    lock = threading.Lock()
    count = 0

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            nonlocal count
            with lock:
                count += 1
                fault = fault_of(self.command, count)
            size = int(self.headers.get("Content-Length") or 0)
            if fault.isdigit():
                self.rfile.read(size)
                self._answer(
                    int(fault),
                    [],
                    b"" if self.command == "HEAD" else b"<Error><Code>SlowDown</Code></Error>",
                )
                return
            body = self.rfile.read(size // 2 if fault == "cut" else size)
            if fault == "cut":
                self._send_half(body)
            elif fault == "stall":
                self.connection.recv(1)  # returns when the client closes
            else:
                status, headers, answer = self._forward(body)
                if fault != "lost":
                    self._answer(status, headers, answer)
                    return
            self.close_connection = True

        def _send_half(self, body: bytes) -> None:
            with socket.create_connection(address.split(":")) as server:  # type: ignore[arg-type]
                head = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
                server.sendall(f"{self.command} {self.path} HTTP/1.1\r\n{head}\r\n".encode() + body)

        def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
            upstream = http.client.HTTPConnection(address)
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                upstream.putheader(name, value)
            upstream.endheaders(body)
            answer = upstream.getresponse()
            found = answer.status, answer.getheaders(), answer.read()
            upstream.close()
            return found

        def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
            self.send_response_only(status)
            kept = [
                each
                for each in headers
                if each[0].lower() not in ("content-length", "transfer-encoding", "connection")
            ]
            for name, value in [*kept, ("Content-Length", str(len(body)))]:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_DELETE = do_HEAD = do_POST = _serve  # noqa: N815 - the base class calls these names

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


pytestmark = needs.s3_server

PACE = CopierPace(
    idle_s=0.005, away_s=0.005, away_s_max=0.01, later_s=0.02, chunk_bytes=CHUNK_BYTES
)
NAMES = ObjectNames("g")
FAULTS = ("503", "500", "429", "lost", "cut", "stall")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with s3_server(tmp_path / "s3") as address:
        yield address


def connected(address: str, monkeypatch: pytest.MonkeyPatch, request_s: float = 0.5) -> Objects:
    """A client that does not try again by itself."""
    for name, value in credentials(address).items():
        monkeypatch.setenv(name, value)
    return open_objects(f"s3://{BUCKET}/prefix", request_s=request_s, retry_s=0.01)


def copier_of(store: Store, objects: Objects, *, is_master: bool = True) -> SegmentCopier:
    def fail(cause: BaseException) -> None:
        raise cause

    return SegmentCopier(
        lambda: store,
        lambda: is_master,
        objects,
        "g",
        fail,
        lambda: "owner",
        pace=PACE,
        indexes=True,
    )


def objects_in(folder: Path) -> dict[str, bytes]:
    root = folder / "s3" / "data" / BUCKET / "prefix"
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


@pytest.mark.sampled
async def test_a_log_is_copied_read_and_deleted_through_every_fault(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    random, counts, faults = Random(1), dict.fromkeys(FAULTS, 0), cycle(FAULTS)

    def fault_of(_method: str, _number: int) -> str:
        fault = next(faults) if random.random() < 0.3 else ""
        if fault:
            counts[fault] += 1
        return fault

    with faulty(server, fault_of) as address, log_at(tmp_path / "log") as store:
        objects, log = connected(address, monkeypatch), store.messages
        segments = sealed_segments(store)
        files = {
            each.base: (log.folder / segment_name(each.base)).read_bytes() for each in segments
        }
        copier = copier_of(store, objects)
        copier.start()
        await eventually(lambda: all(log.has_index(each.base) for each in segments), within_s=100)
        assert copier.counters.failures["conflict"] == copier.counters.failures["damaged"] == 0
        for each in segments:
            assert stored(tmp_path, each) == files[each.base]
        for path in log.release_before(log.end):
            path.unlink()
        reads = StoredReads(objects, "g", tmp_path / "cache", 1 << 30)
        indexes = read_indexes(log.folder, log.disk)
        for each in segments:
            index = indexes[each.base]
            got = b""
            while len(got) < each.size:
                try:
                    got += await through_cold_reads(
                        reads.read, index, len(got), min(7_000, each.size - len(got))
                    )
                except Overloaded:
                    continue
            assert got == files[each.base]
        reads.close()
        log.drop_files_before(log.bases[-1])
        await eventually(
            lambda: not copier.catalog.stored and not copier.catalog.noted, within_s=100
        )
        await copier.stop()
        assert objects_in(tmp_path) == {NAMES.owner: b"owner"}
    assert all(counts.values()), counts


def stored(folder: Path, segment: SealedSegment) -> bytes:
    found = objects_in(folder)
    return b"".join(
        [found[NAMES.chunk(segment, number)] for number in range(segment.chunk_count(CHUNK_BYTES))]
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_reports_an_unavailable_store_and_leaves_no_partial_object(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    with faulty(server, lambda _method, _number: fault) as address:
        objects = connected(address, monkeypatch)
        with pytest.raises(StoreAway):
            objects.create("g/x", b"1" * 100_000)
        with pytest.raises(StoreAway):
            objects.get("g/x")
    assert list(objects_in(tmp_path).values()) == ([b"1" * 100_000] if fault == "lost" else [])


def test_replaced_masters_that_upload_one_segment_leave_it_once_and_whole(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with log_at(tmp_path / "1") as first, log_at(tmp_path / "2") as second:
        segment = sealed_segments(first)[0]

        def copy(store: Store, address: str) -> int:
            objects = connected(address, monkeypatch, request_s=20)
            return SegmentCopying(
                objects, NAMES, store.disk, store.messages.folder, lambda: True, CHUNK_BYTES
            ).copy(segment, set())

        others: list[int] = []

        def overtake(_method: str, number: int) -> str:
            if number == 6:
                others.append(copy(second, server))
            return ""

        with faulty(server, overtake) as address:
            own = copy(first, address)
        assert 0 < own < segment.size
        assert own + others[0] == segment.size
        assert (
            stored(tmp_path, segment)
            == (first.messages.folder / segment_name(segment.base)).read_bytes()
        )


async def test_a_server_that_is_killed_and_comes_back_gets_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with log_at(tmp_path / "log") as store:
        with s3_server(tmp_path / "first") as address:
            objects = connected(address, monkeypatch)
            copier = copier_of(store, objects)
            copier.start()
            await eventually(lambda: len(copier.catalog.stored) > 0)
        grow(store, 8)
        await eventually(lambda: copier.counters.failures["away"] > 2)
        with s3_server(tmp_path / "first", port=address.rpartition(":")[2]):
            await eventually(lambda: copier.catalog.stored == sealed_segments(store), within_s=60)
            await copier.stop()
