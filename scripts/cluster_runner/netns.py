"""A network that can be cut: one network namespace for each service, cables between them and a
switch. Needs root and iproute2.

    namespace qmq7-switch:   bridge ── v1 ── v2 ── ... ── host
                                       │     │             │
    namespaces:              qmq7-etcd0:eth0 │             qmq7host (this machine, 10.77.7.254,
                             10.77.7.1       │             so that tests reach everyone)
                                             qmq7-etcd1:eth0 10.77.7.2

The number 7 is the cluster's slot. Adding the switch's namespace claims it, because `ip netns add`
makes the name or fails, so two clusters never share one. The bridge is in a namespace and not on
the host because a host that runs Docker filters its bridges' traffic.

A cut drops packets where they ARRIVE, by a policy rule `from ADDRESS blackhole`. A blackhole route
at the sender would be simpler, but then connect() fails at once with EINVAL, while a real partition
is silent. So the rule for local addresses, which the kernel evaluates first, is moved behind the
rules for cuts.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cluster_runner.errors import ClusterError
from cluster_runner.network import candidates, check_size

SLOTS: Final = 256
NAMESPACES: Final = Path("/run/netns")
HOST: Final = 254
CUT_PRIORITY: Final = "10"
LOCAL_PRIORITY: Final = "100"
NET_ADMIN: Final = 12
SYS_ADMIN: Final = 21
"""Capabilities: to change a network, and to enter a namespace."""


class NetworkNamespaces:
    """10.77.SLOT.0/24, a namespace for each service."""

    name = "netns"

    def __init__(self, folder: Path, services: Sequence[str], slot: int = -1) -> None:
        check_size(services)
        self._folder, self._services, self.slot = folder, services, slot

    @property
    def addresses(self) -> dict[str, str]:
        return {name: f"10.77.{self.slot}.{at}" for at, name in enumerate(self._services, 1)}

    @property
    def switch(self) -> str:
        """The namespace of the bridge."""
        return self.namespace("switch")

    @property
    def host_link(self) -> str:
        """This machine's end of its cable."""
        return f"qmq{self.slot}host"

    def namespace(self, service: str) -> str:
        """The name of a service's namespace."""
        return f"qmq{self.slot}-{service}"

    def claim(self) -> None:
        """Take a slot and make the switch and this machine's cable to it."""
        reason = unavailable()
        if reason:
            raise ClusterError(f"network namespaces: {reason}")
        taken = _routes()
        for slot in [self.slot] if self.slot >= 0 else candidates(self._folder, SLOTS):
            self.slot = slot
            subnet = ipaddress.ip_network(f"10.77.{slot}.0/24")
            if not any(subnet.overlaps(each) for each in taken) and _succeeds(
                "netns", "add", self.switch
            ):
                return self._make_switch_or_nothing()
        raise ClusterError(
            f"no free range in 10.77.0.0/16 (last tried: 10.77.{self.slot}.0/24): another "
            "cluster or network has it"
        )

    def is_there(self) -> bool:
        """Whether the switch is: it is claimed first and released last."""
        return (NAMESPACES / self.switch).exists()

    def _make_switch_or_nothing(self) -> None:
        try:
            self._make_switch()
        except ClusterError:
            self.release()
            raise

    def _make_switch(self) -> None:
        _ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "bridge", "up")
        _ip(
            "link",
            "add",
            self.host_link,
            "type",
            "veth",
            "peer",
            "name",
            "host",
            "netns",
            self.switch,
        )
        _ip("-n", self.switch, "link", "set", "host", "master", "bridge", "up")
        _ip("addr", "add", f"10.77.{self.slot}.{HOST}/24", "dev", self.host_link)
        _ip("link", "set", self.host_link, "up")

    def attach(self, service: str) -> None:
        """Make the service's namespace and cable."""
        inside, port = self.namespace(service), f"v{self._services.index(service) + 1}"
        if (NAMESPACES / inside).exists():
            return
        _ip("netns", "add", inside)
        _ip(
            "link",
            "add",
            "eth0",
            "netns",
            inside,
            "type",
            "veth",
            "peer",
            "name",
            port,
            "netns",
            self.switch,
        )
        _ip("-n", self.switch, "link", "set", port, "master", "bridge", "up")
        _ip("-n", inside, "addr", "add", f"{self.addresses[service]}/24", "dev", "eth0")
        _ip("-n", inside, "link", "set", "lo", "up")
        _ip("-n", inside, "link", "set", "eth0", "up")
        _ip("-n", inside, "rule", "add", "pref", LOCAL_PRIORITY, "lookup", "local")
        _ip("-n", inside, "rule", "del", "pref", "0")

    def own(self, service: str) -> str:
        """Each namespace has its own "localhost"."""
        return ""

    def prefix(self, service: str) -> list[str]:
        """nsenter changes into the namespace and becomes the command,
        so the pid is the service's.
        """
        return [_tool("nsenter"), f"--net={NAMESPACES / self.namespace(service)}", "--"]

    def cut(self, source: str, target: str) -> None:
        """Drop what `source` sends to `target`, where it arrives."""
        self.attach(source)
        self.attach(target)
        _ip("-n", self.namespace(target), *self._rule("add", source))

    def heal(self, source: str, target: str) -> None:
        _succeeds("-n", self.namespace(target), *self._rule("del", source))

    def _rule(self, verb: str, source: str) -> list[str]:
        return ["rule", verb, "pref", CUT_PRIORITY, "from", self.addresses[source], "blackhole"]

    def release(self) -> None:
        """Remove this machine's cable, then every namespace with what is in it; the switch last,
        because it holds the slot.
        """
        _succeeds("link", "del", self.host_link)
        listed = [path.name for path in NAMESPACES.glob("*")] if NAMESPACES.is_dir() else []
        ours = [name for name in listed if re.match(rf"qmq{self.slot}-", name)]
        for name in sorted(ours, key=self.switch.__eq__):
            _ip("netns", "del", name)


def unavailable() -> str:
    """Why this machine cannot have such a network; empty if it can."""
    effective = re.search(r"^CapEff:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    rights = int(effective[1], 16) if effective else 0
    if os.geteuid() != 0 or not (rights >> NET_ADMIN) & (rights >> SYS_ADMIN) & 1:
        return "needs root with CAP_NET_ADMIN and CAP_SYS_ADMIN"
    missing = [tool for tool in ("ip", "nsenter") if not shutil.which(tool)]
    return f"needs {' and '.join(missing)}" if missing else ""


def _routes() -> list[ipaddress.IPv4Network]:
    """The ranges that this machine has routes to, the default route left out."""
    found = [
        each["dst"] for each in json.loads(_ip("-4", "-j", "route")) if each["dst"] != "default"
    ]
    return [ipaddress.IPv4Network(each) for each in found]


def _ip(*words: str) -> str:
    done = subprocess.run([_tool("ip"), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _succeeds(*words: str) -> bool:
    return subprocess.run([_tool("ip"), *words], capture_output=True, check=False).returncode == 0


def _tool(name: str) -> str:
    found = shutil.which(name)
    if not found:
        raise ClusterError(f"{name} is not installed")
    return found
