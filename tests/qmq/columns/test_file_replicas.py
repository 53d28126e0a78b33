"""Files of real replicas, and brokers beside them: both show the same log, and no replica's files
show more than was committed.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

from file_support import opened, rows_of
from support import eventually
from support.clusters import REPLICATED, THREE, cluster

import qmq
from qmq.cli.route import routes_of
from qmq.columns.files.log import FileLog
from qmq.columns.model import ALL, CommittedLog, QueueKey, SourceBatch, SourceQueue, Topology
from qmq.columns.servers.log import ServerAddress
from qmq.errors import InvalidArgument, UnknownSubject
from qmq.log.log_config import LogConfig
from qmq.model import Order, SubjectConfig
from qmq.proto.v1 import meta_pb2 as pb

LOG = LogConfig(segment_bytes=1 << 16, action_segment_bytes=1 << 16)
"""Several segments."""


def ends(log: FileLog, subject: str) -> dict[QueueKey, int]:
    """The end of each queue; empty before a broker's first mark, or for an unknown subject."""
    try:
        return {key: queue.end for key, queue in log.topology([subject]).queues.items()}
    except (InvalidArgument, UnknownSubject):
        return {}


def without_size(topology: Topology) -> dict[QueueKey, SourceQueue]:
    """A broker counts the command message, too."""
    return {key: replace(queue, stored_bytes=0) for key, queue in topology.queues.items()}


def read(log: CommittedLog, topology: Topology) -> dict[QueueKey, list[tuple[object, bytes]]]:
    def batches(key: QueueKey) -> list[SourceBatch]:
        queue = topology.queues[key]
        pieces = log.pieces(key, queue.start, queue.end, 10_000)
        return [batch for piece in pieces for batch in log.read(piece, ALL, skips_lost=False)]

    return {
        key: [(envelope, bytes(region)) for envelope, region in batches(key)]
        for key in topology.queues
    }


async def test_no_replicas_files_ever_show_more_than_was_committed_and_in_the_end_all(
    tmp_path: Path,
) -> None:
    sent: list[bytes] = []
    names = REPLICATED["g1"]
    key = QueueKey("s", 0, "g1")
    async with cluster(tmp_path, REPLICATED, LOG) as it, qmq.connect(it.servers) as mq:
        logs = [opened(tmp_path / name) for name in names]
        best = opened(tmp_path / "g1-?")
        for number in range(4):
            bodies = [b"%d-%d" % (number, at) for at in range(300)]
            sent += bodies
            await mq.send_many("s", bodies)
            for log in (*logs, best):
                shown = ends(log, "s").get(key, 0)
                assert [body for _, body in rows_of(log.pieces(key, 0, shown, 2_000))] == sent[
                    :shown
                ]
            master = (await it.master("g1")).config.replica
            await it.crash(master)
            await it.master("g1", other_than=master)
            await it.start(master)
        for log in (*logs, best):
            await eventually(lambda log=log: ends(log, "s").get(key, 0) == len(sent))
            assert [body for _, body in rows_of(log.pieces(key, 0, len(sent), 2_000))] == sent


async def test_files_and_brokers_return_the_same_ordered_batches_through_a_split(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path, THREE, LOG) as it, qmq.connect(it.servers) as mq:
        await mq.metadata.create_subject(
            SubjectConfig("s", order=Order.STRICT, logical_partitions=16), partitions=3
        )
        keys = [b"k%d" % (at % 40) for at in range(500)]
        tags = [("even", "odd")[at % 2 :] for at in range(500)]
        for number in range(3):
            await mq.send_many(
                "s", [b"%d-%d" % (number, at) for at in range(500)], keys=keys, tags=tags
            )
            if number < 2:
                await mq.metadata.change_route("s", split=pb.SplitOperation(partition=number + 1))
        first = (await mq.metadata.describe_route("s", 1)).route
        routes = tmp_path / "routes.json"
        found = routes_of("s", first, await mq.metadata.route_history("s"))
        routes.write_text(json.dumps({"format": "qmq-routes", "version": 1, "subjects": [found]}))
        servers = ServerAddress(it.servers, 20_000).open()
        try:
            of_servers = await asyncio.to_thread(servers.topology, ["s"])
            assert sum(each.is_sealed for each in of_servers.queues.values()) == 2
            files = opened(*[tmp_path / names[0] for names in THREE.values()], routes=str(routes))
            shown = {
                key: queue.end for key, queue in of_servers.queues.items() if queue.last_append_ms
            }
            await eventually(lambda: ends(files, "s") == shown)
            of_files = files.topology(["s"])
            assert without_size(of_files) == {
                key: queue for key, queue in without_size(of_servers).items() if key in shown
            }
            assert of_files.routes == of_servers.routes
            assert read(files, of_files) == await asyncio.to_thread(read, servers, of_files)
        finally:
            servers.close()
