"""What every target must do (`interfaces.Target`): the conformance suite, run on each of them.

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_a_target(check): check(lambda follower: MyTarget(..., follower))

`open` gives the target, the same each time, for a follower of the name given. A check raises
`AssertionError`. What it cannot see: whether a change is durable, and what happens in a crash
within a call (`follower_case` kills a follower at every statement).
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

from headrace import errors
from headrace.derived.rows import WEIGHT, row_ids
from headrace.interfaces import Changes, Cut, KeptTable, Refused, Target
from headrace.model.schema import Column, schema_of

Open = Callable[[str], Target]
ALL_TYPES = (
    "id bigint, a boolean, b tinyint, c smallint, d int, e float, f double, g decimal(20,4), "
    "h date, i timestamp, j timestamp_ntz, k string, l binary, m array<string>, n array<int>, "
    "o struct<x: int, y: string>, p map<string, double>, q array<decimal(5,2)>, "
    "r array<timestamp>, s interval day to second, t time"
)


def table(name: str, ddl: str, *key: str, generation: int = 1) -> KeptTable:
    """A table of these columns."""
    return KeptTable(name, f"of.{name}", schema_of(ddl).columns, key, generation, view=False)


ITEMS = table("items", "id bigint, name string, n int", "id")
PAIRS = table("pairs", "a string, b int, v string", "a", "b")
BAG = table("bag", "word string, n int")


def change(of: KeptTable, rows: Sequence[dict[str, Any]], weight: int = 1) -> Changes:
    """Changes of these rows, all of one weight unless a row has `_weight` itself."""
    schema = of.schema.append(pa.field(WEIGHT, pa.int64()))
    made = [{**row, WEIGHT: row.get(WEIGHT, weight)} for row in rows]
    batch = pa.RecordBatch.from_pylist(made, schema)
    return Changes(of, lambda: iter([batch]))


def taken(refused: list[Refused]) -> None:
    """Nothing may be refused."""
    assert not refused, refused


def rows(target: Target, of: KeptTable, **bounds: Any) -> list[dict[str, Any]]:
    """What a target holds."""
    _, batches = target.read(of, **bounds)
    found = pa.Table.from_batches(batches, of.schema)
    return list(found.to_pylist())


def loaded(target: Target, epoch: int, cut: Cut, *changes: Changes) -> None:
    """Load a target with these rows."""
    target.wipe(epoch, [one.table for one in changes])
    for one in changes:
        target.apply(epoch, None, [one], taken)
    target.swap(epoch, cut, [], taken)


def started(open_target: Open, *changes: Changes) -> Target:
    """A target that is claimed and loaded, at cut (5, 7)."""
    target = open_target("suite/main")
    target.mark(1, "log1")
    loaded(target, 1, Cut(5, 7), *changes)
    return target


# --- the checks -----------------------------------------------------------------------------------


def a_new_target_has_no_cut(open_target: Open) -> None:
    """Before it is claimed, and after, until it is loaded."""
    target = open_target("suite/main")
    assert target.mark().cut is None
    mark = target.mark(3, "log1")
    assert (mark.epoch, mark.cut, mark.log, mark.tables) == (3, None, "log1", ())
    assert target.mark() == mark


def the_last_claim_says_of_which_log_the_cut_is(open_target: Open) -> None:
    """A log that was restored from a backup goes on with the target under a name of its own."""
    target = started(open_target, change(ITEMS, [{"id": 1}]))
    assert target.mark(2, "log2").log == "log2"
    target.apply(2, Cut(6, 8), [], taken)
    assert (target.mark().log, target.mark().cut) == ("log2", Cut(6, 8))


def what_is_loaded_is_shown_by_swap(open_target: Open) -> None:
    """All at once, with the cut."""
    target = open_target("suite/main")
    target.mark(1, "log1")
    target.wipe(1, [ITEMS])
    target.apply(1, None, [change(ITEMS, [{"id": 2, "name": "b"}, {"id": 1, "n": 5}])], taken)
    assert target.mark().cut is None
    assert target.mark().tables == ()
    target.swap(1, Cut(5, 7), [], taken)
    mark, batches = target.read(ITEMS)
    assert list(batches)
    assert (mark.cut, mark.tables) == (Cut(5, 7), (ITEMS,))
    wanted = [{"id": 1, "name": None, "n": 5}, {"id": 2, "name": "b", "n": None}]
    assert rows(target, ITEMS) == wanted
    again = open_target("suite/main")
    assert again.mark() == mark
    again.close()


def changes_come_with_their_cut(open_target: Open) -> None:
    """Insert, update, delete, of several tables; deleting what is not there is nothing."""
    one = {"id": 1, "name": "a", "n": 1}
    target = started(open_target, change(ITEMS, [one, {"id": 2}]), change(BAG, []))
    target.apply(
        1,
        Cut(8, 9),
        [
            change(ITEMS, [{**one, "n": 2}, {"id": 2, "_weight": -1}, {"id": 3}]),
            change(BAG, [{"word": "x", "n": 1, "_weight": 2}]),
        ],
        taken,
    )
    assert target.mark().cut == Cut(8, 9)
    assert rows(target, ITEMS) == [{**one, "n": 2}, {"id": 3, "name": None, "n": None}]
    assert rows(target, BAG) == [{"word": "x", "n": 1}] * 2
    target.apply(1, Cut(10, 11), [change(ITEMS, [{"id": 9}, {"id": 3}], -1)], taken)
    assert rows(target, ITEMS) == [{**one, "n": 2}]
    target.apply(1, Cut(12, 13), [], taken)
    assert target.mark().cut == Cut(12, 13)


def a_later_chunk_counts_over_an_earlier(open_target: Open) -> None:
    """Within one call."""
    target = started(open_target, change(ITEMS, [{"id": 1, "n": 1}]))
    parts = [
        change(ITEMS, [{"id": 1}, {"id": 2}], -1),
        change(ITEMS, [{"id": 1, "n": 2}]),
        change(ITEMS, [{"id": 2, "n": 3}]),
    ]

    def chunks() -> Iterator[pa.RecordBatch]:
        for part in parts:
            yield from part.chunks()

    target.apply(1, Cut(6, 8), [Changes(ITEMS, chunks)], taken)
    assert [one["n"] for one in rows(target, ITEMS)] == [2, 3]


def a_multiset_counts_its_copies(open_target: Open) -> None:
    """Copies come and go, nulls are equal to nulls; in the order of row ids."""
    x, y, none = {"word": "x", "n": 1}, {"word": "y", "n": None}, {"word": None, "n": None}
    target = started(open_target, change(BAG, [{**x, "_weight": 3}, y, none]))
    target.apply(1, Cut(6, 8), [change(BAG, [{**x, "_weight": -2}, {**y, "_weight": 1}])], taken)
    target.apply(1, Cut(7, 9), [change(BAG, [{**none, "_weight": -1}, {**x, "_weight": 1}])], taken)
    found = rows(target, BAG)
    assert sorted(map(str, found)) == sorted(map(str, [x, x, y, y]))
    ids = row_ids(pa.RecordBatch.from_pylist(found, BAG.schema)).to_pylist()
    assert ids == sorted(ids)
    assert rows(target, BAG, after=(ids[0],)) == found[2:]


def keys_may_be_null(open_target: Open) -> None:
    """Also after a table was made without any; null is below all else."""
    target = started(open_target, change(PAIRS, [{"a": "x", "b": 1, "v": "1"}]))
    new: list[dict[str, Any]] = [{"a": None, "b": 1, "v": "2"}, {"a": None, "b": None}]
    new.append({"a": "x", "b": None, "v": "3"})
    target.apply(1, Cut(6, 8), [change(PAIRS, new)], taken)
    target.apply(1, Cut(7, 9), [change(PAIRS, [{"a": None, "b": 1, "v": "4"}])], taken)
    found = [(one["a"], one["b"], one["v"]) for one in rows(target, PAIRS)]
    wanted = [(None, None, None), (None, 1, "4"), ("x", None, "3"), ("x", 1, "1")]
    assert found == wanted
    target.apply(1, Cut(8, 10), [change(PAIRS, [{"a": None, "b": None}], -1)], taken)
    assert len(rows(target, PAIRS)) == 3
    assert len(rows(target, PAIRS, after=(None, 1))) == 2


def a_range_is_read_in_key_order(open_target: Open) -> None:
    """By the bytes of texts, above `after`, up to and with `through`."""
    words = ["", "B", "Z", "a", "b", "é", "z" * 40, "z" * 40 + "a"]
    keys: list[dict[str, Any]]
    keys = [{"a": one, "b": n, "v": one} for one in words for n in (-3, 5)]
    target = started(open_target, change(PAIRS, keys[::-1]))
    wanted = sorted(keys, key=lambda one: (str(one["a"]).encode(), one["b"]))
    assert rows(target, PAIRS) == wanted
    assert rows(target, PAIRS, after=("B", 5), through=("b", -3)) == wanted[4:9]
    assert rows(target, PAIRS, after=("zz", 0)) == [w for w in wanted if w["a"] > "zz"]


def keys_of_any_type_are_in_the_order_of_the_log(open_target: Open) -> None:
    """NaN is above all other numbers, infinity above all other moments, null below everything."""
    floats = table("floats", "k double, v bigint", "k")
    numbers = [None, float("-inf"), -1.5, 0.0, 2.0, float("inf"), float("nan")]
    target = started(open_target, change(floats, [{"k": k, "v": 1} for k in numbers[::-1]]))
    assert str([one["k"] for one in rows(target, floats)]) == str(numbers)
    decimals = table("decimals", "k decimal(6,2), v bigint", "k")
    amounts = [None, *map(Decimal, ("-10.00", "-9.50", "0.00", "9.00", "10.00"))]
    given = change(decimals, [{"k": k, "v": 1} for k in amounts[::-1]])
    target = started(lambda _: open_target("p/decimals"), given)
    assert [one["k"] for one in rows(target, decimals)] == amounts
    moments = table("moments", "k timestamp_ntz, v bigint", "k")
    us = pa.array([-(2**63), -63_000_000_000_000_000, 0, 2**63 - 1], pa.int64())
    two = [pa.array([1] * 4, pa.int64())] * 2
    chunk = pa.RecordBatch.from_arrays(
        [us.view(pa.timestamp("us")), *two], names=["k", "v", WEIGHT]
    )
    other = started(lambda _: open_target("p/moments"), _given(moments, chunk.take([2, 0, 3, 1])))
    _, batches = other.read(moments)
    found = pa.Table.from_batches(batches, moments.schema).column("k").combine_chunks()
    assert found.view(pa.int64()).equals(us)


def values_come_back_as_they_were(open_target: Open) -> None:
    """Every type, its limits and its odd values."""
    everything = table("everything", ALL_TYPES, "id")
    moment = dt.datetime(2024, 2, 29, 12, 30, 15, 123456)
    some: list[dict[str, Any]] = [
        {
            "id": 1, "a": True, "b": -128, "c": 32767, "d": -(2**31), "e": 1.5, "f": 0.1,
            "g": Decimal("1234567890123456.7890"), "h": dt.date(2024, 2, 29),
            "i": moment.replace(tzinfo=dt.UTC), "j": moment, "k": 'a"b\\c,\n\'é{}NULL',
            "l": b"\x00\xff", "m": ["x", None, "", 'a"\\,{}', "NULL"], "n": [1, None, -5],
            "o": {"x": 1, "y": "ü"}, "p": [("k", 1.5), ("l", None)], "q": [Decimal("1.50"), None],
            "r": [moment.replace(tzinfo=dt.UTC)], "s": dt.timedelta(days=-3, microseconds=7),
            "t": dt.time(23, 59, 59, 999999),
        },
        {"id": 2, "e": float("inf"), "f": float("nan"), "k": "", "l": b"", "m": [], "n": []},
        {"id": 2**63 - 1, "e": float("-inf"), "f": 5e-324, "h": dt.date(1, 1, 1), "q": []},
        {"id": -(2**63), "j": dt.datetime(9999, 12, 31, 23, 59, 59, 999999), "k": r"\.", "p": []},
    ]  # fmt: skip
    batch = pa.RecordBatch.from_pylist(some, everything.schema)
    batch = pa.concat_batches([batch, _beyond(everything)])
    ones = pa.array(np.ones(batch.num_rows, np.int64))
    chunk = batch.append_column(WEIGHT, ones)
    gone = batch.append_column(WEIGHT, pa.array(np.full(batch.num_rows, -1, np.int64)))
    target = started(open_target, _given(everything, chunk))
    want = pa.Table.from_batches([batch]).sort_by("id")
    for at, come in enumerate((chunk, gone, chunk)):  # loaded; then again, as changes
        if at:
            target.apply(1, Cut(5 + at, 7 + at), [_given(everything, come)], taken)
        _, found = target.read(everything)
        got = pa.Table.from_batches(found, everything.schema)
        assert got.num_rows == (0 if come is gone else batch.num_rows)
        for name in want.schema.names if got.num_rows else ():
            one, other = (_plain(side.column(name).combine_chunks()) for side in (got, want))
            assert one == other, (name, one, other)


def _given(of: KeptTable, chunk: pa.RecordBatch) -> Changes:
    return Changes(of, lambda: iter([chunk]))


def _plain(column: pa.Array) -> str:
    """Values to compare, NaN too; moments as numbers, for Python does not have them all."""
    if pa.types.is_temporal(column.type):
        column = column.view(pa.int32() if pa.types.is_date(column.type) else pa.int64())
    return str(column.to_pylist())


def _beyond(everything: KeptTable) -> pa.RecordBatch:
    """Infinity, and moments that Python's types do not have."""
    days = [2**31 - 1, -(2**31), -1_000_000, 5_000_000]
    us = [2**63 - 1, -(2**63), -63_000_000_000_000_000, 300_000_000_000_000_000]
    given = {
        "id": pa.array([11, 12, 13, 14], pa.int64()),
        "h": pa.array(days, pa.int32()).view(pa.date32()),
        "i": pa.array(us, pa.int64()).view(pa.timestamp("us", tz="UTC")),
        "j": pa.array(us, pa.int64()).view(pa.timestamp("us")),
        "t": pa.array([86_400_000_000, 0, 1, None], pa.int64()).view(pa.time64("us")),
    }
    arrays = [given.get(one.name, pa.nulls(4, one.type)) for one in everything.schema]
    return pa.RecordBatch.from_arrays(arrays, schema=everything.schema)


def an_older_epoch_is_fenced(open_target: Open) -> None:
    """From the claim of a newer one on, in every call; nothing of it happens."""
    old = started(open_target, change(ITEMS, [{"id": 1}]))
    new = open_target("suite/main")
    assert new.mark(2, "log1").cut == Cut(5, 7)
    for call in (
        lambda: old.apply(1, Cut(6, 8), [change(ITEMS, [{"id": 2}])], taken),
        lambda: old.apply(1, None, [], taken),
        lambda: old.wipe(1, [ITEMS]),
        lambda: old.swap(1, Cut(6, 8), [], taken),
        lambda: old.mark(1, "log1"),
    ):
        try:
            call()
        except errors.Fenced:
            continue
        raise AssertionError("an older epoch was let in")
    assert old.mark().cut == Cut(5, 7)
    new.apply(2, Cut(6, 8), [change(ITEMS, [{"id": 3}])], taken)
    assert [one["id"] for one in rows(new, ITEMS)] == [1, 3]
    old.close()


def followers_do_not_know_each_other(open_target: Open) -> None:
    """Each has its cut and its epoch; a table belongs to one of them."""
    one = started(open_target, change(ITEMS, [{"id": 1}]))
    other = open_target("suite/other")
    assert other.mark(1, "log1").cut is None
    loaded(other, 1, Cut(1, 1), change(PAIRS, []))
    assert one.mark().cut == Cut(5, 7)
    try:
        other.wipe(1, [ITEMS])
    except errors.TableNotOurs:
        other.close()
        return
    raise AssertionError("a table of another follower was taken over")


def nothing_happens_if_refuse_raises(open_target: Open) -> None:
    """It is asked before a call takes effect, once."""
    target = started(open_target, change(ITEMS, [{"id": 1}]))
    calls = []

    def refuse(found: list[Refused]) -> None:
        calls.append(found)
        raise KeyboardInterrupt

    calling: list[Callable[[], None]] = [
        lambda: target.apply(1, Cut(6, 8), [change(ITEMS, [{"id": 2}])], refuse),
        lambda: target.swap(1, Cut(6, 8), [change(ITEMS, [{"id": 2}])], refuse),
    ]
    for call in calling:
        try:
            call()
        except KeyboardInterrupt:
            continue
        raise AssertionError("what refuse raised was swallowed")
    assert calls == [[], []]
    assert (target.mark().cut, len(rows(target, ITEMS))) == (Cut(5, 7), 1)


def a_load_that_broke_off_leaves_nothing(open_target: Open) -> None:
    """The next wipe begins anew; what is visible stays until the swap, then is as loaded."""
    target = started(open_target, change(ITEMS, [{"id": 1, "n": 1}, {"id": 2}]), change(BAG, []))
    target.wipe(1, [ITEMS, BAG])
    target.apply(1, None, [change(ITEMS, [{"id": 7}])], taken)
    assert len(rows(target, ITEMS)) == 2
    loaded(
        target, 1, Cut(8, 8), change(ITEMS, [{"id": 1, "n": 2}, {"id": 3}]), change(BAG, [{"n": 1}])
    )
    assert [(one["id"], one["n"]) for one in rows(target, ITEMS)] == [(1, 2), (3, None)]
    assert rows(target, BAG) == [{"word": None, "n": 1}]
    assert target.mark().cut == Cut(8, 8)


def a_table_comes_beside_others(open_target: Open) -> None:
    """One is loaded, one stays and gets its changes, one is forgotten; all with the same cut."""
    kept = {"id": 1, "name": None, "n": 1}
    target = started(open_target, change(ITEMS, [kept, {"id": 2}]), change(BAG, [{"n": 1}]))
    target.wipe(1, [PAIRS])
    target.apply(1, None, [change(PAIRS, [{"a": "x", "b": 1, "v": "y"}])], taken)
    assert (target.mark().cut, len(rows(target, ITEMS))) == (Cut(5, 7), 2)
    target.swap(1, Cut(8, 9), [change(ITEMS, [{"id": 2, "_weight": -1}, {"id": 3}])], taken)
    mark = target.mark()
    assert (mark.cut, {one.name for one in mark.tables}) == (Cut(8, 9), {"items", "pairs"})
    assert rows(target, ITEMS) == [kept, {"id": 3, "name": None, "n": None}]
    assert rows(target, PAIRS) == [{"a": "x", "b": 1, "v": "y"}]
    target.wipe(1, [])
    newer = KeptTable("items", ITEMS.topic, (*ITEMS.columns, Column(8, "more", pa.string())),
                      ITEMS.key, 1, view=False)  # fmt: skip
    target.swap(1, Cut(9, 9), [change(newer, [{"id": 3, "more": "z"}])], taken)
    assert target.mark().tables == (newer,)
    assert [one["more"] for one in rows(target, newer)] == [None, "z"]


def columns_come_and_go(open_target: Open) -> None:
    """Added, widened and retired columns travel; a column is known by its id."""
    target = started(open_target, change(ITEMS, [{"id": 1, "name": "a", "n": 1}]))
    name = Column(7, "name", pa.int64())  # retired, and another one of that name added
    ident, _, n = ITEMS.columns
    columns = (ident, Column(3, n.name, pa.int64()), name, Column(8, "more", pa.string()))
    newer = KeptTable("items", ITEMS.topic, columns, ITEMS.key, 1, view=False)
    row = {"id": 2, "n": 2**40, "name": 5, "more": "x"}
    target.apply(1, Cut(6, 8), [change(newer, [row])], taken)
    wanted = [{"id": 1, "n": 1, "name": None, "more": None}, row]
    assert rows(target, newer) == wanted
    assert target.mark().tables == (newer,)
    other = table("items", "id bigint, name string, n string", "id", generation=2)
    fix = ""
    try:
        target.apply(1, Cut(7, 9), [change(other, [])], taken)
    except errors.TargetStopped as error:
        fix = error.fix
    assert "drop table" in fix


CHECKS: list[Callable[[Open], None]] = [
    a_new_target_has_no_cut,
    the_last_claim_says_of_which_log_the_cut_is,
    what_is_loaded_is_shown_by_swap,
    changes_come_with_their_cut,
    a_later_chunk_counts_over_an_earlier,
    a_multiset_counts_its_copies,
    keys_may_be_null,
    a_range_is_read_in_key_order,
    keys_of_any_type_are_in_the_order_of_the_log,
    values_come_back_as_they_were,
    an_older_epoch_is_fenced,
    followers_do_not_know_each_other,
    nothing_happens_if_refuse_raises,
    a_load_that_broke_off_leaves_nothing,
    a_table_comes_beside_others,
    columns_come_and_go,
]
