"""The names by which SQL finds topics. Pure.

A topic `shop.public.orders` is a table `"shop.public.orders"`, `shop.public.orders` (which SQL
reads as catalog, schema, table), and, as long as no other topic could be meant, `public.orders` and
`orders`. Beside each one-part name N stand `history.N`, every row with its place in the log, and
`latest.N`, the last row of each key.

SQL does not tell `Orders` from `orders`: a whole name goes before the end of a longer one, and what
could still mean two topics means none; the error names both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Parts = tuple[str, ...]
"""Of a name as SQL writes it: [catalog,] [schema,] table."""

HISTORY, LATEST = "history", "latest"
RESERVED = frozenset(
    (HISTORY, LATEST, "main", "information_schema", "pg_catalog", "temp", "system", "memory")
)
"""Schemas and catalogs that are not ours to give: topics `main.x` are `"main.x"` only."""
EVERYTHING = ("show", "duckdb_", "information_schema", "pg_", "sqlite_")
"""Words of queries that ask which tables there are."""


@dataclass(frozen=True)
class Names:
    """What names mean: `found` a topic each; `unclear` several."""

    found: dict[Parts, str] = field(default_factory=dict)
    """In lower case."""
    unclear: dict[Parts, list[str]] = field(default_factory=dict)

    def of(self, topic: str) -> list[Parts]:
        """The names of one topic."""
        return [parts for parts, name in self.found.items() if name == topic]

    def catalogs(self) -> set[str]:
        """First parts of three: a name of two that begins so lies in that catalog."""
        return {parts[0] for parts in self.found if len(parts) == 3}


def names_of(topics: Iterable[str]) -> Names:
    """Which names mean which of these topics."""
    whole: dict[Parts, list[str]] = {}
    ends: dict[Parts, list[str]] = {}
    for topic in topics:
        parts = tuple(topic.lower().split("."))
        exact = {(topic.lower(),), parts}
        for name in exact | {parts[at:] for at in range(1, len(parts))}:
            if len(name) <= 3 and all(name) and not (len(name) > 1 and name[0] in RESERVED):
                (whole if name in exact else ends).setdefault(name, []).append(topic)
    claims = ends | whole
    return Names(
        {name: claim[0] for name, claim in claims.items() if len(claim) == 1},
        {name: claim for name, claim in claims.items() if len(claim) > 1},
    )


def mentioned(text: str, topics: Sequence[str]) -> list[str]:
    """Those of the topics that a query can be about: their last part stands in it."""
    lowered = text.lower()
    if any(word in lowered for word in EVERYTHING):
        return list(topics)
    return [topic for topic in topics if topic.lower().rpartition(".")[2] in lowered]
