"""What the keeper deletes, and when: pieces that nobody can publish any more, files not named.

The crash states around them are those of the workloads `large`, `keeps` and `hands_over`
(`headrace.testing.workloads`), after each of which no such piece may be left.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from headrace import errors
from headrace.log.embedded import orphans
from headrace.log.embedded.check import check
from headrace.log.embedded.format import file_name, place_of
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.embedded.system import OsSystem
from headrace.model.records import Piece
from headrace.testing.disk import SimulatedMachine
from headrace.testing.oplog import Image
from headrace.testing.promises import REFUSED
from headrace.testing.simulation import FOLDER, SCHEMA, Run, new_machine, rows_to_write

HOUR_US = round(orphans.PATIENCE_SECONDS * 1e6)


@pytest.fixture
def run() -> Iterator[Run]:
    run = Run(new_machine(), 1)
    run.make_topics(run.open())
    yield run
    run.end()


def rebooted(run: Run) -> Run:
    return Run(SimulatedMachine(run.machine.image(), boot=b"another boot    "), 1)


def stage(log: EmbeddedLog, number: int = 1) -> Piece:
    return log.stage("orders", rows_to_write(number, 2))


def staged_by_a_dead_process(run: Run) -> Piece:
    process = run.machine.process()
    piece = stage(run.open(process))
    process.kill()
    return piece


def pieces(run: Run) -> list[str]:
    return run.machine.process().listdir(f"{FOLDER}/pieces")


def locks(run: Run) -> list[str]:
    names = run.machine.process().listdir(f"{FOLDER}/locks")
    return [name for name in names if name.startswith("staging-")]


def test_what_a_dead_process_left_goes_after_an_hour(run: Run) -> None:
    piece = staged_by_a_dead_process(run)
    keeper = run.open().keeper()
    assert keeper.turn().deleted == []
    run.machine.clock_us += HOUR_US - 1_000_000
    assert keeper.turn().deleted == []
    run.machine.clock_us += 1_000_000
    assert keeper.turn().deleted == [f"pieces/{piece.name}"]
    assert (pieces(run), locks(run)) == ([], [])


def test_what_was_left_before_the_machine_was_started_anew_goes_at_once(run: Run) -> None:
    piece = staged_by_a_dead_process(run)
    later = rebooted(run)
    assert later.open().keeper().turn().deleted == [f"pieces/{piece.name}"]
    assert locks(later) == []
    later.end()


def test_who_is_slow_keeps_what_it_staged(run: Run) -> None:
    log = run.open()
    piece = stage(log)
    keeper = run.open().keeper()
    for _ in range(3):
        assert keeper.turn().deleted == []
        run.machine.clock_us += 10 * HOUR_US
    log.append("orders", piece)
    assert [row["attempt"] for batch in log.read("orders") for row in batch.to_pylist()] == [1, 1]


def test_who_closes_the_log_gives_up_what_it_staged(run: Run) -> None:
    log = run.open()
    piece = stage(log)
    assert len(locks(run)) == 1
    log.close()
    assert locks(run) == []
    keeper = run.open().keeper()
    assert keeper.turn().deleted == []
    run.machine.clock_us += HOUR_US
    assert keeper.turn().deleted == [f"pieces/{piece.name}"]


def test_what_was_published_stays_whoever_is_dead(run: Run) -> None:
    process = run.machine.process()
    log = run.open(process, durability="os")
    log.append("orders", [stage(log), stage(log)])  # not even synced
    process.kill()
    reader = run.open()
    keeper = reader.keeper()
    for _ in range(2):
        keeper.turn()
        run.machine.clock_us += 2 * HOUR_US
    assert len(pieces(run)) == 2
    assert sum(batch.data.num_rows for batch in reader.read("orders")) == 4


def test_who_comes_too_late_is_told(run: Run) -> None:
    piece = staged_by_a_dead_process(run)
    log = run.open()
    keeper = log.keeper()
    keeper.turn()
    run.machine.clock_us += HOUR_US
    keeper.turn()
    with pytest.raises(errors.PieceInvalid):
        log.append("orders", piece)


def test_an_entry_never_names_a_piece_that_was_just_removed(run: Run) -> None:
    piece = staged_by_a_dead_process(run)
    log, keeper = run.open(), run.open().keeper()
    keeper.turn()
    run.machine.clock_us += HOUR_US
    acquire = log.journal.append_lock.acquire

    def late(timeout: float) -> None:
        assert keeper.turn().deleted == [f"pieces/{piece.name}"]
        acquire(timeout)

    with mock.patch.object(log.journal.append_lock, "acquire", late):
        attempt = run.attempt(lambda _: log.append("orders", piece), {"orders": 2})
    assert attempt.outcome == REFUSED
    assert "HR-LOG-024" in attempt.error
    assert list(log.read("orders")) == []
    assert check(run.machine.process(), FOLDER).ok


def test_an_entry_that_nobody_has_folded_yet_names_its_piece(run: Run) -> None:
    """Its writer died after it was written, and before shared memory was told."""
    process = run.machine.process()
    log = run.open(process)
    run.machine.kill_at("pwritev", 1, process=process, path="journal/0", fraction=1.0)
    assert process.run(lambda: log.append("orders", stage(log))) is None
    reader = run.open()
    with mock.patch.object(orphans, "PATIENCE_SECONDS", 0.0):
        assert reader.keeper().turn().deleted == []
    assert sum(batch.data.num_rows for batch in reader.read("orders")) == 2


def test_names_of_before_there_were_owners_are_left_alone(run: Run) -> None:
    process = run.machine.process()
    process.create(f"{FOLDER}/pieces/000001-{'0' * 32}.piece", 64)
    later = rebooted(run)
    assert later.open().keeper().turn().deleted == []
    later.end()


def test_one_damaged_record_does_not_hide_rows_that_were_moved_lately(run: Run) -> None:
    """The file of before stays until a checkpoint says what the record of the move said."""
    log = run.open()
    log.create_topic("keyed", SCHEMA, key="k")
    log.set_topic("keyed", compact=True)
    log.append("keyed", rows_to_write(1, 3))
    keeper = log.keeper()
    done = keeper.turn(close=True, compact=True)
    assert (done.compacted, done.deleted) == (["keyed"], [])
    number, at = place_of(log.journal.live.tail().control)
    keeper.release()
    log.close()
    image, path = run.machine.image(), f"{FOLDER}/journal/{file_name(number)}"
    inode, old = image.files[path]
    files = {**image.files, path: (inode, old[:at] + bytes(128) + old[at + 128 :])}
    later = Run(SimulatedMachine(Image(image.folders, files), boot=b"another boot    "), 1)
    rows = []
    with pytest.raises(errors.LogDamaged, match=file_name(number)):
        for batch in later.open().read("keyed"):
            rows += batch.to_pylist()
    assert len(rows) == 3
    later.end()


def test_a_real_process_that_dies(tmp_path: Path) -> None:
    """What the kernel says about locks of the living, the forked and the dead."""
    with EmbeddedLog(tmp_path / "log") as log, mock.patch.object(orphans, "PATIENCE_SECONDS", 0.0):
        log.create_topic("orders", SCHEMA, key="k")
        mine = stage(log)
        told, tell = os.pipe()
        wait, go = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.write(tell, stage(log, 2).name.encode())
                os.read(wait, 1)
            finally:
                os._exit(0)
        name = os.read(told, 200).decode()
        keeper = log.keeper()
        assert keeper.turn().deleted == []
        os.write(go, b"x")
        os.waitpid(child, 0)
        assert keeper.turn().deleted == [f"pieces/{name}"]
        log.append("orders", mine)
        assert check(OsSystem(), str(tmp_path / "log")).orphans == []
        for end in (told, tell, wait, go):
            os.close(end)
