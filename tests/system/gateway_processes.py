"""Processes of the gateway's benchmark and fault runs: gateways, RocketMQ's own servers, and
programs of RocketMQ's clients.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from support import needs
from support.etcd_process import free_ports

ROOT: Final = Path(__file__).resolve().parents[2]
PROGRAMS: Final = ROOT / "tests" / "qmq" / "gateway" / "programs"
CACHE: Final = needs.CACHE / "rocketmq"
JAR: Final = CACHE / "rocketmq-client-java-5.2.0.jar"
SERVER_JARS: Final = CACHE / "server"
_TICKS: Final = os.sysconf("SC_CLK_TCK")


def cpu_s(*pids: int) -> float:
    """CPU time of processes so far, seconds."""
    found = 0.0
    for pid in pids:
        words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        found += (int(words[11]) + int(words[12])) / _TICKS
    return found


def java(program: str, *options: str) -> list[str]:
    """The command that runs a program of RocketMQ's Java client. It is compiled once, into the
    cache.
    """
    source = PROGRAMS / f"{program}.java"
    classes = (
        CACHE
        / f"classes-{hashlib.sha256(source.read_bytes() + JAR.name.encode()).hexdigest()[:16]}"
    )
    if not classes.is_dir():
        made = tempfile.mkdtemp(dir=CACHE)
        subprocess.run(["javac", "-cp", str(JAR), "-d", made, str(source)], check=True)
        with suppress(OSError):  # another process was first
            Path(made).rename(classes)
    return ["java", *options, "-cp", f"{JAR}:{classes}", program]


class Gateway:
    """A `qmq gateway` process; `variables` are added to its environment."""

    def __init__(
        self,
        server: str,
        port: int = 0,
        *options: str,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.port = port or free_ports(1)[0]
        command = [
            sys.executable,
            "-m",
            "qmq.cli",
            "gateway",
            "--server",
            server,
            "--port",
            str(self.port),
            *options,
        ]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, **(variables or {})}
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "ready at" in line, line

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def kill(self) -> None:
        """As `kill -9` does."""
        self.process.kill()
        self.process.communicate()  # closes the pipe

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate()


class RocketMQ:
    """RocketMQ's name server, broker and proxy, each in its own JVM, with default settings except
    sizes, folders and ports.
    """

    def __init__(self, *topics: str) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="rocketmq-"))
        self.processes: list[subprocess.Popen[bytes]] = []
        names, broker, self.port = free_ports(3)
        self._write(
            "names.conf",
            listenPort=names,
            bindAddress="127.0.0.1",
            kvConfigPath=self.home / "kv",
            configStorePath=self.home / "names",
        )
        self._write(
            "broker.conf",
            brokerClusterName="DefaultCluster",
            brokerName="broker-a",
            brokerId=0,
            brokerIP1="127.0.0.1",
            bindAddress="127.0.0.1",
            listenPort=broker,
            haListenPort=free_ports(1)[0],
            namesrvAddr=f"127.0.0.1:{names}",
            storePathRootDir=self.home / "store",
            storePathCommitLog=self.home / "store" / "commitlog",
            mappedFileSizeCommitLog=128 << 20,
            autoCreateTopicEnable="true",
        )
        proxy = {
            "rocketMQClusterName": "DefaultCluster",
            "namesrvAddr": f"127.0.0.1:{names}",
            "grpcServerPort": self.port,
            "remotingListenPort": free_ports(1)[0],
            "enableTopicMessageTypeCheck": False,
        }
        (self.home / "proxy.json").write_text(json.dumps(proxy))
        self._start("namesrv.NamesrvStartup", 256, "-c", "names.conf")
        self._wait_for(names)
        self._start("broker.BrokerStartup", 2048, "-c", "broker.conf")
        self._wait_for(broker)
        for topic in topics:
            self._admin(
                names, "updateTopic", "-c", "DefaultCluster", "-t", topic, "-r", "8", "-w", "8"
            )
        self._start(
            "proxy.ProxyStartup",
            1024,
            "-pm",
            "CLUSTER",
            "-n",
            f"127.0.0.1:{names}",
            "-pc",
            str(self.home / "proxy.json"),
        )
        self._wait_for(self.port)

    def _write(self, name: str, **settings: object) -> None:
        (self.home / name).write_text(
            "".join(f"{key}={value}\n" for key, value in settings.items())
        )

    def _java(self, megabytes: int, main: str) -> list[str]:
        memory = f"-Xmx{megabytes}m"
        where = [f"-Duser.home={self.home}", f"-Drocketmq.home.dir={self.home}"]
        return ["java", memory, *where, "-cp", f"{SERVER_JARS}/*", f"org.apache.rocketmq.{main}"]

    def _start(self, main: str, megabytes: int, *words: str) -> None:
        with (self.home / f"{main}.log").open("wb") as out:
            self.processes.append(
                subprocess.Popen(
                    [*self._java(megabytes, main), *words], cwd=self.home, stdout=out, stderr=out
                )
            )

    def _admin(self, names: int, *words: str) -> None:
        command = [
            *self._java(128, "tools.command.MQAdminStartup"),
            *words,
            "-n",
            f"127.0.0.1:{names}",
        ]
        for _ in range(60):
            if (
                b"success"
                in subprocess.run(command, cwd=self.home, capture_output=True, check=False).stdout
            ):
                return
        raise RuntimeError(f"{words[0]} did not succeed")

    def _wait_for(self, port: int, seconds: float = 120) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            with socket.socket() as found:
                if found.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.2)
        raise RuntimeError(f"nothing listens at {port}: {self.home} has the logs")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def stop(self) -> None:
        for each in reversed(self.processes):
            each.kill()
            each.wait()
        shutil.rmtree(self.home)


class Load:
    """A program of RocketMQ's Java client (RocketmqLoad.java), which runs until `result`."""

    def __init__(self, address: str, *words: object) -> None:
        self._home = tempfile.mkdtemp(prefix="rocketmq-load-")
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - the program's until its end
        command = [*java("RocketmqLoad", "-Xmx1g", f"-Duser.home={self._home}"), address]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [*command, *map(str, words)], stdin=pipe, stdout=pipe, stderr=self._errors, text=True
        )

    def until_stored(self) -> None:
        """Wait until a sender has stored the share that it may send."""
        assert self.process.stdout is not None
        if not self.process.stdout.readline().startswith("stored"):
            raise RuntimeError("the sender ended before it had stored its messages")

    def go_on(self) -> None:
        """Let a sender send its next share."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """End it before its time."""
        if self.process.poll() is None:
            self.process.kill()

    def result(self) -> dict[str, Any]:
        """The result that the process prints at its end."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        out = self.process.stdout.read()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        shutil.rmtree(self._home, ignore_errors=True)
        self._errors.seek(0)
        errors = self._errors.read()
        self._errors.close()
        lines = [each for each in out.splitlines() if each.startswith("{")]
        if not lines:
            raise RuntimeError(f"the program ended without a result: {out}{errors[-2000:]}")
        return dict(json.loads(lines[-1]))
