"""What people ask of a capture: a named value in the log, which the running capture reads.

So every process that has the log can pause a capture or ask for a snapshot, and what was asked for
survives a restart. A change reads the value and writes it with a counter that must not have moved
meanwhile: of two changes at once none is lost.

**Passwords** are never written to the log. The address is kept without it; PGPASSWORD or ~/.pgpass
supplies it, as for every program that connects through libpq.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from headrace import errors
from headrace.sources.postgres.state import State, settings_name

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog

EVERYTHING = ("public.*",)
SECRETS = ("password", "sslpassword", "oauth_client_secret")


@dataclass(frozen=True)
class Settings:
    """What is asked of one capture."""

    dsn: str
    """Without the password."""
    tables: tuple[str, ...] = EVERYTHING
    """Patterns."""
    numeric_as_text: bool = False
    paused: bool = False
    snapshots: dict[str, int] = field(default_factory=dict)
    """Table -> how often it was asked to be read anew."""
    awaited: int = 0
    """An LSN that somebody waits for: see `Capture`."""
    removed: bool = False
    """The name is free again; its topics are kept."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Settings:
        """As it stands in the log."""
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        return cls(**known | {"tables": tuple(data["tables"])})

    def to_json(self) -> dict[str, Any]:
        """The inverse."""
        return asdict(self) | {"tables": list(self.tables)}


def patterns(tables: Iterable[str]) -> tuple[str, ...]:
    """One may stand alone; with those only that leave out, all else of schema `public` is meant."""
    found = (tables,) if isinstance(tables, str) else tuple(tables)
    return found if any(not one.startswith("!") for one in found) else (*EVERYTHING, *found)


def check_name(name: str) -> None:
    """Refuse a name that cannot be part of the names of topics and of a slot."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name):
        raise errors.BadSetting(
            f"'{name}' cannot be the name of a capture",
            place=name,
            why="a slot is named after it: at most 40 of a to z, 0 to 9 and _, a letter first",
            fix="e.g. 'shop'",
        )


def without_password(dsn: str) -> tuple[str, bool]:
    """An address without its password, and whether there was one.

    What libpq says of an address that it cannot read may quote the password, so it is not shown.
    Of a URL whose password has an @ or / as it is, libpq takes the rest for the host or database.
    """
    url = re.match("postgres(?:ql)?://(?:[^@/]*@)?([^?]*)", dsn)
    try:
        if url and "@" in url[1]:
            raise psycopg.ProgrammingError
        parts: dict[str, Any] = conninfo_to_dict(dsn)
    except psycopg.Error:
        raise errors.BadSetting(
            "the address is not one of PostgreSQL",
            place="the address",
            why="it is a URL or words such as 'host=... dbname=...'; special characters in a URL"
            " are written as %XX",
            fix="e.g. postgresql://user@host:5432/shop",
        ) from None
    secret = [parts.pop(name, None) for name in SECRETS]
    return make_conninfo(**parts), any(secret)


def find(log: EmbeddedLog, name: str) -> Settings | None:
    """What is asked of a capture; None if there is none of that name."""
    data = log.value(settings_name(name))
    settings = None if data is None else Settings.from_json(data)
    return None if settings is None or settings.removed else settings


def get(log: EmbeddedLog, name: str) -> Settings:
    """The same, for one that must be there."""
    settings = find(log, name)
    if settings is not None:
        return settings
    names = list(everything(log))
    fix = errors.nearest(name, names) or (f"the captures are {', '.join(names)}" if names else "")
    raise errors.UnknownCapture(f"there is no capture '{name}'", place=log.path, fix=fix)


def everything(log: EmbeddedLog) -> dict[str, Settings]:
    """All captures of a log by name."""
    prefix = settings_name("")
    found = {}
    for name, data in sorted(log.values(prefix).items()):
        settings = Settings.from_json(data)
        if not settings.removed:
            found[name.removeprefix(prefix)] = settings
    return found


def change(log: EmbeddedLog, name: str, changed: Callable[[Settings | None], Settings]) -> Settings:
    """Replace what is asked of a capture by what `changed` makes of it."""
    counter = settings_name(name)
    while True:
        version = log.counter(counter)
        settings = changed(find(log, name))
        try:
            with log.transaction() as transaction:
                transaction.expect(counter, version)
                transaction.put(settings_name(name), settings.to_json())
        except errors.Conflict:
            continue  # somebody else has changed it: look again
        return settings


def add(log: EmbeddedLog, name: str, wanted: Settings) -> None:
    """Enter a new capture."""

    def changed(there: Settings | None) -> Settings:
        if there is not None:
            check_free(log, name)
        return wanted

    check_name(name)
    change(log, name, changed)


def check_free(log: EmbeddedLog, name: str) -> None:
    """Refuse the name of a capture that is there."""
    there = find(log, name)
    if there is not None:
        raise errors.CaptureExists(
            f"there is a capture '{name}' already: {there.dsn}", place=log.path
        )


def update(log: EmbeddedLog, name: str, **changes: Any) -> Settings:
    """Change some of what is asked of a capture."""

    def changed(there: Settings | None) -> Settings:
        return replace(there or get(log, name), **changes)

    return change(log, name, changed)


def ask_snapshot(log: EmbeddedLog, name: str, table: str) -> None:
    """Ask for a table to be read anew."""

    def changed(there: Settings | None) -> Settings:
        settings = there or get(log, name)
        times = settings.snapshots.get(table, 0) + 1
        return replace(settings, snapshots=settings.snapshots | {table: times})

    change(log, name, changed)


def saved_state(log: EmbeddedLog, name: str) -> State | None:
    """How far a capture is, without claiming it."""
    return State.load(log, name)
