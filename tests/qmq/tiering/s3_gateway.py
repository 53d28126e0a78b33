"""versitygw, an S3 server that is not ours, and a proxy before it that answers errors, loses answers, cuts uploads and stalls."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from qmq_coordination.etcd.process import free_ports
from support import needs

BUCKET = "segments"
KEY, SECRET = "qmq", "qmq-secret"

Fault = str
"""`500` to `599` and `429`: that answer. `lost`: the request is done, and its answer never comes. `cut`: half of the request arrives.
`stall`: no answer until the client gives up. Empty: none.
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
    with subprocess.Popen([*command, *where], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
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
    """A proxy before the server; its address. `fault_of` gets the method and the number of the request, from 1."""
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
                self._answer(int(fault), [], b"" if self.command == "HEAD" else b"<Error><Code>SlowDown</Code></Error>")
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
            kept = [each for each in headers if each[0].lower() not in ("content-length", "transfer-encoding", "connection")]
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
