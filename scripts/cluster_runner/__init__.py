"""Runs the services of docker-compose.yml as local processes, so that a laptop or a test has the
cluster without Docker.

The compose file is the only place that says what the services are. The runner asks the real compose
binary for the resolved file and translates each service, as a container engine would:

    docker-compose.yml ──compose.py──▶ Service ──translate.py──▶ argv, environment
                                                    ▲
                       network.py / netns.py: an address for each service

    argv, environment ──processes.py──▶ a process

One idea a file: `compose` (what the file says), `translate` (names, paths and programs of this
machine), `network` and `netns` (the two networks), `processes` (start, signal, recognise), `health`
(wait until it serves), `state` (what is remembered between two commands), `cluster` (the verbs).
Linux only.

    with Cluster(tmp_path) as cluster:  # `network="netns"` for one that can be partitioned
        cluster.up()
        address = f"{cluster.address('meta0')}:20880"
        cluster.kill("g1-a")
"""

from cluster_runner.cluster import Cluster, ServiceStatus
from cluster_runner.compose import COMPOSE_FILE, Service
from cluster_runner.errors import ClusterError

__all__ = ["COMPOSE_FILE", "Cluster", "ClusterError", "Service", "ServiceStatus"]
