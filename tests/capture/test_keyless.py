"""What is owed of a table without a key. R-B1

Caught: rows that are owed more or less often than they should be, and memory that grows with them.
Not caught: the snapshot around it, which `test_snapshots` runs against a server.
"""

from __future__ import annotations

import tracemalloc
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pytest

from headrace.sources.postgres import keyless, scratch
from headrace.sources.postgres.keyless import Owed


def batch(numbers: list[int | None]) -> pa.RecordBatch:
    texts = [f"text {one}" for one in numbers]
    return pa.RecordBatch.from_pydict({"n": pa.array(numbers, pa.int64()), "t": texts})


def test_a_row_is_owed_as_often_as_it_was_added_and_not_paid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyless, "REST_ROWS", 3)
    monkeypatch.setattr(scratch, "WRITTEN_BYTES", 2000)
    for seed in range(20):
        chance, owed, model = (
            Random(seed),
            Owed(str(tmp_path / "spill/owed")),
            Counter[int | None](),
        )
        for _ in range(chance.choice([0, 1, 10, 60])):
            some = chance.choices(
                [None, *range(chance.choice([2, 300]))], k=chance.choice([0, 1, 40])
            )
            if chance.random() < 0.5:
                weight = np.array([chance.choice([1, 1, 3]) for _ in some], np.int64)
                owed.add(batch(some), weight)
                for one, by in zip(some, weight.tolist(), strict=True):
                    model[one] += by
            else:
                left = owed.pay(batch(some)).tolist()
                kept = Counter(one for one, there in zip(some, left, strict=True) if there)
                assert kept == Counter(some) - model, seed
                model -= Counter(some)
        rest = [*owed.rest()]
        assert max((one.num_rows for one in rest), default=0) <= 3
        assert Counter(one for part in rest for one in part["n"].to_pylist()) == +model, seed


def test_what_is_owed_is_not_in_memory(tmp_path: Path) -> None:
    """Before it lay in files, 300,000 rows took 70 MB."""
    owed, before = Owed(str(tmp_path / "spill/owed")), pa.total_allocated_bytes()
    tracemalloc.start()
    for at in range(0, 300_000, 50_000):
        owed.add(batch([*range(at, at + 50_000)]))
    held = tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes() - before
    tracemalloc.stop()
    assert held < 8 << 20
    folder = tmp_path / "spill/owed"
    assert sum(one.stat().st_size for one in folder.rglob("*") if one.is_file()) > 300_000 * 24
    del owed
    assert not [*folder.iterdir()]
