"""One batch through the algebra of all views: bottom up, each different subtree once.

The engine holds the views' nodes and the collections of every operator that keeps state, and is a
function: `step` takes the changes of the inputs and gives the changes of the views and the *next*
collections; nothing is kept until `keep` is told that the log took them. So a batch that fails, or
whose commit is refused, leaves the engine where it was.

State is named by **identity**: the fingerprint of the operator's subtree and of everything below
it, down to the topics. Two views with a common subtree share its state; a changed file keeps the
state of every subtree it did not change.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import pyarrow as pa

from headrace import errors
from headrace.pipelines.views import aggregate, groups, join
from headrace.pipelines.views.algebra import (
    Aggregate,
    Const,
    Distinct,
    Full,
    Join,
    Node,
    Regroup,
    Scan,
    Stateless,
)
from headrace.pipelines.views.changes import Failed, States, Step, change, nothing, typed
from headrace.pipelines.views.executors import Executors
from headrace.tables.collection import Collection
from headrace.tables.packs import Attempt, Packs

Kept = dict[str, Collection]
"""The collections of one operator."""


WHOLE = "mend the row, or change the definition: what is computed as a whole sets no row aside"


class Operator(NamedTuple):
    """How an operator keeps its output right."""

    collections: Callable[[Any], dict[str, pa.Schema]]
    """What it keeps."""
    step: Callable[[Any, States, Sequence[pa.RecordBatch], int], Step]
    """The change of its output from the changes of its inputs."""
    snapshot: Callable[[Any, States, int], Iterator[pa.RecordBatch]]
    """Its whole output, from what it keeps."""


STEPS: dict[type[Node], Operator] = {
    Join: Operator(join.collections, join.step, join.snapshot),
    Aggregate: Operator(aggregate.collections, aggregate.step, aggregate.snapshot),
    Distinct: Operator(groups.distinct_collections, groups.distinct_step, groups.distinct_snapshot),
    Regroup: Operator(groups.regroup_collections, groups.regroup_step, groups.kept_as("given")),
    Full: Operator(groups.full_collections, groups.full_step, groups.kept_as("given")),
    groups.Unique: Operator(groups.unique_collections, groups.unique_step, groups.kept_as("rows")),
}


@dataclass
class Batch:
    """A batch that was computed and not yet kept."""

    views: dict[str, pa.RecordBatch]
    """The change of each view."""
    kept: dict[str, Kept]
    """The collections afterwards, by identity: those that are new or changed."""
    view: str = ""
    """The view that is being computed (the first, if several share an operator)."""
    aside: list[dict[str, Any]] = field(default_factory=list)
    """Rows that made a view fail, as rows of the topic of these."""
    _memo: dict[str, pa.RecordBatch] = field(default_factory=dict)


class Evaluate(Protocol):
    """Evaluates templates; what fails may be put aside in the batch."""

    def __call__(
        self, batch: Batch, node: Stateless, inputs: Sequence[pa.RecordBatch]
    ) -> pa.RecordBatch:
        """The rows that these rows become."""

    def tolerates(self, view: str) -> bool:
        """Whether a view goes on without what fails."""

    def failed(self, batch: Batch, failed: Failed) -> None:
        """Note what failed."""


class _Strict:
    """Whatever fails is an error."""

    def __call__(
        self, batch: Batch, node: Stateless, inputs: Sequence[pa.RecordBatch]
    ) -> pa.RecordBatch:
        del batch
        return node.template(*inputs)

    def tolerates(self, view: str) -> bool:
        del view
        return False

    def failed(self, batch: Batch, failed: Failed) -> None:
        raise AssertionError(failed)  # only tolerant steps give any


class Engine:
    """The operators of a set of views, and their state."""

    def __init__(
        self,
        views: Mapping[str, Node],
        inputs: Mapping[str, str],
        packs: Packs,
        seed: int,
        evaluate: Evaluate | None = None,
        executors: Executors | None = None,
    ) -> None:
        """`views` by name, each after those it reads; `inputs`: name -> what identifies it."""
        self.views = dict(views)
        self.packs = packs
        self.seed = seed
        self._inputs = dict(inputs)
        self._evaluate = evaluate or _Strict()
        self._executors = executors
        self.loading = False
        """Whether many large batches come one after the other, until `settle`."""
        self._identities: dict[int, str] = {}
        self.kept: dict[str, Kept] = {}
        self._lists: WeakKeyDictionary[Collection, list[Any]] = WeakKeyDictionary()
        """Where the list of a collection's slices is stored."""

    # -- identity ---------------------------------------------------------------------------

    def identity(self, node: Node) -> str:
        """What names the state of a subtree."""
        found = self._identities.get(id(node))
        if found is None:
            if isinstance(node, Scan):
                view = self.views.get(node.name)
                parts = [self.identity(view)] if view else ["input", self._inputs[node.name]]
            else:
                parts = [type(node).__name__, node.fingerprint, *map(self.identity, node.inputs)]
            found = blake2b("\n".join(parts).encode(), digest_size=12).hexdigest()
            self._identities[id(node)] = found
        return found

    def published(self, node: Node, topic: int) -> str:
        """What names the rows of a view: its topic's id, the names and types of its columns."""
        types = (str(one.type) for one in node.columns)
        parts = [self.identity(node), str(topic), *node.names, *types]
        return blake2b("\n".join(parts).encode(), digest_size=12).hexdigest()

    def nodes(self) -> Iterator[Node]:
        """Every node of every view, inputs before what reads them, each identity once."""
        seen: set[str] = set()

        def walk(node: Node) -> Iterator[Node]:
            if self.identity(node) in seen:
                return
            for below in node.inputs:
                yield from walk(below)
            if self.identity(node) not in seen:
                seen.add(self.identity(node))
                yield node

        for view in self.views.values():
            yield from walk(view)

    # -- a batch ----------------------------------------------------------------------------

    def step(
        self,
        changes: Mapping[str, pa.RecordBatch],
        attempt: Attempt,
        given: Mapping[str, pa.RecordBatch] | None = None,
    ) -> Batch:
        """The changes of all views, from the changes of the inputs (absent: none).

        `given`: the changes of operators by their identity, which are taken as they are instead of
        being computed.
        """
        batch = Batch({}, {}, _memo=dict(given or {}))
        for name, node in self.views.items():
            batch.view = name
            batch.views[name] = self._change(node, changes, attempt, batch)
        return batch

    def _change(
        self,
        node: Node,
        changes: Mapping[str, pa.RecordBatch],
        attempt: Attempt,
        batch: Batch,
    ) -> pa.RecordBatch:
        if isinstance(node, Scan):
            if node.name in batch.views:
                return batch.views[node.name]
            given = changes.get(node.name)
            # Spark's types are not always those of the log: its times have nanoseconds.
            return nothing(node.columns) if given is None else typed(given, node.columns)
        identity = self.identity(node)
        if identity in batch._memo:
            return batch._memo[identity]
        below = [self._change(inner, changes, attempt, batch) for inner in node.inputs]
        batch._memo[identity] = found = self._apply(node, identity, below, attempt, batch)
        return found

    def _apply(
        self,
        node: Node,
        identity: str,
        below: list[pa.RecordBatch],
        attempt: Attempt,
        batch: Batch,
    ) -> pa.RecordBatch:
        new = identity not in self.kept
        if isinstance(node, Const):
            if not new:
                return nothing(node.columns)
            batch.kept[identity] = {}
            return change(node.rows.columns, [1] * node.rows.num_rows, node.columns)
        if not any(one.num_rows for one in below) and (isinstance(node, Stateless) or not new):
            return nothing(node.columns)
        if isinstance(node, Stateless):
            return self._evaluate(batch, node, below)
        operator = STEPS[type(node)]
        kept = self.kept.get(identity) or {
            name: Collection(self.packs, schema)
            for name, schema in operator.collections(node).items()
        }
        run: Callable[..., Step] = operator.step
        if self._executors is not None and self._executors.takes(node, below):
            run = self._executors.step
        tolerant = self._evaluate.tolerates(batch.view)
        try:
            asked = replace(node, tolerant=True) if tolerant else node
            done = run(asked, kept, below, self.seed)
        except errors.ExpressionFailed as error:  # a residual, a sum, a regrouped aggregate, a Full
            raise errors.ViewStopped(
                f"view '{batch.view}' fails: {error.fact.strip()}",
                place=node.origin,
                fix=WHOLE if tolerant else error.fix,
            ) from error
        for failed in done.failed:
            self._evaluate.failed(batch, failed)
        add = Collection.loaded if self.loading else Collection.plus
        batch.kept[identity] = {
            name: add(collection, done.state[name], attempt) if name in done.state else collection
            for name, collection in kept.items()
        }
        return done.output

    def take_over(self, other: Engine) -> dict[str, Node]:
        """Take the state that another engine has for what is below these views.

        Gives the topmost operators that were taken over: what they give is known from their state
        (`snapshot`), and nothing below them need be computed again. Constant rows that are also
        used elsewhere are still to come there.
        """
        found: dict[str, Node] = {}
        to_come: set[str] = set()

        def visit(node: Node) -> None:
            view = self.views.get(node.name) if isinstance(node, Scan) else None
            if view is not None:
                visit(view)
                return
            identity = self.identity(node)
            if type(node) in STEPS and identity in other.kept:
                found[identity] = node
            elif isinstance(node, Const):
                to_come.add(identity)
            else:
                for below in node.inputs:
                    visit(below)

        def take(node: Node) -> None:
            view = self.views.get(node.name) if isinstance(node, Scan) else None
            identity = self.identity(node)
            if identity in other.kept and identity not in to_come:
                self.kept[identity] = other.kept[identity]
            for below in (view,) if view is not None else node.inputs:
                take(below)

        for view in self.views.values():
            visit(view)
        for node in found.values():
            take(node)
        return found

    def reads_inputs(self, known: Container[str]) -> bool:
        """Whether a view needs an input by a way that leads through none of these operators."""

        def visit(node: Node) -> bool:
            if isinstance(node, Scan):
                view = self.views.get(node.name)
                return True if view is None else visit(view)
            return self.identity(node) not in known and any(map(visit, node.inputs))

        return any(map(visit, self.views.values()))

    def snapshot(self, node: Node) -> Iterator[pa.RecordBatch]:
        """The whole output of an operator, from its state, in chunks."""
        return STEPS[type(node)].snapshot(node, self.kept[self.identity(node)], self.seed)

    def again(self) -> Engine:
        """An engine with the same views and state, to try something with."""
        other = Engine(
            self.views, self._inputs, self.packs, self.seed, self._evaluate, self._executors
        )
        other.kept, other._lists = dict(self.kept), self._lists
        return other

    def keep(self, batch: Batch) -> None:
        """The log took the batch: its collections are the state now."""
        self.kept.update(batch.kept)

    def settle(self, attempt: Attempt) -> None:
        """The end of loading: do the merges that were put off."""
        self.loading = False
        self.kept = {
            identity: {name: one.settled(attempt) for name, one in kept.items()}
            for identity, kept in self.kept.items()
        }

    # -- manifest ---------------------------------------------------------------------------

    def manifest(self, batch: Batch, attempt: Attempt) -> dict[str, Any]:
        """All collections after a batch, as JSON; what did not change is not written again."""
        return {
            identity: {name: self._listed(one, attempt) for name, one in kept.items()}
            for identity, kept in {**self.kept, **batch.kept}.items()
        }

    def _listed(self, one: Collection, attempt: Attempt) -> list[Any]:
        if one not in self._lists:
            self._lists[one] = one.to_manifest(attempt)
        return self._lists[one]

    def pack_names(self, manifest: Mapping[str, Any]) -> set[str]:
        """The packs that a manifest of the state as it is now names."""
        lists = {listed[0] for kept in manifest.values() for listed in kept.values()}
        pieces = [one.pack_names() for kept in self.kept.values() for one in kept.values()]
        return lists.union(*pieces)

    def load(self, manifest: Mapping[str, Any]) -> None:
        """Take the state that a manifest names, as far as these views need it."""
        self.kept = {}
        for node in self.nodes():
            found = manifest.get(self.identity(node))
            if found is None:
                continue
            collections = STEPS[type(node)].collections(node) if type(node) in STEPS else {}
            self.kept[self.identity(node)] = kept = {
                name: Collection.from_manifest(found[name], self.packs, schema)
                for name, schema in collections.items()
            }
            self._lists.update((one, found[name]) for name, one in kept.items())
