"""Packs: what is finished outlives kills and power cuts; damage is named; garbage goes.

Catches: a missing sync of file, folder or parent, a name used twice, a section read with a wrong
place or unverified, garbage collection that takes what is named or running. Cannot catch: disks
that lie about syncs. The disk is the simulated one: every state a power cut may leave is tried.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import PackDamaged
from headrace.tables import packs as packs_module
from headrace.tables.collection import Collection
from headrace.tables.packs import Attempt, Packs, Ref
from headrace.testing.disk import SimulatedMachine
from tests.tables.kit import PLAIN, Row, change, check, random_change, small_levels


def committed(machine: SimulatedMachine, rng: random.Random, batches: int) -> list[Any]:
    """Keep a collection over some batches; (operations done, manifest, world) of each."""
    packs = Packs("/log/state/packs", machine.process())
    collection, world = Collection(packs, PLAIN), dict[Row, int]()
    done = []
    for number in range(batches):
        attempt = packs.attempt(number)
        collection = collection.plus(change(random_change(rng, world, 60)), attempt)
        ref = attempt.add_json(collection.to_manifest(attempt))
        attempt.finish()
        done.append((len(machine.ops), ref, dict(world)))
        keep = {one.pack for _, one, _ in done[-2:]} | collection.pack_names()
        packs.drop_except(keep, older_than=number - 1)
    return done


@pytest.mark.parametrize("seed", range(3))
def test_what_was_finished_is_there_after_a_power_cut_at_any_operation(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    small_levels(monkeypatch, rng)
    monkeypatch.setattr(packs_module, "OWN_FILE", 2_000)
    machine = SimulatedMachine()
    setup = machine.process()
    setup.mkdir("/log")
    setup.fsync_dir("/")
    done = committed(machine, rng, 6)
    states = 0
    for at in range(len(machine.ops) + 1):
        last = [entry for entry in done if entry[0] <= at][-1:]
        for _, ref, world in last:
            for state in machine.crash_states(at, rng, 6):
                packs = Packs("/log/state/packs", state.machine().process())
                found = Collection.from_manifest(packs.json(ref), packs, PLAIN)
                check(found, world, rng)
                states += 1
    assert states > 40, states


def lazy_finish(attempt: Attempt) -> None:
    """The bug of not syncing the folder."""
    if attempt._sections:
        attempt._write(f"{attempt.stem}.pack", attempt._sections)
    attempt.forget()


def test_the_power_cuts_find_a_forgotten_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attempt, "finish", lazy_finish)
    with pytest.raises(PackDamaged):
        test_what_was_finished_is_there_after_a_power_cut_at_any_operation(0, monkeypatch)


def stored(folder: Path) -> tuple[Ref, dict[Row, int]]:
    packs = Packs(str(folder))
    attempt = packs.attempt(3, 1)
    ref = attempt.add(change([((1, "one"), 1)]))
    attempt.finish()
    return ref, {(1, "one"): 1}


def test_a_flipped_bit_is_damage_that_names_its_place(tmp_path: Path) -> None:
    ref, _ = stored(tmp_path)
    path = tmp_path / ref.pack
    data = bytearray(path.read_bytes())
    data[ref.offset + ref.length // 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(PackDamaged) as caught:
        Packs(str(tmp_path)).open(ref)
    assert caught.value.details["file"] == str(path)
    assert caught.value.details["offset"] == ref.offset
    assert caught.value.details["expected"] != caught.value.details["found"]


def test_a_short_or_missing_pack_is_damage(tmp_path: Path) -> None:
    ref, _ = stored(tmp_path)
    os.truncate(tmp_path / ref.pack, ref.offset + 5)
    with pytest.raises(PackDamaged, match="over 5 bytes"):
        Packs(str(tmp_path)).open(ref)
    (tmp_path / ref.pack).unlink()
    with pytest.raises(PackDamaged, match="no file"):
        Packs(str(tmp_path)).open(ref)


def test_two_attempts_at_one_batch_never_meet(tmp_path: Path) -> None:
    packs = Packs(str(tmp_path))
    one, two = packs.attempt(7, 1), packs.attempt(7, 1)
    a, b = one.add(change([((1, "a"), 1)])), two.add(change([((1, "b"), 1)]))
    two.finish()
    one.finish()
    assert a.pack != b.pack
    assert packs.open(a).column("c1").to_pylist() == ["a"]
    assert packs.open(b).column("c1").to_pylist() == ["b"]


def test_garbage_is_what_is_older_and_not_named(tmp_path: Path) -> None:
    packs = Packs(str(tmp_path))
    refs = []
    for number in (1, 2, 3, 4):
        attempt = packs.attempt(number)
        refs.append(attempt.add(change([((number, ""), 1)])))
        attempt.finish()
    (tmp_path / "notes.txt").write_text("not ours")
    assert packs.drop_except({refs[0].pack}, older_than=3) == [refs[1].pack]
    assert sorted(packs.names()) == sorted(ref.pack for ref in refs if ref != refs[1])


def test_opened_packs_cost_no_descriptors(tmp_path: Path) -> None:
    packs = Packs(str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    kept = []
    for number in range(20):
        attempt = packs.attempt(number)
        ref = attempt.add(change([((number, ""), 1)]))
        attempt.finish()
        kept.append(packs.open(ref))
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_section_is_aligned_and_read_without_a_copy(tmp_path: Path) -> None:
    ref, _ = stored(tmp_path)
    batch = Packs(str(tmp_path)).open(ref)
    assert ref.offset % 64 == 0
    assert all(b.address % 8 == 0 for c in batch.columns for b in c.buffers() if b is not None)
    assert batch.column("_k").to_numpy().flags.writeable is False


def test_small_sections_of_the_last_attempt_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packs = Packs(str(tmp_path / "packs"))
    rows = change([((1, "a"), 1)])

    def written() -> Ref:
        attempt = packs.attempt(1)
        ref = attempt.add(rows)
        attempt.finish()
        return ref

    first = written()
    assert packs.open(first) is rows
    second = written()
    assert packs.open(first) is not rows
    assert packs.open(first) == rows
    assert packs.open(second) is rows
    monkeypatch.setattr(packs_module, "OWN_FILE", 10)  # else they are only mapped
    assert packs.open(written()) is not rows
