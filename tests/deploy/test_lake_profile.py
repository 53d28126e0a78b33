"""`docker compose --profile lake`: an S3 server, and a broker group that keeps old messages
there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from support import needs
from support.etcd_process import free_ports

from qmq.tiering.object_store import open_objects

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from cluster_runner.compose import COMPOSE_FILE, resolve, services  # noqa: E402

SERVICES: dict[str, dict[str, Any]] = resolve(COMPOSE_FILE, {})["services"]
LAKE = {name for name, body in SERVICES.items() if "lake" in body.get("profiles", ())}


def test_the_profile_adds_an_s3_server_and_a_group_and_changes_no_other() -> None:
    assert {"s3", "g3-a", "g3-b", "g3-c"} == LAKE
    assert set(services(resolve(COMPOSE_FILE, {}))) >= LAKE, "scripts/cluster can read them"
    with_store = {
        name
        for name, body in SERVICES.items()
        if "QMQ_OBJECT_STORE" in (body.get("environment") or {})
    }
    assert with_store == LAKE - {"s3"}


def test_its_brokers_have_options_that_there_are_and_wait_for_the_server() -> None:
    known = set(
        re.findall(
            r"^\| `(\w+)` .*`qmq broker`",
            (ROOT / "docs" / "reference" / "configuration.md").read_text(),
            re.MULTILINE,
        )
    )
    server = SERVICES["s3"]["environment"]
    for name in LAKE - {"s3"}:
        body, given = SERVICES[name], SERVICES[name]["environment"]
        assert body["depends_on"]["s3"]["condition"] == "service_healthy"
        assert {each for each in given if each.startswith("QMQ_")} <= known
        assert given["AWS_ACCESS_KEY_ID"] == server["ROOT_ACCESS_KEY"]
        assert given["AWS_SECRET_ACCESS_KEY"] == server["ROOT_SECRET_KEY"]
        assert given["QMQ_REPLICA"] in given["QMQ_REPLICAS"].split(",")
        assert f"s3:{SERVICES['s3']['command'][1].partition(':')[2]}" == given[
            "AWS_ENDPOINT"
        ].removeprefix("http://")


@needs.s3_server
def test_the_servers_command_gives_a_store_that_its_brokers_can_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very words of the file, with a folder and a port of this test."""
    body, given = SERVICES["s3"], SERVICES["g3-a"]["environment"]
    port, folder = str(free_ports(1)[0]), str(tmp_path / "objects")
    here = {
        "/objects": folder,
        "0.0.0.0:7070": f"127.0.0.1:{port}",
        "versitygw": str(needs.find_s3_server()),
    }
    words = [each.replace("$$", "$") for each in (*body["entrypoint"], *body["command"])]
    words = [re.sub("|".join(here), lambda found: here[found[0]], each) for each in words]
    sidecar = tmp_path / "sidecar"  # this file system may have no extended attributes
    sidecar.mkdir()
    environment = {**os.environ, **body["environment"], "VGW_META_SIDECAR": str(sidecar)}
    with subprocess.Popen(
        words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            while not _is_healthy(body["healthcheck"]["test"][-1].replace("7070", port)):
                assert process.poll() is None
            for name, value in given.items():
                if name.startswith("AWS_"):
                    monkeypatch.setenv(name, value.replace("s3:7070", f"127.0.0.1:{port}"))
            objects = open_objects(given["QMQ_OBJECT_STORE"])
            assert objects.create("g3/message/1/000000", b"bytes")
            assert not objects.create("g3/message/1/000000", b"others")
            assert objects.get("g3/message/1/000000") == b"bytes"
        finally:
            process.terminate()


def _is_healthy(url: str) -> bool:
    with suppress(URLError, OSError), urlopen(url, timeout=5) as answer:
        return bool(answer.status == 200)
    return False
