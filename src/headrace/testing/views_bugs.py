"""Bugs of views on purpose: a line of production code is changed for as long as a hunt lasts.

A mutation takes the source of a function, changes a text that must occur in it exactly once, and
puts the result in its place; so a bug whose place was rewritten says so instead of being silently
gone. The hunters are the general ones, which know nothing of the bugs: random cases without Spark
(`views_plain`), the crash enumerator and the race (`views_crash`), random SQL (`views_sql`), and a
restart under another time zone.
"""

from __future__ import annotations
import __future__

import contextlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from headrace.log.writer import WriterTransaction
from headrace.pipelines.views import aggregate, changes, groups, join, lift_fingerprint
from headrace.pipelines.views import engine as engines
from headrace.pipelines.views import run as loop
from headrace.pipelines.views.aggregate import FloatSum
from headrace.pipelines.views.source import Source
from headrace.tables.packs import Attempt
from headrace.testing.hunt import Catch, look_for, table
from headrace.testing.views_crash import explore, raced
from headrace.testing.views_plain import attempt, plain_case

BEGIN, END = "<!-- bugs of views: begin -->", "<!-- bugs of views: end -->"
Patch = contextlib.AbstractContextManager[Any]
Change = tuple[Any, str, str, str]
"""Module or class, function, a text in it, and what to put there."""


@dataclass(frozen=True)
class Bug:
    """A bug that can be switched on."""

    name: str
    where: str
    """The hunter that should find it first."""
    changes: tuple[Change, ...] = ()
    patches: Callable[[], list[Patch]] | None = None

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Have it for a while."""
        with contextlib.ExitStack() as stack:
            for owner, name in dict.fromkeys((c[0], c[1]) for c in self.changes):
                texts = [(c[2], c[3]) for c in self.changes if (c[0], c[1]) == (owner, name)]
                for patch in _mutation(owner, name, texts):
                    stack.enter_context(patch)
            for patch in self.patches() if self.patches else ():
                stack.enter_context(patch)
            yield


def _mutation(owner: Any, name: str, texts: list[tuple[str, str]]) -> list[Patch]:
    original = inspect.unwrap(getattr(owner, name))
    source = SOURCES[owner, name]
    for old, new in texts:
        if source.count(old) != 1:
            raise AssertionError(f"{name} has {source.count(old)} times: {old}")
        source = source.replace(old, new)
    source = source.replace("super()", f"super({getattr(owner, '__name__', '')}, self)")
    module = sys.modules[original.__module__]
    code = compile(source, "<bug>", "exec", flags=__future__.annotations.compiler_flag)
    made: dict[str, Any] = {}
    exec(code, module.__dict__, made)  # our own source, changed on purpose
    found: list[Patch] = [mock.patch.object(owner, name, made[name])]
    steps = {
        kind: operator._replace(step=made[name])
        for kind, operator in engines.STEPS.items()
        if operator.step is original
    }
    return [*found, mock.patch.dict(engines.STEPS, steps)] if steps else found


# --- the bugs -----------------------------------------------------------------------------

GIVEN_AGAIN = """before = node.groups(_copies(states["rows"].probe(touched), node.over.columns))
    given = keyed(
        change(before.columns, np.ones(before.num_rows), node.columns),
        range(len(node.keys)), seed)"""
ROW_BLOCKS = "[block if number == 0 else block.turned() for block in blocks]"
SORTED = 'return batch.sort_by([(n, "ascending") for n in batch.schema.names if n in "_k_o_h"])'

BUGS = [
    Bug("a weight is lost in a join", "plain", (
        (join.Block, "weights", "* weights(self.right)[self.in_right]",
         "* np.sign(weights(self.right)[self.in_right])"),)),
    Bug("the new side of a join is used for the old", "plain", (
        (join, "step", 'states["r"].probe(distinct(keys_of(d_left)))',
         'consolidate(pa.concat_batches([states["r"].probe(distinct(keys_of(d_left))), d_right]))'),
        )),
    Bug("dA x dB is forgotten", "plain", (
        (join, "step", "Block.of(d_left, d_right, left, right)",
         "Block.of(d_left, d_right, left, right).only(np.zeros(0, np.int64))"),)),
    Bug("matches are counted before the residual", "plain", (
        (join, "step", "blocks = _residual(node, blocks, failed)",
         "whole, blocks = blocks, _residual(node, blocks, failed)"),
        (join, "step", ROW_BLOCKS, ROW_BLOCKS.replace("in blocks", "in whole")))),
    Bug("a null key matches", "plain", (
        (join, "_taken", "for i in side.strict:", "for i in ():"),)),
    Bug("a count of partners crosses zero unseen", "plain", (
        (join, "_by_key", "(old == 0) & (new > 0), (old > 0) & (new == 0)",
         "(old == 0) & (new == 1), (old == 1) & (new == 0)"),)),
    Bug("consolidation is skipped", "plain", (
        (changes, "keyed_rows", "return consolidate(batch)", SORTED),)),
    Bug("regroup retracts a recomputed before", "plain", (
        (groups, "regroup_step", 'given = states["given"].probe(touched)', GIVEN_AGAIN),)),
    Bug("the global group is removed at 0", "plain", (
        (aggregate, "step", "(n > 0) if node.keys else np.ones(1, bool)", "n > 0"),)),
    Bug("a group without rows stays", "plain", (
        (aggregate, "step", "(n > 0) if node.keys else np.ones(1, bool)",
         "np.ones(len(touched), bool)"),)),
    Bug("an infinity poisons a sum for ever", "plain", (
        (FloatSum, "add", "counts[at] + rows.total(kind.astype(np.int64))",
         "np.maximum(counts[at], counts[at] + rows.total(kind.astype(np.int64)))"),)),
    Bug("a carry between limbs is lost", "plain", (
        (aggregate, "carried", "carry = total >> 32", "carry = total * 0"),)),
    Bug("min and max read on from the wrong end", "plain", (
        (aggregate._Finder, "_walk", "reverse=self.highest", "reverse=not self.highest"),)),
    Bug("a prefix of a string is taken for the string", "plain", (
        (aggregate._Finder, "__init__", "self.exact = exact", "self.exact = True"),)),
    Bug("count distinct counts copies", "plain", (
        (aggregate, "_once", "moved = (new > 0).astype(np.int64) - (old > 0).astype(np.int64)",
         "moved = weights(values)"),)),
    Bug("distinct gives a row again with each copy", "plain", (
        (groups, "distinct_step", "- (old > 0).astype(np.int64)", "- (old < 0).astype(np.int64)"),
        )),
    Bug("literal rows enter with every batch", "plain", (
        (engines.Engine, "_apply", "if not new:", "if node is None:"),)),
    Bug("the manifest names the state before the batch", "plain", (
        (engines.Engine, "manifest", "{**self.kept, **batch.kept}.items()",
         "{**batch.kept, **self.kept}.items()"),)),
    Bug("an entry that came meanwhile is read again", "race", (
        (Source, "take", "self.through = max(self.through, batch.position)",
         "self.through = max(self.through, min(batch.position, visible))"),)),
    Bug("the entry does not require the epoch", "crash", (
        (WriterTransaction, "__init__", "self._require[writer.epoch_counter] = writer.epoch",
         "pass"),)),
    Bug("the entry neither requires nor expects", "race", (
        (WriterTransaction, "__init__", "self._require[writer.epoch_counter] = writer.epoch",
         "pass"),
        (WriterTransaction, "__init__", "self._expect[writer.counter] = writer.version", "pass"))),
    Bug("a pack is not synced", "crash", (
        (Attempt, "_write", "file.fdatasync()", "pass"),)),
    Bug("the folder of packs is not synced", "crash", (
        (Attempt, "finish", "self.packs.system.fsync_dir(self.packs.folder)", "pass"),)),
    Bug("the entry comes before its packs", "crash", (
        (loop.Runner, "_commit", "attempt.finish()", "pass"),
        (loop.Runner, "_commit", "engine.keep(batch)", "attempt.finish(); engine.keep(batch)"))),
    Bug("a pack that is needed is swept away", "crash", (
        (engines.Engine, "pack_names", "return lists.union(*pieces)", "return lists"),)),
    Bug("nothing is ever swept", "crash", (
        (loop.Runner, "_sweep", "if self.commits %", "if not self.commits and self.commits %"),)),
    Bug("the fingerprint ignores the time zone", "zones", (), lambda: [
        mock.patch.object(lift_fingerprint, "SETTINGS", lift_fingerprint.SETTINGS[1:]),
        mock.patch.object(lift_fingerprint, "DROPPED", lift_fingerprint.DROPPED | {"timeZoneId"}),
    ]),
]  # fmt: skip


SOURCES = {
    (owner, name): textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(owner, name))))
    for bug in BUGS
    for owner, name, _, _ in bug.changes
}
"""As they were when this module was imported, whoever edits the files meanwhile."""


# --- the hunt -----------------------------------------------------------------------------

Found = tuple[str, int]
"""What was said, and after how many tries."""


def _plain(number: int, spark: Any) -> Found:
    del spark
    wrong = attempt(plain_case(f"hunt{number}"))
    return ("" if wrong is None else str(wrong)), 1


def _crash(number: int, spark: Any) -> Found:
    del spark
    tally = explore(plain_case(f"crash{number}"), points=16, bound=8)
    return (tally.wrong[0] if tally.wrong else ""), max(1, tally.opened)


def _race(number: int, spark: Any) -> Found:
    del spark
    return raced(plain_case(f"race{number}"), str(number)), 1


def _zones(number: int, spark: Any) -> Found:
    from headrace.testing.views_sql import moved_zone

    del number
    return (moved_zone(spark), 1) if spark is not None else ("", 0)


HUNTERS: dict[str, tuple[str, int, Callable[[int, Any], Found]]] = {
    "plain": ("random cases without Spark", 400, _plain),
    "crash": ("crash enumerator", 12, _crash),
    "race": ("two drivers and a writer", 100, _race),
    "zones": ("a restart under another time zone", 1, _zones),
}
"""The title of each hunter, how many cases it tries, and how it tries one."""


def catch(bug: Bug, spark: Any = None) -> Catch:
    """Look for a bug where it should show."""
    title, most, look = HUNTERS[bug.where]

    def sound(number: int) -> Found:
        return look(number, spark)

    def buggy(number: int) -> Found:
        with bug.on():
            return sound(number)

    return look_for(bug.name, title, most, buggy, sound)


def hunt(only: str, say: Callable[[str], None], spark: Callable[[], Any]) -> list[Catch]:
    """Look for all bugs whose name contains `only`."""
    found = []
    for bug in BUGS:
        if only in bug.name:
            found.append(catch(bug, spark() if bug.where == "zones" else None))
            say(found[-1].line())
    return found


__all__ = ["BUGS", "Bug", "catch", "hunt", "table"]
