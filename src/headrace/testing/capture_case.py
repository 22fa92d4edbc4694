"""Databases that change at random while they are captured, and what must hold of the log then.

The `Writer`s do everything that a database can do to a capture: key changes, large values left
alone, savepoints taken back, transactions that the server streams before they end, empty ones,
truncates, other columns, messages. Triggers write down what each statement did (`history`: rows,
their number, a sum), in the same transaction, so that the log can be held against it:

- `table`: the topic's table equals the database, row by row;
- `before`: each row that is taken away is there, as it stands; each row that comes is not;
- `whole`: the rows of each transaction are in one entry, and add up to what its history says;
- `order`: transactions come in commit order, each once, numbered so in the entry;
- `messages`: each message once.

`whole` sums are known only for tables that were `live` all the time: the caller says between which
positions. Two drivers use this: `stepped` (one thread; the capture is stopped at chosen instants,
and its writers go on there; it finds seeded bugs fast) and `capture_process` (threads, processes,
real kills).
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from random import Random
from typing import Any
from unittest import mock

import psycopg

import headrace as hr
from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.writer import WriterTransaction
from headrace.sources.postgres import snapshot, snapshots
from headrace.sources.postgres.capture import Capture
from headrace.sources.postgres.keyless import Whole
from headrace.sources.postgres.snapshot import Wanted
from headrace.sources.postgres.snapshots import Readers
from headrace.sources.postgres.state import LIVE, STOPPED, State, settings_name
from headrace.sources.postgres.stream import Stream
from headrace.testing.postgres import Server, fresh_database
from headrace.testing.verdicts import verdict_on

NAME = "shop"
SETTINGS = {"logical_decoding_work_mem": "64kB", "wal_writer_delay": "10ms"}
CORE = ("id", "part", "title", "amount", "body")
TABLE = """
    create table {name}(
        id int not null, part text not null, title text, amount numeric(12, 2), body text,
        at timestamptz, primary key (id, part)
    );
    alter table {name} alter column body set storage external;
"""
HISTORY = """
    create table history(
        n bigserial primary key, xid bigint default pg_current_xact_id()::text::bigint,
        changed text, number int, rows int, total numeric(20, 2)
    );
    create function note() returns trigger language plpgsql as $$
    declare
        n int := 0; t numeric := 0; m int := 0; u numeric := 0;
    begin
        if TG_OP in ('INSERT', 'UPDATE') then
            select count(*), coalesce(sum(amount), 0) into n, t from new_rows;
        end if;
        if TG_OP in ('DELETE', 'UPDATE') then
            select count(*), coalesce(sum(amount), 0) into m, u from old_rows;
        end if;
        if TG_OP = 'TRUNCATE' then
            execute format('select count(*), coalesce(sum(amount), 0) from %I', TG_TABLE_NAME)
            into m, u;
        end if;
        if n > 0 or m > 0 then
            insert into history(changed, number, rows, total)
            values (TG_TABLE_NAME, n + m, n - m, t - u);
        end if;
        return null;
    end $$;
"""
TRIGGERS = """
    create trigger i after insert on {name} referencing new table as new_rows
        for each statement execute function note();
    create trigger u after update on {name} referencing new table as new_rows old table as old_rows
        for each statement execute function note();
    create trigger d after delete on {name} referencing old table as old_rows
        for each statement execute function note();
    create trigger t before truncate on {name} for each statement execute function note();
"""
REFUSED = (
    psycopg.errors.UniqueViolation,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.LockNotAvailable,
    psycopg.errors.UndefinedColumn,
    psycopg.errors.DuplicateColumn,
)
"""What another writer's doings may do to a transaction: it is rolled back."""


def make_tables(connection: psycopg.Connection[Any], tables: Sequence[str], *full: str) -> None:
    """Tables of one kind with triggers, and `history`; those in `full` give whole old rows."""
    connection.execute(HISTORY)
    for table in tables:
        make_table(connection, table, full=table in full)


def make_table(connection: psycopg.Connection[Any], table: str, *, full: bool = False) -> None:
    """One more."""
    connection.execute(TABLE.format(name=table) + TRIGGERS.format(name=table))
    if full:
        connection.execute(f"alter table {table} replica identity full")


# --- writers ------------------------------------------------------------------------------


class Writer:
    """Changes tables at random. Writers with other numbers have other rows."""

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        tables: Sequence[str],
        seed: str,
        number: int = 0,
        *,
        alters: bool = False,
        messages: bool = False,
    ) -> None:
        """The changes follow from the seed (and from what others do meanwhile)."""
        self.connection = connection
        self.tables = list(tables)
        self.chance = Random(seed)
        self.number = number
        self.truncates = 0.02
        """The share of statements that empty a table."""
        self.alters = alters
        self.messages = messages
        self.sent: set[str] = set()
        """Messages that must come."""
        self._new: list[tuple[str, bool]] = []
        self._names = itertools.count()
        self._exclusive = False

    def transaction(self) -> None:
        """One transaction; perhaps rolled back."""
        for _ in self.steps():
            pass

    def steps(self) -> Generator[None, None, None]:
        """One transaction, statement by statement; no pause while it holds a table alone."""
        chance = self.chance
        self._new, self._exclusive = [], False
        undone = False
        try:
            with self.connection.transaction():
                for _ in range(chance.choice([0, 1, 1, 2, 5, 12])):
                    if chance.random() < 0.25:
                        yield from self._savepoint(2)
                    else:
                        self.change()
                    if not self._exclusive:
                        yield
                undone = chance.random() < 0.1
                if undone:
                    raise psycopg.Rollback
        except REFUSED:
            undone = True
        self.sent |= {text for text, transactional in self._new if not (transactional and undone)}

    def _savepoint(self, depth: int) -> Generator[None, None, None]:
        """Changes of which half are taken back, also inside of each other."""
        kept = len(self._new)
        undone = self.chance.random() < 0.5
        with self.connection.transaction():
            for _ in range(2):
                if depth and self.chance.random() < 0.2:
                    yield from self._savepoint(depth - 1)
                self.change()
                if not self._exclusive:
                    yield
            if undone:
                self._new[kept:] = [one for one in self._new[kept:] if not one[1]]
                raise psycopg.Rollback

    def _key(self) -> tuple[int, str]:
        return 10 * self.chance.randrange(6) + self.number, self.chance.choice("abc")

    def change(self) -> None:
        """One statement."""
        chance = self.chance
        table = chance.choice(self.tables)
        key = self._key()
        kind = chance.random()
        run = self.connection.execute
        if chance.random() < self.truncates:
            self._exclusive = True
            run(f"truncate {table}")
        elif kind < 0.33:
            body = (
                None if chance.random() < 0.3 else chance.choice("xyz") * chance.choice([5, 9000])
            )
            title = chance.choice(["", "t", None, 'q"\t\\'])
            run(
                f"insert into {table} (id, part, title, amount, body, at)"
                " values (%s, %s, %s, %s, %s, now())"
                " on conflict (id, part) do update set title = excluded.title",
                (*key, title, chance.randrange(10**6) / 100, body),
            )
        elif kind < 0.6:
            run(
                f"update {table} set amount = %s, title = %s where id = %s",
                (chance.randrange(1000), str(chance.random()), key[0]),
            )
        elif kind < 0.68:
            run(f"update {table} set body = %s where id = %s", ("w" * 7000, key[0]))
        elif kind < 0.78:
            run(
                f"update {table} set id = id + 1000 where (id, part) = (%s, %s)"
                f" and not exists (select from {table} where (id, part) = (%s, %s))",
                (*key, key[0] + 1000, key[1]),
            )
        elif kind < 0.9:
            run(f"delete from {table} where id = %s", (key[0] + chance.choice([0, 1000]),))
        elif kind < 0.93:
            self._many(table)
        elif self.alters and kind < 0.96:
            self._alter(table)
        else:
            self._message()

    def _many(self, table: str) -> None:
        """So many rows that the server streams them before the transaction ends."""
        if self.chance.random() < 0.5:
            self.connection.execute(
                f"insert into {table} (id, part, amount, body)"
                f" select 10 * g + {self.number}, 'm', g, repeat('m', 1000)"
                " from generate_series(1000, 1090) g on conflict do nothing"
            )
        else:
            self.connection.execute(
                f"delete from {table} where id > 9000 and id %% 10 = %s", (self.number,)
            )

    def _message(self) -> None:
        if not self.messages:
            return
        text, transactional = f"{self.number} {next(self._names)}", self.chance.random() < 0.5
        self.connection.execute(
            "select pg_logical_emit_message(%s, 'test', %s)", (transactional, text)
        )
        self._new.append((text, transactional))

    def _alter(self, table: str) -> None:
        """Other columns; those that all tables have stay."""
        self._exclusive = True
        chance, run = self.chance, self.connection.execute
        found = run(
            "select attname, atttypid::regtype::text from pg_attribute"
            " where attrelid = %s::regclass and attnum > 0 and attname like 'x%%'"
            " and not attisdropped",
            (table,),
        ).fetchall()
        name = f"x{chance.randrange(100)}"
        if not found or chance.random() < 0.5:
            default = chance.choice(["", "default 7"])
            run(f"alter table {table} add column {name} int {default}")
        else:
            other, kind = chance.choice(found)
            which = chance.random()
            if which < 0.3:
                run(f"alter table {table} drop column {other}")
            elif which < 0.6 or kind != "integer":
                run(f"alter table {table} rename column {other} to {name}")
            else:
                run(f"alter table {table} alter column {other} type bigint")
        run(f"update {table} set amount = 1 where id = %s", (self._key()[0],))


# --- what must hold -----------------------------------------------------------------------


@dataclass
class Audit:
    """What was looked at, and what is wrong: `check: what`."""

    entries: int = 0
    transactions: int = 0
    summed: int = 0
    """Transactions whose sums were held against the history."""
    rows: int = 0
    wrong: list[str] = field(default_factory=list)


def audit(log: EmbeddedLog, live: Sequence[tuple[int, int]] = ()) -> Audit:
    """Hold everything in the topics of a capture against itself.

    `live`: from where to where no table was being read.
    """
    found = Audit()
    topics = [topic.name for topic in log.topics() if topic.name.startswith(f"{NAME}.")]
    entries: dict[int, list[tuple[str, dict[str, Any], int]]] = defaultdict(list)
    for batch in log.read(topics):
        rows = batch.data.to_pylist()
        for row, position, number in zip(
            rows, batch.positions.to_pylist(), batch.transaction.to_pylist(), strict=True
        ):
            entries[position].append((batch.topic, row, number))
    state: dict[str, dict[Any, Any]] = defaultdict(dict)
    seen: dict[int, int] = {}
    last = 0
    for position in sorted(entries):
        found.entries += 1
        sums: dict[int, dict[str, list[Any]]] = defaultdict(dict)
        numbers: dict[int, int] = {}
        for topic, row, number in entries[position]:
            found.rows += 1
            if topic.startswith(f"{NAME}._"):
                continue
            _step(found, state[topic], topic, row)
            if row["_xid"] is not None:
                _count(sums[row["_xid"]], topic, row)
                numbers.setdefault(row["_lsn"], row["_xid"])
                numbers_of = numbers.setdefault(~number, row["_xid"])
                if numbers_of != row["_xid"]:
                    found.wrong.append(f"order: number {number} of {topic} is of two transactions")
        told = [r for topic, r, _ in entries[position] if topic == f"{NAME}._transactions"]
        for row in told:
            found.transactions += 1
            xid, lsn = row["xid"], row["lsn"]
            if xid in seen:
                found.wrong.append(f"order: transaction {xid} at {seen[xid]} and {position}")
            if lsn <= last:
                found.wrong.append(f"order: transaction {xid} at LSN {lsn} after {last}")
            seen[xid], last = position, max(last, lsn)
        if {row["xid"] for row in told} != set(sums):
            found.wrong.append(f"whole: entry {position} tells of other transactions than it has")
        if any(begin < position <= end for begin, end in live):
            for xid, parts in sums.items():
                found.summed += 1
                _whole(found, xid, parts)
    return found


def _step(found: Audit, state: dict[Any, Any], topic: str, row: dict[str, Any]) -> None:
    """Add a row to a state."""
    names = ("n", "xid", "number") if topic == f"{NAME}.public.history" else CORE
    value = tuple(row[name] for name in names)
    key = value[:1] if names[0] == "n" else value[:2]
    there = state.get(key)
    if row["_weight"] == 1:
        if there is not None:
            found.wrong.append(f"before: {topic} gets {key} ({row['_op']}), which is there")
        state[key] = value
    else:
        if there != value:
            what = "is not there" if there is None else "is another row"
            found.wrong.append(f"before: {topic} loses {key} ({row['_op']}), which {what}")
        state.pop(key, None)


def _count(sums: dict[str, list[Any]], topic: str, row: dict[str, Any]) -> None:
    name = topic.rpartition(".")[2]
    if name == "history":
        told = sums.setdefault(f"={row['changed']}", [0, 0, 0])
        more = [row["number"], row["rows"], row["total"]]
    else:
        told = sums.setdefault(name, [0, 0, 0])
        more = [1, row["_weight"], row["_weight"] * (row["amount"] or 0)]
    told[:] = [one + other for one, other in zip(told, more, strict=True)]


def _whole(found: Audit, xid: int, parts: dict[str, list[Any]]) -> None:
    for name in {name.lstrip("=") for name in parts}:
        one, other = parts.get(name, [0, 0, 0]), parts.get(f"={name}", [0, 0, 0])
        if one != other:
            found.wrong.append(
                f"whole: transaction {xid} changes {name} by {list(map(str, one))}"
                f" (number, rows, sum), its history says {list(map(str, other))}"
            )


def differences(
    log: EmbeddedLog, connection: psycopg.Connection[Any], tables: Sequence[str]
) -> list[str]:
    """How tables of log and database differ."""
    wrong = []
    for table in tables:
        names = [
            row[0]
            for row in connection.execute(
                "select attname from pg_attribute where attrelid = %s::regclass"
                " and attnum > 0 and not attisdropped order by attnum",
                (table,),
            )
        ]
        try:
            found = log.table(f"{NAME}.public.{table}").scan().read_all()
        except errors.HeadraceError as error:
            wrong.append(verdict_on(error, f"table: {table}: "))
            continue
        if not set(names) <= set(found.schema.names):
            wrong.append(f"table: {table} has {found.schema.names} in the log, {names} there")
            continue
        rows = found.to_pylist()
        ours = {tuple(row[name] for name in names) for row in rows}
        listed = ", ".join(names)
        theirs = set(connection.execute(f"select {listed} from {table}").fetchall())
        if ours != theirs or len(rows) != len(theirs):
            only, lost = (sorted(map(str, one))[:2] for one in (ours - theirs, theirs - ours))
            wrong.append(
                f"table: {table} has {len(rows)} rows in the log and {len(theirs)} in the database;"
                f" only there: {_short(only)}, missing: {_short(lost)}"
            )
    return wrong


def _short(rows: list[str]) -> list[str]:
    return [row if len(row) < 90 else f"{row[:87]}..." for row in rows]


def messages(log: EmbeddedLog, sent: set[str]) -> list[str]:
    """Messages that came twice or not at all."""
    topic = f"{NAME}._messages"
    if topic not in {one.name for one in log.topics()}:
        return ["messages: none came"] if sent else []
    came = [m.decode() for batch in log.read(topic) for m in batch.data["content"].to_pylist()]
    twice = sorted({one for one in came if came.count(one) > 1})
    wrong = [f"messages: {one} came {came.count(one)} times" for one in twice]
    return wrong + [f"messages: {one} did not come" for one in sorted(sent - set(came))]


def all_live(log: EmbeddedLog, tables: Sequence[str], lsn: int) -> bool:
    """Whether these tables are captured through here, and none is being read or is to be."""
    state = State.load(log, NAME)
    asked = (log.value(settings_name(NAME)) or {}).get("snapshots", {})
    if state is None or state.lsn < lsn:
        return False
    found = [state.tables.get(f"public.{table}") for table in tables]
    return all(one is not None and one.status == LIVE for one in found) and all(
        state.tables[table].asked >= times for table, times in asked.items()
    )


def ask_snapshot(log: EmbeddedLog, table: str) -> None:
    """Ask for a snapshot, by way of the log, as the command does."""
    name = settings_name(NAME)
    value = dict(log.value(name) or {})
    asked = dict(value.get("snapshots", {}))
    asked[table] = asked.get(table, 0) + 1
    with log.transaction() as entry:
        entry.put(name, value | {"snapshots": asked})


def stopped(log: EmbeddedLog) -> list[str]:
    """Tables that were stopped, and why."""
    state = State.load(log, NAME)
    return [
        f"stopped: {name}: {table.reason}"
        for name, table in ({} if state is None else state.tables).items()
        if table.status == STOPPED
    ]


# --- one thread ---------------------------------------------------------------------------


class Killed(BaseException):
    """The capture ends here, as if it had been killed."""


PATIENCE = 60
"""So often a capture looks for news before the transactions that it may wait for are ended."""


class Late(SimpleQueue[Any]):
    """What was read arrives later than it was, when the stream has gone on."""

    def __init__(self, chance: Random) -> None:
        """Once in three times that it is asked for."""
        self.chance = chance

    def get_nowait(self) -> Any:
        """The next one, or `Empty`."""
        if self.chance.random() < 2 / 3:
            raise Empty
        return super().get_nowait()


class LateReaders(Readers):
    """Readers of tables in the capture's thread; the stream goes on before it has the chunk."""

    def start(self, turn: int, wanted: Wanted, whole: Whole | None = None) -> None:
        """Read at once."""
        self._read(turn, wanted, whole)


class Stepped:
    """A capture and its writers in one thread: at chosen instants of the one the others go on.

    The instants: before the stream is asked, after a chunk was read, before and after an entry is
    committed, before a position is confirmed. At each the capture may be killed. A transaction that
    is under way stays so while the capture runs.
    """

    def __init__(
        self,
        server: Server,
        database: str,
        folder: Path,
        seed: str,
        *,
        alters: bool = True,
        kills: float = 0.02,
    ) -> None:
        """Everything follows from the seed, but for when the server sends what."""
        self.chance = Random(f"stepped {seed}")
        self._late = Random(f"late {seed}")
        self.server, self.database = server, database
        self.folder = folder
        self.kills = kills
        self.alters = alters
        self.tables = ["a", "b", "c"]
        self.kinds: dict[str, int] = defaultdict(int)
        self._budget = self._chunks = self._waits = 0
        self._shop: Capture | None = None
        self._open: dict[int, Generator[None, None, None]] = {}
        self._stack = contextlib.ExitStack()
        connect = self._stack.enter_context
        self.connection = connect(server.connect(database))
        make_tables(self.connection, self.tables, "c")
        self.writers = []
        for number in range(3):
            connection = connect(server.connect(database, options="-c lock_timeout=30"))
            writer = Writer(connection, self.tables, f"{seed} {number}", number)
            writer.truncates = 0.06
            self.writers.append(writer)
        self.log: EmbeddedLog = connect(hr.connect(folder / "log"))
        self.live: list[tuple[int, int]] = []

    def __enter__(self) -> Stepped:
        return self

    def __exit__(self, *exception: object) -> None:
        for one in self._open.values():
            one.close()
        self._stack.close()

    def write(self, steps: int) -> None:
        """Some statements of some writers."""
        for _ in range(steps):
            number = self.chance.randrange(len(self.writers))
            one = self._open.setdefault(number, self.writers[number].steps())
            if next(one, self) is self:
                del self._open[number]

    def finish(self) -> None:
        """End all transactions."""
        for one in self._open.values():
            for _ in one:
                pass
        self._open.clear()

    def _pause(self, kind: str) -> None:
        state = None if self._shop is None else self._shop.state
        if self._budget <= 0 or state is None or not state.lsn:
            return  # a slot is made only when no transaction is under way
        self._budget -= 1
        self.kinds[kind] += 1
        self.write(self.chance.choice([0, 0, 1, 3, 8]))
        if self.chance.random() < self.kills:
            self.kinds["kills"] += 1
            raise Killed

    def _overtake(self, table: str) -> None:
        """A transaction that changes rows of the chunk which was just read."""
        idle = [one for one in range(len(self.writers)) if one not in self._open]
        if self._chunks > 0 and idle and table in self.tables:
            self._chunks -= 1
            number = self.chance.choice(idle)
            mine = f"where id between 0 and 2000 and id % 10 = {number}"
            changes = {
                f"update {table} set amount = 1 {mine}": 3,
                f"delete from {table} {mine}": 3,
                f"update {table} set id = id + 2000 {mine}": 3,
                f"truncate {table}": 1,
            }
            (change,) = self.chance.choices([*changes], [*changes.values()])
            with contextlib.suppress(*REFUSED):
                self.writers[number].connection.execute(change)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        receive, confirm, commit = Stream.receive, Stream.confirm, WriterTransaction.commit
        read = snapshot.read_chunk

        def readers(dsn: str, count: int) -> Readers:
            made = LateReaders(dsn, count)
            made.done = Late(self._late)
            return made

        def before_receive(stream: Stream, seconds: float) -> Any:
            self._pause("receive")
            self._waits += self._budget <= 0
            if self._waits > PATIENCE:  # a first reading waits for what is under way
                self.finish()
            return receive(stream, seconds)

        def before_confirm(stream: Stream, position: int) -> None:
            self._pause("confirm")
            confirm(stream, position)

        def around_commit(transaction: WriterTransaction) -> Any:
            self._pause("entry")
            made = commit(transaction)
            self._pause("entry")
            return made

        def after_read(*given: Any, **more: Any) -> Any:
            chunk = read(*given, **more)
            self._overtake(given[1].table[1])
            self._pause("chunk")
            return chunk

        with (
            mock.patch.object(Stream, "receive", before_receive),
            mock.patch.object(Stream, "confirm", before_confirm),
            mock.patch.object(WriterTransaction, "commit", around_commit),
            mock.patch.object(snapshots, "read_chunk", after_read),
            mock.patch.object(snapshots, "Readers", readers),
        ):
            yield

    def run(self, budget: int) -> None:
        """Capture until it has caught up, with so many pauses, killed or not."""
        self._budget, self._chunks, self._waits = budget, budget // 2, 0
        with self._watched():
            while True:
                try:
                    self._shop = self.capture()
                    self._shop.run("caught up")
                except Killed:
                    saved = State.load(self.log, NAME)
                    if saved is None or not saved.lsn:  # the next one makes the slot: see `_pause`
                        self.finish()
                    continue
                return

    def capture(self) -> Capture:
        """A new capture, as a new process would have it."""
        chunk = self.chance.choice([9, 40])
        return Capture(
            self.log, NAME, self.server.dsn(self.database),
            chunk_rows=chunk, group_rows=40, heartbeat_seconds=0.05,
            readers=self.chance.choice([0, 1]),
            part_bytes=self.chance.choice([2000, 50_000, 4 << 20]),
        )  # fmt: skip


def stepped(
    server: Server,
    folder: Path,
    seed: str,
    *,
    rounds: int = 4,
    pauses: int = 40,
    alters: bool = True,
    kills: float = 0.02,
) -> tuple[list[str], Audit]:
    """One case; what is wrong, the first first."""
    name = f"case_{next(_numbers)}"
    with (
        fresh_database(server, name) as database,
        Stepped(server, database, folder, seed, alters=alters, kills=kills) as case,
    ):
        try:
            return _rounds(case, rounds, pauses)
        except errors.HeadraceError as error:
            return [verdict_on(error, "stopped: ")], Audit()


_numbers = itertools.count(1)


def by_parts(server: Server, folder: Path, seed: str) -> list[str]:
    """What is wrong when every transaction is large: read, completed and staged in small parts."""
    with (
        fresh_database(server, f"case_{next(_numbers)}") as database,
        server.connect(database) as connection,
        hr.connect(folder / "log") as log,
    ):
        make_tables(connection, ["a", "b", "c"], "c")
        shop = Capture(log, NAME, server.dsn(database), part_bytes=400, readers=0)
        shop.run("caught up")
        writer = Writer(connection, ["a", "b", "c"], seed)
        writer.truncates = 0.06
        for _ in range(15):
            writer.transaction()
        shop.run("caught up")
        wrong = [*stopped(log), *differences(log, connection, ["a", "b", "c", "history"])]
        return wrong + audit(log).wrong


def _rounds(case: Stepped, rounds: int, pauses: int) -> tuple[list[str], Audit]:
    case.write(60)
    case.finish()
    case.run(pauses)
    for writer in case.writers:
        writer.messages = True
    wrong: list[str] = []
    for number in range(rounds):
        quiet = number % 2 == 0
        case.run(0)
        begin = case.log.position
        for writer in case.writers:
            writer.alters = case.alters and not quiet
        if not quiet:
            ask_snapshot(case.log, f"public.{case.chance.choice(case.tables)}")
        case.write(case.chance.choice([5, 30, 80]))
        case.run(pauses)
        case.finish()
        if not quiet:
            for table in case.tables:  # what the stream has not shown yet it shows now
                case.connection.execute(
                    f"insert into {table} (id, part, amount) values ({-1 - number}, 'z', 1)"
                )
        case.run(0)
        if quiet:
            case.live.append((begin, case.log.position))
        wrong += stopped(case.log)
        wrong += differences(case.log, case.connection, [*case.tables, "history"])
        if wrong:
            break
    sent = set().union(*(writer.sent for writer in case.writers))
    found = audit(case.log, case.live)
    return wrong + found.wrong + messages(case.log, sent), found
