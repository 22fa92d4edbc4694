"""A storm of DDL over a captured database: tables come, go, change names and columns, all the time.

`Storm` is threads that write rows and run, at random and against each other: CREATE, DROP, RENAME
(also of two tables with each other), SET SCHEMA, tables put in the place of others in one
transaction, columns added, dropped, renamed, retyped, REPLICA IDENTITY, VACUUM FULL, partitions
attached and detached. The capture is a process, killed now and then, its connections cut, its
tables read anew on demand, and sometimes a table is taken out of its publication behind its back.

What must hold, each time the storm rests (`_calm`):

- `equal`: all tables that are there are live, and equal the database row by row, in a capture that
  runs on, soon, and in one that is started and runs until it has caught up, at once;
- `before`: each row that was taken away from a topic with a key was there, as it stood, and each
  row that came was not (rows are compared by the columns that the topic has in the end);
- `alarm`: the capture has ended only with the error that names a table of its publication, and only
  after somebody had changed that; what the error advises (read it anew) helps.

It cannot see whether transactions are whole, nor a wrong row that was put right before the storm
rested (`capture_case` and `capture_process` can, with fewer kinds of DDL).
"""

from __future__ import annotations

import contextlib
import itertools
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import psycopg
from psycopg.rows import dict_row

import headrace as hr
from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.sources.postgres.capture import Capture
from headrace.sources.postgres.state import LIVE, State
from headrace.testing.capture_case import NAME, SETTINGS, ask_snapshot, differences
from headrace.testing.capture_process import LOST, Case, Child, cut, ended
from headrace.testing.postgres import Server, fresh_database

KEYED = [f"k{n}" for n in range(5)]
KEYLESS = [f"n{n}" for n in range(2)]
PARTED = ["p0"]
KINDS = {name: kind for kind in (KEYED, KEYLESS, PARTED) for name in kind}
"""A topic keeps its key, so a table gets names of its own kind only."""
COLUMNS = [f"c{n}" for n in range(4)]
TYPES = ["int", "bigint", "text", "numeric(12, 2)", "int default 7", "text default 'd'"]
CASTS = {"int": ["bigint", "text"], "bigint": ["text", "numeric(12, 2)"], "text": ["varchar"]}
LEFT = errors.TableLeftPublication.code
REST_SECONDS = 60.0
"""A capture that is not right so long after the storm has come to rest is wrong."""


class Storm:
    """Threads that change everything, until they are told to rest."""

    def __init__(self, server: Server, database: str, seed: str, threads: int = 3) -> None:
        self.server, self.database = server, database
        self.chance = Random(f"storm {seed}")
        self.done: Case = Case()
        self._ids = itertools.count(1)
        self._go, self._stop = threading.Event(), threading.Event()
        self._idle = [threading.Event() for _ in range(threads)]
        self._threads = [
            threading.Thread(target=self._blow, args=(idle, Random(f"{seed} {n}")))
            for n, idle in enumerate(self._idle)
        ]
        with server.connect(database) as connection:
            connection.execute("create schema aside")
            for name in KINDS:
                Gust(connection, self.chance, self._ids).make(name)

    def __enter__(self) -> Storm:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._go.set()
        for thread in self._threads:
            thread.join()

    def blow(self) -> None:
        """Go on."""
        self._go.set()

    def rest(self) -> None:
        """Return when nobody changes anything."""
        self._go.clear()
        for idle in self._idle:
            idle.wait()

    def _blow(self, idle: threading.Event, chance: Random) -> None:
        connection: psycopg.Connection[Any] | None = None
        while not self._stop.is_set():
            if not self._go.is_set():
                idle.set()
                self._go.wait(0.1)
                continue
            idle.clear()
            try:
                if connection is None or connection.closed:
                    options = "-c lock_timeout=100 -c deadlock_timeout=50"
                    connection = self.server.connect(self.database, options=options)
                self._some(connection, chance)
            except LOST:
                if connection is not None:
                    connection.close()
                time.sleep(0.05)
            time.sleep(chance.choice([0, 0, 0.01, 0.05]))
        if connection is not None:
            connection.close()

    def _some(self, connection: psycopg.Connection[Any], chance: Random) -> None:
        """One statement, or a transaction of several; what fails is rolled back."""
        gust = Gust(connection, chance, self._ids)
        one = chance.choice(DOINGS)
        try:
            if one is Gust.vacuum or chance.random() < 0.6:
                self._do(gust, one)
            else:
                with connection.transaction():
                    for _ in range(chance.choice([2, 3, 5])):
                        self._do(gust, chance.choice(IN_TRANSACTION))
                    if chance.random() < 0.1:
                        raise psycopg.Rollback
        except psycopg.OperationalError as error:
            if connection.broken or not isinstance(error, REFUSED):
                raise
            self.done.events["refused"] += 1
        except psycopg.Error:
            self.done.events["refused"] += 1

    def _do(self, gust: Gust, one: Doing) -> None:
        one(gust, gust.chance.choice(list(KINDS)))
        self.done.events[one.__name__] += 1


@dataclass
class Gust:
    """What one thread may do to a table."""

    connection: psycopg.Connection[Any]
    chance: Random
    ids: Iterator[int]

    def __post_init__(self) -> None:
        """Statements are many here."""
        self.run = self.connection.execute

    def rows(self, count: int) -> str:
        """Rows with new ids, as VALUES."""
        made = [next(self.ids) for _ in range(count)]
        return ", ".join(f"({n}, {n % 10}, 'v{n % 7}')" for n in made)

    def insert(self, name: str) -> None:
        """Also rows whose columns have their defaults."""
        self.run(f"insert into {name}(id) values ({next(self.ids)})")
        self.run(f"insert into {name}(id, c0, c1) values {self.rows(self.chance.choice([1, 40]))}")

    def update(self, name: str) -> None:
        """A third of the rows."""
        column, value = self.chance.choice(COLUMNS), self.chance.choice(["id % 5", "'3'", "null"])
        self.run(f"update {name} set {column} = {value} where id % 3 = {self.chance.randrange(3)}")

    def move(self, name: str) -> None:
        """Rows get other keys, or go."""
        which = f"id % 7 = {self.chance.randrange(7)}"
        if self.chance.random() < 0.5:
            self.run(f"update {name} set id = id + 10000000 where {which}")
        else:
            self.run(f"delete from {name} where {which}")

    def truncate(self, name: str) -> None:
        """All rows go."""
        self.run(f"truncate {name}")

    def make(self, name: str) -> None:
        """A table of the kind that its name says."""
        columns = "id int, c0 int, c1 text"
        if name in KEYED:
            self.run(f"create table {name}({columns}, primary key (id))")
        elif name in KEYLESS:
            with self.connection.transaction():  # or it is refused, and stays so
                self.run(f"create table {name}({columns})")
                self.run(f"alter table {name} replica identity full")
        else:
            self.run(f"create table {name}({columns}, primary key (id)) partition by range (id)")
            self.run(f"create table {name}_a_{next(self.ids)} partition of {name} default")
        if self.chance.random() < 0.7:
            self.run(f"insert into {name}(id, c0, c1) values {self.rows(5)}")

    def drop(self, name: str) -> None:
        """A table goes."""
        self.run(f"drop table {name}")

    def rename(self, name: str) -> None:
        """To the name that another one may have had."""
        self.run(f"alter table {name} rename to {self.chance.choice(KINDS[name])}")

    def swap(self, name: str) -> None:
        """Two tables change their names with each other."""
        other = self.chance.choice(KINDS[name])
        with self.connection.transaction():
            self.run(f"alter table {name} rename to middle")
            self.run(f"alter table {other} rename to {name}")
            self.run(f"alter table middle rename to {other}")

    def replace(self, name: str) -> None:
        """Another table takes the place of one, with most of its rows, as migrations do."""
        if name in PARTED:
            return
        with self.connection.transaction():
            self.run(f"create table middle (like {name} including all)")
            if name in KEYLESS:
                self.run("alter table middle replica identity full")
            self.run(f"insert into middle select * from {name} where id % 4 > 0")
            self.run(f"drop table {name}")
            self.run(f"alter table middle rename to {name}")

    def aside(self, name: str) -> None:
        """Out of sight, or back."""
        if self.chance.random() < 0.5:
            self.run(f"alter table {name} set schema aside")
        else:
            self.run(f"alter table aside.{name} set schema public")

    def column(self, name: str) -> None:
        """One more, one less, other names, other types."""
        one, other = self.chance.choice(COLUMNS), self.chance.choice(COLUMNS)
        alter, kind = f"alter table {name}", self.chance.random()
        if kind < 0.35:
            self.run(f"{alter} add column {one} {self.chance.choice(TYPES)}")
        elif kind < 0.55:
            self.run(f"{alter} drop column {one}")
        elif kind < 0.75:
            self.run(f"{alter} rename column {one} to {other}")
        elif kind < 0.85:
            with self.connection.transaction():
                self.run(f"{alter} rename column {one} to middle")
                self.run(f"{alter} rename column {other} to {one}")
                self.run(f"{alter} rename column middle to {other}")
        else:
            found = self.run(
                "select format_type(atttypid, null) from pg_attribute"
                " where attrelid = %s::regclass and attname = %s and not attisdropped",
                (name, one),
            ).fetchone()
            made = self.chance.choice(CASTS.get(str(found and found[0]), ["int"]))
            using = f"nullif(regexp_replace({one}::text, '[^0-9]', '', 'g'), '')::int"
            self.run(f"{alter} alter column {one} type {made} using {using}::{made}")

    def identity(self, name: str) -> None:
        """The stream says old rows whole, or only their keys."""
        if name not in KEYLESS:
            how = self.chance.choice(["full", "default"])
            self.run(f"alter table {name} replica identity {how}")

    def vacuum(self, name: str) -> None:
        """All rows get another file, and stay what they are."""
        self.run(f"vacuum full {name}")

    def part(self, name: str) -> None:
        """A partition goes, with its rows, and another one comes, with rows."""
        name = self.chance.choice(PARTED)
        with self.connection.transaction():
            found = self.run(
                "select inhrelid::regclass::text from pg_inherits where inhparent = %s::regclass",
                (name,),
            ).fetchall()
            for (one,) in found:
                self.run(f"alter table {name} detach partition {one}")
                self.run(f"drop table {one}")
            made = f"{name}_a_{next(self.ids)}"
            self.run(f"create table {made} (like {name} including all)")
            if self.chance.random() < 0.6:
                self.run(f"insert into {made}(id, c0, c1) values {self.rows(9)}")
            self.run(f"alter table {name} attach partition {made} default")


Doing = Callable[[Gust, str], None]
REFUSED = (
    psycopg.errors.LockNotAvailable,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.ObjectInUse,
    psycopg.errors.SerializationFailure,
)
"""Operational, says psycopg, and yet only somebody was in the way."""
WRITING: list[Doing] = [Gust.insert, Gust.insert, Gust.update, Gust.move, Gust.truncate]
DEFINING: list[Doing] = [
    *(Gust.make, Gust.make, Gust.drop, Gust.rename, Gust.swap, Gust.replace, Gust.aside),
    *(Gust.column, Gust.column, Gust.column, Gust.identity, Gust.part),
]
IN_TRANSACTION: list[Doing] = [*WRITING, *WRITING, *DEFINING]
DOINGS: list[Doing] = [*IN_TRANSACTION, *WRITING, Gust.vacuum]


def case(seed: str, seconds: float = 20.0) -> Case:
    """One storm of about so many seconds (and the rests in it)."""
    with (
        tempfile.TemporaryDirectory(prefix="headrace-") as folder,
        Server(**SETTINGS) as server,
        fresh_database(server, "shop") as database,
        hr.connect(Path(folder) / "log") as log,
    ):
        child = Child(Path(folder), server.dsn(database), tables=["public.*", "!public.*_a_*"])
        storm = Storm(server, database, seed)
        with storm, ended(child):
            _case(storm, child, log, seconds)
            storm.done.events["statements"] = sum(
                storm.done.events[one.__name__] for one in {*DOINGS}
            )
        return storm.done


def _case(storm: Storm, child: Child, log: EmbeddedLog, seconds: float) -> None:
    found, chance = storm.done, storm.chance
    end = time.monotonic() + seconds
    taken_out = False
    child.start()
    while not found.wrong:
        storm.blow()
        for _ in range(chance.choice([3, 6, 10])):
            time.sleep(chance.choice([0.1, 0.3, 0.8]))
            taken_out |= _event(storm, child, log, taken_out)
        storm.rest()
        taken_out = _calm(storm, child, log, taken_out)
        if time.monotonic() > end:
            break
    for name in KINDS:
        if name not in KEYLESS and not found.wrong:
            found.wrong += _steps(log, f"{NAME}.public.{name}")


def _event(storm: Storm, child: Child, log: EmbeddedLog, taken_out: bool) -> bool:
    """Something beside the storm; whether it was the publication that was changed."""
    found, chance = storm.done, storm.chance
    kind = chance.choice(["none", "kill", "cut", "snapshot", "publication", "none"])
    found.events[kind] += kind != "none"
    if kind == "kill":
        _ended(storm, child.kill(), log, taken_out)
        time.sleep(chance.choice([0, 0, 0.5]))
        child.start()
    elif kind == "cut":
        cut(storm.server, storm.database)
    elif kind == "snapshot":
        ask_snapshot(log, f"public.{chance.choice(list(KINDS))}")
    elif kind == "publication":
        name = chance.choice(list(KINDS))
        with (
            contextlib.suppress(psycopg.Error),
            storm.server.connect(storm.database) as connection,
        ):
            connection.execute(f"alter publication headrace_{NAME} drop table {name}")
            taken_out = True
            if chance.random() < 0.5:
                time.sleep(chance.choice([0, 0.2]))
                connection.execute(f"alter publication headrace_{NAME} add table only {name}")
    said = child.ended()
    if said:
        _ended(storm, said, log, taken_out)
        child.start()
    return taken_out


def _ended(storm: Storm, said: str, log: EmbeddedLog, taken_out: bool) -> None:
    """Do what the error advises, if it may be."""
    if not said:
        return
    names = set(re.findall(r"\bpublic\.(\w+)", said)) & set(KINDS)
    if LEFT in said and taken_out and names:
        storm.done.events["alarms"] += 1
        for name in names:
            ask_snapshot(log, f"public.{name}")
    else:
        storm.done.wrong.append(f"alarm: {said}")


def _calm(storm: Storm, child: Child, log: EmbeddedLog, taken_out: bool) -> bool:
    """The storm rests: everything must be right, soon or at once.

    Whether the capture may not have seen yet that the publication was changed.
    """
    storm.done.events["rests"] += 1
    if storm.chance.random() < 0.5:
        _ended(storm, child.kill(), log, taken_out)
        _catch_up(storm, log, taken_out)
        storm.done.wrong += _unequal(storm, log)
        child.start()
        return False
    until = time.monotonic() + REST_SECONDS
    while not storm.done.wrong:
        said = child.ended()
        if said:
            _ended(storm, said, log, taken_out)
            child.start()
        wrong = _unequal(storm, log)
        if not wrong:
            break
        if time.monotonic() > until:
            storm.done.wrong += wrong
        time.sleep(0.2)
    return taken_out


def _catch_up(storm: Storm, log: EmbeddedLog, taken_out: bool) -> None:
    """Run until all is captured; at each try one table may be found unpublished."""
    for _ in range(len(KINDS) + 1):
        capture = Capture(
            log, NAME, storm.server.dsn(storm.database), ["public.*", "!public.*_a_*"],
            heartbeat_seconds=0.2, chunk_rows=200,
        )  # fmt: skip
        try:
            capture.run("caught up")
        except errors.HeadraceError as error:
            _ended(storm, str(error), log, taken_out)
        else:
            return
    storm.done.wrong.append("alarm: reading each table anew that is named does not help")


def _unequal(storm: Storm, log: EmbeddedLog) -> list[str]:
    """How the log differs from the database."""
    with storm.server.connect(storm.database) as connection:
        there = [
            row[0]
            for row in connection.execute(
                "select relname from pg_class where relnamespace = 'public'::regnamespace"
                " and relname = any(%s)",
                (list(KINDS),),
            )
        ]
        state = State.load(log, NAME)
        tables = {} if state is None else state.tables
        wrong = [
            f"equal: {name} is {one.status if one else 'unknown'}: {one.reason if one else ''}"
            for name in there
            if (one := tables.get(f"public.{name}")) is None or one.status != LIVE
        ]
        if wrong:
            return wrong
        keyed = [name for name in there if name not in KEYLESS]
        wrong = [f"equal: {one}" for one in differences(log, connection, keyed)]
        for name in set(there) & set(KEYLESS):
            with connection.cursor(row_factory=dict_row) as cursor:
                theirs = Counter(_shown(one) for one in cursor.execute(f"select * from {name}"))
            found = hr.sql(log, f'select * from "{NAME}.public.{name}"')
            ours = Counter(_shown(row) for row in found.to_pylist())
            if ours != theirs:
                wrong.append(f"equal: {name}: more {ours - theirs}, less {theirs - ours}")
        return wrong


def _shown(row: dict[str, Any]) -> str:
    """A row of one of these tables: its numbers and texts, whatever their types."""
    return str({name: None if row[name] is None else str(row[name]) for name in sorted(row)})


def _steps(log: EmbeddedLog, topic: str) -> list[str]:
    """What a topic with a key takes away that is not there, or adds that is."""
    if topic not in {one.name for one in log.topics()}:
        return []
    schemas = log.topic(topic).schemas
    there: dict[tuple[int, int], dict[str, Any]] = {}
    for batch in log.read(topic):
        generation = schemas[batch.schema_version - 1].generation
        for row, position in zip(batch.data.to_pylist(), batch.positions.to_pylist(), strict=True):
            key = generation, row["id"]
            own = {name: value for name, value in row.items() if name[0] != "_"}
            if row["_weight"] == 1 and key in there:
                return [f"before: {topic} gets {own} ({row['_op']}) at {position}: {there[key]}"]
            if row["_weight"] == -1 and there.get(key) != own:
                found = there.get(key)
                return [f"before: {topic} loses {own} ({row['_op']}) at {position}: {found}"]
            if row["_weight"] == 1:
                there[key] = own
            else:
                del there[key]
    return []
