"""What the simulated processes do to the log while everything is recorded.

Each workload is a function of a `Run`; it appends, reads, claims, rolls, closes and opens again, on
its own or with other processes under a `Schedule`, and leaves its history behind. Together they go
through every path of the log that writes something. Where the short cut of the log is compiled,
those that append by it come twice: in Python, and `..._in_c`.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from random import Random
from unittest import mock

from headrace import errors
from headrace.log.embedded import orphans, shortcut
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.writer import Writer
from headrace.model.records import Piece, Receipt
from headrace.testing.disk import SimulatedProcess
from headrace.testing.promises import REFUSED, TAKEN, UNKNOWN, Attempt
from headrace.testing.schedule import Schedule
from headrace.testing.simulation import SCHEMA, TOPICS, Run, agreeing, rows_to_write
from headrace.testing.verdicts import Violated

Workload = Callable[[Run], None]


def plain(run: Run) -> None:
    """One process: entries of one and two topics, conditions, conflicts, a follower, reopening."""
    log = run.open()
    run.make_topics(log)
    through = 0
    for number in range(14):
        counter = f"c{number % 2}"
        rows = {"orders": run.rng.randrange(1, 4)}
        if number % 3 == 0:
            rows["audit"] = 1
        known = log.counter(counter)
        run.append(log, rows, expect={counter: known} if number % 2 else None)
        if number % 4 == 1:
            run.append(log, {"orders": 1}, expect={counter: known})  # a conflict
            run.append(log, {"orders": 1}, require={counter: log.counter(counter)})
        if number % 3 == 2:
            through = run.follow(log, "follower", TOPICS, through)
        if number == 8:
            log.close()
            log = run.open()
    run.follow(log, "follower", TOPICS, through)


def rolls(run: Run) -> None:
    """Entries large enough that journal files follow one another; quiet times, files made ahead."""
    log = run.open()
    run.make_topics(log)
    through = 0
    for number in range(16):
        value = log.counter("c2")
        run.append(log, {"orders": 2, "audit": 2}, pad=900, expect={"c2": value})
        if number % 4 == 3:
            log.tick()
        if number % 5 == 4:
            through = run.follow(log, "follower", TOPICS, through)
    log.close()


def large(run: Run) -> None:
    """Entries by reference: too large to stand in the journal, or staged by hand."""
    log = run.open(inline_bytes_max=1500, chunk_bytes=4000)
    run.make_topics(log)
    through = 0
    for number in range(5):
        run.append(log, {"orders": 6, "audit": 1}, pad=700 + 300 * number)
        run.append(log, {"orders": 2}, pad=100)
        run.append(log, {"audit": 3}, pad=400, stage=True, expect={"c0": number})
        through = run.follow(log, "follower", TOPICS, through)


def weak(run: Run) -> None:
    """`os` and `interval` durability among durable entries, syncs, marks and reopening."""
    log = run.open(durability="os")
    run.make_topics(log)
    through = 0
    for number in range(18):
        durability = run.rng.choice(("os", "os", "interval", "fsync"))
        expect = {"c1": log.counter("c1")} if number % 3 == 0 else None
        run.append(log, {"orders": 2}, durability=durability, expect=expect, pad=300)
        if number % 7 == 5:
            log.sync()
        if number % 8 == 7:
            log.tick()
        if number == 11:
            log.close()
            log = run.open(durability="os")
        through = run.follow(log, "follower", TOPICS, through)


def writers(run: Run) -> None:
    """Claims of one name by two handles: fencing, retries, versions."""
    one, two = run.open(), run.open()
    run.make_topics(one)
    writer = claim(run, one, "capture")
    for number in range(3):
        store(run, writer, number)
    successor = claim(run, two, "capture")
    store(run, writer, 3)  # fenced
    store(run, successor, 3)
    store(run, successor, 3)  # a retry: stored once
    store(run, claim(run, one, "capture"), 4)
    run.follow(two, "follower", TOPICS)


def claim(run: Run, log: EmbeddedLog, name: str) -> Writer:
    """Claim a writer's name, remembered as an attempt without rows."""
    made: list[Writer] = []

    def act(attempt: Attempt) -> Receipt:
        made.append(log.writer(name))
        attempt.expect = {made[0].epoch_counter: made[0].epoch - 1}
        return Receipt(log.position, 0, 0)

    run.attempt(act, {})
    return made[0]


def store(run: Run, writer: Writer, version: int) -> Attempt | None:
    """Store the writer's entry number `version`; None when it was stored before."""
    expect = {writer.counter: version}
    require = {writer.epoch_counter: writer.epoch}
    if version < writer.version:
        if not writer.append("orders", run.rows(0, 1), version=version).duplicate:
            raise Violated(f"version {version} was taken twice")
        return None
    return run.attempt(
        lambda attempt: writer.append("orders", run.rows(attempt.number, 2), version=version),
        {"orders": 2}, expect=expect, require=require,
    )  # fmt: skip


def topics(run: Run) -> None:
    """Topics made and changed between entries, by two handles that must notice each other."""
    one, two = run.open(), run.open()
    run.make_topics(one)
    run.append(one, {"orders": 1})
    two.create_topic("extra", SCHEMA, key="k", partitions=2)
    run.append(one, {"orders": 1, "extra": 2})
    two.alter_topic("orders", add="more string")
    run.append(one, {"orders": 2, "extra": 1})
    with contextlib.suppress(errors.TopicExists):
        one.create_topic("extra", "other bigint")
    one.alter_topic("orders", retire="more")
    run.append(two, {"orders": 2, "audit": 1}, pad=2000)
    for _ in range(4):
        run.append(two, {"audit": 2}, pad=1500)
    run.append(one, {"extra": 2})
    run.follow(two, "follower", (*TOPICS, "extra"))


def sync_fails(run: Run) -> None:
    """A sync fails, pages are lost; everybody stops; opening again saves what can be read."""
    log, other = run.open(), run.open()
    run.make_topics(log)
    for _ in range(3):
        run.append(log, {"orders": 2}, pad=200)
    run.append(other, {"orders": 1}, expect={"c1": 0})
    weak = run.append(log, {"orders": 1}, durability="os")
    through = run.follow(log, "follower", TOPICS)
    evicts = run.rng.random() < 0.3
    run.machine.fail("fdatasync", 1, errno.EIO, path="journal/0", evicts=evicts)
    run.append(log, {"orders": 2, "audit": 1})
    if evicts:  # what nobody had synced may be gone from memory too, as by a power cut
        weak.outcome = UNKNOWN
    for refused in (
        run.append(log, {"orders": 1}),
        run.append(other, {"orders": 1}, durability="os"),
    ):
        if refused.outcome != REFUSED:
            raise Violated(f"a poisoned log has taken an entry: {refused}")
    run.machine.heal()
    again = run.open()
    through = run.follow(again, "follower", TOPICS, through)
    for _ in range(2):
        run.append(again, {"orders": 1, "audit": 1}, expect={"c0": again.counter("c0")})
    run.append(log, {"orders": 1})
    run.follow(again, "follower", TOPICS, through)


def disk_full(run: Run) -> None:
    """No space: for a journal file, for a piece, in the middle of a write; then there is again."""
    log = run.open(inline_bytes_max=3000)
    run.make_topics(log)
    for kind, path in (("create", "journal"), ("create", "pieces"), ("pwritev", "pieces")):
        run.append(log, {"orders": 2}, pad=900)
        nth = run.rng.randrange(1, 3)
        run.machine.fail(kind, nth, errno.ENOSPC, path=path, persistent=True, fraction=0.4)
        for _ in range(5):
            run.append(log, {"orders": 2, "audit": 1}, pad=900)
        run.append(log, {"audit": 4}, pad=1500)
        run.machine.heal()
    run.machine.fail("pwritev", 2, errno.ENOSPC, path="journal/0", fraction=0.7)
    for _ in range(4):
        run.append(log, {"orders": 1}, pad=100)
    run.follow(log, "follower", TOPICS)


def interleaved(
    run: Run, *, lines: float = 0.0, kill: bool = False, durability: str = "fsync"
) -> None:
    """Two writers and a follower at once, one of them perhaps killed somewhere."""
    run.make_topics(run.open())
    schedule = Schedule(run.machine, f"schedule/{run.rng.random()}", lines=lines)

    def write(process: SimulatedProcess) -> None:
        log = run.open(process, durability=durability)
        rng = Random(process.pid())
        for number in range(6):
            name = f"c{rng.randrange(2)}"
            expect = {name: log.counter(name)} if number % 2 else None
            rows = {"orders": rng.randrange(1, 3)} | ({"audit": 1} if number % 3 == 0 else {})
            run.append(log, rows, expect=expect, pad=rng.choice((20, 600)))
        log.close()

    def read(process: SimulatedProcess) -> None:
        log = run.open(process)
        through = 0
        chosen = run.rng.choice((TOPICS, ("orders",)))
        for _ in range(4):
            through = run.follow(
                log, f"follower {process.pid()}", chosen, through, follow=True, timeout=0.5
            )

    tasks = [schedule.spawn(write), schedule.spawn(write), schedule.spawn(read)]
    if kill:
        schedule.kill(run.rng.choice(tasks[:2]), run.rng.randrange(1, 260))
    schedule.run()
    for task in tasks:
        if task.error is not None:
            raise task.error


def chased(run: Run) -> None:
    """A writer that fills several journal files while the follower reads one."""
    run.make_topics(run.open())
    schedule = Schedule(run.machine, f"schedule/{run.rng.random()}")

    def write(process: SimulatedProcess) -> None:
        durability = run.rng.choice(("fsync", "os"))
        log = run.open(process, durability=durability, journal_bytes_max=16 << 10)
        for number in range(18):
            run.append(log, {"orders": 2} if number % 5 else {"audit": 1}, pad=2500)
        log.close()

    def read(process: SimulatedProcess) -> int:
        log = run.open(process)
        chosen = run.rng.choice((TOPICS, ("orders",)))
        return run.follow(log, "follower", chosen, follow=True, timeout=5.0)

    tasks = [schedule.spawn(write), schedule.spawn(read)]
    schedule.run()
    for task in tasks:
        if task.error is not None:
            raise task.error
    last = max(attempt.position for attempt in run.history.attempts)
    if tasks[1].result != last:
        raise Violated(f"the follower ended at {tasks[1].result}, and the log is at {last}")
    if run.machine.clock_us > 9_000_000:  # the one timeout at the end is five seconds
        raise Violated("the follower slept while there was something to read")


def killed_often(run: Run) -> None:
    """One writer after the other, each killed at some line of the log's own code.

    By the short cut at one of its operations: it has no lines that could be told apart.
    """
    run.make_topics(run.open())

    def write(process: SimulatedProcess) -> None:
        log = run.open(process, durability=run.rng.choice(("fsync", "os")))
        for _ in range(4):
            name = f"c{run.rng.randrange(3)}"
            expect = {name: log.counter(name)}
            run.append(log, {"orders": 2, "audit": 1}, expect=expect, pad=run.rng.choice((20, 700)))

    for number in range(10):
        lines, most = (0.02, 260) if run.machine.short_cut else (1.0, 2200)
        schedule = Schedule(run.machine, number, lines=lines)
        schedule.kill(schedule.spawn(write), run.rng.randrange(50, most))
        schedule.run()
        error = schedule.tasks[0].error
        if error is not None:
            raise error
    run.follow(run.open(), "follower", TOPICS)


def keeps(run: Run) -> None:
    """A keeper seals and deletes between appends, large ones too; a follower reads behind it."""
    log = run.open(inline_bytes_max=1500, chunk_bytes=4000)
    run.make_topics(log)
    through, keeper = 0, log.keeper()
    for number in range(12):
        run.append(log, {"orders": 3, "audit": 1}, pad=run.rng.choice((50, 900)))
        if number % 3 == 1:
            keeper.turn(close=run.rng.random() < 0.7)
        if number % 4 == 3:
            through = run.follow(log, "follower", TOPICS, through)
        if number == 7:
            keeper.release()
            log.close()
            log = run.open(inline_bytes_max=1500, chunk_bytes=4000)
            keeper = log.keeper()
    keeper.turn(close=True)
    keeper.turn(close=True)
    run.follow(log, "follower", TOPICS, through)
    run.follow(log, "another", TOPICS)


def compacts(run: Run) -> None:
    """A keeper compacts one topic and lets the oldest of another go, between appends to both."""
    log = run.open(inline_bytes_max=1500, chunk_bytes=4000)
    for name in ("twin", "keyed", "short"):
        log.create_topic(name, SCHEMA, key="k", partitions=2)
    log.set_topic("keyed", compact=True, grace_seconds=0.0)
    log.set_topic("short", retention_bytes=6000)
    through, keeper = 0, log.keeper()
    for number in range(10):
        pad = run.rng.choice((50, 700))
        run.append(log, {"twin": 3}, apart={"keyed": 3, "short": 2}, pad=pad)
        if number % 3 == 2:
            keeper.turn(close=run.rng.random() < 0.7, compact=run.rng.random() < 0.7)
            through = run.follow(log, "follower", ["twin"], through)
        if number == 6:
            keeper.release()
            log.close()
            log = run.open(inline_bytes_max=1500, chunk_bytes=4000)
            keeper = log.keeper()
    for _ in range(2):
        keeper.turn(close=True, compact=True)
    run.follow(log, "another", ["twin"])
    agreeing(log)


def kept_meanwhile(run: Run) -> None:
    """A writer, a slow follower, and keepers of which one is killed, all at once."""
    run.make_topics(run.open())
    schedule = Schedule(run.machine, f"schedule/{run.rng.random()}")

    def write(process: SimulatedProcess) -> None:
        log = run.open(process, inline_bytes_max=2000, journal_bytes_max=16 << 10)
        for number in range(10):
            run.append(log, {"orders": 2} if number % 3 else {"audit": 1, "orders": 1}, pad=1500)
        log.close()

    def read(process: SimulatedProcess) -> int:
        log = run.open(process)
        chosen = run.rng.choice((TOPICS, ("orders",)))
        return run.follow(log, "follower", chosen, follow=True, timeout=5.0)

    def keep(process: SimulatedProcess) -> None:
        keeper = run.open(process).keeper()
        for number in range(4):
            if keeper.take():
                keeper.turn(close=number % 2 == 1)
        keeper.release()

    tasks = [schedule.spawn(one) for one in (write, read, keep, keep)]
    schedule.kill(tasks[2], run.rng.randrange(1, 400))
    schedule.run()
    for task in tasks:
        if task.error is not None:
            raise task.error
    lost = [attempt for attempt in run.history.attempts if attempt.outcome != TAKEN]
    if lost:
        raise Violated(f"an append failed, though its process lived: {lost[0]}")
    last = max(attempt.position for attempt in run.history.attempts)
    reached = tasks[1].result
    if not isinstance(reached, int) or reached < last:
        raise Violated(f"the follower ended at {reached}, and the log is at {last}")


def hands_over(run: Run) -> None:
    """Pieces published by another process than staged them, which is dead; a keeper is at work.

    It has no patience with what nobody seems to want: an entry then comes too late, or in time.
    """
    run.make_topics(run.open())
    schedule = Schedule(run.machine, f"schedule/{run.rng.random()}")
    handed: list[tuple[int, Piece]] = []

    def stage(process: SimulatedProcess) -> None:
        log = run.open(process)
        for number in (901, 902):
            piece = log.stage("orders", rows_to_write(number, 2))
            handed.append((number, piece))

    def publish(process: SimulatedProcess) -> None:
        log = run.open(process, durability=run.rng.choice(("fsync", "os")))
        for _ in range(6):
            run.append(log, {"audit": 1}, stage=True)
            if handed:
                number, piece = handed.pop(0)

                def act(attempt: Attempt, number: int = number, piece: Piece = piece) -> Receipt:
                    attempt.number = number
                    return log.append("orders", piece)

                run.attempt(act, {"orders": 2}, durable=log.settings.durability == "fsync")

    def keep(process: SimulatedProcess) -> None:
        keeper = run.open(process).keeper()
        for _ in range(6):
            keeper.turn()
        keeper.release()

    with mock.patch.object(orphans, "PATIENCE_SECONDS", 0.0):
        tasks = [schedule.spawn(one) for one in (stage, publish, keep)]
        schedule.kill(tasks[0], run.rng.randrange(20, 80))
        schedule.run()
    for task in tasks:
        if task.error is not None:
            raise task.error
    run.follow(run.open(), "follower", TOPICS)


def two_processes(run: Run) -> None:
    """Two writers and a follower, switching at operations."""
    interleaved(run)


def two_processes_killed(run: Run) -> None:
    """The same, with a writer killed somewhere, at any line."""
    interleaved(run, lines=0.05, kill=True, durability=run.rng.choice(("fsync", "os")))


def in_c(work: Workload) -> Workload:
    """The same by the short cut, before the power cut and after it."""

    def by_short_cut(run: Run) -> None:
        run.machine.short_cut = True
        work(run)

    return by_short_cut


WORKLOADS: dict[str, Workload] = {
    work.__name__: work
    for work in (
        plain, rolls, large, weak, writers, topics, sync_fails, disk_full, killed_often, chased,
        keeps, compacts, kept_meanwhile, hands_over,
        two_processes,
        two_processes_killed,
    )
}  # fmt: skip
IN_C: dict[str, Workload] = {
    f"{work.__name__}_in_c": in_c(work)
    for work in (
        plain, rolls, weak, writers, topics, sync_fails, disk_full, chased, killed_often,
        kept_meanwhile, two_processes, two_processes_killed,
    )
    if shortcut.compiled() is not None
}  # fmt: skip
WORKLOADS |= IN_C
