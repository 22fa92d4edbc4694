"""Writes docs/coverage.md from the TPC-H queries: ./run python -m tools.coverage_page."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from headrace.pipelines.views.algebra import Join, Node
from headrace.pipelines.views.explain import explained
from headrace.testing.tpch import QUERIES
from headrace.testing.views_tpch import generated

PAGE = Path(__file__).resolve().parent.parent / "docs" / "coverage.md"

HEAD = """\
# Coverage

The 22 queries of TPC-H (without `limit`, which is refused for now) as views: the rules that serve
each, and what is special about the cost of a change. All of them are kept right under inserts,
updates and deletes (`./run faults views`, a handful in `./run test`). Made by
`./run python -m tools.coverage_page`; a test holds it to what the plan reader says today.

A change costs the rows and groups that it touches, unless the last column says otherwise.

| query | rules | beware |
|---|---|---|
"""


def page(spark: Any) -> str:
    """Give the whole page."""
    from headrace.pipelines.views.lift_definition import read_definition

    with tempfile.TemporaryDirectory() as folder:
        schemas = {name: one.schema for name, one in generated(Path(folder), 0.001).items()}
    rows = []
    for name, sql in QUERIES.items():
        node = read_definition(spark, sql, schemas, name=name)
        rows.append(f"| {name} | {_rules(node)} | {_beware(node)} |\n")
    return HEAD + "".join(rows)


def _rules(node: Node) -> str:
    seen = Counter(
        line.operator
        for one in node.walk()
        for line in [next(explained(one, {}))]
        if line.keeps != "nothing"
    )
    return ", ".join(f"{n} {what}" if n > 1 else what for what, n in sorted(seen.items()))


def _beware(node: Node) -> str:
    joins = [one for one in node.walk() if isinstance(one, Join) and not one.left_keys]
    return "a join without an equality: reads the whole other side" if joins else ""


def main() -> None:
    """Write the page."""
    from headrace.pipelines.spark import session

    PAGE.write_text(page(session()))


if __name__ == "__main__":
    main()
