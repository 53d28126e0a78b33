"""`qmq console` and the console of `qmq dev`, as processes."""

from __future__ import annotations

import http.client
import subprocess
import sys
from urllib.parse import urlsplit

from support import NodeProcess


def opened(line: str) -> tuple[int, str, str]:
    """The answer of the printed address: status, redirect target, cookie."""
    assert line.startswith("the console is at http://127.0.0.1:"), line
    url = urlsplit(line.removeprefix("the console is at ").strip())
    connection = http.client.HTTPConnection("127.0.0.1", url.port, timeout=20)
    connection.request("GET", f"{url.path}?{url.query}", headers={"Host": url.netloc})
    answer = connection.getresponse()
    found = (
        answer.status,
        answer.getheader("location", ""),
        answer.getheader("set-cookie", "").split(";")[0],
    )
    answer.read()
    connection.request("GET", "/", headers={"Host": url.netloc, "Cookie": found[2]})
    page = connection.getresponse()
    assert (page.status, b"All is well." in page.read()) == (200, True)
    connection.close()
    return found


def test_qmq_dev_has_a_console_at_one_address(node_process: NodeProcess) -> None:
    node_process.options = ("--console", "read", "--console-port", "0")
    node_process.start()
    assert node_process.process is not None
    assert node_process.process.stdout is not None
    status, target, cookie = opened(node_process.process.stdout.readline())
    assert (status, target) == (303, "/")
    assert cookie
    assert node_process.stop() == 0


def test_qmq_console_serves_until_it_is_stopped(node_process: NodeProcess) -> None:
    address = node_process.start()
    command = [sys.executable, "-m", "qmq.cli", "console", "--server", address, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert opened(process.stdout.readline())[0] == 303
        finally:
            process.terminate()
        assert process.wait(20) == 0


def test_a_console_for_other_machines_needs_protection() -> None:
    command = [sys.executable, "-m", "qmq.cli", "console", "--host", "0.0.0.0", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--insecure" in done.stderr
