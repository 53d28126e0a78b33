"""A worker of the OpenMessaging Benchmark that drives QMQ's own client (docs/PEERS.md).

    .venv/bin/python tools/omb_worker.py [--host 127.0.0.1] [--port 8080]

The benchmark's coordinator is started with `--drivers qmq.yaml --workers http://127.0.0.1:8080,…
WORKLOAD.yaml`. The driver's file says `server`, `topicNamePrefix`, `ordered`, `acks` and
`compression`. A worker is one process with one event loop: start several.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

sys.path.append(str(Path(__file__).resolve().parent / "openmessaging"))

from load_worker import LoadWorker

import qmq
from qmq.errors import QmqError
from qmq.rpc.web_server import WebServer

CONNECTIONS_MAX = 64


def application(worker: LoadWorker) -> Starlette:
    """The benchmark's protocol between coordinator and worker. A call that fails answers 400 and
    says why.
    """
    turn = asyncio.Lock()

    def post(path: str, act: Callable[[bytes], Awaitable[Any]]) -> Route:
        async def answer(request: Request) -> Response:
            body = await request.body()
            try:
                async with turn:
                    found = await act(body)
            except (QmqError, ValueError, KeyError, TypeError) as failure:
                return PlainTextResponse(f"{type(failure).__name__}: {failure}", 400)
            return Response() if found is None else JSONResponse(found)

        return Route(path, answer, methods=["POST"])

    def get(path: str, ask: Callable[[], Any]) -> Route:
        async def answer(_: Request) -> Response:
            return JSONResponse(ask())

        return Route(path, answer, methods=["GET"])

    async def create_topics(body: bytes) -> list[str]:
        wanted = json.loads(body)
        return await worker.create_topics(
            wanted["numberOfTopics"], wanted["numberOfPartitionsPerTopic"]
        )

    async def create_consumers(body: bytes) -> None:
        await worker.create_consumers(
            [
                (each["topic"], each["subscription"])
                for each in json.loads(body)["topicsSubscriptions"]
            ]
        )

    async def start_load(body: bytes) -> None:
        wanted = json.loads(body)
        payloads = [base64.b64decode(each) for each in wanted["payloadData"]]
        await worker.start_load(
            payloads, wanted["publishRate"], wanted.get("keyDistributorType") or "NO_KEY"
        )

    async def reset_stats(_: bytes) -> None:
        worker.stats.reset_latencies()

    return Starlette(
        routes=[
            post("/initialize-driver", worker.initialize),
            post("/create-topics", create_topics),
            post("/create-producers", lambda body: worker.create_producers(json.loads(body))),
            post("/create-consumers", create_consumers),
            post("/probe-producers", lambda _: worker.probe()),
            post("/start-load", start_load),
            post("/adjust-publish-rate", lambda body: worker.adjust(float(body))),
            post("/pause-consumers", lambda _: worker.pause()),
            post("/resume-consumers", lambda _: worker.resume()),
            post("/stop-all", lambda _: worker.stop_all()),
            post("/reset-stats", reset_stats),
            get("/period-stats", worker.stats.period),
            get("/cumulative-latencies", worker.stats.latencies),
            get("/counters-stats", worker.stats.counters),
        ]
    )


async def main(host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT."""
    worker, ended = LoadWorker(), asyncio.Event()
    server = WebServer(application(worker), host, port, requests_max=CONNECTIONS_MAX)
    for each in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(each, ended.set)
    print(f"the worker is at http://{host}:{await server.start()}", flush=True)
    await ended.wait()
    await worker.stop_all()
    await server.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A worker of the OpenMessaging Benchmark.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080, help="0 takes a free one")
    given = parser.parse_args()
    qmq.run(main(given.host, given.port))
