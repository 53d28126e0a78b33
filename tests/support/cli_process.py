"""The command line in a separate process, forked from one that has loaded the libraries: loading
takes most of a command's time.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import pty
import socket
import struct
import subprocess
import sys
import termios
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from io import FileIO
from tempfile import TemporaryFile
from typing import Final, NoReturn

import msgspec

TIMEOUT_S: Final = 60
_FDS: Final = 3


class Command(msgspec.Struct):
    """A command line and its environment."""

    words: list[str]
    environment: dict[str, str]
    folder: str


def run(
    words: tuple[str, ...], environment: dict[str, str], data: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Run `qmq WORDS` with `data` as its standard input. Raises TimeoutError."""
    with TemporaryFile() as stdin, TemporaryFile() as stdout, TemporaryFile() as stderr:
        stdin.write(data)
        stdin.seek(0)
        channel = _begin(words, environment, [each.fileno() for each in (stdin, stdout, stderr)])
        status = int.from_bytes(_exactly(channel, 4), "big", signed=True)
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(words, status, stdout.read(), stderr.read())


def hand_over(
    replica: str, control: str, wait: str = "20", **variables: str
) -> subprocess.CompletedProcess[bytes]:
    """Run `qmq broker hand-over`, as a pod's preStop does, for a replica of group g at this control
    port. `variables` are environment variables.
    """
    host, _, port = control.rpartition(":")
    words = (
        "broker",
        "--group",
        "g",
        "--replica",
        replica,
        "--host",
        host,
        "--control-port",
        port,
        "hand-over",
        "--wait",
        wait,
        "--json",
    )
    return run(words, {**os.environ, **variables})


def run_in_terminal(
    columns: int, words: tuple[str, ...], environment: dict[str, str], *, is_whole: bool = False
) -> subprocess.CompletedProcess[bytes]:
    """Run `qmq WORDS` with a terminal as its standard output, and as its standard error if
    `is_whole`. Raises TimeoutError.
    """
    ours, theirs = pty.openpty()
    with open(ours, "rb", 0) as screen, TemporaryFile() as stdin, TemporaryFile() as stderr:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        try:
            channel = _begin(
                words,
                environment,
                [stdin.fileno(), theirs, theirs if is_whole else stderr.fileno()],
            )
        finally:
            os.close(theirs)
        shown = b"".join(_parts(screen))
        status = int.from_bytes(_exactly(channel, 4), "big", signed=True)
        stderr.seek(0)
        return subprocess.CompletedProcess(words, status, shown, stderr.read())


def _parts(screen: FileIO) -> Iterator[bytes]:
    """The output on a terminal, until the other end is closed."""
    while True:
        try:
            part = screen.read(65_536)
        except OSError:  # the other end is closed
            return
        if not part:
            return
        yield part


def _begin(words: tuple[str, ...], environment: dict[str, str], fds: list[int]) -> socket.socket:
    """Start a command, and return the connection on which its status comes."""
    channel = _server(environment.get("COLUMNS", ""))
    command = msgspec.msgpack.encode(Command(list(words), environment, os.getcwd()))
    channel.settimeout(TIMEOUT_S)
    socket.send_fds(channel, [len(command).to_bytes(4, "big")], fds)
    channel.sendall(command)
    return channel


@cache
def _server(columns: str) -> socket.socket:
    """The connection to the process that forks. There is one process for each width, because the
    width is read while the libraries load.
    """
    ours, its = socket.socketpair()
    environment = {**os.environ, "COLUMNS": columns}
    process = subprocess.Popen(
        [sys.executable, __file__, str(its.fileno())], pass_fds=[its.fileno()], env=environment
    )
    its.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _exactly(channel: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = channel.recv(size - len(found))
        if not part:
            raise EOFError
        found += part
    return found


def _run_and_exit(command_line: Callable[[], object]) -> NoReturn:
    """Run a command and end this process with its status, without taking the libraries down: that
    is most of what the command takes.
    """
    status = 1
    try:
        command_line()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else end.code is not None
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _serve(channel: socket.socket) -> None:
    """Fork a process for each command, one after another, and send what it ended with."""
    import grpc  # noqa: F401 - what most commands load
    import typer._adapters  # noqa: F401 - what typer loads for the first value, with pydantic
    from typer.main import get_command

    from qmq.cli.app import COMMANDS, app, loaded

    for each in COMMANDS:
        loaded(each)
    command_line = get_command(app)
    while True:
        size, fds, *_ = socket.recv_fds(channel, 4, _FDS)
        if not size:
            return
        command = msgspec.msgpack.decode(
            _exactly(channel, int.from_bytes(size, "big")), type=Command
        )
        child = os.fork()
        if child == 0:
            for place, fd in enumerate(fds):
                os.dup2(fd, place)
            os.environ.clear()
            os.environ.update(command.environment)
            os.chdir(command.folder)
            sys.argv = ["qmq", *command.words]
            _run_and_exit(command_line)
        for fd in fds:
            os.close(fd)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        channel.sendall(status.to_bytes(4, "big", signed=True))


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
