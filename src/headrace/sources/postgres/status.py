"""How a capture is: what the log says, and what the server says, if it can be reached.

**Bytes held back.** A slot keeps the server's WAL from `restart` on, however long nobody fetches
it; if the server has no limit for that, its disk fills. Two looks, a second apart, give the growth,
and with the free space the time that is left. The free space is known where the server sets a limit
(`safe_wal_size`), or where its folder is on this machine.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC
from typing import TYPE_CHECKING, Any

import psycopg

from headrace.clock import SystemClock
from headrace.log.tail import last_rows
from headrace.sources.postgres import settings as asked
from headrace.sources.postgres import waits
from headrace.sources.postgres.catalog import lsn_text
from headrace.sources.postgres.prepare import one_line, patient
from headrace.sources.postgres.session import SETTINGS, connected
from headrace.sources.postgres.snapshots import Progress
from headrace.sources.postgres.state import SNAPSHOTTING, TableState

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog
    from headrace.sources.postgres.state import State

LOOK = """
    select pg_current_wal_lsn() - '0/0', s.active, s.wal_status,
      pg_wal_lsn_diff(pg_current_wal_lsn(), s.confirmed_flush_lsn),
      pg_wal_lsn_diff(pg_current_wal_lsn(), s.restart_lsn), s.safe_wal_size
    from (select 1) one left join pg_replication_slots s on s.slot_name = %s
"""


@dataclass(frozen=True)
class Look:
    """What the server says of a slot at one time."""

    at: float
    lsn: int
    active: bool | None
    """None: there is no such slot."""
    wal_status: str | None
    behind: int | None
    held: int | None
    safe: int | None
    """Bytes that may still be written before the server gives up the slot."""
    free: int | None
    """Bytes free on the server's disk, where that is this machine's."""
    waits: str


@dataclass
class Status:
    """How a capture is; numbers that are not known are None."""

    capture: str
    address: str
    patterns: list[str]
    state: str
    """`new`, `starting` (its slot cannot be made yet: see `waits`), `paused`, `running`, `stopped`,
    `away`, `no slot`, or `slot lost` (the server has given it up)."""
    away: str = ""
    """Why the server could not be asked."""
    waits: str = ""
    """For whom a statement of the capture waits at the server, if one does."""
    failed: str = ""
    """Why the last connection of the capture ended, if it is tried again since."""
    ended: str = ""
    """With which error the capture ended, if none has streamed since."""
    lsn: str | None = None
    """The log has every transaction that was committed before."""
    slot: str | None = None
    publication: str | None = None
    last_commit: str | None = None
    """When the last transaction was committed that changed a captured table."""
    last_commit_age_seconds: float | None = None
    server_lsn: str | None = None
    lag_bytes: int | None = None
    held_bytes: int | None = None
    growth_bytes_per_second: float | None = None
    room_bytes: int | None = None
    """Until the disk is full, or the server may give up the slot."""
    room_seconds: float | None = None
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return asdict(self)


def statuses(log: EmbeddedLog, names: list[str], pause: float = 1.0) -> list[Status]:
    """How these captures are; their servers are looked at twice."""
    found = {name: asked.get(log, name) for name in names}
    states = {name: asked.saved_state(log, name) for name in names}
    first = {name: _looked(name, found[name].dsn, states[name]) for name in names}
    seen = [name for name in names if isinstance(first[name], Look) and states[name]]
    if seen:
        time.sleep(pause)
    second = first | {name: _looked(name, found[name].dsn, states[name]) for name in seen}
    return [
        _status(log, name, found[name], states[name], first[name], second[name]) for name in names
    ]


def _looked(name: str, dsn: str, state: State | None) -> Look | str:
    """What the server says; or why it says nothing."""
    try:
        with connected(patient(dsn), SETTINGS) as connection:
            row = connection.execute(LOOK, (state.slot if state else "",)).fetchone()
            assert row is not None
            lsn, active, wal_status, *counts = row
            behind, held, safe = (None if one is None else int(one) for one in counts)
            return Look(
                time.monotonic(), int(lsn), active, wal_status, behind, held, safe,
                _free(connection), waits.for_session(connection, f"headrace {name}"),
            )  # fmt: skip
    except psycopg.Error as error:
        return one_line(error)


def _free(connection: psycopg.Connection[Any]) -> int | None:
    """Bytes free where the server keeps its WAL, if that is on this machine."""
    host = connection.info.host
    if not (host.startswith("/") or host in ("localhost", "127.0.0.1", "::1")):
        return None
    query = "select setting from pg_settings where name = 'data_directory'"
    row = connection.execute(query).fetchone()  # hidden from roles that may not know
    try:
        found = os.statvfs(os.path.join(row[0], "pg_wal") if row else "")
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _status(
    log: EmbeddedLog,
    name: str,
    settings: asked.Settings,
    state: State | None,
    first: Look | str,
    second: Look | str,
) -> Status:
    status = Status(name, settings.dsn, list(settings.tables), "new")
    status.failed, status.ended = ("", "") if state is None else (state.failed, state.ended)
    if state is not None and state.lsn:
        status.state = "stopped"
        status.lsn, status.slot, status.publication = (
            lsn_text(state.lsn), state.slot, state.publication
        )  # fmt: skip
        _add_commit(status, log)
        status.tables = {
            table: {
                "topic": one.topic,
                "status": one.status,
                "rows_read": one.rows,
                **_far(table, one),
                "reason": one.reason,
            }
            for table, one in sorted(state.tables.items())
        }
    if isinstance(second, str):
        status.away = second
        status.state = "away"
    else:
        status.waits = second.waits
        if status.slot is None and status.waits:
            status.state = "starting"
        if status.slot is not None:
            _add_look(status, second)
            if isinstance(first, Look):
                _add_growth(status, first, second)
    if settings.paused:
        status.state = "paused"
    return status


def _far(table: str, one: TableState) -> dict[str, Any]:
    """How far a snapshot is."""
    if one.status != SNAPSHOTTING:
        return {}
    far = Progress(table, one.rows, one.of, one.rate)
    left = far.seconds_left
    return {
        "rows_estimated": one.of if one.of >= 0 else None,
        "rows_per_second": round(one.rate, 1),
        "seconds_left": None if left is None else round(left, 1),
    }


def _add_look(status: Status, look: Look) -> None:
    status.server_lsn = lsn_text(look.lsn)
    if look.active is None:
        status.state = "no slot"
        return
    if look.wal_status == "lost":
        status.state = "slot lost"
        return
    if look.active:
        status.state = "running"
    status.lag_bytes, status.held_bytes = look.behind, look.held
    rooms = [max(0, room) for room in (look.safe, look.free) if room is not None]
    status.room_bytes = min(rooms, default=None)


def _add_growth(status: Status, first: Look, second: Look) -> None:
    seconds = second.at - first.at
    if first.held is None or second.held is None or seconds <= 0:
        return
    growth = (second.held - first.held) / seconds
    status.growth_bytes_per_second = round(growth, 1)
    if growth > 0 and status.room_bytes is not None:
        status.room_seconds = round(status.room_bytes / growth, 1)


def _add_commit(status: Status, log: EmbeddedLog) -> None:
    """When the last transaction of the log was committed."""
    found = last_rows(log, f"{status.capture}._transactions", 1)
    last = None if found is None else found.column("commit_time")[0].as_py()
    if last is None:
        return
    committed = last if last.tzinfo else last.replace(tzinfo=UTC)
    status.last_commit = committed.isoformat()
    age = SystemClock().now_us() / 1e6 - committed.timestamp()
    status.last_commit_age_seconds = round(max(0.0, age), 1)
