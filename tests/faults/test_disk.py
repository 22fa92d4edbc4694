"""The simulated machine itself: what survives a power cut, a kill, a failed sync.

Caught here: a model of the disk that is too kind (a wrong write-ahead file passes) or impossible (a
right one fails). Not caught here: whether real filesystems behave as the model says; the loop-image
tests ask a real one.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from random import Random

import pytest

from headrace.log.embedded.locks import CrossLock
from headrace.log.embedded.system import System
from headrace.testing.disk import Deadlock, SimulatedMachine
from headrace.testing.oplog import SECTOR, Image
from headrace.testing.powercut import Disk, Plan

RECORD = 1024


def record(number: int) -> bytes:
    """A record whose every sector says what it belongs to."""
    return b"".join(number.to_bytes(4, "little") + bytes([number]) * 508 for _ in range(2))


def right(system: System, acknowledge: Callable[[int], None]) -> None:
    system.mkdir("/log")
    system.fsync_dir("/")
    file = system.create("/log/new", 16 * RECORD)
    file.fdatasync()
    system.rename("/log/new", "/log/journal")
    system.fsync_dir("/log")
    for number in range(1, 6):
        file.pwritev([record(number)], (number - 1) * RECORD)
        file.fdatasync()
        acknowledge(number)


def no_folder_sync(system: System, acknowledge: Callable[[int], None]) -> None:
    system.mkdir("/log")
    system.fsync_dir("/")
    file = system.create("/log/journal", 16 * RECORD)
    file.fdatasync()
    for number in range(1, 3):
        file.pwritev([record(number)], (number - 1) * RECORD)
        file.fdatasync()
        acknowledge(number)


def no_parent_sync(system: System, acknowledge: Callable[[int], None]) -> None:
    system.mkdir("/log")
    file = system.create("/log/journal", 16 * RECORD)
    system.fsync_dir("/log")
    file.pwritev([record(1)], 0)
    file.fdatasync()
    acknowledge(1)


def acknowledged_early(system: System, acknowledge: Callable[[int], None]) -> None:
    system.mkdir("/log")
    system.fsync_dir("/")
    file = system.create("/log/journal", 16 * RECORD)
    file.fdatasync()
    system.fsync_dir("/log")
    for number in range(1, 3):
        file.pwritev([record(number)], (number - 1) * RECORD)
        acknowledge(number)
        file.fdatasync()


def renamed_before_synced(system: System, acknowledge: Callable[[int], None]) -> None:
    system.mkdir("/log")
    system.fsync_dir("/")
    file = system.create("/log/new", 16 * RECORD)
    file.pwritev([record(1)], 0)
    system.rename("/log/new", "/log/journal")
    system.fsync_dir("/log")
    acknowledge(1)
    file.fdatasync()


def sync_tried_again(system: System, acknowledge: Callable[[int], None]) -> None:
    system.mkdir("/log")
    system.fsync_dir("/")
    file = system.create("/log/journal", 16 * RECORD)
    file.fdatasync()
    system.fsync_dir("/log")
    file.pwritev([record(1)], 0)
    try:
        file.fdatasync()
    except OSError:
        file.fdatasync()
    acknowledge(1)


def survivors(image: Image) -> list[int]:
    """The whole records from the start; a torn one ends it."""
    content = image.files.get("/log/journal", (0, b""))[1]
    result: list[int] = []
    for number in range(1, 17):
        if content[(number - 1) * RECORD : number * RECORD] != record(number):
            break
        result.append(number)
    return result


def lost(
    work: Callable[[System, Callable[[int], None]], None],
    prepare: Callable[[SimulatedMachine], None] = lambda machine: None,
) -> tuple[int, int]:
    """States tried, and states in which something acknowledged is gone."""
    machine = SimulatedMachine()
    prepare(machine)
    acknowledged: list[tuple[int, int]] = []
    work(machine.process(), lambda number: acknowledged.append((len(machine.ops), number)))
    tried = bad = 0
    for at in range(len(machine.ops) + 1):
        expected = {number for index, number in acknowledged if index <= at}
        for state in machine.crash_states(at, Random(at), 60):
            tried += 1
            bad += not expected <= set(survivors(state.image))
    return tried, bad


def test_a_right_journal_survives_every_power_cut() -> None:
    tried, bad = lost(right)
    assert tried > 80
    assert bad == 0


@pytest.mark.parametrize(
    "wrong", [no_folder_sync, no_parent_sync, acknowledged_early, renamed_before_synced]
)
def test_a_wrong_journal_is_caught(
    wrong: Callable[[System, Callable[[int], None]], None],
) -> None:
    tried, bad = lost(wrong)
    assert bad > 0, f"{tried} states, none of them caught it"


def test_a_sync_that_failed_is_not_mended_by_the_next_one() -> None:
    def fail(machine: SimulatedMachine) -> None:
        machine.fail("fdatasync", 2, errno.EIO)

    assert lost(sync_tried_again, fail)[1] > 0
    assert lost(sync_tried_again)[1] == 0


def journal_with(writes: list[tuple[bytes, int]], size: int = 8192) -> Disk:
    machine = SimulatedMachine()
    system = machine.process()
    file = system.create("/journal", size)
    file.fdatasync()
    system.fsync_dir("/")
    for data, offset in writes:
        file.pwritev([data], offset)
    return Disk.replayed(machine, len(machine.ops))


def test_states_of_one_torn_write() -> None:
    disk = journal_with([(b"x" * 3 * SECTOR, 100)])
    contents = {
        state.image.files["/journal"][1][:2200] for state in disk.crash_states(Random(1), 200)
    }
    whole = bytes(100) + b"x" * 3 * SECTOR
    assert bytes(2200) in contents, "nothing"
    assert whole.ljust(2200, b"\0") in contents, "everything"
    assert whole[:SECTOR].ljust(2200, b"\0") in contents, "the first sector only"
    middle_gone = whole[:SECTOR] + bytes(SECTOR) + whole[2 * SECTOR :]
    assert middle_gone.ljust(2200, b"\0") in contents, "a sector in the middle missing"


def test_a_sector_holds_all_earlier_writes_to_it() -> None:
    disk = journal_with([(b"a" * 100, 0), (b"b" * 100, 100)])
    for state in disk.crash_states(Random(1), 200):
        content = state.image.files["/journal"][1]
        assert content[100:200] != b"b" * 100 or content[:100] == b"a" * 100


def test_later_writes_may_come_without_earlier_ones() -> None:
    disk = journal_with([(b"a" * 512, 0), (b"b" * 512, 512)])
    contents = {
        state.image.files["/journal"][1][:1024] for state in disk.crash_states(Random(1), 99)
    }
    assert bytes(512) + b"b" * 512 in contents


def test_length_before_data() -> None:
    machine = SimulatedMachine()
    system = machine.process()
    file = system.create("/piece", 0)
    system.fsync_dir("/")
    file.pwritev([b"x" * 9000], 0)
    states = list(machine.crash_states(len(machine.ops), Random(1), 200))
    contents = {state.image.files["/piece"][1] for state in states}
    assert {b"", bytes(9000), b"x" * 9000} <= contents
    assert any(len(content) == 9000 and content[-1:] not in b"x\0" for content in contents), (
        "garbage"
    )


def test_names_come_and_go_one_by_one() -> None:
    machine = SimulatedMachine()
    system = machine.process()
    system.create("/a", 10).fdatasync()
    system.fsync_dir("/")
    system.rename("/a", "/b")
    system.create("/c", 10)
    system.unlink("/b")
    seen = {
        tuple(sorted(state.image.files))
        for state in machine.crash_states(len(machine.ops), Random(1), 200)
    }
    assert {("/a",), ("/b",), ("/b", "/c"), ("/c",), ()} <= seen
    system.fsync_dir("/")
    states = machine.crash_states(len(machine.ops), Random(1), 200)
    assert {tuple(state.image.files) for state in states} == {("/c",)}


def test_pages_of_a_map_may_be_old() -> None:
    machine = SimulatedMachine()
    system = machine.process()
    shared = system.map("/live", 8192)
    system.fsync_dir("/")
    for value in range(1, 5):
        shared.view[0] = value
        shared.view[5000] = value
        system.listdir("/")
    states = list(machine.crash_states(len(machine.ops), Random(1), 200))
    seen = {(c[0], c[5000]) for s in states if len(c := s.image.files["/live"][1]) > 5000}
    assert (4, 4) in seen, "what it was at the end"
    assert (0, 0) in seen, "what it was at the start"
    assert len(seen) > 2, "pages of different times"
    assert len({state.boot for state in states}) == len(states), "each reboot has its own boot id"


def test_states_are_the_same_for_the_same_seed() -> None:
    disk = journal_with([(b"a" * 3000, 64), (b"b" * 700, 3072), (b"c" * 64, 4000)])
    one = [(s.title, s.image.digest()) for s in disk.crash_states(Random(7), 80)]
    two = [(s.title, s.image.digest()) for s in disk.crash_states(Random(7), 80)]
    assert one == two
    assert len(one) > 40


def test_a_machine_starts_from_a_state_and_goes_on() -> None:
    disk = journal_with([(b"a" * 3000, 64)])
    machine = next(disk.crash_states(Random(1), 1)).machine()
    assert machine.boot != bytes(16)
    system = machine.process()
    file = system.open("/journal")
    assert file.pread(10, 64) == bytes(10)
    file.pwritev([b"again"], 64)
    file.fdatasync()
    after = Disk.replayed(machine, len(machine.ops)).image(Plan("nothing", frozenset()))
    assert after.files["/journal"][1][64:69] == b"again"


def test_a_lock_belongs_to_its_handle_and_dies_with_the_process() -> None:
    machine = SimulatedMachine()
    one, two = machine.process(), machine.process()
    first = one.create("/lock", 0)
    second, third = one.open("/lock"), two.open("/lock")
    assert first.try_lock()
    assert first.try_lock(), "taking it again is no error"
    assert not second.try_lock(), "another handle of the same process is another owner"
    assert not third.try_lock()
    one.kill()
    assert third.try_lock(), "a dead process holds nothing"
    third.close()
    assert two.open("/lock").try_lock(), "closing gives it back"


def test_a_timeout_names_the_holder_of_the_lock() -> None:
    from headrace import errors

    machine = SimulatedMachine()
    locks = []
    for process in (machine.process(41), machine.process(42)):
        shared = process.map("/live", 4096)
        file = process.create("/lock", 0)
        locks.append(CrossLock(process, file, shared, name="append", word=100, holder=10))
    locks[0].acquire(1.0)
    with pytest.raises(errors.LockTimeout, match="process 41"):
        locks[1].acquire(1.0)
    assert 1.0 <= machine.clock_us / 1e6 < 1.2
    locks[0].release()
    locks[1].acquire(1.0)


def test_killed_in_the_middle_of_a_write() -> None:
    machine = SimulatedMachine()
    process = machine.process()
    file = process.create("/journal", 8192)
    shared = process.map("/live", 4096)
    machine.kill_at("pwritev", 1, fraction=0.5)

    def work() -> None:
        shared.view[0] = 1
        try:
            file.pwritev([b"x" * 1000], 0)
        finally:
            shared.view[0] = 9  # what handlers of a dead process do must not be seen

    assert process.run(work) is None
    other = machine.process()
    assert other.open("/journal").pread(1000, 0) == b"x" * 500 + bytes(500)
    assert other.map("/live", 4096).view[0] == 1


def test_killed_states_hold_the_page_cache_and_the_same_boot() -> None:
    machine = SimulatedMachine()
    process = machine.process()
    file = process.create("/journal", 8192)
    file.pwritev([b"a" * 10, b"b" * 10], 0)
    before_write = next(op.index for op in machine.ops if op.kind == "write")
    states = list(machine.killed_states(before_write, Random(1), 10))
    contents = {state.image.files["/journal"][1][:20] for state in states}
    assert {bytes(20), b"a" * 10 + bytes(10)} <= contents
    assert {state.boot for state in states} == {machine.boot}


def test_operations_fail_as_told() -> None:
    machine = SimulatedMachine()
    one, two = machine.process(), machine.process()
    file = one.create("/a", 100)
    machine.fail("pwritev", 2, errno.ENOSPC, process=one, fraction=0.5)
    file.pwritev([b"x" * 10], 0)
    two.open("/a").pwritev([b"y" * 10], 10)
    with pytest.raises(OSError, match="No space left") as caught:
        file.pwritev([b"z" * 10], 20)
    assert caught.value.errno == errno.ENOSPC
    assert file.pread(30, 0) == b"x" * 10 + b"y" * 10 + b"z" * 5 + bytes(5)
    file.pwritev([b"z" * 10], 20)
    machine.fail("create", 1, errno.ENOSPC, persistent=True)
    for name in "bc":
        with pytest.raises(OSError, match="No space left"):
            one.create(f"/{name}", 100)
    assert one.listdir("/") == ["a"]
    machine.heal()
    one.create("/b", 100)


def test_pages_that_could_not_be_synced_may_leave_the_cache() -> None:
    machine = SimulatedMachine()
    process = machine.process()
    file = process.create("/journal", 2048)
    file.fdatasync()
    process.fsync_dir("/")
    file.pwritev([b"a" * 512], 0)
    machine.fail("fdatasync", 1, errno.EIO, evicts=True)
    with pytest.raises(OSError, match="Input/output error"):
        file.fdatasync()
    assert file.pread(512, 0) == bytes(512), "a reader gets what the disk has"
    file.pwritev([b"b" * 512], 512)
    file.fdatasync()
    for state in machine.crash_states(len(machine.ops), Random(1), 20):
        assert state.image.files["/journal"][1][:1024] == bytes(512) + b"b" * 512


def test_sleeping_without_anybody_to_wake_is_a_deadlock() -> None:
    shared = SimulatedMachine().process().map("/live", 4096)
    shared.wait(0, 1, None)  # the word is not 1: returns at once
    with pytest.raises(Deadlock):
        shared.wait(0, 0, None)
