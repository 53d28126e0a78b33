"""A real machine that loses power: QEMU, without KVM, boots Debian's kernel with one node (`qmq
dev`) on a virtio disk; clients are outside, and the emulator is killed at random moments.

    scripts/campaign emulator --kills 200

    +---------------- QEMU -----------------+        +---- this process ----------------------+
    |  kernel, initramfs                    |  TCP   |  two senders with acks="flushed"       |
    |  python -m qmq.cli dev  <-------------+--------+  a consumer, a scanner                 |
    |  /      read only: python, packages   |        |  the one that kills, and boots again   |
    |  /data  ext4 ----- virtio-blk --------+--NBD---+  the disk and its cache (volatile_disk)|
    +---------------------------------------+        +----------------------------------------+

After each kill the disk loses a random half of what was not flushed, and the machine boots again:
the kernel replays its file system's journal, and the node must be ready. A fifth of the kills come
while it boots. At the end all is read once more, and the campaign's checkers of the workload
`archive` judge the history (`verdict.judged`): everything that was acknowledged is there, at its
place.

Needs qemu-system-x86_64, mkfs.ext4, Debian's kernel (a package linux-image-*-cloud-amd64) and
busybox (busybox-static); where the last two are not installed, `apt-get download` gets them.
"""

from __future__ import annotations

import asyncio
import gzip
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, distribution
from pathlib import Path
from random import Random
from typing import Final

from history.events import Recorder, Reset

import qmq
from campaign.client import Job
from campaign.programs import read, send_batches
from campaign.tail import Tail
from campaign.values import SUBJECT, CampaignTest, Checker, Fault, Strike, Striking, Struck
from campaign.verdict import Result, judged
from campaign.volatile_disk import VolatileDisk
from campaign.workloads.archive import GROUP, WORKLOADS, scan
from qmq.errors import QmqError

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("qmq", "coordination", "replication", "ordering")
EXTRAS: Final = ("server", "cli", "compression")
EMULATOR: Final = "qemu-system-x86_64"
TOOLS: Final = (EMULATOR, "mkfs.ext4", "ldd")
MODULES: Final = ("virtio_pci", "virtio_blk", "virtio_net", "virtio-rng")
NOT_COPIED: Final = ("test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3")
PYTHON: Final = Path(sys.executable).resolve()
SITE: Final = "/site"
DATA_MIB: Final = 4096
MEMORY_MIB: Final = 1024
READY_S: Final = 300.0
SERVES_S: Final = 180.0
CALM_S: Final = (1.0, 8.0)
AGAIN: Final = 3
"""Sends that must be answered between two kills."""
BOOTING: Final = 0.2
"""The share of kills that come while the machine boots."""
OVERLAP: Final = 2_000
"""Messages that a scan after a boot reads once more."""
FOLLOW_S: Final = 0.2
INIT: Final = """#!/bin/busybox sh
set -e
b=/bin/busybox
$b mkdir -p /proc /sys /dev /system
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t devtmpfs dev /dev
for each in {modules}; do $b insmod /modules/$each.ko; done
for each in vda vdb; do while [ ! -b /dev/$each ]; do $b sleep 0.1; done; done
$b mount -t ext4 -o ro /dev/vda /system
$b mount -t ext4 /dev/vdb /system/data
$b mount -t tmpfs tmp /system/tmp
for each in proc sys dev; do $b mount -o bind /$each /system/$each; done
$b ip link set lo up
$b ip addr add 10.0.2.15/24 dev eth0
$b ip link set eth0 up
$b ip route add default via 10.0.2.2
export HOME=/tmp PYTHONPATH={site} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 LC_ALL=C.UTF-8
exec $b chroot /system {command}
"""


class CannotRun(Exception):
    """This machine lacks something; or the machine inside does not boot."""


# --- the machine's parts --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kernel:
    """Files of Debian's kernel and of busybox."""

    image: Path
    modules: Path
    busybox: Path


def kernel_in(folder: Path) -> Kernel:
    """Installed ones, else those of packages that are unpacked in the folder. Raises CannotRun."""
    installed = _kernel_below(Path("/"))
    if installed is not None:
        return installed
    unpacked = folder / "packages"
    unpacked.mkdir(parents=True, exist_ok=True)
    _run("apt-get", "download", _kernel_package(), "busybox-static", cwd=unpacked)
    for package in unpacked.glob("*.deb"):
        _run("dpkg-deb", "-x", str(package), str(unpacked))
    found = _kernel_below(unpacked)
    if found is None:
        raise CannotRun("the packages of the kernel and of busybox have other files than expected")
    return found


def _kernel_below(root: Path) -> Kernel | None:
    images = sorted((root / "boot").glob("vmlinuz-*cloud-amd64"))
    tools = [path for path in (root / "bin/busybox", root / "usr/bin/busybox") if path.is_file()]
    if not images or not tools:
        return None
    version = images[-1].name.removeprefix("vmlinuz-")
    return Kernel(images[-1], root / "lib/modules" / version / "kernel", tools[0])


def _kernel_package() -> str:
    said = _run("apt-cache", "depends", "linux-image-cloud-amd64")
    found = re.search(r"Depends: (linux-image-\S+)", said)
    if found is None:
        raise CannotRun("there is no package linux-image-cloud-amd64")
    return found[1]


def _run(*words: str, cwd: Path | None = None) -> str:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotRun(f"{' '.join(words)}: {done.stderr.strip()[-500:]}")
    return done.stdout


def initramfs(kernel: Kernel, to: Path, command: str) -> None:
    """The first file system: busybox, the drivers of virtio, and a script that mounts the disks."""
    modules = _with_needed(kernel.modules)
    names = " ".join(path.stem for path in modules)
    init = INIT.format(modules=names, site=SITE, command=command)
    with gzip.open(to, "wb", compresslevel=1) as file:
        for folder in ("bin", "modules"):
            _add(file, folder, b"", mode=0o040755)
        _add(file, "bin/busybox", kernel.busybox.read_bytes())
        for path in modules:
            _add(file, f"modules/{path.name}", path.read_bytes())
        _add(file, "init", init.encode())
        _add(file, "TRAILER!!!", b"")


def _add(file: gzip.GzipFile, name: str, data: bytes, *, mode: int = 0o100755) -> None:
    """One entry of a cpio archive (newc)."""
    path = name.encode() + b"\0"
    fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(path), 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + path
    for part in (head, data):
        file.write(part + bytes(-len(part) % 4))


def _with_needed(folder: Path) -> list[Path]:
    """The modules and those that they need, each after what it needs."""
    known = {path.stem.replace("-", "_"): path for path in folder.rglob("*.ko")}
    found: list[Path] = []

    def add(name: str) -> None:
        path = known.get(name.replace("-", "_"))
        if path is None or path in found:
            return  # built in, or there already
        needs = re.search(rb"depends=([\w,-]*)\0", path.read_bytes())
        for each in needs[1].decode().split(",") if needs else ():
            add(each)
        found.append(path)

    for name in MODULES:
        add(name)
    return found


def root_image(folder: Path) -> Path:
    """A file system with this Python, the product and what it needs, at the paths of this
    machine.
    """
    tree, image = folder / "root", folder / "root.ext4"
    for each in ("proc", "sys", "dev", "tmp", "data"):
        (tree / each).mkdir(parents=True)
    site = tree / SITE.strip("/")
    _copy_python(tree)
    for needed in _needed("qmq", EXTRAS):
        _copy_distribution(needed, site)
    for package in PACKAGES:
        _copy_package(ROOT / package, site)
    _run(str(PYTHON), "-m", "compileall", "-q", str(site))
    _copy_libraries(tree)
    mib = sum(path.stat().st_size for path in tree.rglob("*") if path.is_file()) >> 20
    with image.open("wb") as file:
        file.truncate((mib * 5 // 4 + 128) << 20)
    _run("mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-d", str(tree), str(image))
    shutil.rmtree(tree)
    return image


def _copy_python(tree: Path) -> None:
    prefix = Path(sys.base_prefix)
    library = prefix / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for path in (PYTHON, library):
        target = tree / str(path).strip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            unwanted = shutil.ignore_patterns("site-packages", "config-*", *NOT_COPIED)
            shutil.copytree(path, target, ignore=unwanted, symlinks=True)
        else:
            shutil.copy2(path, target)


def _needed(name: str, extras: tuple[str, ...]) -> list[Distribution]:
    """What a distribution needs, without itself, as it is installed here."""
    found: dict[str, Distribution] = {}
    todo = [(name, extras)]
    seen: set[tuple[str, tuple[str, ...]]] = set()
    while todo:
        each = todo.pop()
        if each in seen:
            continue
        seen.add(each)
        installed = distribution(each[0])
        if each[0] != name:
            found[each[0]] = installed
        todo += _requirements(installed, each[1])
    return list(found.values())


def _requirements(
    installed: Distribution, extras: tuple[str, ...]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    from packaging.requirements import Requirement

    for line in installed.requires or ():
        each = Requirement(line)
        wanted = each.marker is None or any(
            each.marker.evaluate({"extra": extra}) for extra in ("", *extras)
        )
        if wanted:
            yield each.name, tuple(sorted(each.extras))


def _copy_distribution(installed: Distribution, site: Path) -> None:
    for file in installed.files or ():
        path = Path(str(installed.locate_file(file)))
        if ".." in file.parts or not path.is_file() or set(file.parts) & set(NOT_COPIED):
            continue
        target = site / str(file)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)


def _copy_package(package: Path, site: Path) -> None:
    """A folder of the product: a package, or one that holds a package."""
    folders = [package] if (package / "__init__.py").exists() else package.iterdir()
    for folder in folders:
        if (folder / "__init__.py").exists():
            unwanted = shutil.ignore_patterns("__pycache__")
            shutil.copytree(folder, site / folder.name, ignore=unwanted)


def _copy_libraries(tree: Path) -> None:
    """The shared libraries of everything in the tree, at their own paths."""
    files = [PYTHON, *(path for path in tree.rglob("*.so*") if path.is_file())]
    for file in files:
        done = subprocess.run(["ldd", str(file)], capture_output=True, text=True, check=False)
        for found in re.finditer(r"(?:=> |^\s*)(/\S+)", done.stdout, re.MULTILINE):
            target = tree / found[1].strip("/")
            if not target.exists() and tree not in Path(found[1]).parents:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(Path(found[1]).resolve(), target)


# --- the machine ----------------------------------------------------------------------------------


class Machine:
    """The emulator. `console` is what kernel and node write."""

    def __init__(self, folder: Path, kernel: Kernel, ports: tuple[int, int, int]) -> None:
        self.console = folder / "console.log"
        self.boots = 0
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        options = "--no-delay --console off --host 0.0.0.0 --insecure --advertise 127.0.0.1"
        named = zip(("--port", "--data-port", "--control-port"), ports, strict=True)
        where = " ".join(f"{name} {port}" for name, port in named)
        command = f"{PYTHON} -P -m qmq.cli dev --data /data/node {options} {where}"
        initramfs(kernel, folder / "initramfs", command)
        self._words = self._command(kernel, root_image(folder), ports)

    def _command(self, kernel: Kernel, root: Path, ports: tuple[int, ...]) -> list[str]:
        forwarded = "".join(f",hostfwd=tcp:127.0.0.1:{port}-:{port}" for port in ports)
        disk = f"nbd+unix:///?socket={self._folder / 'disk.sock'}"
        return [
            *(EMULATOR, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
            *("-machine", "pc", "-accel", "tcg", "-cpu", "max", "-m", str(MEMORY_MIB)),
            *("-kernel", str(kernel.image), "-initrd", str(self._folder / "initramfs")),
            *("-append", "console=ttyS0 quiet panic=-1 mitigations=off"),
            *("-serial", f"file:{self.console}"),
            *("-drive", f"file={root},format=raw,if=virtio,readonly=on"),
            *("-drive", f"file={disk},format=raw,if=virtio,cache=none"),
            *("-netdev", f"user,id=net,restrict=on{forwarded}"),
            *("-device", "virtio-net-pci,netdev=net,romfile="),
            *("-device", "virtio-rng-pci"),
        ]

    def boot(self) -> None:
        """Turn the power on."""
        self.boots += 1
        self.console.unlink(missing_ok=True)
        with (self._folder / "emulator.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._words, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    async def ready(self) -> float:
        """Wait until the node serves; after how many seconds. Raises CannotRun if it does not."""
        begun_s = time.monotonic()
        while time.monotonic() < begun_s + READY_S:
            if "qmq is ready at" in self.said():
                return time.monotonic() - begun_s
            if self._process is None or self._process.poll() is not None:
                break
            await asyncio.sleep(0.1)
        tail = "\n".join(self.said().splitlines()[-20:])
        raise CannotRun(f"boot {self.boots}: the node is not ready; the console ends with\n{tail}")

    def said(self) -> str:
        """The console so far."""
        return self.console.read_text(errors="replace") if self.console.exists() else ""

    def kill(self) -> None:
        """Cut the power."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        self._process = None
        if self.console.exists():
            shutil.copy(self.console, self._folder / f"console-{self.boots}.log")


def free_ports() -> tuple[int, int, int]:
    """Ports of this machine that are free now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    first, second, third = (each.getsockname()[1] for each in sockets)
    for each in sockets:
        each.close()
    return first, second, third


# --- a run ----------------------------------------------------------------------------------------


class Run:
    """One machine and its clients."""

    def __init__(self, machine: Machine, disk: VolatileDisk, folder: Path, seed: int) -> None:
        self.tail = Tail(folder)
        self.random = Random(seed)
        self._machine, self._disk, self._folder = machine, disk, folder
        self._count = 0
        """Messages that a scan has seen."""

    def _job(self, client: qmq.Client, role: str, number: int, recorder: Recorder) -> Job:
        return Job(
            name=f"{role}{number}.{os.getpid()}",
            role=role,
            number=number,
            subject=SUBJECT,
            client=client,
            folder=self._folder,
            recorder=recorder,
            durability="flushed",
            random=Random(self.random.random()),
            life=os.getpid() * 8 + number,
        )

    async def kills(self, count: int, server: str) -> str:
        """Boot, kill so often, and read all. Why it failed; empty if it did not."""
        self._machine.boot()
        say(f"boot 1: ready after {await self._machine.ready():.1f} s")
        recorders = [Recorder(self._folder / f"{name}.jsonl") for name in ("clients", "nemesis")]
        async with qmq.connect(server) as client:
            senders = [self._job(client, "producer", at, recorders[0]) for at in range(2)]
            reader = self._job(client, "reader", 2, recorders[0])
            scanner = self._job(client, "scanner", 3, recorders[0])
            sending = [asyncio.create_task(send_batches(each)) for each in senders]
            reading = asyncio.create_task(read(reader, GROUP))
            looking = asyncio.create_task(self._look([*sending, reading]))
            try:
                for number in range(count):
                    await self._serves()
                    await asyncio.sleep(self.random.uniform(*CALM_S))
                    await self._kill(recorders[1], f"{number + 1} of {count}")
                    await self._scan(scanner, max(self._count - OVERLAP, 0))
                await self._serves()
                for each in senders:
                    each.stops.set()
                await asyncio.gather(*sending)
                await self._scan(scanner, 0)
                await self._drained()
            except CannotRun as failure:
                return str(failure)
            finally:
                for task in (*sending, reading, looking):
                    task.cancel()
                await asyncio.gather(*sending, reading, looking, return_exceptions=True)
                for written in recorders:
                    written.close()
        return ""

    async def _kill(self, recorder: Recorder, which: str) -> None:
        """Once, or again and again while it boots."""
        begun = recorder.record(Strike(process="nemesis", type="invoke", fault=FAULT.name))
        recorder.record(Reset(process="nemesis", type="invoke"))
        lost, kept = await self._cut()
        seen = begun.ended("info", effect=f"{lost} blocks lost, {kept} kept", targets=("node",))
        recorder.record(seen)
        self._machine.boot()
        while self.random.random() < BOOTING:
            await asyncio.sleep(self.random.uniform(0.0, 20.0))
            lost, kept = await self._cut()
            say(f"kill {which}: again while it boots; {lost} blocks lost, {kept} kept")
            self._machine.boot()
        ready_s = await self._machine.ready()
        say(f"kill {which}: {seen.effect}; ready after {ready_s:.1f} s")
        await self._serves()
        recorder.record(Reset(process="nemesis", type="ok"))
        recorder.record(seen.ended("ok"))

    async def _cut(self) -> tuple[int, int]:
        self._machine.kill()
        return await asyncio.to_thread(self._disk.lose_power)

    async def _serves(self) -> None:
        """Raises CannotRun if clients are not served."""
        before = self.tail.answered["send"]
        await _until(
            lambda: self.tail.answered["send"] >= before + AGAIN, SERVES_S, "no send is answered"
        )

    async def _scan(self, scanner: Job, first: int) -> None:
        try:
            async with asyncio.timeout(SERVES_S):
                while True:
                    with suppress(QmqError):
                        self._count = first + await scan(scanner, first)
                        return
        except TimeoutError:
            raise CannotRun(f"the log cannot be read within {SERVES_S:g} s") from None

    async def _drained(self) -> None:
        drained = WORKLOAD.is_drained
        await _until(lambda: drained(self.tail.events), SERVES_S, "readers did not get everything")

    async def _look(self, tasks: list[asyncio.Task[None]]) -> None:
        while True:
            self.tail.look()
            for task in tasks:
                if task.done() and not task.cancelled() and task.exception() is not None:
                    say(f"a client ended: {task.exception()!r}")
            await asyncio.sleep(FOLLOW_S)


async def _until(condition: Callable[[], bool], within_s: float, otherwise: str) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end_s:
            raise CannotRun(f"{otherwise} within {within_s:g} s")
        await asyncio.sleep(FOLLOW_S)


@asynccontextmanager
async def _never(_: object) -> Striking:
    yield Struck(targets=(), effect="")


FAULT: Final = Fault(
    name="emulator-kill",
    what="the emulator is killed, and the disk's cache is lost",
    strike=_never,
    loses_acks=frozenset({"flushed"}),
)
KILLS: Final = 200
KILL_S: Final = 60.0
"""About how long one takes, with the boots after it, on two cores."""


def _lacks() -> str:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"an emulator: {', '.join(missing)} is missing" if missing else ""


WORKLOAD: Final = replace(
    WORKLOADS[0],
    gates={"send": 20, "poll": 10, "scan": 2},
    seconds=KILLS * KILL_S,
    is_long=True,
    lacks=_lacks,
)


async def _many_kills(folder: Path, seed: int, checkers: Mapping[str, Checker]) -> Result:
    try:
        place = await asyncio.to_thread(folder.resolve)
        return await run(place, checkers, kills=KILLS, seed=seed)
    except CannotRun as failure:
        return Result(test=TEST.name, verdict="error", seed=seed, seconds=0.0, reason=str(failure))


TEST: Final = CampaignTest(workload=WORKLOAD, fault=FAULT, durability="flushed", run=_many_kills)


def say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


async def run(
    folder: Path,
    checkers: Mapping[str, Checker],
    *,
    kills: int,
    seed: int,
    lies: bool = False,
) -> Result:
    """The verdict. Raises CannotRun where this machine lacks something."""
    begun_s = time.monotonic()
    if lacks := _lacks():
        raise CannotRun(lacks)
    ports = free_ports()
    machine = Machine(folder, kernel_in(folder), ports)
    image = folder / "data.ext4"
    with image.open("wb") as file:
        file.truncate(DATA_MIB << 20)
    _run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
    histories = folder / "histories"
    histories.mkdir()
    socket_at = folder / "disk.sock"
    try:
        with VolatileDisk(image, socket_at, Random(seed), lies=lies) as disk:
            work = Run(machine, disk, histories, seed)
            try:
                reason = await work.kills(kills, f"127.0.0.1:{ports[0]}")
            finally:
                machine.kill()
            say(f"{disk.writes:,} writes, {disk.flushes:,} flushes, {machine.boots} boots")
    finally:
        (folder / "root.ext4").unlink(missing_ok=True)
    work.tail.look()
    return judged(
        TEST,
        work.tail.in_order(),
        checkers,
        is_drained=not reason,
        seed=seed,
        seconds=time.monotonic() - begun_s,
        reason=reason,
    )
