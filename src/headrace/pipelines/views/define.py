"""From a pipeline's definitions to nodes: read by Spark, checked, given their topics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace import errors
from headrace.model.ddl import normal_type
from headrace.model.topic import define
from headrace.pipelines.pipeline import Pipeline, View
from headrace.pipelines.views.algebra import Node, Scan, is_unique
from headrace.pipelines.views.groups import Unique
from headrace.pipelines.views.reading import commits_topic, own_columns, topic_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.log.embedded.log import EmbeddedLog


KIND = "changes"
"""Of the topic of a view."""
TESTED = ("4.3.0",)
"""Versions of Spark that the tests have read plans of; another one is tried out first."""


@dataclass(frozen=True)
class Defined:
    """A view that was read."""

    view: View
    node: Node
    names: tuple[str, ...]
    key: tuple[int, ...]
    """The places of its key columns; without a declared key, of all columns."""

    @property
    def schema(self) -> pa.Schema:
        """Its columns under the user's names."""
        return pa.schema(
            [field.with_name(n) for field, n in zip(self.node.columns, self.names, strict=True)]
        )


@dataclass
class Views:
    """All views of a pipeline, each after those it reads."""

    by_name: dict[str, Defined] = field(default_factory=dict)
    input_identities: dict[str, str] = field(default_factory=dict)
    input_schemas: dict[str, pa.Schema] = field(default_factory=dict)
    spark: Any = None
    """The session that read them."""

    @property
    def nodes(self) -> dict[str, Node]:
        """The topmost node of each view."""
        return {name: one.node for name, one in self.by_name.items()}

    def unchanged(self, published: Mapping[str, str], before: Mapping[str, str]) -> list[str]:
        """The views that go on: they, and all that they read, are published as before."""
        same = {name for name, what in published.items() if before.get(name) == what}
        return [name for name in self.by_name if same.issuperset(self.needed([name]))]

    def needed(self, views: Iterable[str]) -> list[str]:
        """These views and all that they read, in order."""
        wanted = set(views)
        pending = list(wanted)
        while pending:
            for node in self.nodes[pending.pop()].walk():
                if isinstance(node, Scan) and node.name in self.by_name:
                    pending += [node.name] if node.name not in wanted else []
                    wanted.add(node.name)
        return [name for name in self.by_name if name in wanted]


def define_views(
    pipeline: Pipeline, log: EmbeddedLog, spark: SparkSession | None, *, topics: bool = True
) -> Views:
    """Read all definitions; each view gets its topic, unless `topics` is False."""
    from headrace.pipelines.spark import session
    from headrace.pipelines.views.lift_definition import Refresh, check_reader, read_definition
    from headrace.pipelines.views.source import input_identity, input_schema

    found = Views()
    for one in pipeline.inputs.values():
        found.input_schemas[one.name] = input_schema(log, one)
        found.input_identities[one.name] = input_identity(log, one)
    schemas = dict(found.input_schemas)
    started = found.spark = spark or session()
    if started.version not in TESTED and any(v.refresh != "full" for v in pipeline.views.values()):
        check_reader(started)
    for view in pipeline.in_order():
        reads = {name: schemas[name] for name in view.among(schemas)}
        full: Refresh = "full" if view.refresh == "full" else "changes"
        node = read_definition(started, view.definition, reads, name=view.said, refresh=full)
        defined = _checked(view, node)
        found.by_name[view.name] = defined
        schemas[view.name] = defined.schema
    if topics:
        make_topics(pipeline, log, found)
    return found


def make_topics(pipeline: Pipeline, log: EmbeddedLog, views: Views) -> None:
    """Give each view its topic."""
    commits_topic(log, pipeline.name)  # first: by it a topic is known as that of a view
    for name, defined in views.by_name.items():
        ensure_topic(log, topic_of(pipeline.name, name), defined)


def _checked(view: View, node: Node) -> Defined:
    counts = Counter(name.lower() for name in node.names)  # as in a topic, and in SQL
    twice = [name for name in node.names if counts[name.lower()] > 1]
    reserved = [name for name in node.names if name.startswith("_")]
    for names, what in ((twice, "comes twice"), (reserved, "starts with _, as Headrace's own do")):
        if names:
            raise errors.BadPipeline(
                f"column '{names[0]}' of view '{view.name}' {what}",
                place=view.place,
                fix="rename it with .alias(...), or drop it; .join(other, 'x') has its x once",
            )
    if not node.names:
        raise errors.BadPipeline(
            f"view '{view.name}' has no columns", place=view.place, fix="select at least one"
        )
    untyped = [n for n, one in zip(node.names, node.columns, strict=True) if one.type == pa.null()]
    if untyped:
        raise errors.BadPipeline(
            f"column '{untyped[0]}' of view '{view.name}' has no type",
            place=view.place,
            why="it is a NULL of no type, and a topic's columns have one",
            fix="say which: CAST(NULL AS string), or F.lit(None).cast('string')",
        )
    missing = [name for name in view.key if name not in node.names]
    if missing:
        raise errors.BadPipeline(
            f"view '{view.name}' has no column '{missing[0]}', which its key names",
            place=view.place,
            why=f"its columns are {', '.join(node.names)}",
            fix=errors.nearest(missing[0], node.names),
        )
    columns = zip(node.columns, node.names, strict=True)
    try:  # as its topic is made later, where nobody knows of a definition
        define(view.name, pa.schema([c.with_name(n) for c, n in columns]), view.key, None, 1, KIND)
    except errors.BadSchema as error:
        error.place = f"{error.place or 'a column'} of view '{view.name}', {view.place}"
        raise
    if view.on_error == "set_aside":
        node = _alone(node, f"{view.name} {node.names} {node.fingerprint}")
    key = tuple(node.names.index(name) for name in view.key)
    if key and not is_unique(node, frozenset(key)):
        node = Unique(
            over=node,
            keys=key,
            view=view.name,
            columns=node.columns,
            names=node.names,
            fingerprint=f"unique {key} {node.fingerprint}",
            origin="unique key",
        )
    return Defined(view, node, tuple(node.names), key or tuple(range(len(node.columns))))


def _alone(node: Node, salt: str) -> Node:
    """The same operators, whose state no other view and no other definition of this one shares.

    What is set aside is noted by who evaluates: another view would go on with less than it should
    have, and a new definition on kept state would not know what was left out below it.
    """
    if isinstance(node, Scan):
        return node
    below = node.below(lambda one: _alone(one, salt))
    return replace(node, fingerprint=f"{node.fingerprint} {salt}", **below)


def ensure_topic(log: EmbeddedLog, name: str, view: Defined, *, alter: bool = False) -> None:
    """Make the topic of a view, or (`alter`) give it the columns of a changed definition."""
    schema = pa.schema([field.with_nullable(True) for field in view.schema])
    key = [view.names[i] for i in view.key] if view.view.key else []
    if name not in {topic.name for topic in log.topics()}:
        # Another driver may be starting at this moment: it makes the same topic.
        log.create_topic(name, schema, key=key, kind=KIND, exist_ok=True)
        return
    topic = log.topic(name)
    if list(topic.key) != key:
        raise errors.BadPipeline(
            f"view '{view.view.name}' had the key {', '.join(topic.key) or '(none)'} before",
            place=view.view.place,
            why="the key decides the partition of each row, for ever",
            fix="give the view another name, or its old key",
        )
    found = topic.schema.arrow
    have = {found.field(i).name: found.field(i).type for i in own_columns(found)}
    want = {field.name: normal_type(field.type, field.name) for field in schema}
    added = [schema.field(column) for column in want if column not in have]
    retyped = {c: want[c] for c in want if c in have and have[c] != want[c]}
    retired = [column for column in have if column not in want]
    changes = {"add": pa.schema(added), "retype": retyped, "retire": retired}
    wanted = {name: change for name, change in changes.items() if len(change)}
    if alter and wanted:
        log.alter_topic(topic.name, **wanted)
