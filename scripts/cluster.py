"""`scripts/cluster`: the cluster of docker-compose.yml as local processes. See docs/DEPLOY.md, and
cluster_runner for how it works.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from cluster_runner import COMPOSE_FILE, Cluster, ClusterError, ServiceStatus

STATE_DIR: Final = COMPOSE_FILE.parent / ".cluster"
SECURE_STATE_DIR: Final = COMPOSE_FILE.parent / ".cluster-secure"
"""A secured cluster has its own folder, because etcd's members remember whether they use TLS."""


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(prog="scripts/cluster", description=__doc__)
    whole.add_argument(
        "--dir", type=Path, help="state folder: data, logs, pids (default: .cluster)"
    )
    whole.add_argument("--file", type=Path, default=COMPOSE_FILE, help="the compose file")
    whole.add_argument(
        "--secure",
        action="store_true",
        help="with docker-compose.secure.yml: TLS everywhere (folder: .cluster-secure)",
    )
    verbs = whole.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", help="start services and wait until they are healthy")
    up.add_argument(
        "--network",
        default="",
        choices=("loopback", "netns"),
        help="netns can be partitioned, but needs root",
    )
    up.add_argument("--services", default="", metavar="A,B", help="only these, and what they need")
    up.add_argument("--no-deps", action="store_true", help="... without what they need")
    up.add_argument("--no-wait", action="store_true", help="do not wait until they are healthy")
    up.add_argument(
        "--foreground",
        action="store_true",
        help="stay in the foreground; Ctrl-C stops all services, and they die with this process",
    )
    up.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="for each step's health"
    )
    down = verbs.add_parser("down", help="stop everything")
    down.add_argument("--force", action="store_true", help="SIGKILL instead of SIGTERM")
    down.add_argument("--volumes", action="store_true", help="and remove all data")
    status = verbs.add_parser("status", help="show processes and addresses")
    status.add_argument("--json", action="store_true", help="for machines")
    status.add_argument("--health", action="store_true", help="run the health checks")
    helps = {
        "start": "start again",
        "stop": "SIGTERM",
        "kill": "SIGKILL",
        "pause": "SIGSTOP",
        "resume": "SIGCONT",
    }
    for verb, text in helps.items():
        verbs.add_parser(verb, help=text).add_argument("services", nargs="+", metavar="SERVICE")
    partition = verbs.add_parser("partition", help="drop all packets between two services")
    partition.add_argument("a")
    partition.add_argument("b")
    partition.add_argument("--one-way", action="store_true", help="drop only packets from A to B")
    verbs.add_parser("heal", help="undo every partition")
    logs = verbs.add_parser("logs", help="show a service's output")
    logs.add_argument("service")
    logs.add_argument("--follow", "-f", action="store_true", help="follow the output")
    run = verbs.add_parser(
        "run",
        help=(
            "run a command in which service names are replaced by addresses; default: the "
            "service's own command"
        ),
    )
    run.add_argument(
        "--service",
        default="client",
        help="the service whose environment the command gets (default: client)",
    )
    run.add_argument("command", nargs="*", metavar="-- COMMAND")
    return whole


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    chosen = parser().parse_args(words)
    folder = chosen.dir or (SECURE_STATE_DIR if chosen.secure else STATE_DIR)
    cluster = Cluster(
        folder,
        getattr(chosen, "network", ""),
        file=chosen.file,
        progress=_say,
        secure=chosen.secure,
    )
    try:
        return _do(cluster, chosen)
    except ClusterError as failure:
        _say(f"error: {failure}")
        return 1


def _do(cluster: Cluster, chosen: argparse.Namespace) -> int:
    match chosen.verb:
        case "up":
            return _up(cluster, chosen)
        case "down":
            cluster.down(volumes=chosen.volumes, force=chosen.force)
        case "status":
            _show(cluster.status(health=chosen.health), as_json=chosen.json)
        case "partition":
            cluster.partition(chosen.a, chosen.b, one_way=chosen.one_way)
        case "heal":
            cluster.heal()
        case "logs":
            _logs(cluster.log(chosen.service), follow=chosen.follow)
        case "run":
            return cluster.run(chosen.command, chosen.service)
        case verb:
            getattr(cluster, verb)(*chosen.services)
    return 0


def _up(cluster: Cluster, chosen: argparse.Namespace) -> int:
    names = [name for name in chosen.services.split(",") if name]
    try:
        cluster.up(
            names,
            deps=not chosen.no_deps,
            wait=not chosen.no_wait,
            foreground=chosen.foreground,
            within_s=chosen.timeout,
        )
        if chosen.foreground:
            _say("all is up; Ctrl-C stops it")
            # Block signals only now: services would inherit the mask and could not be stopped.
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
            signal.sigwait((signal.SIGINT, signal.SIGTERM))
    finally:
        if chosen.foreground:
            cluster.down()
    return 0


def _show(lines: list[ServiceStatus], *, as_json: bool) -> None:
    rows = [asdict(each) for each in lines]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    for row in [{name: name for name in rows[0]}, *rows]:
        print(
            (
                f"{row['service']:<14}{row['state']:<9}{row['pid'] or '':>8}  "
                f"{row['address']:<16}{row['health']}"
            ).rstrip()
        )


def _logs(path: Path, *, follow: bool) -> None:
    if not path.exists():
        raise ClusterError(f"{path.stem} has printed nothing yet")
    if follow:
        tail = shutil.which("tail") or "tail"
        os.execv(tail, [tail, "-n", "+1", "-F", str(path)])
    sys.stdout.write(path.read_text(errors="replace"))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
