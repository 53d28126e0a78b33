"""The servers that are compared. Each runs alone, on free loopback ports, in its own folder, with
its default settings unless this file says otherwise.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import fetch
from fetch import jars, nats_server, program

HOST: Final = "127.0.0.1"
TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
START_S: Final = 90.0
STOP_S: Final = 20.0
JAVA: Final = ("java", "-XX:+UseG1GC")
CLIENTS: Final = Path(__file__).parent / "clients"


class Missing(Exception):
    """The server is not available on this machine. The message says why."""


def free_ports(count: int) -> list[int]:
    with_ports = [socket.create_server((HOST, 0)) for _ in range(count)]
    found: list[int] = [each.getsockname()[1] for each in with_ports]
    for each in with_ports:
        each.close()
    return found


@dataclass
class Server:
    """A running server."""

    address: str
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def run(
        self, *command: str | Path, name: str = "server", environment: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process; its output goes to a file of the folder."""
        with (self.folder / f"{name}.out").open("ab") as out:
            process = subprocess.Popen(
                list(map(str, command)),
                stdout=out,
                stderr=out,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def wait_for(self, port: int) -> None:
        """Wait until a process listens on the port."""
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            with socket.socket() as probe:
                if probe.connect_ex((HOST, port)) == 0:
                    return
            if any(each.poll() not in (None, 0) for each in self.processes):
                break
            time.sleep(0.1)
        said = "\n".join(
            path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.out")
        )
        raise Missing(f"it did not start: {said}")

    def memory_mib(self) -> float:
        """Memory of the server's processes and their children: their own, and a share of what they
        have in common (PSS).
        """
        found = 0
        for pid in _tree([each.pid for each in self.processes]):
            with suppress(OSError):
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):
                        found += int(line.split()[1])
        return found / 1024

    def cpu_s(self) -> float:
        """CPU time of the server's processes and their children."""
        return cpu_s([each.pid for each in self.processes])

    def stop(self) -> None:
        """Stop the server, and delete its data."""
        for process in reversed(self.processes):
            pids = _tree([process.pid])
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


def cpu_s(pids: list[int]) -> float:
    """CPU time of processes and their children."""
    return sum(cpu_by_process(pids).values())


def cpu_by_process(pids: list[int]) -> dict[int, float]:
    """The same, by process."""
    found: dict[int, float] = {}
    for pid in _tree(pids):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            found[pid] = (int(words[11]) + int(words[12])) * TICK_S
    return found


def _tree(pids: list[int]) -> list[int]:
    """Processes with their children, and theirs. Parents name children by thread, and a thread may
    end meanwhile: children name parents.
    """
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            children.setdefault(int(path.read_text().rsplit(")", 1)[1].split()[1]), []).append(
                int(path.parent.name)
            )
    found: list[int] = []
    while pids:
        found += pids
        pids = [child for pid in pids for child in children.get(pid, ())]
    return found


@contextmanager
def _starting(port: int) -> Iterator[Server]:
    """A server. It is stopped if its start fails."""
    server = Server(f"{HOST}:{port}", Path(tempfile.mkdtemp(prefix="qmq-peer-")))
    try:
        yield server
    except BaseException:
        server.stop()
        raise


def qmq(_: Path, is_flushed: bool = False, environment: dict[str, str] | None = None) -> Server:
    """`environment` may name another tree of QMQ's. Whether an answer waits for the disk is the
    sender's choice (`acks`).
    """
    (port,) = free_ports(1)
    with _starting(port) as server:
        words = (
            "--port",
            str(port),
            "--data-port",
            "0",
            "--control-port",
            "0",
            "--console-port",
            "0",
        )
        # With `-m` Python looks into the working folder first, which is this tree, and only then
        # into PYTHONPATH.
        # Bytecode is kept between starts, as after an installation: compiling all sources takes
        # longer than the rest of the start.
        found = {
            "PYTHONSAFEPATH": "1",
            "PYTHONDONTWRITEBYTECODE": "",
            **(environment or {}),
        }
        server.run(
            sys.executable,
            "-m",
            "qmq.cli",
            "dev",
            "--data",
            server.folder / "data",
            *words,
            environment=found,
        )
        server.wait_for(port)
        return server


def kafka(cache: Path, is_flushed: bool = False, nodes: int = 1) -> Server:
    """A topic's own setting says whether each message is flushed."""
    folder = jars(cache, "kafka")
    if folder is None:
        raise Missing("Maven and Java are needed")
    ports = free_ports(2 * nodes)
    brokers, controllers = ports[:nodes], ports[nodes:]
    with _starting(brokers[0]) as server:
        server.address = ",".join([f"{HOST}:{port}" for port in brokers])
        replicas, in_sync = str(nodes), str(nodes // 2 + 1)
        shared = {
            "process.roles": "broker,controller",
            "controller.quorum.voters": ",".join(
                [f"{number}@{HOST}:{port}" for number, port in enumerate(controllers, 1)]
            ),
            "controller.listener.names": "CONTROLLER",
            "offsets.topic.replication.factor": replicas,
            "transaction.state.log.replication.factor": replicas,
            "transaction.state.log.min.isr": in_sync,
            "share.coordinator.state.topic.replication.factor": replicas,
            "share.coordinator.state.topic.min.isr": in_sync,
            "group.initial.rebalance.delay.ms": "0",
        }
        java = (*JAVA, "-Xms1G", "-Xmx1G", "-cp", f"{folder}/*")
        cluster = secrets.token_urlsafe(16)
        for number, (port, controller) in enumerate(zip(brokers, controllers, strict=True), 1):
            settings = {
                **shared,
                "node.id": str(number),
                "listeners": f"PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller}",
                "log.dirs": str(server.folder / f"log{number}"),
            }
            path = server.folder / f"server{number}.properties"
            path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
            subprocess.run(
                [
                    *java,
                    "kafka.tools.StorageTool",
                    "format",
                    f"--cluster-id={cluster}",
                    "-c",
                    str(path),
                ],
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            server.run(*java, "kafka.Kafka", path, name=f"server{number}")
        for port in brokers:
            server.wait_for(port)
        return server


def rocketmq(cache: Path, is_flushed: bool = False) -> Server:
    """Not all of RocketMQ's ports can be bound to loopback, so it runs only where loopback is the
    only network.
    """
    if {name for _, name in socket.if_nameindex()} != {"lo"}:
        raise Missing(
            "it listens on all addresses, and this machine cannot have a network namespace"
        )
    folder = jars(cache, "rocketmq")
    if folder is None:
        raise Missing("Maven and Java are needed")
    names, broker, slaves = free_ports(3)
    with _starting(names) as server:
        home = server.folder
        (home / "names.conf").write_text(f"listenPort={names}\n")
        (home / "broker.conf").write_text(
            "brokerClusterName=DefaultCluster\nbrokerName=b\nbrokerId=0\nbrokerRole=ASYNC_MASTER\n"
            f"flushDiskType={'SYNC' if is_flushed else 'ASYNC'}_FLUSH\n"
            "maxTransferCountOnMessageInMemory=1000\nmaxTransferBytesOnMessageInMemory=4194304\n"
            "waitTimeMillsInSendQueue=30000\n"
            f"listenPort={broker}\nhaListenPort={slaves}\nnamesrvAddr={HOST}:{names}\n"
            f"brokerIP1={HOST}\nstorePathRootDir={home / 'store'}\n"
        )
        opens = (
            "java.base/jdk.internal.ref",
            "java.base/sun.nio.ch",
            "java.base/java.nio",
            "java.base/java.lang",
        )
        java = (
            *JAVA,
            *(f"--add-opens={each}=ALL-UNNAMED" for each in opens),
            "-Xms512M",
            "-Xmx2G",
            f"-Duser.home={home}",
            "-cp",
            f"{folder}/*",
        )
        package, environment = "org.apache.rocketmq", {"ROCKETMQ_HOME": str(home)}
        server.run(
            *java,
            f"{package}.namesrv.NamesrvStartup",
            "-c",
            home / "names.conf",
            name="names",
            environment=environment,
        )
        server.wait_for(names)
        server.run(
            *java,
            f"{package}.broker.BrokerStartup",
            "-c",
            home / "broker.conf",
            environment=environment,
        )
        server.wait_for(broker)
        return server


def nats(cache: Path, is_flushed: bool = False) -> Server:
    found = nats_server(cache)
    if found is None:
        raise Missing("Go is needed")
    (port,) = free_ports(1)
    with _starting(port) as server:
        path = server.folder / "nats.conf"
        flush = "  sync_interval: always\n" if is_flushed else ""
        path.write_text(
            f'listen: "{HOST}:{port}"\nmax_payload: 2MB\njetstream {{\n  store_dir: '
            f'"{server.folder / "data"}"\n{flush}}}\n'
        )
        server.run(found, "-c", path)
        server.wait_for(port)
        return server


def redis(_: Path, is_flushed: bool = False) -> Server:
    found = program("redis-server")
    if found is None:
        raise Missing("apt-get install redis-server")
    (port,) = free_ports(1)
    with _starting(port) as server:
        words = (
            "--bind",
            HOST,
            "--port",
            str(port),
            "--save",
            "",
            "--appendonly",
            "yes",
            "--appendfsync",
            "always" if is_flushed else "everysec",
            "--dir",
            server.folder,
        )
        server.run(found, *words)
        server.wait_for(port)
        return server


def rabbitmq(_: Path, is_flushed: bool = False) -> Server:
    """A quorum queue answers after a flush in any case."""
    found = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")  # not the wrapper that changes the user
    mapper = program("epmd")
    if not found.exists() or mapper is None:
        raise Missing("apt-get install rabbitmq-server")
    port, names, distribution = free_ports(3)
    with _starting(port) as server:
        (server.folder / "plugins").write_text("[].\n")
        environment = {
            "HOME": str(server.folder),
            "ERL_EPMD_PORT": str(names),
            "ERL_EPMD_ADDRESS": HOST,
            "RABBITMQ_NODENAME": "bench@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": HOST,
            "RABBITMQ_NODE_PORT": str(port),
            "RABBITMQ_DIST_PORT": str(distribution),
            "RABBITMQ_MNESIA_BASE": str(server.folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(server.folder / "log"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(server.folder / "plugins"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "RABBITMQ_CONFIG_FILE": str(server.folder / "none"),
            "RABBITMQ_CONF_ENV_FILE": str(server.folder / "none.conf"),
        }
        server.run(
            mapper, "-port", str(names), "-address", HOST, name="epmd", environment=environment
        )
        server.wait_for(names)
        server.run(found, environment=environment)
        server.wait_for(port)
        return server


@dataclass(frozen=True, slots=True)
class Peer:
    """A server with a client. A new one is an entry of `PEERS`.

    module: a Python module in `clients`; "java/" with a class, or "go", for the program in that
    folder. offers: what rows may need. settings: what differs from the defaults, of server and
    client.
    """

    name: str
    start: Callable[..., Server]
    module: str
    durability: str
    offers: frozenset[str]
    settings: str = "defaults"
    options: Mapping[str, str] = field(default_factory=dict)

    def client(self, python: Path, address: str, is_flushed: bool = False) -> list[str]:
        """The command of a client process."""
        options = {
            **self.options,
            **({"acks": "flushed"} if is_flushed and self.module == "qmq_client" else {}),
        }
        if self.module.startswith("java/"):
            cache = fetch.cache_folder()
            path = ":".join((str(cache / "java"), f"{cache / self.start.__name__}/*"))
            return [
                "java",
                f"-Duser.home={cache / 'java'}",
                "-cp",
                path,
                self.module.removeprefix("java/"),
                address,
            ]
        if self.module == "go":
            return [str(fetch.cache_folder() / "bin" / "nats-client"), address]
        interpreter = sys.executable if self.module == "qmq_client" else str(python)
        return [interpreter, str(CLIENTS / "phases.py"), self.module, address, json.dumps(options)]


ONE_CACHE: Final = "one replica; acknowledged from the page cache"
KAFKA: Final = f"{ONE_CACHE}, acks=all, idempotent, flushed when the kernel does"
KAFKA_SETTINGS: Final = "server: -Xmx1G, one node, group.initial.rebalance.delay.ms=0"
ALL: Final = frozenset({"ordered", "shared", "groups", "large", "disk", "flush"})
PEERS: Final = (
    Peer(
        "QMQ",
        qmq,
        "qmq_client",
        f"{ONE_CACHE}, flushed every 20 ms",
        ALL,
        "`qmq dev`; acks=flushed in the flushed rows",
    ),
    Peer(
        "Kafka, librdkafka",
        kafka,
        "kafka_confluent",
        KAFKA,
        frozenset({"ordered", "flush", "disk", "large"}),
        f"{KAFKA_SETTINGS}; linger.ms=0 where sends are awaited; consume(10000)",
    ),
    Peer(
        "Kafka, Java",
        kafka,
        "java/KafkaClient",
        KAFKA,
        frozenset({"ordered", "groups", "flush", "disk", "large"}),
        f"{KAFKA_SETTINGS}; linger.ms=0 where sends are awaited",
    ),
    Peer(
        "Kafka, aiokafka",
        kafka,
        "kafka_aiokafka",
        KAFKA,
        frozenset({"ordered", "flush"}),
        KAFKA_SETTINGS,
    ),
    Peer(
        "NATS JetStream, nats-py",
        nats,
        "nats_py",
        f"{ONE_CACHE}, file store, flushed every 2 min",
        frozenset({"shared", "groups", "large", "disk", "flush"}),
        "max_payload 2MB; 4,000 pending; sync_interval always in the flushed rows",
    ),
    Peer(
        "NATS JetStream, nats.go",
        nats,
        "go",
        f"{ONE_CACHE}, file store, flushed every 2 min",
        frozenset({"shared", "groups", "large", "disk", "flush"}),
        "max_payload 2MB; 4,000 pending; sync_interval always in the flushed rows",
    ),
    Peer(
        "Redis Streams, redis-py",
        redis,
        "redis_streams",
        f"{ONE_CACHE}, append-only file, flushed every second",
        frozenset({"shared", "groups", "large", "flush"}),
        "hiredis; save ''; appendfsync always in the flushed rows",
    ),
    Peer(
        "RabbitMQ, aio-pika",
        rabbitmq,
        "rabbitmq_aio_pika",
        "one replica, quorum queue: acknowledged after a flush",
        frozenset({"shared", "flush"}),
        "no plugins; prefetch 1,000; 1,000 confirms pending",
    ),
    Peer(
        "RocketMQ, Java",
        rocketmq,
        "java/RocketMqClient",
        f"{ONE_CACHE}, ASYNC_FLUSH, ASYNC_MASTER",
        frozenset({"ordered", "groups", "large", "disk", "flush"}),
        "server: -Xmx2G, maxTransferCountOnMessageInMemory=1000; client: remoting, "
        "batches of 1,000, 8 in flight, pullBatchSize=1000; SYNC_FLUSH in the flushed rows",
    ),
)
