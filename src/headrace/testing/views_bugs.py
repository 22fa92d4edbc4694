"""Bugs of views on purpose: mutants of production code, as in `seeded`.

The hunters are the general ones, which know nothing of the bugs: random cases without Spark
(`views_plain`), the crash enumerator and the race (`views_crash`), random SQL (`views_sql`), and a
restart under another time zone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

from headrace.log.writer import WriterTransaction
from headrace.pipelines.views import aggregate, changes, groups, join, lift_fingerprint
from headrace.pipelines.views import engine as engines
from headrace.pipelines.views import run as loop
from headrace.pipelines.views.aggregate import FloatSum
from headrace.pipelines.views.source import Source
from headrace.tables.packs import Attempt
from headrace.testing.hunt import Catch, each, look_with
from headrace.testing.seeded import Bug, Patch, instead, mutant
from headrace.testing.views_crash import explore, raced
from headrace.testing.views_plain import attempt, plain_case


def _steps_too(original: Any, made: Any) -> list[Patch]:
    """The table of operators refers to their functions."""
    steps = {
        kind: operator._replace(step=made)
        for kind, operator in engines.STEPS.items()
        if operator.step is original
    }
    return [mock.patch.dict(engines.STEPS, steps)] if steps else []


_mutant = partial(mutant, beside=_steps_too)


# --- the bugs -----------------------------------------------------------------------------

GIVEN_AGAIN = """before = node.groups(_copies(states["rows"].probe(touched), node.over.columns))
    given = keyed(
        change(before.columns, np.ones(before.num_rows), node.columns),
        range(len(node.keys)), seed)"""
ROW_BLOCKS = "[block if number == 0 else block.turned() for block in blocks]"
SORTED = 'return batch.sort_by([(n, "ascending") for n in batch.schema.names if n in "_k_o_h"])'

BUGS = [
    _mutant("a weight is lost in a join", "plain", (
        (join.Block, "weights", "* weights(self.right)[self.in_right]",
         "* np.sign(weights(self.right)[self.in_right])"),)),
    _mutant("the new side of a join is used for the old", "plain", (
        (join, "step", 'states["r"].probe(distinct(keys_of(d_left)))',
         'consolidate(pa.concat_batches([states["r"].probe(distinct(keys_of(d_left))), d_right]))'),
        )),
    _mutant("dA x dB is forgotten", "plain", (
        (join, "step", "Block.of(d_left, d_right, left, right)",
         "Block.of(d_left, d_right, left, right).only(np.zeros(0, np.int64))"),)),
    _mutant("matches are counted before the residual", "plain", (
        (join, "step", "blocks = _residual(node, blocks, failed)",
         "whole, blocks = blocks, _residual(node, blocks, failed)"),
        (join, "step", ROW_BLOCKS, ROW_BLOCKS.replace("in blocks", "in whole")))),
    _mutant("a null key matches", "plain", (
        (join, "_taken", "for i in side.strict:", "for i in ():"),)),
    _mutant("a count of partners crosses zero unseen", "plain", (
        (join, "_by_key", "(old == 0) & (new > 0), (old > 0) & (new == 0)",
         "(old == 0) & (new == 1), (old == 1) & (new == 0)"),)),
    _mutant("consolidation is skipped", "plain", (
        (changes, "keyed_rows", "return consolidate(batch)", SORTED),)),
    _mutant("regroup retracts a recomputed before", "plain", (
        (groups, "regroup_step", 'given = states["given"].probe(touched)', GIVEN_AGAIN),)),
    _mutant("the global group is removed at 0", "plain", (
        (aggregate, "step", "(n > 0) if node.keys else np.ones(1, bool)", "n > 0"),)),
    _mutant("a group without rows stays", "plain", (
        (aggregate, "step", "(n > 0) if node.keys else np.ones(1, bool)",
         "np.ones(len(touched), bool)"),)),
    _mutant("an infinity poisons a sum for ever", "plain", (
        (FloatSum, "add", "counts[at] + rows.total(kind.astype(np.int64))",
         "np.maximum(counts[at], counts[at] + rows.total(kind.astype(np.int64)))"),)),
    _mutant("a carry between limbs is lost", "plain", (
        (aggregate, "carried", "carry = total >> 32", "carry = total * 0"),)),
    _mutant("min and max read on from the wrong end", "plain", (
        (aggregate._Finder, "_walk", "reverse=self.highest", "reverse=not self.highest"),)),
    _mutant("a prefix of a string is taken for the string", "plain", (
        (aggregate._Finder, "__init__", "self.exact = exact", "self.exact = True"),)),
    _mutant("count distinct counts copies", "plain", (
        (aggregate, "_once", "moved = (new > 0).astype(np.int64) - (old > 0).astype(np.int64)",
         "moved = weights(values)"),)),
    _mutant("distinct gives a row again with each copy", "plain", (
        (groups, "distinct_step", "- (old > 0).astype(np.int64)", "- (old < 0).astype(np.int64)"),
        )),
    _mutant("literal rows enter with every batch", "plain", (
        (engines.Engine, "_apply", "if not new:", "if node is None:"),)),
    _mutant("the manifest names the state before the batch", "plain", (
        (engines.Engine, "manifest", "{**self.kept, **batch.kept}.items()",
         "{**batch.kept, **self.kept}.items()"),)),
    _mutant("an entry that came meanwhile is read again", "race", (
        (Source, "take", "self.through = max(self.through, batch.position)",
         "self.through = max(self.through, min(batch.position, visible))"),)),
    _mutant("the entry does not require the epoch", "crash", (
        (WriterTransaction, "__init__", "self._require[writer.epoch_counter] = writer.epoch",
         "pass"),)),
    _mutant("the entry neither requires nor expects", "race", (
        (WriterTransaction, "__init__", "self._require[writer.epoch_counter] = writer.epoch",
         "pass"),
        (WriterTransaction, "__init__", "self._expect[writer.counter] = writer.version", "pass"))),
    _mutant("a pack is not synced", "crash", (
        (Attempt, "_write", "file.fdatasync()", "pass"),)),
    _mutant("the folder of packs is not synced", "crash", (
        (Attempt, "finish", "self.packs.system.fsync_dir(self.packs.folder)", "pass"),)),
    _mutant("the entry comes before its packs", "crash", (
        (loop.Runner, "_commit", "attempt.finish()", "pass"),
        (loop.Runner, "_commit", "engine.keep(batch)", "attempt.finish(); engine.keep(batch)"))),
    _mutant("a pack that is needed is swept away", "crash", (
        (engines.Engine, "pack_names", "return lists.union(*pieces)", "return lists"),)),
    _mutant("nothing is ever swept", "crash", (
        (loop.Runner, "_sweep", "if self.commits %", "if not self.commits and self.commits %"),)),
    Bug("the fingerprint ignores the time zone", lambda: [
        instead(lift_fingerprint, "SETTINGS", lift_fingerprint.SETTINGS[1:]),
        instead(lift_fingerprint, "DROPPED", lift_fingerprint.DROPPED | {"timeZoneId"}),
    ], ("zones",)),
]  # fmt: skip

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
    "race": ("two drivers and a writer", 300, _race),
    "zones": ("a restart under another time zone", 1, _zones),
}
"""The title of each hunter, how many cases it tries, and how it tries one."""


def catch(bug: Bug, spark: Any = None) -> Catch:
    """Look for a bug where it should show."""
    title, most, look = HUNTERS[bug.where[0]]

    return look_with(bug, title, most, lambda number: look(number, spark))


def hunt(only: str, say: Callable[[str], None], spark: Callable[[], Any]) -> list[Catch]:
    """Look for all bugs whose name contains `only`."""
    return each(BUGS, only, lambda bug: catch(bug, spark() if "zones" in bug.where else None), say)
