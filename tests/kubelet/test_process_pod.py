"""A pod as a local process: probes decide when it is ready and when it is started again; its end is
preStop, SIGTERM, grace, SIGKILL.
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from kubelet.manifests import ROOT, NotHonoured, PodTemplate, Probe, pod_sets
from kubelet.process_kubelet import ProcessPod
from support import eventually

SERVER = """
import http.server, pathlib, signal, sys
folder = pathlib.Path(sys.argv[1])
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if (folder / self.path[1:]).exists() else 503)
        self.end_headers()
    def log_message(self, *words): pass
def end(number, frame):
    (folder / "order").open("a").write("SIGTERM ")
    if not (folder / "stubborn").exists(): sys.exit(0)
signal.signal(signal.SIGTERM, end)
http.server.HTTPServer((sys.argv[2], 20890), Answer).serve_forever()
"""
ADDRESS = f"127.78.{os.getpid() // 256 % 256}.{os.getpid() % 256}"
"""A separate process on this machine has its own address."""


def start(folder: Path, **changes: object) -> ProcessPod:
    probe = Probe(20890, "/live", 0.05, 5.0, 400)
    template = PodTemplate(
        {},
        "",
        (),
        (),
        {},
        probe,
        replace(probe, failures=3),
        replace(probe, path="/ready", failures=2),
        (),
        30.0,
        True,
    )
    stop = (sys.executable, "-c", f"open({str(folder / 'order')!r}, 'a').write('preStop ')")
    argv = (sys.executable, "-c", SERVER, str(folder), ADDRESS)
    return ProcessPod(
        "p",
        "n",
        ADDRESS,
        replace(template, **changes),
        argv,
        stop,
        dict(os.environ),
        folder / "log",
    )  # type: ignore[arg-type]


@pytest.mark.xdist_group("process pod")
async def test_probes_decide_when_it_is_ready_and_when_it_starts_again(tmp_path: Path) -> None:
    pod = start(tmp_path)
    try:
        (tmp_path / "ready").touch()
        await asyncio.sleep(0)
        assert pod.ready_s is None
        (tmp_path / "live").touch()
        await eventually(lambda: pod.ready_s is not None, within_s=60)
        (tmp_path / "ready").unlink()
        await eventually(lambda: pod.ready_s is None, within_s=60)
        (tmp_path / "ready").touch()
        await eventually(lambda: pod.ready_s is not None, within_s=60)
        (tmp_path / "live").unlink()
        await eventually(lambda: pod.restarts == 1, within_s=60)
        assert pod.ready_s is None
        (tmp_path / "live").touch()
        await eventually(lambda: pod.ready_s is not None, within_s=60)
        assert pod.restarts == 1
    finally:
        pod.delete()
        await pod.gone()
    assert pod.is_gone
    assert not pod.was_killed


@pytest.mark.xdist_group("process pod")
async def test_it_ends_by_pre_stop_then_sigterm_then_sigkill_after_its_grace(
    tmp_path: Path,
) -> None:
    (tmp_path / "live").touch()
    (tmp_path / "ready").touch()
    for is_stubborn in (False, True):
        (tmp_path / "order").unlink(missing_ok=True)
        if is_stubborn:
            (tmp_path / "stubborn").touch()
        pod = start(tmp_path, grace_s=3.0 if is_stubborn else 60.0)
        await eventually(lambda found=pod: found.ready_s is not None, within_s=60)  # type: ignore[misc]
        pod.delete()
        assert pod.ready_s is None
        await pod.gone()
        assert pod.was_killed == is_stubborn
        if not is_stubborn:
            assert (tmp_path / "order").read_text() == "preStop SIGTERM "


def test_a_manifest_that_asks_for_more_is_refused() -> None:
    (found,) = [
        each
        for each in yaml.safe_load_all(
            (ROOT / "deploy" / "kubernetes" / "base" / "qmq.yaml").read_text()
        )
        if (each["kind"], each["metadata"]["name"]) == ("StatefulSet", "qmq-g1")
    ]
    (wanted,) = pod_sets([found])
    assert (wanted.replicas, wanted.template.grace_s, wanted.template.spreads_hosts) == (
        3,
        60,
        True,
    )
    assert wanted.template.variables("qmq-g1-2")["QMQ_ADVERTISE"] == "qmq-g1-2.qmq-g1.qmq.svc"
    found["spec"]["template"]["spec"]["hostNetwork"] = True
    with pytest.raises(NotHonoured, match="hostNetwork"):
        pod_sets([found])
