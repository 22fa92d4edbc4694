"""SQL over the log: what names mean, one position for all, types, what is read, what is refused.

Caught: a table that is not the topic's keyed reading or sum, two tables of one query at different
positions, values or types that DuckDB changes on the way, more read than a query needs, errors
without their place, a query that reaches files or settings, memory that grows with the answer. Not
caught: whether DuckDB computes right.
"""

from __future__ import annotations

import datetime as dt
import signal
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.model.ddl import DURATION, TIMESTAMP, TIMESTAMP_NTZ
from headrace.model.json_values import json_values
from headrace.pipelines.views.reading import added_up
from headrace.queries import query, sources
from headrace.queries.names import names_of
from tests.model.strategies import TYPES, values_of


@pytest.fixture
def log(tmp_path: Path) -> Any:
    with hr.connect(tmp_path / "data") as log:
        yield log


@pytest.fixture
def shop(log: EmbeddedLog) -> EmbeddedLog:
    """Orders by key, clicks as events, revenue without a key; five entries with rows: 4 to 8."""
    log.create_topic("shop.public.orders", "id bigint, state string", key="id", kind="changes")
    log.create_topic("clicks", "user bigint, url string", key="user", partitions=3)
    log.create_topic("shop.revenue", "country string, amount bigint", kind="changes")
    log.append("shop.public.orders", [{"id": i, "state": "new"} for i in range(5)])
    log.append("clicks", [{"user": i % 3, "url": f"/{i}"} for i in range(10)])
    log.append("shop.revenue", [{"country": "de", "amount": 1}] * 2 + [{"country": "fr"}])
    with log.transaction() as both:
        both.append("shop.public.orders", [{"id": 1, "state": "paid"}, {"id": 2, "_weight": -1}])
        both.append("shop.revenue", [{"country": "fr", "_weight": -1}])
    log.append("clicks", [{"user": 1, "url": "/last"}])
    return log


def rows(log: EmbeddedLog, text: str, **options: Any) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in hr.sql(log, text, **options).to_pylist()]


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ['"shop.public.orders"', "shop.public.orders", "public.orders", "orders", "ORDERS",
     'Shop.Public."orders"'],
)  # fmt: skip
def test_a_topic_has_its_whole_name_and_the_ends_of_it(shop: EmbeddedLog, name: str) -> None:
    assert rows(shop, f"select count(*) from {name}") == [(4,)]


def test_views_and_captured_tables_of_one_name_are_both_there(shop: EmbeddedLog) -> None:
    """`shop.x` is in the catalog that `shop.public.y` makes."""
    assert rows(shop, "select * from shop.revenue order by 1") == [("de", 1), ("de", 1)]
    assert rows(shop, "select count(*) from revenue, shop.public.orders") == [(8,)]


def test_a_name_that_could_mean_two_topics_means_none(shop: EmbeddedLog) -> None:
    shop.create_topic("bank.public.orders", "id bigint", key="id")
    with pytest.raises(errors.UnknownTable, match=r"could be shop\.public\.orders or bank"):
        hr.sql(shop, "select * from orders")
    assert rows(shop, "select count(*) from bank.public.orders") == [(0,)]
    shop.create_topic("orders", "id bigint", key="id")  # a whole name goes before an end
    assert rows(shop, "select count(*) from orders") == [(0,)]


def test_topics_whose_names_are_schemas_of_sql_need_quotes(shop: EmbeddedLog) -> None:
    for name in ("history.x", "main.y", "a.b.c.d", "with-dash", "temp.z.w"):
        shop.create_topic(name, "id bigint")
        shop.append(name, [{"id": 1}])
        assert rows(shop, f'select * from "{name}"') == [(1,)]
    assert rows(shop, "select * from d") == [(1,)]


@settings(deadline=None)
@given(st.lists(st.from_regex(r"\A[abAB](\.[abAB]){0,4}\Z"), unique=True, max_size=12))
def test_every_name_means_one_topic_or_is_known_to_be_unclear(topics: list[str]) -> None:
    names = names_of(topics)
    for topic in topics:
        claim = (topic.lower(),)
        same = [other for other in topics if other.lower() == topic.lower()]
        if len(same) == 1:
            assert names.found.get(claim) == topic
        else:
            assert claim in names.unclear
    for parts, topic in names.found.items():
        assert topic.lower().endswith(".".join(parts))


def test_an_unknown_name_says_what_is_near_and_what_is_there(shop: EmbeddedLog) -> None:
    with pytest.raises(errors.UnknownTable) as caught:
        hr.sql(shop, "select *\n  from ordesr")
    assert "did you mean 'orders'" in caught.value.fix
    assert "shop.public.orders" in caught.value.why
    assert caught.value.place == "query, line 2, column 8"


# --- what the names mean --------------------------------------------------------------------------


def test_changes_are_rows_now_and_their_history_has_places(shop: EmbeddedLog) -> None:
    now = [(0, "new"), (1, "paid"), (3, "new"), (4, "new")]
    assert rows(shop, "select * from orders order by id") == now
    found = hr.sql(shop, "select * from history.orders where _position = 7 order by id")
    assert found.column("_weight").to_pylist() == [1, -1]
    assert found.column("_offset").to_pylist() == [5, 6]
    assert rows(shop, 'select count(*) from history."shop.public.orders"') == [(7,)]
    assert rows(shop, "select max(_position) from history.orders") == [(7,)]


def test_events_are_their_rows_and_latest_is_the_last_of_each_key(shop: EmbeddedLog) -> None:
    assert rows(shop, "select count(*) from clicks") == [(11,)]
    latest = rows(shop, "select * from latest.clicks order by user")
    assert latest == [(0, "/9"), (1, "/last"), (2, "/8")]
    with pytest.raises(errors.UnknownTable):
        hr.sql(shop, "select * from latest.revenue")


def test_all_tables_of_a_query_are_at_one_position(shop: EmbeddedLog) -> None:
    both = "select (select count(*) from orders), (select count(*) from revenue)"
    assert rows(shop, both, at=6) == [(5, 3)]
    assert rows(shop, both, at=7) == [(4, 2)]  # one entry changed both
    assert rows(shop, both, at=0) == [(0, 0)]
    assert hr.sql(shop, both, at=7).schema.metadata == {b"headrace.position": b"7"}


def test_what_is_appended_while_a_query_runs_is_not_in_it(shop: EmbeddedLog) -> None:
    with hr.Query(shop, "select count(*) from clicks a, latest.clicks b") as asked:
        shop.append("clicks", [{"user": 9, "url": "/late"}])
        assert next(iter(asked)).to_pylist() == [{"count_star()": 33}]
        assert asked.position == 8
        assert asked.topics == ["clicks"]


def test_a_time_is_the_position_before_it(shop: EmbeddedLog) -> None:
    received = {
        batch.position: batch.received_time[0].as_py()
        for batch in (next(iter(shop.read("clicks", after=p))) for p in (4, 7))
    }
    count = "select count(*) from clicks"
    assert rows(shop, count, at=received[8]) == [(10,)]
    assert rows(shop, count, at=(received[8] + dt.timedelta(seconds=1)).isoformat()) == [(11,)]
    assert rows(shop, count, at="2001-01-01") == [(0,)]
    with pytest.raises(errors.BadPosition):
        hr.sql(shop, count, at="yesterday")
    with pytest.raises(errors.WaitTimeout):
        hr.sql(shop, count, at=99, timeout=0.01)


def test_a_time_of_which_rows_are_gone_is_refused(tmp_path: Path) -> None:
    """Not answered as of a later position, at which they would count as not there."""
    with hr.connect(tmp_path / "log") as log:
        log.create_topic("short", "n bigint")
        log.create_topic("long", "n bigint")
        log.set_topic("short", retention_bytes=1)
        times = []
        for topic in ("long", "short", "short", "long"):
            log.append(topic, [{"n": 1}])
            time.sleep(0.002)
            times.append(dt.datetime.now(dt.UTC))
        log.keeper().turn(close=True)
        short, long = "select count(*) from short", "select count(*) from long"
        for at in times[:2]:
            with pytest.raises(errors.BadPosition, match="whole from"):
                hr.sql(log, short, at=at)
        assert [rows(log, long, at=at)[0][0] for at in times] == [1, 1, 1, 2]
        assert rows(log, short, at=times[3]) == [(0,)]
        assert rows(log, short, at="2999-01-01") == [(0,)]


Change = tuple[int | None, float, list[tuple[str, int]], int]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(
            st.none() | st.integers(0, 2),
            st.sampled_from([0.0, 1.5, float("nan")]),
            st.sampled_from([[], [("a", 1)], [("a", 1), ("b", 2)]]),
            st.sampled_from([1, 1, 1, -1]),
        ),
        max_size=12,
    )
)
def test_changes_without_a_key_are_added_up(log: EmbeddedLog, changes: list[Change]) -> None:
    """As views are added up everywhere else (`added_up`)."""
    topic = f"z{len(log.topics())}"
    log.create_topic(topic, "a bigint, b double, c map<string, int>", kind="changes")
    there: list[str] = []
    for a, b, c, weight in changes:
        if weight > 0:
            there.append(repr((a, b, c)))
        elif repr((a, b, c)) in there:
            there.remove(repr((a, b, c)))
        else:
            continue  # nothing goes that is not there
        log.append(topic, [{"a": a, "b": b, "c": c, "_weight": weight}])
    mine, theirs = hr.sql(log, f"from {topic}"), added_up(log, topic, None)
    assert sorted(map(repr, mine.to_pylist())) == sorted(map(repr, theirs.to_pylist()))


def test_schema_versions_are_read_as_the_newest_and_older_generations_are_not(
    shop: EmbeddedLog,
) -> None:
    shop.alter_topic("clicks", add="tag string")
    shop.append("clicks", [{"user": 5, "url": "/x", "tag": "t"}])
    assert rows(shop, "select count(*), count(tag) from clicks") == [(12, 1)]
    shop.alter_topic("clicks", retype={"url": "bigint"})
    shop.append("clicks", [{"user": 6, "url": 7, "tag": "u"}])
    assert rows(shop, "select url from clicks") == [(7,)]
    assert rows(shop, "select url from history.clicks") == [(7,)]
    shop.alter_topic("clicks", add="more string")  # which no older generation ever had
    shop.append("clicks", [{"user": 6, "url": 8, "more": "m"}])
    assert rows(shop, "select url, more from clicks") == [(7, None), (8, "m")]
    read = [one for batch in shop.read("clicks", columns=["more"]) for one in batch.data["more"]]
    assert [one.as_py() for one in read] == [None] * 13 + ["m"]


def test_a_topic_that_is_altered_while_a_query_reads_it_is_read_as_it_was(
    shop: EmbeddedLog,
) -> None:
    """The query knows the columns of the moment when it began."""
    topic, position = shop.topic("clicks"), shop.position
    shop.alter_topic("clicks", add="tag string")
    shop.append("clicks", [{"user": 5, "url": "/x", "tag": "t"}])
    found = sources.Rows(shop, topic, position, places=False).reader().read_all()
    assert found.column_names == ["user", "url"]
    assert found.num_rows == 11


# --- types ----------------------------------------------------------------------------------------


def same_maps(value: Any) -> bool:
    """Whether no map has a key twice, which DuckDB refuses; floats and nested keys are left out."""
    if isinstance(value, dict):
        return all(map(same_maps, value.values()))
    if isinstance(value, list):
        if value and all(isinstance(one, tuple) for one in value):
            keys = [repr(key) for key, _ in value]
            return len(set(keys)) == len(keys) and all(same_maps(v) for pair in value for v in pair)
        return all(map(same_maps, value))
    return True


def check_equal(log: EmbeddedLog, kind: pa.DataType, values: list[Any]) -> None:
    topic = f"t{len(log.topics())}"
    log.create_topic(topic, pa.schema([("x", kind)]))
    log.append(topic, [{"x": value} for value in values])
    read = pa.concat_arrays([batch.data.column("x") for batch in log.read(topic)])
    (found,) = hr.sql(log, f"from {topic}").columns
    assert loose(found.type) == loose(kind)
    assert json_values(found.combine_chunks()) == json_values(read)


def loose(kind: pa.DataType) -> str:
    return str(kind).replace(" not null", "")


def has_map_key_of_floats(kind: pa.DataType) -> bool:
    return "map<" in str(kind) and ("float" in str(kind) or "double" in str(kind))


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_every_type_comes_out_as_the_log_gives_it(log: EmbeddedLog, data: st.DataObject) -> None:
    kind = data.draw(TYPES.filter(lambda t: not has_map_key_of_floats(t)))
    values = data.draw(
        st.lists(st.none() | values_of(kind).filter(same_maps), min_size=1, max_size=4)
    )
    check_equal(log, kind, values)


DAY = dt.timedelta(days=1)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (DURATION, [dt.timedelta(days=999_999_99), dt.timedelta(days=-999_999_99, microseconds=1)]),
        (pa.list_(DURATION), [[-DAY, None, DAY * 200_000], [], None]),
        (pa.map_(pa.string(), DURATION), [[("a", DAY * 400_000), ("b", None)]]),
        (pa.struct([("d", DURATION)]), [{"d": -DAY * 300_000}, {"d": None}, None]),
        (pa.decimal128(38, 10), [Decimal("9" * 28 + "." + "9" * 10), Decimal("-0.0000000001")]),
        (pa.date32(), [dt.date(1, 1, 1), dt.date(9999, 12, 31)]),
        (TIMESTAMP, [dt.datetime(y, 12, 31, 23, 59, 59, 999999, dt.UTC) for y in (1, 9999)]),
        (TIMESTAMP_NTZ, [dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31, 23, 59, 59, 999999)]),
        (pa.time64("us"), [dt.time(0), dt.time(23, 59, 59, 999999)]),
        (pa.float64(), [float("nan"), float("inf"), -0.0, 5e-324]),
        (pa.binary(), [b"", b"\0\xff", None]),
        (pa.string(), ["", "a\0b", "ä", None]),
    ],
)  # fmt: skip
def test_extremes_come_out_as_the_log_gives_them(
    log: EmbeddedLog, kind: pa.DataType, values: list[Any]
) -> None:
    check_equal(log, kind, values)


def test_sums_of_integers_are_bigint_and_say_when_they_do_not_fit(log: EmbeddedLog) -> None:
    log.create_topic("n", "x bigint")
    log.append("n", [{"x": 2**62}, {"x": 2**61}])
    assert hr.sql(log, "select sum(x) from n").schema.types == [pa.int64()]
    log.append("n", [{"x": 2**62}])
    with pytest.raises(errors.BadQuery, match="larger than a bigint"):
        hr.sql(log, "select sum(x) from n")


def test_columns_of_one_name_are_told_apart(shop: EmbeddedLog) -> None:
    found = hr.sql(shop, "select a.id, b.id from orders a, orders b where a.id = 1 and b.id = 3")
    assert found.to_pylist() == [{"id": 1, "id_1": 3}]


# --- how much is read -----------------------------------------------------------------------------


def test_only_what_a_query_needs_is_read(
    shop: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns of the query only, rows of the keys and positions that it names only, once each."""
    read: list[tuple[Any, ...]] = []
    for kind in (sources.Rows, sources.Keyed):

        def noted(
            self: Any, names: list[str], filters: Any, real: Any = kind.batches, kind: Any = kind
        ) -> Any:
            for batch in real(self, names, filters):
                read.append((kind.__name__, names, batch.num_rows))
                yield batch

        monkeypatch.setattr(kind, "batches", noted)
    assert rows(shop, "select state from orders where id in (1, 3, 77) and id < 3") == [("paid",)]
    assert read == [("Keyed", ["id", "state"], 2)]
    read.clear()
    assert rows(shop, "select max(url) from clicks") == [("/last",)]
    assert read == [("Rows", ["url"], 11)]
    read.clear()
    after = "select url from history.clicks where _position > 5 and _position <= 8"
    assert rows(shop, after) == [("/last",)]
    assert [one[2] for one in read] == [1]
    read.clear()
    assert rows(shop, "select count(*) from history.clicks where _position = 7") == [(0,)]
    assert read == []


def test_an_error_of_the_log_on_the_way_is_that_error(
    shop: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*_: object, **__: object) -> Any:
        raise errors.LogDamaged("journal file 1, byte 64", place="there")

    monkeypatch.setattr(EmbeddedLog, "read", damaged)
    with pytest.raises(errors.LogDamaged, match="byte 64"):
        hr.sql(shop, "select count(*) from clicks")


BOUNDED = """
import resource, sys
import headrace as hr
with hr.connect(sys.argv[1]) as log:
    with hr.Query(log, sys.argv[2], memory="100MB") as query:
        next(iter(query))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        rows = sum(batch.num_rows for batch in query)
print(rows, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_memory_does_not_grow_with_the_answer(tmp_path: Path) -> None:
    """300 MB of rows: scanned, and sorted within 100 MB through the temporary folder."""
    folder = str(tmp_path / "data")
    text = pa.array([f"{i:0100d}" for i in range(100_000)])
    with hr.connect(folder) as log:
        log.create_topic("big", "a bigint, b string")
        for at in range(0, 3_000_000, 100_000):
            log.append(
                "big", pa.record_batch([pa.array(range(at, at + 100_000)), text], ["a", "b"])
            )
    for text_ in ("from big", "select * from big order by b desc, a"):
        done = subprocess.run(
            [sys.executable, "-c", BOUNDED, folder, text_], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        count, grown = map(int, done.stdout.split())
        assert count > 2_900_000
        assert grown < 250, text_


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "create table x (a int)", "insert into clicks values (1)", "drop view clicks",
        "set threads = 1", "attach '/etc/x.db'", "copy clicks to '/etc/x.csv'", "install httpfs",
        "load httpfs", "select * from read_csv('/etc/passwd')", "select * from '/etc/x.parquet'",
        "select * from glob('/*')", "select * from read_text('/etc/passwd')",
    ],
)  # fmt: skip
def test_a_query_only_reads_the_log(shop: EmbeddedLog, text: str) -> None:
    with pytest.raises(errors.QueryRefused):
        hr.sql(shop, text)


def test_python_variables_are_out_of_reach(shop: EmbeddedLog) -> None:
    secret = pa.table({"a": [1]})
    with pytest.raises(errors.UnknownTable):
        hr.sql(shop, "select * from secret")
    assert secret.num_rows == 1


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("selec 1", "query, line 1, column 1"),
        ("select id,\n  nope from orders", "query, line 2, column 3"),
        ("select 1; select 2", "query"),
        ("", "query"),
        ("select cast(state as int) from orders", "query, line 1, column 8"),
    ],
)
def test_errors_have_their_place_in_the_query(shop: EmbeddedLog, text: str, place: str) -> None:
    with pytest.raises(errors.BadQuery) as caught:
        hr.sql(shop, text)
    assert caught.value.place == place


@pytest.mark.parametrize(
    "text", ["select 1;", "select 1; -- done", "-- why\nselect 1", "(select 1)"]
)
def test_a_statement_may_end_and_begin_as_people_write_it(shop: EmbeddedLog, text: str) -> None:
    assert rows(shop, text) == [(1,)]


def test_what_asks_for_tables_sees_all(shop: EmbeddedLog) -> None:
    assert {"orders", "clicks", "revenue"} <= {name for (name,) in rows(shop, "show tables")}
    assert rows(shop, "describe orders")[0][:2] == ("id", "BIGINT")


def test_without_the_way_that_is_not_public_answers_are_the_same(
    shop: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version of DuckDB may not have it: then all columns are read, and nothing changes."""
    monkeypatch.setattr(query, "register", lambda to, name, source: to.register(name, source))
    asked = (
        "select state from orders where id in (1, 3, 77) union all select url from latest.clicks"
    )
    assert sorted(rows(shop, asked)) == [("/8",), ("/9",), ("/last",), ("new",), ("paid",)]
    assert rows(shop, "select count(*) from history.orders where _position = 7") == [(2,)]
    assert rows(shop, "select a.id from orders a, orders b where a.id = b.id and a.id = 3") == [
        (3,)
    ]


def test_an_interrupt_ends_a_long_query(tmp_path: Path) -> None:
    with hr.connect(tmp_path / "data") as log:
        log.create_topic("t", "a bigint")
    endless = "select count(*) from range(1000000000) a, range(1000000000) b"
    command = [sys.executable, "-m", "headrace", "sql", endless, "--log", str(tmp_path / "data")]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as running:
        folders = Path(f"/proc/{running.pid}/task")
        while len(list(folders.iterdir())) < 3:  # DuckDB's threads are there
            assert running.poll() is None
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        try:
            assert running.wait(60) == 130
        finally:
            running.kill()


def test_sealed_rows_are_asked_like_others(shop: EmbeddedLog) -> None:
    asked = [
        ("select * from orders order by id", 8),
        ("select * from revenue order by 1, 2", 6),
        ("select count(*), max(url) from clicks", 8),
        ("select id, _weight, _offset from history.orders where _position = 7 order by id", 8),
    ]
    before = [rows(shop, text, at=at) for text, at in asked]
    keeper = shop.keeper()
    keeper.turn(close=True)
    keeper.release()
    shop.append("clicks", [{"user": 1, "url": "/zzz"}])
    assert [rows(shop, text, at=at) for text, at in asked] == before


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("events", {"retention_seconds": 0}),
        ("events", {"compact": True}),
        ("changes", {"compact": True}),
    ],
)
def test_a_position_at_which_a_topic_is_not_whole_is_refused(
    log: EmbeddedLog, kind: str, policy: dict[str, Any]
) -> None:
    """Not answered with what happens to be left; and a range of positions is what is left of it."""
    log.create_topic("t", "k bigint, v bigint", key="k", kind=kind)
    log.set_topic("t", **policy)
    early = [log.append("t", [{"k": 1, "v": n}]).position for n in range(3)]
    keeper = log.keeper()
    keeper.turn(close=True, compact=True)
    keeper.release()
    late = log.append("t", [{"k": 2, "v": 3}]).position
    since = log.since_of("t")
    for at in early[:2]:
        with pytest.raises(errors.BadPosition) as raised:
            rows(log, "select * from t", at=at)
        assert str(since) in raised.value.why
    assert rows(log, "select v from t where k = 2", at=late) == [(3,)]
    held = [one for (one,) in rows(log, "select _position from history.t order by 1")]
    assert late in held
    for low in (0, *early, late - 1, late):
        left = [(one,) for one in held if one > low]
        where = f"from history.t where _position > {low}"
        assert rows(log, f"select _position {where} order by 1") == left
        assert rows(log, f"select count(*) {where}") == [(len(left),)]
