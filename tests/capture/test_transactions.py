"""Whole transactions: from histories that an encoder writes as messages, and from a real server.

The histories have three sessions at once, two of them streamed, with savepoints, altered tables and
rollbacks. Caught: a change lost, doubled, out of order or in the wrong transaction, a rolled back
one that stays, a row read with a definition of its table that was not in force, all of this by way
of files too (`spill`), and what a server does otherwise than the encoder thinks. Not caught: what
only other versions of the server do.
"""

from __future__ import annotations

import random
import select
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from tempfile import gettempdir
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import BadReplicationData
from headrace.sources.postgres import protocol, transactions
from headrace.sources.postgres.protocol import (
    EPOCH_US,
    KEY,
    OLD,
    UNCHANGED,
    Column,
    Message,
    Relation,
    Rows,
    Truncate,
    frame,
    status_update,
)
from headrace.sources.postgres.spill import Spill, relations_of
from headrace.sources.postgres.transactions import Assembler, Transaction, Unclear
from tests.capture.conftest import Database
from tests.capture.test_protocol import (
    encoded_change,
    encoded_message,
    encoded_relation,
    encoded_truncate,
    number,
    rows_of,
)

# --- the encoder ----------------------------------------------------------------------------------


def begin(xid: int, lsn: int) -> bytes:
    return b"B" + number(lsn, 8) + number(77, 8) + number(xid)


def commit(lsn: int) -> bytes:
    return b"C\0" + number(lsn, 8) + number(lsn + 8, 8) + number(77, 8)


def stream_start(xid: int, first: bool = False) -> bytes:
    return b"S" + number(xid) + number(first, 1)


def stream_commit(xid: int, lsn: int) -> bytes:
    return b"c" + number(xid) + b"\0" + number(lsn, 8) + number(lsn + 8, 8) + number(77, 8)


def stream_abort(xid: int, subxid: int, parallel: bool = False) -> bytes:
    return b"A" + number(xid) + number(subxid) + (bytes(16) if parallel else b"")


STREAM_STOP = b"E"
ORIGIN = b"O" + number(5, 8) + b"elsewhere\0"
TYPE = number(77) + b"public\0mood\0"
"""The fields of a type message."""


def relation_of(table: int, width: int, identity: str = "d") -> Relation:
    columns = tuple(Column(f"c{place}", 25, -1, place == 0) for place in range(width))
    return Relation(table, "public", f"t{table}", identity, columns)


def flat(transaction: Transaction) -> list[Any]:
    """The changes of a transaction, row by row."""
    changes: list[Any] = []
    for change in transaction.changes:
        if isinstance(change, Rows):
            changes += [(change.op, change.relation, *row) for row in rows_of(change)]
        else:
            changes.append(change)
    return changes


# --- histories ------------------------------------------------------------------------------------

Action = tuple[Any, ...]
WIDTH_MAX = 3
TABLES = (1, 2, 3)
RARE = [
    "outside",
    "truncate",
    "alter",
    "release",
    "invalidate",
    "aside",
    "commit",
    "abort",
    "pause",
]
COMMON = ["again"] * 8 + ["iud"] * 6 + ["message"] * 2 + ["savepoint", "roll back"] * 2 + RARE


def history_of(seed: int, length: int) -> Iterator[tuple[int, Action]]:
    """What three sessions do; the same seed with another length has the same beginning."""
    dice = random.Random(seed)
    last: Action = ("i", 1)

    def row() -> list[Any]:
        return [dice.choice([None, UNCHANGED, b"", b"a", b"bc"]) for _ in range(WIDTH_MAX)]

    for _ in range(length):
        place = dice.randrange(3)
        match dice.choice(COMMON):
            case "again" | "iud" as which:
                op, table = last if which == "again" else (dice.choice("iud"), dice.choice(TABLES))
                last = op, table
                kind = dice.choice({"i": [""], "u": ["", "K", "O"], "d": ["K", "O"]}[op])
                yield place, (op, table, kind, row(), row())
            case "truncate":
                yield place, ("truncate", dice.sample(TABLES, dice.randint(1, 3)))
            case "message" | "outside" as which:
                yield place, (which, dice.randbytes(2))
            case "alter":
                yield place, ("alter", dice.choice(TABLES), dice.randint(1, WIDTH_MAX))
            case which:
                yield place, (which,)


@dataclass
class Savepoint:
    """A subtransaction that is open."""

    subxid: int
    altered: dict[int, Relation]
    """What the transaction had altered before."""
    released: list[int] = field(default_factory=list)
    """Subtransactions that ended inside of it."""


@dataclass
class Session:
    """A transaction that runs."""

    xid: int
    streamed: bool
    altered: dict[int, Relation] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)
    """Its locks: a table that one has altered or used can not be used or altered by another."""
    changes: list[tuple[int, Any]] = field(default_factory=list)
    """(subtransaction, change as `flat` gives it)."""
    stack: list[Savepoint] = field(default_factory=list)
    told: dict[int, Relation] = field(default_factory=dict)
    """The relations described in its stream."""
    begun: bool = False
    """Something of it was streamed."""
    with_messages: bool = False
    """Among that a logical message."""

    @property
    def subxid(self) -> int:
        return self.stack[-1].subxid if self.stack else self.xid


class Encoder:
    """Writes the messages that a server would, and what must come of them."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.expected: list[Any] = []
        self.relations = {table: relation_of(table, table) for table in TABLES}
        self.told: dict[int, Relation] = {}
        """The relations described outside of streams."""
        self.sessions: dict[int, Session] = {}
        self.block: Session | None = None
        self.numbers = 100
        self.lsn = 1000

    def act(self, place: int, action: Action) -> None:
        """A session does something."""
        session = self.sessions.get(place)
        if session is None:
            session = self.sessions[place] = Session(self.new_number(), streamed=place > 0)
        others = [other for other in self.sessions.values() if other is not session]
        match action:
            case "i" | "u" | "d", table, *_ if any(table in other.altered for other in others):
                return
            case "truncate", numbers if any(other.used & set(numbers) for other in others):
                return
            case "alter", table, _ if any(table in other.used for other in others):
                return
            case "i" | "u" | "d" as op, table, kind, old, new:
                self.change(session, self.row(session, op, table, kind, old, new))
            case "truncate", numbers:
                relations = tuple(self.relation(session, table) for table in numbers)
                self.change(session, Truncate(relations, len(numbers) > 1, numbers[0] == 1))
            case "message", content:
                self.change(session, Message("hr", content, self.lsn, True))
            case "outside", content:
                self.end_block()
                self.messages.append(encoded_message("hr", content, self.lsn, False))
                self.expected.append(Message("hr", content, self.lsn, False))
            case "alter", table, width:
                session.used.add(table)
                session.altered[table] = relation_of(table, width, "f")
            case ("savepoint",):
                session.stack.append(Savepoint(self.new_number(), dict(session.altered)))
            case ("release",):
                self.release(session)
            case ("roll back",):
                self.roll_back(session)
            case ("invalidate",):
                (session.told if session.streamed else self.told).clear()
            case ("aside",):
                if session.streamed:
                    self.begin_block(session)
                    self.messages += [ORIGIN, b"Y" + number(session.subxid) + TYPE]
            case ("pause",):
                self.end_block()
            case ("commit",):
                del self.sessions[place]
                self.commit(session)
            case ("abort",):
                del self.sessions[place]
                self.end_block()
                if session.begun:
                    self.messages.append(stream_abort(session.xid, session.xid, place == 2))
            case _:
                raise AssertionError(action)

    def new_number(self) -> int:
        self.numbers += 1
        return self.numbers

    def relation(self, session: Session, table: int) -> Relation:
        session.used.add(table)
        return session.altered.get(table) or self.relations[table]

    def row(self, session: Session, op: str, table: int, kind: str, old: Any, new: Any) -> Any:
        relation = self.relation(session, table)
        width = len(relation.columns)
        before = old[:width] if kind else None
        after = new[:width] if op != "d" else None
        return op, relation, ord(kind) if kind else 0, before, after

    def change(self, session: Session, change: Any) -> None:
        session.changes.append((session.subxid, change))
        if session.streamed:
            self.begin_block(session)
            with_message = isinstance(change, Message)  # the server does not say the savepoint's
            session.with_messages |= with_message
            self.write(change, session.xid if with_message else session.subxid, session.told)

    def release(self, session: Session) -> None:
        """A subtransaction is part of the one around it; in the outermost it can only commit."""
        if session.stack:
            ended = session.stack.pop()
            if session.stack:
                session.stack[-1].released += [*ended.released, ended.subxid]

    def roll_back(self, session: Session) -> None:
        if session.stack and not session.with_messages:  # or it is asked for whole: see below
            ended = session.stack.pop()
            gone = [*ended.released, ended.subxid]
            session.changes = [change for change in session.changes if change[0] not in gone]
            self.invalidate(table for table in session.altered if table not in ended.altered)
            session.altered = ended.altered
            if session.begun:
                self.end_block()
                self.messages += [stream_abort(session.xid, subxid) for subxid in gone]

    def begin_block(self, session: Session) -> None:
        if self.block is not session:
            self.end_block()
            self.messages.append(stream_start(session.xid, not session.begun))
            self.block = session
            session.begun = True

    def end_block(self) -> None:
        if self.block is not None:
            self.messages.append(STREAM_STOP)
            self.block = None

    def commit(self, session: Session) -> None:
        self.end_block()
        self.lsn += 100
        if session.begun:
            self.messages.append(stream_commit(session.xid, self.lsn))
            current = self.relations.items()
            self.told |= {table: told for table, told in current if session.told.get(table) == told}
        elif not session.streamed:
            self.messages.append(begin(session.xid, self.lsn))
            for _, change in session.changes:
                self.write(change, None, self.told)
            self.messages.append(commit(self.lsn))
        else:
            return
        self.relations |= session.altered
        self.invalidate(session.altered)
        changes = [change for _, change in session.changes]
        self.expected.append((session.xid, self.lsn, session.streamed, changes))

    def invalidate(self, altered: Iterable[int]) -> None:
        """Tables that are described anew to everybody, as their definition has come or gone."""
        for table in altered:
            for told in [self.told, *(other.told for other in self.sessions.values())]:
                told.pop(table, None)

    def write(self, change: Any, subxid: int | None, told: dict[int, Relation]) -> None:
        if isinstance(change, Message):
            message = encoded_message(change.prefix, change.content, change.lsn, True, subxid)
            self.messages.append(message)
            return
        relations = change.relations if isinstance(change, Truncate) else (change[1],)
        for relation in relations:
            if told.get(relation.id) != relation:
                self.messages.append(encoded_relation(relation, subxid))
                told[relation.id] = relation
        if isinstance(change, Truncate):
            numbers = [relation.id for relation in relations]
            message = encoded_truncate(numbers, change.cascade, change.restart, subxid)
        else:
            op, relation, kind, old, new = change
            message = encoded_change(op, relation.id, chr(kind), old, new, subxid)
        self.messages.append(message)


@settings(deadline=None, max_examples=300)
@given(
    seed=st.integers(0, 2**32),
    length=st.integers(0, 300),
    run_bytes_max=st.sampled_from([1, 60, 1 << 20]),
    spill_bytes=st.sampled_from([None, 0, 1500, 1 << 20]),
    short=st.booleans(),
)
def test_transactions_are_what_the_history_says(
    seed: int, length: int, run_bytes_max: int, spill_bytes: int | None, short: bool
) -> None:
    encoder = Encoder()
    for place, action in history_of(seed, length):
        encoder.act(place, action)
    spill = Spill() if spill_bytes is None else Spill(gettempdir(), spill_bytes)
    assembler = Assembler(spill, run_bytes_max=run_bytes_max)
    made: list[Any] = []
    with mock.patch.object(protocol, "SHORT_RUN", 1 if short else 32):
        for message in encoder.messages:
            result = assembler.feed(message)
            if isinstance(result, Transaction):
                assert (result.end_lsn, result.commit_time_us) == (
                    result.final_lsn + 8,
                    EPOCH_US + 77,
                )
                made.append((result.xid, result.final_lsn, result.streamed, flat(result)))
                runs = [change for change in result.changes if isinstance(change, Rows)]
                changed = [one for change in result.changes for one in relations_of(change)]
                assert list(result.relations()) == changed
                reading = {run.relation.table for run in runs if run.op != "i"}
                assert reading <= {table for _, table in result.read_by(full=True)}
                result.close()
            elif result is not None:
                made.append(result)
    assert made == encoder.expected
    assert assembler.busy == (encoder.block is not None)
    if spill_bytes == 0 and not assembler.busy:
        assert spill.room == 0, "all that has not ended is in files"


# --- single rules ---------------------------------------------------------------------------------

ONE, TWO = relation_of(1, 1), relation_of(2, 2)


def insert(table: int, *values: Any, subxid: int | None = None) -> bytes:
    return encoded_change("i", table, "", None, values, subxid)


def fed(assembler: Assembler, *messages: bytes) -> list[Transaction | Message]:
    """What the messages complete."""
    made = [assembler.feed(message) for message in messages]
    return [one for one in made if one is not None]


def one_transaction(assembler: Assembler, *messages: bytes) -> Transaction:
    (made,) = fed(assembler, *messages)
    assert isinstance(made, Transaction)
    return made


def test_equal_operations_in_a_row_are_one_run() -> None:
    update = encoded_change("u", 1, "", None, [b"x"], None)
    tables = [encoded_relation(ONE), encoded_relation(TWO)]
    inserts = [insert(1, b"a"), insert(1, b"b"), insert(2, b"c", b"d"), insert(1, b"e")]
    made = one_transaction(
        Assembler(), begin(5, 1), *tables, *inserts, update, update, insert(1, b"f"), commit(1)
    )
    assert [(run.op, run.relation.id, len(run)) for run in made.changes if type(run) is Rows] == [
        ("i", 1, 2),
        ("i", 2, 1),
        ("i", 1, 1),
        ("u", 1, 2),
        ("i", 1, 1),
    ]


def test_a_relation_described_again_stays_the_same_object() -> None:
    assembler = Assembler()
    start, described = begin(5, 1), encoded_relation(ONE)
    first = one_transaction(assembler, start, described, insert(1, b"a"), commit(1))
    again = one_transaction(assembler, start, described, insert(1, b"b"), commit(1))
    other = encoded_relation(relation_of(1, 2))
    changed = one_transaction(assembler, start, other, insert(1, b"b", b"c"), commit(1))
    relations = [
        change.relation
        for made in (first, again, changed)
        for change in made.changes
        if type(change) is Rows
    ]
    assert relations[0] is relations[1]
    assert relations[1] != relations[2]


def test_a_relation_described_otherwise_ends_a_run() -> None:
    other = relation_of(1, 2)
    rows = insert(1, b"a"), encoded_relation(other), insert(1, b"b", b"c")
    made = one_transaction(Assembler(), begin(5, 1), encoded_relation(ONE), *rows, commit(1))
    assert flat(made) == [("i", ONE, 0, None, [b"a"]), ("i", other, 0, None, [b"b", b"c"])]


def test_an_empty_transaction_is_handed_out() -> None:
    made = one_transaction(Assembler(), begin(5, 1), commit(1))
    assert (made.xid, made.final_lsn, made.end_lsn, list(made.changes)) == (5, 1, 9, [])


def test_types_are_kept() -> None:
    assembler = Assembler()
    fed(assembler, begin(5, 1), b"Y" + TYPE, ORIGIN)
    assert assembler.types == {77: (77, "public", "mood")}


def test_a_stream_that_was_rolled_back_leaves_nothing() -> None:
    """Not even for a later transaction that has the same number."""
    assembler = Assembler()
    fed(assembler, begin(5, 1), encoded_relation(ONE), commit(1))
    altered = encoded_relation(relation_of(1, 3), 9)
    row = insert(1, b"a", b"b", b"c", subxid=9)
    fed(assembler, stream_start(9), altered, row, STREAM_STOP, stream_abort(9, 9))
    made = one_transaction(assembler, begin(6, 2), insert(1, b"a"), commit(2))
    assert flat(made) == [("i", ONE, 0, None, [b"a"])]
    row = insert(1, b"d", subxid=9)
    made = one_transaction(assembler, stream_start(9), row, STREAM_STOP, stream_commit(9, 3))
    assert flat(made) == [("i", ONE, 0, None, [b"d"])]


def test_which_messages_were_rolled_back_is_not_known() -> None:
    assembler = Assembler()
    message = encoded_message("hr", b"", 1, True, 7)
    begun = [stream_start(7, first=True), message, STREAM_STOP]
    fed(assembler, *begun, stream_abort(7, 7), *begun, stream_commit(7, 10))
    fed(assembler, stream_start(7, first=True), encoded_relation(ONE, 7), STREAM_STOP)
    assert fed(assembler, stream_abort(7, 8)) == [], "it has no message"
    with pytest.raises(Unclear):
        fed(assembler, *begun, stream_abort(7, 8))


def test_an_older_definition_of_a_stream_does_not_replace_a_newer_one() -> None:
    assembler = Assembler()
    before = encoded_relation(ONE, 9), insert(1, b"a", subxid=9)
    fed(assembler, stream_start(9), *before, STREAM_STOP)
    fed(assembler, begin(5, 1), encoded_relation(relation_of(1, 2)), commit(1))
    streamed = one_transaction(assembler, stream_commit(9, 2))
    assert flat(streamed) == [("i", ONE, 0, None, [b"a"])]
    made = one_transaction(assembler, begin(6, 3), insert(1, b"a", b"b"), commit(3))
    assert flat(made) == [("i", relation_of(1, 2), 0, None, [b"a", b"b"])]


def test_the_rollback_of_an_unknown_transaction_is_nothing() -> None:
    assert fed(Assembler(), stream_abort(9, 9), stream_abort(9, 10)) == []


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([b""], "an unknown kind of message in a message of no bytes of 0 bytes, at offset 0"),
        ([b"P123"], "an unknown kind of message in a message 'P' of 4 bytes, at offset 0"),
        ([insert(1, b"a")], "a change outside of a transaction in a message 'I'"),
        ([begin(5, 1), insert(1, b"a")], "relation 1, which was not described, in a message 'I'"),
        ([begin(5, 1), b"I\0"], "an early end in a message 'I' of 2 bytes, at offset 2"),
        ([begin(5, 1), begin(6, 1)], "a transaction inside of another"),
        ([begin(5, 1), commit(2)], "a commit at 0/2 instead of 0/1 in a message 'C'"),
        ([begin(5, 1)[:9]], "an early end in a message 'B' of 9 bytes, at offset 9"),
        ([begin(5, 1), stream_start(5)], "a block inside of a transaction"),
        ([stream_start(5), stream_commit(5, 1)], "a commit inside of a block"),
        ([stream_start(5), stream_abort(5, 5)], "a rollback inside of a block"),
        ([commit(1)], "a commit without a transaction"),
        ([STREAM_STOP], "the end of a block that did not begin"),
        ([encoded_message("a", b"", 1, True)], "a transactional message outside"),
    ],
)
def test_what_is_out_of_order_is_refused(messages: list[bytes], says: str) -> None:
    assembler = Assembler()
    fed(assembler, *messages[:-1])
    with pytest.raises(BadReplicationData) as caught:
        assembler.feed(messages[-1], 0x16B3748)
    assert says in caught.value.fact
    assert caught.value.place.endswith(", from 0/16B3748")


def test_a_row_costs_one_comparison() -> None:
    """The counted twin of the speed of `feed`: a row of the run at hand reads no field."""
    assembler = Assembler()
    fed(assembler, begin(5, 1), encoded_relation(ONE), insert(1, b"a"))
    with mock.patch.object(transactions, "unpack", side_effect=AssertionError):
        assert fed(assembler, *[insert(1, b"b")] * 100) == []
    assert len(flat(one_transaction(assembler, commit(1)))) == 101


# --- a real server --------------------------------------------------------------------------------

SMALL_MEMORY = "-c logical_decoding_work_mem=64kB"
"""Transactions above it are streamed; so are all with debug_logical_replication_streaming."""


@dataclass
class Source:
    """A database, and a replication connection to it from its beginning."""

    database: Database
    options: str = ""

    def run(self, *statements: str) -> None:
        """One transaction."""
        with self.database.connect(autocommit=False) as connection:
            for statement in statements:
                connection.execute(statement)

    def capture(self, work: Callable[[], None]) -> list[Transaction | Message]:
        """What comes of the work."""
        wanted = self.database.connect(replication="database", options=self.options)
        with closing(wanted) as connection:
            wire = connection.pgconn
            wire.exec_(b"CREATE_REPLICATION_SLOT s TEMPORARY LOGICAL pgoutput (SNAPSHOT 'nothing')")
            work()
            self.run("select pg_logical_emit_message(false, 'hr', 'the end')")
            wire.exec_(
                b"START_REPLICATION SLOT s LOGICAL 0/0 (proto_version '2', streaming 'on',"
                b" messages 'true', publication_names 'p')"
            )
            return list(self.received(wire))

    @staticmethod
    def received(wire: Any) -> Iterator[Transaction | Message]:
        assembler = Assembler()
        while True:
            size, data = wire.get_copy_data(1)
            assert size >= 0, wire.get_result().error_message
            if not size:
                assert select.select([wire.socket], [], [], 20)[0], "nothing comes"
                wire.consume_input()
                continue
            read = frame(bytes(data))
            if isinstance(read, protocol.Keepalive):
                wire.put_copy_data(status_update(0, 0, 0))
                wire.flush()
                continue
            made = assembler.feed(read.payload, read.start)
            if isinstance(made, Message) and made.content == b"the end":
                return
            if made is not None:
                yield made


def outlined(transaction: Transaction | Message) -> list[Any]:
    """The changes without their relations: op, table, kind, old, new."""
    assert isinstance(transaction, Transaction)
    return [
        change
        if isinstance(change, Message)
        else ("t", *sorted(relation.table for relation in change.relations))
        if isinstance(change, Truncate)
        else (change[0], change[1].table, *change[2:])
        for change in flat(transaction)
    ]


def applied(changes: Iterable[Transaction | Message]) -> dict[bytes, list[Any]]:
    """The table of (id, ...) that the changes make."""
    table: dict[bytes, list[Any]] = {}
    for transaction in changes:
        assert isinstance(transaction, Transaction)
        for op, _, kind, old, new in outlined(transaction):
            before = [] if op == "i" else table.pop((old if kind else new)[0])
            if op != "d":
                assert new[0] not in table
                table[new[0]] = [
                    before[place] if value is UNCHANGED else value
                    for place, value in enumerate(new)
                ]
    return table


def contents(database: Database) -> dict[bytes, list[Any]]:
    with database.connect() as connection:
        rows = connection.execute("select id::text, small, big from a").fetchall()
    return {
        row[0].encode(): [None if value is None else value.encode() for value in row]
        for row in rows
    }


TABLE_A = "create table a (id int primary key, small text, big text)"
BIG = "(select string_agg(md5(n::text), '') from generate_series(1, 200) n)"
"""Too long for its page, and does not compress: it lies beside the table (TOAST)."""


def test_a_server_says_what_was_done(database: Database) -> None:
    source = Source(database)
    source.run(
        TABLE_A,
        "create table f (id int, x text)",
        "alter table f replica identity full",
        "create table g (id int primary key, x int, y int generated always as (x * 2) stored)",
        "create type mood as enum ('good')",
        "create table m (id mood primary key)",
        "create publication p for all tables with (publish_generated_columns = stored)",
    )

    def work() -> None:
        source.run(f"insert into a values (1, 'x', null), (2, 'ü', {BIG})")
        source.run("update a set small = 'y'")
        source.run("update a set id = id + 10")
        source.run("delete from a where id = 11")
        source.run(
            "insert into f values (1, 'x'), (1, null)", "update f set id = 2", "delete from f"
        )
        source.run("insert into g values (1, 21)", "insert into m values ('good')")
        source.run(
            "insert into a values (5)",
            "savepoint s",
            "insert into a values (6)",
            "rollback to s",
            "insert into a values (7)",
        )
        source.run(
            "alter table a add column more int default 3",
            "insert into a values (8, 'x', 'y', 4)",
            "alter table a drop column small",
            "insert into a values (9, 'y', 5)",
        )
        source.run("truncate a, f restart identity cascade")
        source.run(
            "select pg_logical_emit_message(true, 'hr', 'inside')",
            "insert into a values (10)",
        )
        source.run("select pg_logical_emit_message(false, 'hr', 'outside')")

    made = source.capture(work)
    big = made[0].changes[0].new.values[2][1]  # type: ignore[index, union-attr]
    assert big is not None
    assert len(big) == 32 * 200
    assert [outlined(one) for one in made[:9]] == [
        [
            ("i", "a", 0, None, [b"1", b"x", None]),
            ("i", "a", 0, None, [b"2", "ü".encode(), big]),
        ],
        [
            ("u", "a", 0, None, [b"1", b"y", None]),
            ("u", "a", 0, None, [b"2", b"y", UNCHANGED]),
        ],
        [
            ("u", "a", KEY, [b"1", None, None], [b"11", b"y", None]),
            ("u", "a", KEY, [b"2", None, None], [b"12", b"y", UNCHANGED]),
        ],
        [("d", "a", KEY, [b"11", None, None], None)],
        [
            ("i", "f", 0, None, [b"1", b"x"]),
            ("i", "f", 0, None, [b"1", None]),
            ("u", "f", OLD, [b"1", b"x"], [b"2", b"x"]),
            ("u", "f", OLD, [b"1", None], [b"2", None]),
            ("d", "f", OLD, [b"2", b"x"], None),
            ("d", "f", OLD, [b"2", None], None),
        ],
        [("i", "g", 0, None, [b"1", b"21", b"42"]), ("i", "m", 0, None, [b"good"])],
        [
            ("i", "a", 0, None, [b"5", None, None]),
            ("i", "a", 0, None, [b"7", None, None]),
        ],
        [
            ("i", "a", 0, None, [b"8", b"x", b"y", b"4"]),
            ("i", "a", 0, None, [b"9", b"y", b"5"]),
        ],
        [("t", "a", "f")],
    ]
    truncate = made[8].changes[0]  # type: ignore[index, union-attr]
    assert isinstance(truncate, Truncate)
    assert (truncate.cascade, truncate.restart) == (True, True)
    inside = outlined(made[9])
    assert (inside[0].prefix, inside[0].content) == ("hr", b"inside")
    assert inside[1] == ("i", "a", 0, None, [b"10", None, b"3"])
    outside = made[10]
    assert isinstance(outside, Message)
    assert (outside.content, outside.transactional) == (b"outside", False)
    positions = [one.end_lsn for one in made if isinstance(one, Transaction)]
    assert positions == sorted(set(positions))
    columns = made[0].changes[0].relation.columns  # type: ignore[index, union-attr]
    assert columns == (
        Column("id", 23, -1, True),
        Column("small", 25, -1, False),
        Column("big", 25, -1, False),
    )


def test_a_server_streams_what_is_large(database: Database) -> None:
    """Two sessions, with rollbacks to savepoints; everything is streamed, even what is small."""
    source = Source(database, SMALL_MEMORY)
    source.run(TABLE_A, "create publication p for all tables")
    rows = "insert into a select n, md5(n::text), null from generate_series({}, {}) n"

    def work() -> None:
        with (
            database.connect(autocommit=False) as one,
            database.connect(autocommit=False) as two,
            database.connect(autocommit=False) as three,
        ):
            one.execute(rows.format(1, 2000))
            two.execute(rows.format(10_001, 12_000))
            source.run("insert into a values (100000, 'whole', null)")
            one.execute("savepoint outer_")
            one.execute(rows.format(2001, 4000))
            one.execute("savepoint inner_")
            one.execute(rows.format(4001, 6000))
            one.execute("release inner_")
            one.execute("update a set small = 'changed' where id < 3000")
            three.execute(rows.format(20_001, 23_000))
            one.execute("rollback to outer_")
            one.execute(f"update a set big = {BIG} where id <= 100")
            one.execute("savepoint last_")
            one.execute("update a set small = 'with toast' where id <= 100")
            one.execute("update a set id = id + 5000 where id between 50 and 99")
            three.rollback()
            two.execute("savepoint only_")
            two.execute("delete from a where id > 11500")
            two.execute("rollback to only_")
            two.execute("delete from a where id > 11700")
            two.commit()
            one.execute("delete from a where id between 100 and 120")
            one.commit()

    made = source.capture(work)
    assert [one.streamed for one in made if isinstance(one, Transaction)] == [False, True, True]
    assert applied(made) == contents(database)


@pytest.mark.parametrize("seed", range(3))
def test_a_server_streams_at_once(database: Database, seed: int) -> None:
    """Random small transactions of two sessions, each change in a block of its own."""
    source = Source(database, "-c debug_logical_replication_streaming=immediate")
    source.run(TABLE_A, "create publication p for all tables")
    dice = random.Random(seed)

    def work() -> None:
        with (
            database.connect(autocommit=False) as one,
            database.connect(autocommit=False) as two,
        ):
            for _ in range(60):
                place = dice.randrange(2)
                connection, low = (one, two)[place], place * 1000
                key = low + dice.randrange(30)
                connection.execute(
                    dice.choice(
                        [
                            f"insert into a values ({key}, 'x', {BIG}) on conflict do nothing",
                            f"update a set small = '{dice.random()}' where id = {key}",
                            f"update a set small = 'all' where id between {low} and {key}",
                            f"delete from a where id = {key}",
                            f"update a set id = {dice.randrange(10**4, 10**9)} where id = {key}",
                            f"savepoint s{dice.randrange(2)}",
                        ]
                    )
                )
                end = dice.random()
                if end < 0.1:
                    connection.commit()
                elif end < 0.15:
                    connection.rollback()
                elif end < 0.3:
                    connection.execute("savepoint t; insert into a values (-1); rollback to t")
            one.commit()
            two.commit()

    made = source.capture(work)
    assert all(one.streamed for one in made if isinstance(one, Transaction))
    assert applied(made) == contents(database)


def test_a_server_describes_anew_what_was_altered_and_rolled_back(database: Database) -> None:
    source = Source(database, "-c debug_logical_replication_streaming=immediate")
    source.run(TABLE_A, "create publication p for all tables")

    def work() -> None:
        with database.connect(autocommit=False) as one:
            one.execute("savepoint s")
            one.execute("insert into a values (1, 'gone')")
            one.execute("rollback to s")
            one.execute("insert into a values (2)")
            one.execute("savepoint s")
            one.execute("alter table a drop column big")
            one.execute("insert into a values (3, 'gone')")
            one.execute("rollback to s")
        source.run("insert into a values (4, 'x', 'y')")
        with database.connect(autocommit=False) as one:
            one.execute("alter table a drop column big")
            one.execute("insert into a values (5, 'gone')")
            one.rollback()
        source.run("insert into a values (6, 'x', 'y')")

    made = source.capture(work)
    assert [outlined(one) for one in made] == [
        [("i", "a", 0, None, [b"2", None, None])],
        [("i", "a", 0, None, [b"4", b"x", b"y"])],
        [("i", "a", 0, None, [b"6", b"x", b"y"])],
    ]
