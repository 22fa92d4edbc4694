"""Rows that a target refuses, set aside in the log: a topic of changes, by table and key.

A row is set aside before the target goes on without it, and taken out of here before the target
goes on with it: a crash in between means that the cut is applied again, and says the same again of
the same key. So no row is ever missing from both, and being here twice is being here once.

Who looks after the rows asks by the log too: `retry` marks a row, and the follower, which is woken
by that, applies what the key is now. It needs no address, and fences nobody.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace import errors
from headrace.interfaces import Cut, KeptTable, Refused
from headrace.log.embedded.log import EmbeddedLog

SCHEMA = (
    "table string not null, key string not null, reason string, code string, row string, "
    "through bigint, position bigint, asked boolean"
)


def aside_topic(follower: str) -> str:
    """The topic of a follower, named `<pipeline>/<kept>`."""
    pipeline, _, name = follower.partition("/")
    return f"{pipeline}._aside_{name}"


def ensure(log: EmbeddedLog, follower: str) -> str:
    """Make the topic if it is not there."""
    name = aside_topic(follower)
    log.create_topic(name, SCHEMA, key=("table", "key"), kind="changes", exist_ok=True)
    return name


def key_text(table: KeptTable, row: Mapping[str, Any]) -> str:
    """The key of a row as JSON; of a multiset what the row is known by."""
    names = table.key or ("_row",)
    return json.dumps({name: row[name] for name in names}, ensure_ascii=False)


def noted(refused: Sequence[Refused], cut: Cut) -> dict[tuple[str, str], dict[str, Any]]:
    """Refused rows as they are set aside at a cut, by table and key."""
    return {
        (one.table.name, key): {
            "table": one.table.name,
            "key": key,
            "reason": one.reason,
            "code": one.code,
            "row": json.dumps(one.row, ensure_ascii=False) if one.weight > 0 else None,
            "through": cut.through,
            "position": one.table.at(cut),
            "asked": False,
        }
        for one in refused
        for key in [key_text(one.table, one.row)]
    }


def rows(log: EmbeddedLog, follower: str) -> list[dict[str, Any]]:
    """What is set aside, by table and key."""
    name = aside_topic(follower)
    if name not in {topic.name for topic in log.topics()}:
        return []
    found: list[dict[str, Any]] = log.table(name).scan().read_all().to_pylist()
    for one in found:
        one.pop("_position")
    return found


def followers(log: EmbeddedLog) -> list[str]:
    """The followers that have set something aside."""
    parts = [topic.name.partition("._aside_") for topic in log.topics()]
    return [f"{pipeline}/{name}" for pipeline, mark, name in parts if mark and "." not in name]


def one_of(log: EmbeddedLog, follower: str, table: str, key: str | None) -> list[dict[str, Any]]:
    """Rows of a table that are set aside, or the one with this key (JSON)."""
    wanted = None if key is None else _as_object(key)
    found = [
        one
        for one in rows(log, follower)
        if one["table"] == table and wanted in (None, json.loads(one["key"]))
    ]
    if not found:
        text = f" with key {key}" if key is not None else ""
        raise errors.UnknownAside(
            f"no row of '{table}'{text} is set aside", place=f"follower '{follower}'"
        )
    return found


def _as_object(key: str) -> Any:
    try:
        return json.loads(key)
    except ValueError:
        raise errors.UnknownAside(f"{key} is not a key in JSON", place=key) from None


def replace(log: EmbeddedLog, follower: str, found: list[dict[str, Any]], **changes: Any) -> None:
    """Say something else of rows that are set aside; `gone=True`: they no longer are."""
    old = [{**one, "_weight": -1} for one in found]
    new = [] if changes.get("gone") else [{**one, **changes, "_weight": 1} for one in found]
    log.append(aside_topic(follower), [*old, *new])
