"""A stranger does not write into a server's log: what gRPC says of handshakes that fail stays unsaid, unless it is asked for."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from support import NodeProcess
from test_tls import HOST, Papers

from qmq.cli.main import GRPC_VERBOSITY


@pytest.mark.parametrize(("asked", "is_said"), [("", False), ("INFO", True)])
def test_handshakes_that_fail_write_no_line_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, is_said: bool
) -> None:
    own = Papers(tmp_path / "papers").of("broker0", "node", HOST, days=30)
    monkeypatch.setenv(GRPC_VERBOSITY, asked) if asked else monkeypatch.delenv(GRPC_VERBOSITY, raising=False)
    node = NodeProcess(tmp_path / "node", "--no-delay", "--tls-ca", str(own.ca), "--tls-cert", str(own.cert), "--tls-key", str(own.key))
    try:
        address = node.start()
        for _ in range(3):
            with socket.create_connection((HOST, int(address.rpartition(":")[2])), timeout=20) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                assert stranger.recv(1) == b"", "the server has ended it: the handshake has failed"
        assert node.stop() == 0
    finally:
        node.kill()
    assert ("Handshake failed" in node.errors) is is_said, node.errors
    assert is_said or not node.errors
