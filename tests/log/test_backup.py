"""Backup and restore of a live log (R-A13): consistent at a position, whatever happens meanwhile.

The oracle reads everything of both logs through the position of the backup: rows with their places,
offsets of groups, values, counters. Caught: rows beyond or short of the position, a file that is
missing or changed and not noticed, a backup that a crash leaves half and that passes for whole (on
every disk that a power cut may leave), a restored log that is taken for the original. Not caught:
disks that change bytes after the restore has read them.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
from xxhash import xxh3_128

import headrace as hr
from headrace import errors
from headrace.derived.follower import Follower
from headrace.interfaces import Kept
from headrace.log.embedded import backup as backups
from headrace.log.embedded import live as shared
from headrace.log.embedded.backup import Backup, restore
from headrace.log.embedded.check import check
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.embedded.system import OsSystem
from headrace.settings import LogSettings
from headrace.testing.disk import SimulatedMachine
from headrace.testing.oplog import Image
from tests.log.kit import Child

SMALL: dict[str, Any] = {
    "journal_bytes_first": 16384,
    "journal_bytes_max": 16384,
    "chunk_bytes": 4096,
}


def content(log: EmbeddedLog, through: int) -> dict[str, Any]:
    """All that readers can see of a log through a position; counters of its end."""
    topics = {}
    for topic in log.topics():
        rows = []
        for batch in log.read(topic.name, through=through):
            places = (batch.positions, batch.partition, batch.offset, batch.sent_time)
            table = [*(one.to_pylist() for one in places), batch.headers.to_pylist()]
            rows += list(zip(*table, map(repr, batch.to_pylist()), strict=True))
        topics[topic.name] = (topic.to_json(), rows)
    return {"topics": topics}


def state(log: EmbeddedLog) -> dict[str, Any]:
    """What is known at the end: values, offsets, counters, ends."""
    return {
        "values": log.values(""),
        "offsets": {group: log.offsets(group) for group in ("g", "h")},
        "counters": {name: log.counter(name) for name in ("c/0", "c/1", "c/2")},
        "ends": {topic.name: log.ends(topic.name) for topic in log.topics()},
        "position": log.position,
    }


def filled(log: EmbeddedLog, entries: int, start: int = 0) -> None:
    """Rows of two topics, some in pieces; offsets, values and counters that move."""
    log.create_topic("t", "a bigint, b string", key="a", partitions=3, exist_ok=True)
    log.create_topic("u", "a bigint", kind="changes", exist_ok=True)
    for n in range(start, start + entries):
        with log.transaction() as entry:
            entry.append("t", [{"a": n, "b": "x" * 200}, {"a": n % 3, "b": None}])
            entry.append("u", [{"a": n}], headers={"n": b"%d" % n})
            entry.commit_offsets("g", {"t": {0: n}})
            entry.put(f"v/{n % 2}", n)
            entry.expect(f"c/{n % 3}", n // 3)
        if n % 5 == 0:
            piece = log.stage("t", [{"a": i, "b": "y" * 100} for i in range(50)])
            log.append("t", [piece])
    log.stage("t", [{"a": -1, "b": "staged and never published"}])


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EmbeddedLog]:
    with hr.connect(tmp_path / "log", **SMALL) as log:
        filled(log, 40)
        yield log


def checked(folder: Path | str) -> None:
    report = check(OsSystem(), str(folder))
    assert report.ok, [problem.render() for problem in report.problems]


def test_a_restored_log_has_everything_through_the_position(
    log: EmbeddedLog, tmp_path: Path
) -> None:
    made = log.backup(tmp_path / "backup")
    assert made.position == log.position
    found = hr.restore(tmp_path / "backup", tmp_path / "restored")
    assert found.position == made.position
    checked(tmp_path / "restored")
    with hr.connect(tmp_path / "restored") as restored:
        assert content(restored, made.position) == content(log, made.position)
        assert state(restored) == state(log)
        filled(restored, 10, start=40)
        assert restored.table("t").scan().read_all().num_rows > 40
    checked(tmp_path / "restored")


def test_what_is_not_in_the_backup_is_what_is_derived(log: EmbeddedLog, tmp_path: Path) -> None:
    log.table("t").scan().read_all()
    log.backup(tmp_path / "backup")
    hr.restore(tmp_path / "backup", tmp_path / "restored")
    assert "tables" not in os.listdir(tmp_path / "restored")
    pieces = os.listdir(tmp_path / "log" / "pieces")
    assert len(os.listdir(tmp_path / "restored" / "pieces")) == len(pieces) - 1


def test_an_empty_log_and_a_quiet_one_are_backed_up_too(tmp_path: Path) -> None:
    with hr.connect(tmp_path / "log") as log:
        assert log.backup(tmp_path / "b").position == 0
    with hr.connect(hr_restored(tmp_path / "b", tmp_path / "r")) as log:
        assert log.position == 0
        filled(log, 3)


def hr_restored(source: Path, to: Path) -> Path:
    hr.restore(source, to)
    return to


# --- again into the same folder -------------------------------------------------------------------


def test_the_next_backup_copies_what_is_new(log: EmbeddedLog, tmp_path: Path) -> None:
    first = log.backup(tmp_path / "b")
    again = log.backup(tmp_path / "b")
    assert first.written == first.size
    assert again.files == first.files
    assert again.written < 20_000
    filled(log, 40, start=40)
    second = log.backup(tmp_path / "b")
    kept = {file.path for file in first.files} & {file.path for file in second.files}
    assert (
        second.written <= second.size - sum(f.size for f in first.files if f.path in kept) + 20_000
    )
    stored = {file.stored for file in second.files}
    there = {
        os.path.relpath(os.path.join(parent, name), tmp_path / "b")
        for parent, _, names in os.walk(tmp_path / "b")
        for name in names
    }
    assert there == stored | {"backup.json"}, "what no manifest names is swept away"
    with hr.connect(hr_restored(tmp_path / "b", tmp_path / "r")) as restored:
        assert content(restored, second.position) == content(log, second.position)
        assert state(restored) == state(log)


def test_a_copy_that_has_decayed_is_made_anew(log: EmbeddedLog, tmp_path: Path) -> None:
    made = log.backup(tmp_path / "b")
    victim = tmp_path / "b" / next(f.stored for f in made.files if f.path.startswith("journal/"))
    data = bytearray(victim.read_bytes())
    data[100] ^= 1
    victim.write_bytes(data)
    with pytest.raises(errors.BackupDamaged):
        hr.restore(tmp_path / "b", tmp_path / "r")
    log.backup(tmp_path / "b")
    hr.restore(tmp_path / "b", tmp_path / "r")


def test_a_folder_with_other_things_is_refused(log: EmbeddedLog, tmp_path: Path) -> None:
    with pytest.raises(errors.BackupElsewhere):
        log.backup(tmp_path / "log")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").touch()
    with pytest.raises(errors.BackupElsewhere, match=r"letter\.txt"):
        log.backup(tmp_path / "other")
    log.backup(tmp_path / "b")
    with hr.connect(hr_restored(tmp_path / "b", tmp_path / "r")) as restored:
        with pytest.raises(errors.BackupElsewhere, match="history"):
            restored.backup(tmp_path / "b")
        restored.backup(tmp_path / "b2")
    with hr.connect(hr_restored(tmp_path / "b2", tmp_path / "r2")) as twice:
        assert twice.knows(log.history, log.position)


# --- what a restore refuses -----------------------------------------------------------------------


def test_every_changed_or_missing_file_is_noticed(log: EmbeddedLog, tmp_path: Path) -> None:
    made = log.backup(tmp_path / "b")
    rng = Random(7)
    for name in [*(file.stored for file in made.files), "backup.json"]:
        path = tmp_path / "b" / name
        data = path.read_bytes()
        for harm in ("flip", "cut", "gone"):
            if harm == "gone":
                path.unlink()
            elif harm == "cut":
                path.write_bytes(data[:-1])
            else:
                at = rng.randrange(len(data))
                path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
            with pytest.raises((errors.BackupDamaged, errors.NotABackup)):
                hr.restore(tmp_path / "b", tmp_path / "r")
            path.write_bytes(data)
    hr.restore(tmp_path / "b", tmp_path / "r")  # nothing of the failed ones is in the way


def test_only_an_empty_folder_is_restored_to(log: EmbeddedLog, tmp_path: Path) -> None:
    log.backup(tmp_path / "b")
    for there in (tmp_path / "log", tmp_path / "b"):
        with pytest.raises(errors.FolderNotEmpty):
            hr.restore(tmp_path / "b", there)
    with pytest.raises(errors.NotABackup):
        hr.restore(tmp_path / "nothing", tmp_path / "r")
    with pytest.raises(errors.NotALog):  # a backup is not a log by itself
        hr.connect(tmp_path / "b")


def test_a_damaged_log_is_not_backed_up(log: EmbeddedLog, tmp_path: Path) -> None:
    log.close()
    path = tmp_path / "log" / "journal" / "00000002.log"
    data = bytearray(path.read_bytes())
    data[300] ^= 1
    path.write_bytes(data)
    with hr.connect(tmp_path / "log") as broken, pytest.raises(errors.LogDamaged):
        broken.backup(tmp_path / "b")
    with pytest.raises(errors.NotABackup):
        hr.restore(tmp_path / "b", tmp_path / "r")


def test_backups_of_one_log_wait_for_each_other(tmp_path: Path) -> None:
    with hr.connect(tmp_path / "log", lock_timeout_seconds=0.1) as log:
        lock = OsSystem().open(f"{log.path}/locks/backup", create=True)
        assert lock.try_lock()
        with pytest.raises(errors.LockTimeout, match="another backup"):
            log.backup(tmp_path / "b")
        timer = threading.Timer(0.05, lock.close)
        timer.start()
        log.backup(tmp_path / "b")
        timer.join()


# --- beside a keeper ------------------------------------------------------------------------------


def test_what_is_sealed_is_in_it(log: EmbeddedLog, tmp_path: Path) -> None:
    keeper = log.keeper()
    assert keeper.take()
    keeper.turn(close=True)
    filled(log, 40, start=40)
    keeper.turn()
    assert os.listdir(tmp_path / "log" / "sealed")
    made = log.backup(tmp_path / "b")
    keeper.release()
    assert any(file.path.startswith("sealed/") for file in made.files)
    hr.restore(tmp_path / "b", tmp_path / "r")
    checked(tmp_path / "r")
    with hr.connect(tmp_path / "r") as restored:
        assert content(restored, made.position) == content(log, made.position)
        assert state(restored) == state(log)
        filled(restored, 20, start=80)
        with restored.keeper() as again:
            again.turn(close=True)
        assert content(restored, made.position) == content(log, made.position)


KEEPING = """
log = hr.connect(folder, journal_bytes_first=16384, journal_bytes_max=16384, chunk_bytes=4096)
keeper = log.keeper()
assert keeper.take()
say("keeping")
while True:
    keeper.turn(close=True)
"""


def test_a_keeper_at_work_deletes_what_it_likes(log: EmbeddedLog, tmp_path: Path) -> None:
    """Journal files, pieces and sealed files go all the time, between any two files copied."""
    log.set_topic("t", compact=True, grace_seconds=0.0)
    real, again = backups._Copying._all, []

    def counted(self: Any, end: int, position: int) -> Backup:
        again.append(end)
        return real(self, end, position)

    with Child(log.path, KEEPING) as keeper, Child(log.path, WRITER) as writer:
        assert keeper.line() == "keeping"
        assert writer.line() == "writing"
        for round_ in range(5):
            with mock.patch.object(backups._Copying, "_all", counted):
                made = log.backup(tmp_path / f"b{round_ % 2}")
            folder = tmp_path / f"r{round_}"
            hr.restore(made.folder, folder)
            checked(folder)
            with hr.connect(folder) as restored:
                assert restored.position == made.position
                tables = [
                    one.table("t").scan(at=made.position).read_all().to_pylist()
                    for one in (restored, log)
                    if one.since_of("t") <= made.position
                ]
                assert tables[0] == tables[-1]
                assert (
                    content(restored, made.position)["topics"]["u"]
                    == (content(log, made.position)["topics"]["u"])
                )
            shutil.rmtree(folder)
    assert len(again) >= 5


# --- while others write ---------------------------------------------------------------------------

WRITER = """
import headrace as hr
log = hr.connect(folder, journal_bytes_first=16384, journal_bytes_max=16384, chunk_bytes=4096)
n = 0
while True:
    with log.transaction() as entry:
        entry.append("t", [{"a": n, "b": "x" * 300}])
        entry.append("u", [{"a": n}])
    if n % 7 == 0:
        log.append("t", [log.stage("t", [{"a": n, "b": "y" * 50}] * 30)])
    n += 1
    if n == 20:
        print("writing", flush=True)
"""


@pytest.mark.parametrize("killed", [False, True])
def test_writers_in_other_processes_go_on_or_die(
    log: EmbeddedLog, tmp_path: Path, killed: bool
) -> None:
    """Each backup is whole at its position: a transaction is in both topics, or in none."""
    positions = []
    with Child(log.path, WRITER) as one, Child(log.path, WRITER) as other:
        assert one.line() == "writing"
        assert other.line() == "writing"
        for round_ in range(6):
            if killed and round_ in (1, 3):
                threading.Timer(0.01, (one if round_ == 1 else other).kill).start()
            made = log.backup(tmp_path / "b")
            positions.append(made.position)
            folder = tmp_path / f"r{round_}"
            hr.restore(tmp_path / "b", folder)
            checked(folder)
            with hr.connect(folder) as restored:
                assert restored.position == made.position
                assert content(restored, made.position) == content(log, made.position)
                pairs = restored.read(["t", "u"])
                seen: dict[str, set[int]] = {"t": set(), "u": set()}
                for batch in pairs:
                    seen[batch.topic] |= set(batch.positions.to_pylist())
                assert seen["u"] <= seen["t"]
            shutil.rmtree(folder)
    assert positions == sorted(positions)
    assert killed or positions[-1] > positions[0]


BACKING_UP = """
log = hr.connect(folder, journal_bytes_first=16384, journal_bytes_max=16384, chunk_bytes=4096)
say("ready")
while True:
    log.append("t", [{"a": 1, "b": "z" * 500}] * 5)
    log.backup(sys.argv[2])
    say("made")
"""


def test_a_backup_that_is_killed_leaves_a_whole_one_or_none(
    log: EmbeddedLog, tmp_path: Path
) -> None:
    outcomes = []
    rng = Random(11)
    for round_ in range(8):
        target, folder = tmp_path / f"b{round_ // 4}", tmp_path / f"r{round_}"
        with Child(log.path, BACKING_UP, target) as child:
            assert child.line() == "ready"
            if round_ % 4:  # the first is killed before it has made one, or not
                assert child.line() == "made"
            timer = threading.Timer(rng.random() * 0.2, child.kill)
            timer.start()
            timer.join()
        try:
            made = hr.restore(target, folder)
        except errors.NotABackup:
            outcomes.append(0)
            continue
        checked(folder)
        with hr.connect(folder) as restored:
            assert content(restored, made.position) == content(log, made.position)
        outcomes.append(made.position)
    assert all(outcomes[at] for at in range(8) if at % 4)


# --- crashes --------------------------------------------------------------------------------------


def simulated() -> tuple[SimulatedMachine, dict[int, Any]]:
    """A machine whose log is backed up twice into one folder; what the log held at each."""
    machine = SimulatedMachine(Image(frozenset(("/", "/disk"))))
    settings = LogSettings(journal_bytes_first=16384, journal_bytes_max=16384, background=False)
    log = EmbeddedLog("/disk/log", settings, system=machine.process())
    wanted: dict[int, Any] = {}
    for start in (0, 8):
        filled(log, 8, start=start)
        made = log.backup("/disk/backup")
        wanted[made.position] = content(log, made.position), state(log)
        log.append("t", [{"a": 1, "b": "after"}])
    log.close()
    return machine, wanted


def states_of(machine: SimulatedMachine, bound: int) -> Iterator[Any]:
    quiet = ("load", "store", "wait", "wake")
    ops = [op for op in machine.ops if op.kind not in quiet]
    first = next(op.index for op in ops if "/disk/backup" in str(op))
    for op in ops:
        if op.index < first:
            continue
        yield from machine.crash_states(op.index, Random(op.index), bound)


def verdict(image_machine: SimulatedMachine, wanted: dict[int, Any]) -> str:
    """What a restore from this disk comes to: refused, the position that is right, or wrong."""
    system = image_machine.process()
    try:
        made = restore("/disk/backup", "/disk/restored", system=system)
    except errors.NotABackup:
        return "refused"
    log = EmbeddedLog("/disk/restored", LogSettings(background=False), system=system)
    try:
        right = wanted.get(made.position)
        if right is None or (content(log, made.position), state(log)) != right:
            return f"wrong at {made.position}"
    finally:
        log.close()
    return str(made.position)


def explored(bound: int) -> list[str]:
    machine, wanted = simulated()
    found, seen = [], set()
    for crash in states_of(machine, bound):
        digest = crash.image.digest()
        if digest in seen:
            continue
        seen.add(digest)
        try:
            found.append(verdict(crash.machine(), wanted))
        except errors.HeadraceError as error:
            found.append(f"wrong: {error.code} {error.fact}")
    return found


@pytest.mark.timeout(300)
def test_a_power_cut_leaves_the_old_backup_or_the_new_one_or_none() -> None:
    found = explored(bound=6)
    kinds = {one if not one.startswith("wrong") else "wrong" for one in found}
    assert len(found) > 100
    assert not [one for one in found if one.startswith("wrong")]
    assert len(kinds) == 3, kinds  # refused, the first, the second


# --- seeded bugs ----------------------------------------------------------------------------------


def early(system: Any, made: Backup, before: Backup | None) -> None:
    """The manifest appears before the names of the files are on the disk."""
    backups._place(system, f"{made.folder}/{backups.MANIFEST}", made.encode())
    for name in (*(f"{made.folder}/{name}" for name in backups.KEPT_FOLDERS), made.folder):
        system.fsync_dir(name)


def unsynced(system: Any, source: Any, length: int, path: str, place: str) -> str:
    """Files are copied and not synced."""
    target = system.create(path, 0)
    data = source.pread(length, 0)
    target.pwritev([data], 0)
    target.close()
    return str(xxh3_128(data).hexdigest())


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "bug"), [("_publish", early), ("copy_file", unsynced)])
def test_a_manifest_before_its_files_is_caught(name: str, bug: Callable[..., Any]) -> None:
    with mock.patch.object(backups, name, bug):
        found = explored(bound=3)
    assert [one for one in found if one.startswith("wrong")]


def test_a_copy_beyond_the_synced_end_is_caught(tmp_path: Path) -> None:
    """An entry that nobody has seen, and that a power cut could take back, would be in it."""

    def beyond(journal: Any) -> tuple[int, int]:
        return journal.live.tail().end, journal.live.words[shared.SYNCED_POSITION]

    def right(position: int) -> bool:
        with hr.connect(hr_restored(tmp_path / "b", tmp_path / f"r{position}")) as restored:
            return restored.position == position

    with hr.connect(tmp_path / "log", background=False) as log:
        filled(log, 3)
        log.append("t", [{"a": 1, "b": "seen"}])
        synced = log.position
        log.append("t", [{"a": 1, "b": "not seen"}], durability="os")
        with mock.patch.object(backups, "synced_end", beyond):
            assert log.backup(tmp_path / "b").position == synced
        with pytest.raises(errors.BackupDamaged, match="position"):
            right(synced)
        made = log.backup(tmp_path / "b2")  # syncs: then it is seen, and in it
        assert made.position == synced + 1


def test_a_file_that_is_deleted_meanwhile_is_caught(log: EmbeddedLog, tmp_path: Path) -> None:
    """A backup that steps over what is gone makes a log that does not open, or is not whole."""
    real = backups._Copying._copy

    def skipping(self: Any, path: str, *rest: Any) -> None:
        if not path.endswith("00000003.log"):
            real(self, path, *rest)

    with mock.patch.object(backups._Copying, "_copy", skipping):
        made = log.backup(tmp_path / "b")
    hr.restore(tmp_path / "b", tmp_path / "r")
    assert not check(OsSystem(), str(tmp_path / "r")).ok
    with hr.connect(tmp_path / "r") as restored, pytest.raises(errors.LogDamaged):
        content(restored, made.position)
    log.close()
    os.unlink(tmp_path / "log" / "journal" / "00000003.log")
    with hr.connect(tmp_path / "log") as again, pytest.raises(errors.LogDamaged):
        again.backup(tmp_path / "b2")  # the real one does not step over it


def test_what_a_roll_removes_meanwhile_is_looked_for_again(
    log: EmbeddedLog, tmp_path: Path
) -> None:
    """Counter runs of older checkpoints go when the log rolls."""
    real = backups._Copying._copy_file
    tries: list[str] = []

    def late(self: Any, path: str) -> None:
        if path.startswith("counters/") and not tries:
            filled(log, 120, start=40)
        tries.append(path)
        real(self, path)

    with mock.patch.object(backups._Copying, "_copy_file", late):
        made = log.backup(tmp_path / "b")
    assert len({path for path in tries if path.startswith("counters/")}) > 1
    with hr.connect(hr_restored(tmp_path / "b", tmp_path / "r")) as restored:
        assert restored.position == made.position
        assert state(restored) == state(log)


# --- a restored log is not the original -----------------------------------------------------------


def kept(path: Path) -> Kept:
    return Kept("shop", "main", {"t": "t"}, frozenset(), hr.SQLite(str(path)))


@pytest.mark.parametrize("grown", [False, True])
def test_a_follower_that_is_ahead_of_a_restored_log_says_so(tmp_path: Path, grown: bool) -> None:
    """Also when the restored log has gone further since: the positions are not the same entries."""
    with hr.connect(tmp_path / "log") as log:
        log.create_topic("t", "a bigint, b string", key="a", kind="changes")
        log.append("t", [{"a": 1, "b": "one"}])
        with Follower(log, kept(tmp_path / "t.db")) as follower:
            follower.run("caught up")
        log.backup(tmp_path / "b")
        log.append("t", [{"a": 2, "b": "lost"}])
        with Follower(log, kept(tmp_path / "t.db")) as follower:
            follower.run("caught up")
        shutil.copy(tmp_path / "t.db", tmp_path / "ahead.db")
    with hr.connect(hr_restored(tmp_path / "b", tmp_path / "r")) as restored:
        if grown:
            for n in range(9):
                restored.append("t", [{"a": 10 + n, "b": "other"}])
        ahead = Follower(restored, kept(tmp_path / "ahead.db"))
        with ahead, pytest.raises(errors.OtherLog):
            ahead.run("caught up")


def test_a_follower_that_is_not_ahead_goes_on(tmp_path: Path) -> None:
    with hr.connect(tmp_path / "log") as log:
        log.create_topic("t", "a bigint, b string", key="a", kind="changes")
        log.append("t", [{"a": 1, "b": "one"}])
        with Follower(log, kept(tmp_path / "t.db")) as follower:
            follower.run("caught up")
        log.append("t", [{"a": 2, "b": "two"}])
        log.backup(tmp_path / "b")
        for epoch in range(4):  # started again and again, with nothing to do
            target = kept(tmp_path / "t.db").target.open("shop/main")
            target.mark(target.mark().epoch + 1 + epoch, log.history)
            target.close()
    with hr.connect(hr_restored(tmp_path / "b", tmp_path / "r")) as restored:
        for text in ("three", "four"):
            restored.append("t", [{"a": 3, "b": text}])
            with Follower(restored, kept(tmp_path / "t.db")) as follower:
                cut = follower.run("caught up")
            assert cut is not None
            assert cut.through >= 5


def test_the_history_of_a_log_is_protected(log: EmbeddedLog, tmp_path: Path) -> None:
    log.backup(tmp_path / "b")
    with hr.connect(hr_restored(tmp_path / "b", tmp_path / "r")) as restored:
        assert restored.history != log.history
        assert restored.knows(log.history, log.position)
        assert not restored.knows(log.history, log.position + 1)
        assert not log.knows(restored.history, 1)
        file = tmp_path / "r" / "restored.json"
        content = json.loads(file.read_text())
        file.write_text(json.dumps({**content, "history": "0" * 32}))
        with pytest.raises(errors.LogDamaged, match=r"restored\.json"):
            _ = restored.history


# --- what is in an archive ------------------------------------------------------------------------


@pytest.fixture
def archived(tmp_path: Path) -> Iterator[EmbeddedLog]:
    """A log of which the rows of a topic below 30 are in the folder `far`, the others not."""
    with hr.connect(tmp_path / "log", **SMALL) as log:
        log.create_topic("t", "a bigint")
        log.create_topic("u", "a bigint")
        log.set_topic("t", retention_seconds=0, archive=str(tmp_path / "far"))
        for n in range(3):
            log.append("t", [{"a": 10 * n + i} for i in range(10)])
            log.append("u", [{"a": n}])
            with_keeper(log)
        log.append("t", [{"a": 30}])
        yield log


def with_keeper(log: EmbeddedLog) -> None:
    keeper = log.keeper()
    keeper.turn(close=True)
    keeper.release()


def numbers(log: EmbeddedLog, topic: str = "t", **start: Any) -> list[int]:
    return [row["a"] for batch in log.read(topic, **start) for row in batch.to_pylist()]


def test_archived_files_are_named_by_a_backup_and_read_after_a_restore(
    archived: EmbeddedLog, tmp_path: Path
) -> None:
    """They are not copied, and it is said which they are."""
    made = archived.backup(tmp_path / "backup")
    names = [one.name for one in made.archived]
    assert sorted(names) == sorted(os.listdir(tmp_path / "far"))
    assert not set(names) & set(os.listdir(tmp_path / "backup" / "sealed"))
    assert [(one.topic, one.archive) for one in made.archived] == [("t", f"{tmp_path}/far")] * 3
    found = restore(tmp_path / "backup", tmp_path / "restored")
    assert (found.archived, found.unreachable) == (made.archived, ())
    with hr.connect(tmp_path / "restored") as log:
        assert numbers(log) == list(range(31))
    checked(tmp_path / "restored")


def test_a_restore_elsewhere_names_what_it_cannot_reach(
    archived: EmbeddedLog, tmp_path: Path
) -> None:
    """Exactly the files, and reading them is an error that names them; the rest is read."""
    made = archived.backup(tmp_path / "backup")
    shutil.move(tmp_path / "far", tmp_path / "moved")
    lost = made.archived[1]
    (tmp_path / "far").mkdir()
    for one in made.archived:
        if one is not lost:
            shutil.copy(tmp_path / "moved" / one.name, tmp_path / "far" / one.name)
    found = restore(tmp_path / "backup", tmp_path / "restored")
    assert found.unreachable == (lost,)
    with hr.connect(tmp_path / "restored") as log:
        reading = log.read("t")
        assert next(reading).data.column("a").to_pylist() == list(range(10))
        with pytest.raises(errors.LogDamaged) as raised:
            list(reading)
        assert (raised.value.place, raised.value.details["resume_after"]) == (
            lost.path,
            lost.through,
        )
        assert f"{tmp_path}/far" in raised.value.fix
        assert numbers(log, after=lost.through) == list(range(20, 31))
        assert numbers(log, "u") == [0, 1, 2]


def test_an_archive_that_has_moved_is_named_at_the_restore(
    archived: EmbeddedLog, tmp_path: Path
) -> None:
    """Files are read there from then on, and new ones go there."""
    archived.backup(tmp_path / "backup")
    shutil.move(tmp_path / "far", tmp_path / "moved")
    with pytest.raises(errors.BadSetting) as refused:
        restore(tmp_path / "backup", tmp_path / "restored", archives={"/nowhere": "/else"})
    assert str(tmp_path / "far") in refused.value.fix
    moved = {str(tmp_path / "far"): str(tmp_path / "moved")}
    found = restore(tmp_path / "backup", tmp_path / "restored", archives=moved)
    assert found.unreachable == ()
    with hr.connect(tmp_path / "restored") as log:
        assert numbers(log) == list(range(31))
        before = len(os.listdir(tmp_path / "moved"))
        with_keeper(log)
        assert len(os.listdir(tmp_path / "moved")) == before + 1
        assert numbers(log) == list(range(31))
        assert numbers(log, start={0: 17}) == list(range(17, 31))
    assert not (tmp_path / "far").exists()
    checked(tmp_path / "restored")


def test_a_backup_without_archived_files_is_as_before(log: EmbeddedLog, tmp_path: Path) -> None:
    """Programs that do not know archives in manifests read it."""
    made = log.backup(tmp_path / "backup")
    content = json.loads((tmp_path / "backup" / "backup.json").read_text())
    assert (content["format"], "archived" in content, made.archived) == (1, False, ())
