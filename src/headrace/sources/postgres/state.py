"""What a capture knows of itself: kept in the log, in the same entry as the data it speaks of.

`lsn` is the resume point: everything that was committed in the database before it, and nothing of
what came after, is in the topics of the tables that are `live`. There is no other memory.

Each table is a named value of its own, beside the one with the resume point, and is in an entry
only when something of it has changed: of a thousand tables that would be half a megabyte.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace import errors
from headrace.log.writer import state_counter

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog

FORMAT = 2
"""1 had the tables in the same value."""
LIVE, SNAPSHOTTING, STOPPED = "live", "snapshotting", "stopped"
_UNSAVED = "_unsaved"


@dataclass
class TableState:
    """One table of a capture."""

    topic: str
    key: list[str]
    member: int
    """The entry of the table in the publication."""
    columns: dict[str, int]
    """The columns by name, and the number that each has in the database (a rename keeps it)."""
    status: str = SNAPSHOTTING
    after: list[str] | None = None
    """Snapshotting: the last key that is published."""
    upto: list[str] | None = None
    """Snapshotting: the last key of the table when its first chunk was read."""
    read_through: bool = False
    """Snapshotting: the last chunk is published; only `pending` is left."""
    pending: list[list[str]] = field(default_factory=list)
    """Snapshotting: keys to be read once more."""
    unseen: list[int] = field(default_factory=list)
    """Snapshotting, without a key: transactions that were not heard, which it must see."""
    dirty: bool = False
    """Snapshotting: the topic may hold rows of keys that are still to be read."""
    thorough: bool = False
    """Snapshotting: rows that it does not find go in the end. Not where only values can differ."""
    rows: int = 0
    """Rows that the snapshot has read."""
    of: int = -1
    """How many there are, by the planner's estimate; -1: nobody knows."""
    rate: float = 0.0
    """Rows a second."""
    reason: str = ""
    """Stopped: why."""
    fence: int = 0
    """A chunk counts only if all transactions before this one have ended: what they wrote to the
    table before it was published is not in the stream, and after a restart nobody knows the keys
    that the stream has said. -1: the next number, when it is read."""
    oid: int = 0
    """The table's: another one, and it is another table of the same name."""
    storage: str = ""
    """Its file; another one, and all rows were written anew, without a word in the stream (or
    everything is in another file for nothing, as by VACUUM FULL). Behind a truncate any is
    right if nobody has `altered` the table since (`catalog.emptied`). Empty: any is right."""
    altered: str = ""
    """As `catalog.TableInfo` has it, when the storage was last seen to be right."""
    partitions: str = ""
    """As `catalog.TableInfo` has it, when it was last looked at."""
    grown: int = 0
    """Up to here the stream may change rows that the topic does not have: new partitions have lost
    them since, or partitions have named them by other columns for a while, which nobody says."""
    labels: str = ""
    """The last of the labels of its enums, and a hash of all: another one, and some were renamed,
    also in a word that the stream does not have. Empty: any are right."""
    asked: int = 0
    """How often somebody has asked for a snapshot, as far as it was heard."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Note that it is to be saved. Lists are assigned (`+=` too), or nobody would know."""
        if isinstance(value, list) or value != self.__dict__.get(name):
            self.__dict__[_UNSAVED] = True
        self.__dict__[name] = value

    def stop(self, error: Exception) -> None:
        """Say why it cannot go on."""
        self.status, self.reason = STOPPED, error_line(error)

    def read_again(self, *, thorough: bool = True) -> None:
        """Begin a snapshot from the start of the table."""
        if self.status == STOPPED:  # what the stream said meanwhile was not heard
            self.fence = -1
        self.status, self.reason = SNAPSHOTTING, ""
        self.after, self.upto, self.read_through, self.pending = None, None, False, []
        self.dirty, self.rows = True, 0
        self.thorough = self.thorough or thorough


@dataclass
class State:
    """A capture."""

    system_id: str
    timeline: int
    database: str
    database_oid: int
    slot: str
    publication: str
    publication_oid: int = 0
    lsn: int = 0
    """0: the slot is being made."""
    starts: int = 0
    told: int = 0
    """Rows of the topic of transactions that are older than the slot."""
    failed: str = ""
    """Why the last connection ended that did not hold, until one does."""
    ended: str = ""
    """With which error the last run ended, until another one streams."""
    tables: dict[str, TableState] = field(default_factory=dict)
    """By `schema.table`."""

    _kept: set[str] = field(default_factory=set)
    """Tables that the log has."""

    def to_json(self) -> dict[str, Any]:
        """What every entry has of it."""
        own = {name: value for name, value in vars(self).items() if name not in _APART}
        return {"format": FORMAT, **own}

    def unsaved(self, capture: str) -> dict[str, Any]:
        """The named values of the tables that are to be in the next entry; None: it is gone."""
        gone = self._kept.difference(self.tables)
        return dict.fromkeys([table_name(capture, one) for one in gone]) | {
            table_name(capture, name): {k: v for k, v in vars(one).items() if k != _UNSAVED}
            for name, one in self.tables.items()
            if _UNSAVED in one.__dict__
        }

    def save(self) -> None:
        """The log has it as it is."""
        self._kept = set(self.tables)
        for one in self.tables.values():
            one.__dict__.pop(_UNSAVED, None)

    @classmethod
    def load(cls, log: EmbeddedLog, name: str) -> State | None:
        """As the log has it; refuses what a newer version wrote."""
        values = log.values(state_counter(writer_name(name)))
        data = dict(values.get(state_counter(writer_name(name))) or {})
        if not data:
            return None
        found = data.pop("format")
        if found not in (1, FORMAT):
            raise errors.NewerFormat(
                f"capture '{name}' has state of format {found}, not {FORMAT}", place=name
            )
        prefix = table_name(name, "")
        saved = {one[len(prefix) :]: v for one, v in values.items() if one.startswith(prefix) and v}
        tables = {table: TableState(**one) for table, one in data.pop("tables", saved).items()}
        state = cls(tables=tables, **data)
        if found == FORMAT:
            state.save()
        return state


_APART = ("tables", "_kept")


def error_line(error: Exception) -> str:
    """An error in a line: of one of the catalogue the column, the fact, the code."""
    if not isinstance(error, errors.HeadraceError):
        return " ".join(str(error).split())
    named = not error.place.startswith("column ") or error.place in error.fact
    column = "" if named else f"{error.place}: "
    return f"{column}{error.fact} ({error.code})"


def full_name(schema: str, table: str) -> str:
    """The name of a table in the state: `schema.table`; a point in the schema is `_x002E_`."""
    return f"{schema.replace('.', '_x002E_')}.{table}"


def topic_name(capture: str, table: str) -> str:
    """The topic of a table (its full name): what no topic can be named is as `_x0020_`."""
    return f"{capture}.{re.sub(r'[^A-Za-z0-9_.-]', lambda m: f'_x{ord(m[0]):04X}_', table)}"


def table_of(name: str) -> tuple[str, str]:
    """The schema and the table of a full name."""
    schema, _, table = name.partition(".")
    return schema.replace("_x002E_", "."), table


def told_name(part: str) -> str:
    """A part of a topic's name as the database has it."""
    return re.sub(r"_x([0-9A-F]{4,6})_", lambda m: chr(int(m[1], 16)), part)


def writer_name(capture: str) -> str:
    """The name under which a capture commits."""
    return f"capture/{capture}"


def table_name(capture: str, table: str) -> str:
    """The named value of a table, by its full name."""
    return f"{state_counter(writer_name(capture))}/table/{table}"


def settings_name(capture: str) -> str:
    """The named value with what people ask of a capture: see `Capture`."""
    return f"capture/{capture}"
