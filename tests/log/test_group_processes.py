"""Groups of real processes: killed, stopped, joining and leaving; judged by what they wrote down.

Caught: a death or a hang that is not seen, rows that nobody reads, rows read again after a commit
that covers them, a zombie that commits, a forked child that keeps its parent in the group. The
leases of the tests of deaths are so long that they would run into the time limit if deaths were
found by leases. Not caught: machines that stop as a whole; how long a take-over takes (measured by
`./run bench groups`).
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

import headrace as hr
from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from tests.log.kit import Child

MEMBER = """
    log = hr.connect(folder)
    group, lease = sys.argv[2], float(sys.argv[3])
    consumer = log.consumer("t", group, lease_seconds=lease, max_rows=20)
    say("joined")
    for batch in consumer:
        say("read", len(batch))
        answer = sys.stdin.readline().strip()
        if answer == "commit":
            try:
                consumer.commit()
                say("committed")
            except errors.MemberPutOut as error:
                say(error.code)
        elif answer == "end":
            break
    consumer.close()
    log.close()
    say("left")
"""


def rows(count: int, first: int = 0) -> list[dict[str, int]]:
    return [{"n": n} for n in range(first, first + count)]


def make(log: EmbeddedLog, partitions: int = 1) -> None:
    log.create_topic("t", "n bigint", partitions=partitions)


def test_whoever_is_killed_is_followed_at_once_at_the_committed_offset(
    folder: str, log: EmbeddedLog
) -> None:
    """R-A10: failover; duplicates are what was not committed."""
    make(log)
    with Child(folder, MEMBER, "g", 600) as child:
        assert child.line() == "joined"
        log.append("t", rows(20))
        assert child.line() == "read 20"
        child.go("commit")
        assert child.line() == "committed"
        log.append("t", rows(20, 20))
        assert child.line() == "read 20"
        with log.consumer("t", "g", lease_seconds=600, timeout=30) as consumer:
            assert consumer.assignment == {}
            child.kill()
            batch = next(consumer)  # sleeps until the death is seen
            assert batch.data.column("n").to_pylist() == list(range(20, 40))
            facts = log.group("g")
            assert (len(facts.state.members), len(facts.alive)) == (1, 1)


def test_a_forked_child_does_not_keep_its_parent_in_the_group(
    folder: str, log: EmbeddedLog
) -> None:
    make(log)
    code = """
        log = hr.connect(folder)
        consumer = log.consumer("t", "g", lease_seconds=600)
        child = os.fork()
        if child == 0:
            try:
                next(consumer)
            except errors.LogClosed as error:
                say(error.code)
            time.sleep(600)
        say(child)
        time.sleep(600)
    """
    with Child(folder, code) as child:
        lines = {child.line(), child.line()}
        (pid,) = lines - {"HR-LOG-009"}
        try:
            assert len(lines) == 2
            log.append("t", rows(1))
            child.kill()
            with log.consumer("t", "g", lease_seconds=600, timeout=30) as consumer:
                assert len(next(consumer)) == 1
        finally:
            os.kill(int(pid), signal.SIGKILL)


def test_whoever_hangs_is_put_out_cannot_commit_and_joins_again(
    folder: str, log: EmbeddedLog
) -> None:
    """A member stopped for longer than its lease; R-A10."""
    make(log)
    with Child(folder, MEMBER, "g", 0.5) as child:
        assert child.line() == "joined"
        log.append("t", rows(10))
        assert child.line() == "read 10"
        os.kill(child.pid, signal.SIGSTOP)
        with log.consumer("t", "g", lease_seconds=0.5, timeout=30) as consumer:
            assert len(next(consumer)) == 10
            consumer.commit()
            os.kill(child.pid, signal.SIGCONT)
            child.go("commit")
            assert child.line() == "HR-GROUP-001"
            assert log.offsets("g") == {"t": {0: 10}}
        log.append("t", rows(5, 10))
        assert child.line() == "read 5"
        child.go("commit")
        assert child.line() == "committed"
        child.go("end")


def test_all_members_die_and_the_next_one_finds_the_group_as_it_was(
    folder: str, log: EmbeddedLog
) -> None:
    make(log, partitions=4)
    children = [Child(folder, MEMBER, "g", 600) for _ in range(3)]
    for child in children:
        assert child.line() == "joined"
    for child in children:
        child.process.kill()
    for child in children:
        child.__exit__(None, None, None)
    facts = log.group("g")
    assert facts.state.members  # nobody was left to put out the last one
    assert facts.alive == ()
    with log.consumer("t", "g") as consumer:
        assert consumer.assignment == {"t": frozenset(range(4))}
        assert len(log.group("g").state.members) == 1
    assert os.listdir(f"{folder}/locks/members") == []


# --- many of them ---------------------------------------------------------------------------------

RECORDED = """
    import random
    import pandas  # Arrow would import it at the first batch, which takes seconds on a busy machine
    group, seed = sys.argv[2], int(sys.argv[3])
    chosen = random.Random(seed)
    out = os.open(sys.argv[4], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    def note(*words):
        os.write(out, (" ".join(map(str, words)) + "\\n").encode())
    log = hr.connect(folder)
    consumer = log.consumer("t", group, lease_seconds=1.0, max_rows=50)
    say("joined")
    handed = {}
    while True:
        asked = time.monotonic_ns()
        batch = next(consumer)
        offsets = zip(batch.partition.to_pylist(), batch.offset.to_pylist())
        note("\\n".join(f"read {asked} {partition} {offset}" for partition, offset in offsets))
        time.sleep(chosen.random() * 0.004)
        if chosen.random() < 0.01:
            consumer.close()  # it leaves by itself
            break
        if chosen.random() < 0.7:
            before = {p: at for p, at in consumer._places.get("t", {}).items()}
            try:
                consumer.commit()
            except errors.MemberPutOut:
                note("out", time.monotonic_ns(), 0, 0)
                continue
            now = time.monotonic_ns()
            for partition, end in before.items():
                note("commit", now, partition, end)
"""


def judge(files: list[Path], total: dict[int, int]) -> Counter[str]:
    """What the members of a group wrote down: nothing missing, nothing again that was committed."""
    reads: dict[tuple[int, int], list[int]] = {}
    commits: list[tuple[int, int, int]] = []
    found: Counter[str] = Counter()
    for file in files:
        for line in file.read_text().splitlines():
            kind, *rest = line.split()
            when, partition, offset = map(int, rest)
            found[kind] += 1
            if kind == "read":
                reads.setdefault((partition, offset), []).append(when)
            elif kind == "commit":
                commits.append((when, partition, offset))
    missing = [(p, o) for p, end in total.items() for o in range(end) if (p, o) not in reads]
    assert not missing, f"{len(missing)} rows were read by nobody, such as {missing[0]}"
    first: dict[tuple[int, int], int] = {}
    for when, partition, end in sorted(commits):
        for offset in range(end - 1, -1, -1):
            if (partition, offset) in first:
                break
            first[partition, offset] = when
    late = [
        (place, when)
        for place, times in reads.items()
        for when in times
        if first.get(place, when) < when
    ]
    assert not late, f"{len(late)} rows were read again after a commit, such as {late[0]}"
    found["again"] = sum(len(times) - 1 for times in reads.values())
    return found


def test_the_judge_sees_what_is_missing_and_what_came_too_late(tmp_path: Path) -> None:
    history = tmp_path / "history.txt"
    history.write_text("read 1 0 0\nread 2 0 1\ncommit 3 0 2\nread 2 0 1\n")
    assert judge([history], {0: 2}) == {"read": 3, "commit": 1, "again": 1}
    with pytest.raises(AssertionError, match="1 rows were read by nobody"):
        judge([history], {0: 3})
    with open(history, "a", encoding="utf-8") as file:
        file.write("read 4 0 0\n")
    with pytest.raises(AssertionError, match="1 rows were read again after a commit"):
        judge([history], {0: 2})


def stop(log: EmbeddedLog, child: Child) -> None:
    """Stop a process that does not hold a lock of the log: that would stop everybody."""
    while True:
        os.kill(child.pid, signal.SIGSTOP)
        try:
            for lock in (log.journal.append_lock, log.journal.sync_lock):
                lock.acquire(0.3)
                lock.release()
        except errors.LockTimeout:
            os.kill(child.pid, signal.SIGCONT)
        else:
            return


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", [1, 2])
def test_two_groups_of_three_with_kills_stops_joins_and_leaves(tmp_path: Path, seed: int) -> None:
    """R-A7, R-A10: fan-out and load balancing at once, under kill -9 and SIGSTOP."""
    folder, chosen = str(tmp_path / "log"), random.Random(seed)
    with hr.connect(folder) as log:
        make(log, partitions=5)
        files: dict[str, list[Path]] = {"a": [], "b": []}
        members: dict[str, list[Child]] = {"a": [], "b": []}

        def start(group: str) -> None:
            files[group].append(tmp_path / f"{group}{len(files[group])}.txt")
            files[group][-1].touch()
            arguments = (group, chosen.randrange(10**6), files[group][-1])
            members[group].append(Child(folder, RECORDED, *arguments))

        try:
            for group in ("a", "b"):
                for _ in range(3):
                    start(group)
            for child in [*members["a"], *members["b"]]:
                assert child.line() == "joined"
            made, stopped = 0, []
            for step in range(24):
                for _ in range(10):
                    log.append("t", rows(20, made), partition=chosen.randrange(5))
                    made += 20
                    time.sleep(0.005)
                group = chosen.choice(["a", "b"])
                if step % 3 == 0:
                    victim = members[group].pop(chosen.randrange(len(members[group])))
                    if chosen.random() < 0.5:
                        victim.kill()
                        victim.__exit__(None, None, None)
                    else:
                        stop(log, victim)
                        stopped.append(victim)
                    start(group)
                if step % 9 == 8 and stopped:
                    os.kill(stopped[0].pid, signal.SIGCONT)
                    members["a" if stopped[0] in members["a"] else group].append(stopped.pop(0))
            for child in [*members["a"], *members["b"], *stopped]:  # with rows not committed
                child.kill()
            ends = dict(enumerate(log.ends("t")))
            for group in ("a", "b"):
                last = log.consumer("t", group, lease_seconds=1.0, timeout=5)
                files[group].append(tmp_path / f"{group}-last.txt")
                with open(files[group][-1], "w", encoding="utf-8") as note, last:
                    while log.offsets(group)["t"] != ends:
                        asked = time.monotonic_ns()
                        for batch in itertools.islice(last, 1):
                            places = zip(batch.partition, batch.offset, strict=True)
                            note.writelines(f"read {asked} {p} {o}\n" for p, o in places)
                        last.commit()
        finally:
            for child in [*members["a"], *members["b"], *stopped]:
                child.process.kill()
                child.__exit__(None, None, None)
        found = judge(files["a"], ends) + judge(files["b"], ends)
        assert found["read"] >= 2 * sum(ends.values())
        assert found["commit"] > 0
