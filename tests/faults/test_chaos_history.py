"""The checker of the chaos is itself checked.

For each anomaly a history made by hand in which only its rule finds something; good histories of a
simulated log, in which none does; and mutations of these, in which some rule must. Not caught: an
anomaly that nobody has given a name; a rule that is right about these histories and wrong about
others that the simulated log never makes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from headrace.testing.chaos_history import (
    ACKED,
    REFUSED,
    RULES,
    UNKNOWN,
    Commit,
    Final,
    History,
    Kept,
    Place,
    Recorder,
    Written,
    attempt_of,
    judge,
    read_history,
)
from tests.faults.chaos_simulated import (
    GROUP,
    Simulated,
    random_history,
    rows_of,
    without,
)

Made = tuple[History, Final]
BAD: dict[str, list[Callable[[], Made]]] = {}


def bad(name: str) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    def register(make: Callable[[], Made]) -> Callable[[], Made]:
        BAD.setdefault(name, []).append(make)
        return make

    return register


def world() -> Simulated:
    """Three entries of a row each in `plain`, partition 0, and a transaction over the twins."""
    log = Simulated()
    for _ in range(3):
        log.append({"plain": [(0, False)]})
    log.append({"one": [(4, False)], "two": [(4, False)]})
    return log


def made(log: Simulated) -> Made:
    return log.history, log.final()


@bad("lost")
def _() -> Made:
    log = world()
    log.append({"plain": [(0, False)]}, stored=False).position = 99
    return made(log)


@bad("lost")
def _() -> Made:
    """One row of a producer that sends rows one by one."""
    log = world()
    attempt = log.append({"other": [(0, False), (1, False)]}, whole=False)
    final = log.final()
    without(final, rows_of(final, attempt)[1])
    final.ends["other"] = [1]
    return log.history, final


@bad("vanished")
def _() -> Made:
    log = world()
    attempt = log.append({"plain": [(0, False)]}, UNKNOWN)
    log.read(["plain"])
    final = log.final()
    without(final, *rows_of(final, attempt))
    final.ends["plain"][0] -= 1
    return log.history, final


@bad("duplicate")
def _() -> Made:
    log = world()
    row = log.append({"plain": [(0, False)]}, UNKNOWN).rows["plain"][0]
    log.place("plain", 0, log.position, row, int(log.now))
    return made(log)


@bad("reordered")
def _() -> Made:
    """Acknowledged before the other began, and behind it in the log."""
    log = world()
    first = log.append({"plain": [(0, False)]}, stored=False)
    second = log.append({"plain": [(0, False)]})
    log.position += 1
    log.place("plain", 0, log.position, first.rows["plain"][0], int(log.now))
    first.position = log.position
    assert second.position is not None
    assert first.position > second.position
    return made(log)


@bad("reordered")
def _() -> Made:
    """The rows of one entry, in another order than they were given."""
    log = world()
    attempt = log.append({"other": [(0, False), (0, False)]})
    final = log.final()
    (one, at), (two, _) = final.rows[-2:]
    final.rows[-2:] = [(one._replace(id=two.id), at), (two._replace(id=one.id), at)]
    assert rows_of(final, attempt) == [two.id, one.id]
    return log.history, final


@bad("two values")
def _() -> Made:
    log = world()
    row = log.append({"plain": [(0, False)]}, UNKNOWN, stored=False).rows["plain"][0]
    log.position += 1
    reading = log.read(["plain"])
    place = Place("plain", 0, 3, log.position, row.id)
    reading.batches.append(("plain", log.position, True, [place]))
    log.append({"plain": [(0, False)]})
    return made(log)


@bad("gap")
def _() -> Made:
    log = world()
    log.ends["plain"][0] += 1
    log.append({"plain": [(0, False)]}, UNKNOWN)
    return made(log)


@bad("gap")
def _() -> Made:
    """At the end of a partition."""
    log = world()
    log.ends["plain"][0] += 1
    return made(log)


@bad("torn")
def _() -> Made:
    log = world()
    attempt = log.append({"plain": [(0, False)], "other": [(0, False)]}, UNKNOWN)
    final = log.final()
    without(final, attempt.rows["other"][0].id)
    final.ends["other"] = [0]
    return log.history, final


@bad("torn")
def _() -> Made:
    """Whole in the log, and a reader saw a part of it."""
    log = world()
    log.append({"plain": [(0, False)], "other": [(0, False)]})
    reading = log.read(["plain", "other"])
    reading.batches = [batch for batch in reading.batches if batch[0] != "other"]
    return made(log)


@bad("torn")
def _() -> Made:
    """A transaction in two entries."""
    log = world()
    attempt = log.append({"plain": [(0, False)]}, UNKNOWN)
    attempt.rows["other"] = [Written(attempt.rows["plain"][0].id + 1, 0)]
    log.position += 1
    log.place("other", 0, log.position, attempt.rows["other"][0], int(log.now))
    return made(log)


@bad("missed")
def _() -> Made:
    log = world()
    log.append({"plain": [(1, False)]})
    reading = log.read(["plain"])
    reading.batches.pop()
    return made(log)


@bad("refused and there")
def _() -> Made:
    log = world()
    log.append({"plain": [(0, False)]}, REFUSED)
    return made(log)


@bad("invented")
def _() -> Made:
    log = world()
    log.place("plain", 0, log.position, Written(77 << 12, 0), int(log.now))
    return made(log)


@bad("went back")
def _() -> Made:
    log = world()
    log.append({"plain": [(1, False)]})
    reading = log.read(["plain"])
    reading.batches.insert(0, reading.batches.pop())
    return made(log)


@bad("went back")
def _() -> Made:
    """A group's offsets."""
    log = world()
    log.join()
    log.consume("plain", 0, 3)
    offsets = {"plain": {0: 1}}
    log.history.commits.append(Commit(GROUP, 1, offsets, log.tick(), log.tick(), ACKED))
    return made(log)


@bad("stale")
def _() -> Made:
    log = world()
    log.position -= 1
    log.glimpse("process")
    log.position += 1
    return made(log)


@bad("time went back")
def _() -> Made:
    log = world()
    log.append({"plain": [(0, False)]}, UNKNOWN)
    place, _ = log.rows.pop()
    log.rows.append((place, 1))
    return made(log)


@bad("read of what is gone")
def _() -> Made:
    log = world()
    log.read(["plain"]).starts = {"plain": [2, 0]}
    return made(log)


@bad("not told what is gone")
def _() -> Made:
    log = world()
    log.kept["plain"] = Kept(retention=True)
    log.expire("plain", 0, 2)
    log.read(["plain"], {"offsets": {"0": 1}})
    return made(log)


@bad("told gone of what is there")
def _() -> Made:
    log = world()
    log.starts["plain"][0] = 2
    log.told_gone("plain", {0: 1})
    log.starts["plain"][0] = 0
    return made(log)


@bad("hold ignored")
def _() -> Made:
    log = world()
    log.history.holds += [("hold", 1, True), ("hold", 1, False)]
    return made(log)


@bad("newest dropped")
def _() -> Made:
    log = world()
    attempt = log.append({"one": [(4, False)], "two": [(4, False)]})
    log.compact()
    final = log.final()
    without(final, attempt.rows["two"][0].id)
    return log.history, final


@bad("tombstone forgotten")
def _() -> Made:
    """The older row of the key is there again."""
    log = world()
    attempt = log.append({"one": [(4, True)], "two": [(4, True)]})
    log.kept["one"] = log.kept["two"] = Kept(compact=True)
    final = log.final()
    without(final, attempt.rows["two"][0].id)
    return log.history, final


@bad("tombstone forgotten")
def _() -> Made:
    """Gone before its grace was over."""
    log = world()
    log.append({"one": [(4, True)], "two": [(4, True)]})
    log.compact()
    final = log.final()
    final.rows = [one for one in final.rows if one[0].topic != "two"]
    return log.history, final


@bad("wrong table")
def _() -> Made:
    log = world()
    log.append({"one": [(4, False)], "two": [(4, False)]})
    log.table(4)
    process, _, tables = log.history.tables.pop()
    log.history.tables.append((process, 5, tables))
    return made(log)


@bad("wrong table")
def _() -> Made:
    """In the end."""
    log = world()
    final = log.final()
    final.tables["one"] = {}
    return log.history, final


@bad("disagree")
def _() -> Made:
    """One of the two shows an entry of which nobody else knows."""
    log = world()
    attempt = log.append({"one": [(4, False)], "two": [(4, False)]}, UNKNOWN, stored=False)
    log.position += 1
    log.table()
    tables = log.history.tables[0][2]
    tables["one"] = [(4, attempt.rows["one"][0].id, log.position)]
    return made(log)


@bad("old generation")
def _() -> Made:
    log = world()
    log.join()
    log.join()
    log.consume("plain", 0, 2)
    log.history.commits[-1].generation = 1
    return made(log)


@bad("skipped")
def _() -> Made:
    log = world()
    log.join()
    log.consume("plain", 0, 3)
    log.history.took[GROUP].pop()
    return made(log)


@bad("not once")
def _() -> Made:
    """Copied, and copied again by the next owner."""
    log = world()
    log.join()
    log.consume("plain", 0, 3)
    rows = [place.id for place, _ in log.rows if place.topic == "plain"]
    log.append({"other": [(row, False) for row in rows]})
    log.append({"other": [(rows[0], False)]})
    final = log.final()
    final.copies = {GROUP: ("plain", "other")}
    return log.history, final


CASES = [(name, make) for name, several in BAD.items() for make in several]


def test_there_is_a_bad_history_for_every_rule() -> None:
    assert set(BAD) == set(RULES)


@pytest.mark.parametrize(("name", "make"), CASES, ids=[f"{name}" for name, _ in CASES])
def test_only_its_own_rule_reports_a_bad_history(name: str, make: Callable[[], Made]) -> None:
    found = judge(*make())
    assert found
    assert {one.name for one in found} == {name}, found


def test_what_is_good_is_reported_by_none() -> None:
    assert judge(*made(world())) == []


@pytest.mark.parametrize("seed", range(100))
def test_histories_of_a_correct_log_are_good(seed: int) -> None:
    assert judge(*random_history(seed)) == []


# --- mutations ------------------------------------------------------------------------------------

Mutation = Callable[[Random, History, Final], bool]
MUTATIONS: list[Mutation] = []


def mutation(change: Mutation) -> Mutation:
    MUTATIONS.append(change)
    return change


def acked(history: History, final: Final, *topics: str) -> list[int]:
    """Rows that are there, of attempts that were acknowledged, of topics that keep everything."""
    return [
        place.id
        for place, _ in final.rows
        if history.attempts[attempt_of(place.id)].outcome == ACKED
        and place.topic in (topics or ("plain", "other"))
    ]


@mutation
def drop_a_row(rng: Random, history: History, final: Final) -> bool:
    rows = acked(history, final)
    without(final, *rng.sample(rows, min(1, len(rows))))
    return bool(rows)


@mutation
def drop_an_entry(rng: Random, history: History, final: Final) -> bool:
    rows = acked(history, final)
    if rows:
        without(final, *rows_of(final, history.attempts[attempt_of(rng.choice(rows))]))
    return bool(rows)


@mutation
def store_a_row_again(rng: Random, history: History, final: Final) -> bool:
    place, received = rng.choice(final.rows)
    end = final.ends[place.topic][place.partition]
    final.ends[place.topic][place.partition] += 1
    final.rows.append((place._replace(offset=end, position=10_000), received))
    return True


@mutation
def swap_two_rows(rng: Random, history: History, final: Final) -> bool:
    rows = acked(history, final)
    if len(rows) < 2:
        return False
    one, two = rng.sample(rows, 2)
    final.rows = [
        (place._replace(id={one: two, two: one}.get(place.id, place.id)), received)
        for place, received in final.rows
    ]
    return True


@mutation
def leave_an_offset_out(rng: Random, history: History, final: Final) -> bool:
    rows = acked(history, final, "plain")
    if not rows:
        return False
    row = rng.choice(rows)
    chosen = next(place for place, _ in final.rows if place.id == row)
    final.rows = [
        (place._replace(offset=place.offset + (place[:2] == chosen[:2])), received)
        for place, received in final.rows
    ]
    return True


@mutation
def show_another_row(rng: Random, history: History, final: Final) -> bool:
    batches = [batch for reading in history.readings for batch in reading.batches]
    if not batches:
        return False
    rows = rng.choice(batches)[3]
    rows[0] = rows[0]._replace(id=rows[0].id + 3)
    return True


@mutation
def keep_a_row_from_a_reader(rng: Random, history: History, final: Final) -> bool:
    there = {place for place, _ in final.rows}
    batches = [
        rows
        for reading in history.readings
        for _, _, _, rows in reading.batches
        if rows and rows[0] in there
    ]
    if not batches:
        return False
    rng.choice(batches).pop(0)
    return True


@mutation
def turn_a_reading_round(rng: Random, history: History, final: Final) -> bool:
    long = [r for r in history.readings if len({position for _, position, _, _ in r.batches}) > 1]
    if not long:
        return False
    rng.choice(long).batches.reverse()
    return True


@mutation
def refuse_what_is_there(rng: Random, history: History, final: Final) -> bool:
    rows = acked(history, final)
    if rows:
        history.attempts[attempt_of(rng.choice(rows))].outcome = REFUSED
    return bool(rows)


@mutation
def take_a_key_out_of_a_table(rng: Random, history: History, final: Final) -> bool:
    shown = [rows for _, _, tables in history.tables for rows in tables.values() if rows]
    if not shown:
        return False
    rng.choice(shown).pop()
    return True


@mutation
def keep_a_row_from_a_group(rng: Random, history: History, final: Final) -> bool:
    took = sorted(history.took.get(GROUP, set()))
    if not took:
        return False
    history.took[GROUP].remove(rng.choice(took))
    return True


@mutation
def commit_for_an_older_generation(rng: Random, history: History, final: Final) -> bool:
    for commit in history.commits:
        commit.generation = 0
    return bool(history.commits)


@mutation
def tell_an_older_position(rng: Random, history: History, final: Final) -> bool:
    late = [at for at, (_, _, position) in enumerate(history.glimpses) if position > 1]
    taken = [a for a in history.attempts.values() if a.position is not None]
    if not late:
        return False
    process, at, _ = history.glimpses[late[-1]]
    history.glimpses[late[-1]] = process, at, 0
    return any(attempt.ended < at for attempt in taken)


@mutation
def set_the_clock_back(rng: Random, history: History, final: Final) -> bool:
    if len({place.position for place, _ in final.rows}) < 2:
        return False
    place, _ = final.rows[-1]
    final.rows = [(p, 0 if p.position == place.position else at) for p, at in final.rows]
    return True


@mutation
def forget_the_newest_of_a_key(rng: Random, history: History, final: Final) -> bool:
    if "one" not in final.kept:
        return False
    rows = list(final.tables["one"].values())
    acknowledged = set(acked(history, final, "one"))
    rows = [row for row in rows if row in acknowledged]
    without(final, *rng.sample(rows, min(1, len(rows))))
    return bool(rows)


@mutation
def refuse_a_reader_what_is_there(rng: Random, history: History, final: Final) -> bool:
    told = [reading for reading in history.readings if reading.gone]
    for reading in told:
        reading.gone = {"short": dict.fromkeys((0, 1), 10_000)}
    return bool(told)


@pytest.mark.parametrize("change", MUTATIONS, ids=lambda change: change.__name__)
def test_mutations_of_good_histories_are_reported(change: Mutation) -> None:
    tried = 0
    for seed in range(40):
        history, final = copy.deepcopy(random_history(seed))
        if change(Random(seed), history, final):
            tried += 1
            assert judge(history, final), f"seed {seed}: nobody noticed"
    assert tried >= 5


def test_what_is_recorded_is_read_back_without_the_half_line_of_a_killed_process(
    tmp_path: Path,
) -> None:
    file = tmp_path / "1-producer.ndjson"
    record = Recorder(str(file))
    record(begin=1, rows={"plain": [(4096, 3, False)]})
    record(end=1, outcome=ACKED, position=5, received=7, runs={"plain": [(0, 1, 0)]})
    record(begin=2, rows={"plain": [(8192, 3, False)]})
    record(reading=1, topics=["plain"], start={"after": 3}, starts={"plain": [0]})
    record(batch=1, topic="plain", position=5, last=True, rows=[(0, 0, 5, 4096)])
    record(through=1, position=6)
    with file.open("ab") as other:
        other.write(b'{"at":1,"end":2,"outc')
    history = read_history([file])
    one, two = history.attempts.values()
    assert (one.outcome, one.position, one.runs) == (ACKED, 5, {"plain": [(0, 1, 0)]})
    assert two.outcome == UNKNOWN
    assert history.readings[0].settled == 6
    final = Final([(Place("plain", 0, 0, 5, 4096), 7)])
    assert judge(history, final) == []
