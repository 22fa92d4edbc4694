"""Replication frames and messages, read from bytes that an encoder of our own has written.

Caught: a field read at the wrong place, rows that come out differently when read all at once and
when read singly, damage that is taken for rows, an error that does not say where. Not caught: a
misunderstanding of the protocol that encoder and reader share; `test_transactions` has a server.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import BadReplicationData
from headrace.sources.postgres import protocol
from headrace.sources.postgres.protocol import (
    EPOCH_US,
    UNCHANGED,
    Column,
    Keepalive,
    Relation,
    Rows,
    XLogData,
    frame,
    join,
    lsn_text,
    read_message,
    read_relation,
    read_truncate,
    read_type,
    status_update,
)
from headrace.sources.postgres.values import array_of

# --- the encoder ----------------------------------------------------------------------------------

Values = Sequence[Any]
"""bytes, None, or UNCHANGED."""


def number(value: int, size: int = 4) -> bytes:
    return value.to_bytes(size, "big")


def numbered(kind: bytes, subxid: int | None) -> bytes:
    """The beginning of a message, with the subtransaction when streamed."""
    return kind if subxid is None else kind + number(subxid)


def encoded_row(values: Values) -> bytes:
    parts = [number(len(values), 2)]
    for value in values:
        if value is None:
            parts.append(b"n")
        elif value is UNCHANGED:
            parts.append(b"u")
        else:
            parts += [b"t", number(len(value)), value]
    return b"".join(parts)


def encoded_change(
    op: str, relation: int, kind: str, old: Values | None, new: Values | None, subxid: int | None
) -> bytes:
    message = numbered({"i": b"I", "u": b"U", "d": b"D"}[op], subxid) + number(relation)
    if old is not None:
        message += kind.encode() + encoded_row(old)
    if new is not None:
        message += b"N" + encoded_row(new)
    return message


def encoded_relation(relation: Relation, subxid: int | None = None) -> bytes:
    message = numbered(b"R", subxid) + number(relation.id)
    message += relation.schema.encode() + b"\0" + relation.table.encode() + b"\0"
    message += relation.identity.encode() + number(len(relation.columns), 2)
    for column in relation.columns:
        message += number(int(column.key), 1) + column.name.encode() + b"\0"
        message += number(column.type_oid) + struct.pack(">i", column.type_modifier)
    return message


def encoded_truncate(
    relations: Sequence[int], cascade: bool, restart: bool, subxid: int | None = None
) -> bytes:
    options = cascade | restart << 1
    message = numbered(b"T", subxid) + number(len(relations)) + number(options, 1)
    return message + b"".join(map(number, relations))


def encoded_message(
    prefix: str, content: bytes, lsn: int, transactional: bool, subxid: int | None = None
) -> bytes:
    message = numbered(b"M", subxid) + number(transactional, 1) + number(lsn, 8)
    return message + prefix.encode() + b"\0" + number(len(content)) + content


# --- frames ---------------------------------------------------------------------------------------


def test_a_frame_of_data() -> None:
    data = b"w" + number(5, 8) + number(7, 8) + number(11, 8) + b"payload"
    assert frame(data) == XLogData(5, 7, EPOCH_US + 11, b"payload")
    assert data[protocol.XLOG_DATA_HEADER :] == b"payload"


def test_a_keepalive() -> None:
    data = b"k" + number(7, 8) + number(11, 8) + b"\1"
    assert frame(data) == Keepalive(7, EPOCH_US + 11, True)


def test_a_status_update() -> None:
    update = status_update(3, 2, 1, True, time_us=EPOCH_US + 9)
    assert update == b"r" + b"".join(number(field, 8) for field in (3, 2, 1, 9)) + b"\1"
    assert status_update(3, 2, 1)[-9:] == bytes(9)


@pytest.mark.parametrize("data", [b"", b"w", b"w" + bytes(23), b"k" + bytes(16), b"x" + bytes(30)])
def test_a_frame_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(BadReplicationData):
        frame(data)


def test_a_place_in_the_write_ahead_log_as_the_server_writes_it() -> None:
    assert lsn_text(0x16_0B37_4800) == "16/B374800"


# --- messages but rows ----------------------------------------------------------------------------

ORDERS = Relation(
    16385,
    "shop",
    "Bestellungen ä",
    "d",
    (Column("id", 20, -1, True), Column("note", 1043, 44, False)),
)


@pytest.mark.parametrize("subxid", [None, 7])
def test_messages_say_what_was_written(subxid: int | None) -> None:
    at = 1 if subxid is None else 5
    assert read_relation(encoded_relation(ORDERS, subxid), at) == ORDERS
    truncate = encoded_truncate([1, 2**32 - 1], False, True, subxid)
    assert read_truncate(truncate, at) == ((1, 2**32 - 1), False, True)
    message = read_message(encoded_message("p", b"\0c", 2**40, True, subxid), at)
    assert message == protocol.Message("p", b"\0c", 2**40, True)
    described = numbered(b"Y", subxid) + number(77) + b"\0mood\0"
    assert read_type(described, at) == (77, "pg_catalog", "mood")


WHOLE = {
    read_relation: encoded_relation(ORDERS),
    read_truncate: encoded_truncate([1, 2], True, False),
    read_message: encoded_message("p", b"content", 5, True),
    read_type: b"Y" + number(77) + b"public\0mood\0",
}


@pytest.mark.parametrize("reader", WHOLE, ids=lambda reader: reader.__name__)
def test_a_message_cut_anywhere_or_too_long_is_refused(reader: Any) -> None:
    whole = WHOLE[reader]
    for size in range(1, len(whole)):
        with pytest.raises(BadReplicationData, match=f"message '{whole[:1].decode()}' of {size} b"):
            reader(whole[:size], 1)
    with pytest.raises(BadReplicationData, match="offset"):
        reader(whole + b"\0", 1)


# --- rows -----------------------------------------------------------------------------------------

texts = st.one_of(st.none(), st.just(UNCHANGED), st.binary(max_size=9))


@st.composite
def runs(draw: st.DrawFn, rows_max: int = 12) -> tuple[Rows, list[tuple[int, Any, Any]]]:
    """A run, and what is in it."""
    width = draw(st.integers(0, 4))
    values = st.lists(texts, min_size=width, max_size=width)
    op = draw(st.sampled_from("iud"))
    kinds = {"i": [""], "u": ["", "K", "O"], "d": ["K", "O"]}[op]
    subxid = draw(st.sampled_from([None, 9]))
    content = []
    payloads = []
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=rows_max)):
        old = draw(values) if kind else None
        new = draw(values) if op != "d" else None
        content.append((ord(kind) if kind else 0, old, new))
        payloads.append(encoded_change(op, 5, kind, old, new, subxid))
    columns = tuple(Column(f"c{place}", 25, -1, False) for place in range(width))
    relation = Relation(5, "public", "t", "d", columns)
    return Rows(relation, op, payloads, 5 if subxid is None else 9), content


def rows_of(run: Rows) -> list[tuple[int, Any, Any]]:
    """What is in the columns of a run."""
    kinds = [0] * len(run) if run.old_kind is None else run.old_kind.tolist()
    assert (run.old is None) == (run.old_kind is None)
    assert (run.new is None) == (run.op == "d")
    old, new = rows_of_columns(run.old, len(run)), rows_of_columns(run.new, len(run))
    return [
        (kind, before if kind else None, after)
        for kind, before, after in zip(kinds, old, new, strict=True)
    ]


def rows_of_columns(columns: protocol.RawColumns | None, count: int) -> list[Any]:
    if columns is None:
        return [None] * count
    rows: list[list[Any]] = [[] for _ in range(count)]
    for texts, left_out in zip(columns.values, columns.unchanged, strict=True):
        values = array_of(texts)
        values.validate(full=True)
        assert left_out is None or left_out.any()
        assert len(values) == count
        for place, value in enumerate(values.to_pylist()):
            without = left_out is not None and left_out[place]
            assert not without or value is None
            rows[place].append(UNCHANGED if without else value)
    return rows


@settings(deadline=None)
@given(case=runs())
def test_a_run_read_at_once_is_what_was_written(case: tuple[Rows, Any]) -> None:
    run, content = case
    with (
        mock.patch.object(protocol, "SHORT_RUN", 1),
        mock.patch.object(protocol, "read_row", side_effect=AssertionError),
    ):
        assert rows_of(run) == content


@settings(deadline=None)
@given(case=runs())
def test_a_run_read_singly_is_what_was_written(case: tuple[Rows, Any]) -> None:
    run, content = case
    assert rows_of(run) == content
    assert run.rows() == content


@settings(deadline=None, max_examples=300)
@given(case=runs(), data=st.data())
def test_damage_is_found_at_once_where_it_is_found_singly(
    case: tuple[Rows, Any], data: st.DataObject
) -> None:
    """A byte changed, cut off or added: read at once, the run is refused or the same as singly."""
    run, _ = case
    which = data.draw(st.integers(0, len(run) - 1))
    payload = bytearray(run.payloads[which])
    place = data.draw(st.integers(run.start, len(payload)))
    damage = data.draw(st.sampled_from(["change", "cut", "add"]))
    if damage == "cut":
        del payload[place:]
    elif damage == "add" or place == len(payload):
        payload.insert(place, data.draw(st.integers(0, 255)))
    else:
        payload[place] = data.draw(st.one_of(st.sampled_from(b"KONtnu\0\xff"), st.integers(0, 255)))
    run.payloads[which] = bytes(payload)
    found = None
    try:
        singly = run.rows()
    except BadReplicationData as error:
        found = error
    with mock.patch.object(protocol, "SHORT_RUN", 1):
        if found is None:
            assert rows_of(run) == singly
        else:
            assert f"message '{run.op.upper()}'" in found.fact
            with pytest.raises(BadReplicationData):
                run.read()


def test_a_long_run_is_read_at_once() -> None:
    rows = [[b"%d" % row, None if row % 3 else b"x" * row] for row in range(1000)]
    payloads = [encoded_change("i", 16385, "", None, row, None) for row in rows]
    run = Rows(ORDERS, "i", payloads, 5)
    with mock.patch.object(protocol, "read_row", side_effect=AssertionError):
        assert rows_of(run) == [(0, None, row) for row in rows]


def test_runs_are_joined() -> None:
    content: list[Any] = [(0, None, [b"1", b"a"]), (0, None, [b"2", None]), (0, None, [b"3", b""])]
    payloads = [
        [encoded_change("i", 16385, "", None, new, subxid)]
        for (_, _, new), subxid in zip(content, [None, 7, None], strict=True)
    ]
    parts = [
        Rows(ORDERS, "i", messages, start)
        for messages, start in zip(payloads, [5, 9, 5], strict=True)
    ]
    assert rows_of(join(parts)) == content
    assert rows_of(join(parts[1:])) == content[1:]
    assert rows_of(parts[0]) == content[:1]


@pytest.mark.parametrize(
    ("op", "message", "says", "offset"),
    [
        ("i", b"I\0\0\0\1K", "an unknown part 0x4b instead of N", 5),
        ("i", b"I\0\0\0\1N\0\3", "3 columns instead of 2", 6),
        ("i", b"I\0\0\0\1N\0\2nb\0\0\0\1x", "an unknown kind of value 0x62", 9),
        ("i", b"I\0\0\0\1N\0\2nt\0\0\0\2x", "a value longer than its message", 10),
        ("i", b"I\0\0\0\1N\0\2nt\xff\xff\xff\xff", "a value longer than its message", 10),
        ("i", b"I\0\0\0\1N\0\2nnn", "an end too late or too early", 10),
        ("u", b"U\0\0\0\1X\0\2nn", "an unknown part 0x58", 5),
        ("u", b"U\0\0\0\1K\0\2nn", "an early end", 10),
        ("d", b"D\0\0\0\1N\0\2nn", "no old row", 5),
        ("d", b"D\0\0\0\1", "an early end", 5),
    ],
)
def test_an_error_says_what_is_wrong_and_where(
    op: str, message: bytes, says: str, offset: int
) -> None:
    with pytest.raises(BadReplicationData) as caught:
        Rows(ORDERS, op, [message], 5).read()
    kind = op.upper()
    assert caught.value.fact == (
        f"{says} in a message '{kind}' of {len(message)} bytes, at offset {offset}"
    )
    assert caught.value.place == f"offset {offset} of a message '{kind}'"
