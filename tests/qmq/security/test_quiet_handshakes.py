"""A stranger does not fill a server's log with handshakes that fail: the audit log has one record
of each reason in ten seconds.
"""

from __future__ import annotations

import socket
from pathlib import Path

from access_support import HOST, Papers
from support import NodeProcess


def test_handshakes_that_fail_write_one_line_for_each_reason(tmp_path: Path) -> None:
    own = Papers(tmp_path / "papers").of("broker0", "node", HOST, days=30)
    node = NodeProcess(
        tmp_path / "node",
        "--no-delay",
        "--tls-ca",
        str(own.ca),
        "--tls-cert",
        str(own.cert),
        "--tls-key",
        str(own.key),
    )
    try:
        address = node.start()
        for _ in range(3):
            with socket.create_connection(
                (HOST, int(address.rpartition(":")[2])), timeout=20
            ) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                assert stranger.recv(1) == b"", "the server has ended it: the handshake has failed"
        assert node.stop() == 0
    finally:
        node.kill()
    lines = node.errors.splitlines()
    assert len(lines) == 1, node.errors
    assert '"action": "TLS handshake"' in lines[0]
