"""The log against plain lists: random appends in random sizes, read back from anywhere.

Each partition is a list. Caught: rows lost, repeated, reordered or misplaced for any combination of
partitions, batch sizes, large entries, rolls, reopenings and read limits. Not caught: crashes and
several processes; `tests/faults` has a stateful test for these.
"""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any

import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.model.keys import partitions_of
from tests.log.kit import checked, forget_live, places

KEYS = st.one_of(st.none(), st.integers(-5, 5), st.integers(-(2**63), 2**63 - 1))
APPENDS = st.lists(
    st.one_of(
        st.lists(KEYS, min_size=1, max_size=12),
        st.integers(13, 200).map(lambda count: list(range(count))),
        st.sampled_from(["reopen", "forget", "empty", "conflict"]),
    ),
    min_size=1,
    max_size=14,
)
LIMITS = st.fixed_dictionaries(
    {
        "read_rows_max": st.integers(1, 40),
        "read_bytes_max": st.sampled_from([1, 500, 8 << 20]),
        "inline_bytes_max": st.sampled_from([1, 600, 4 << 20]),
        "chunk_bytes": st.sampled_from([1, 700, 8 << 20]),
        "journal_entries_max": st.sampled_from([3, 50_000]),
    }
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(appends=APPENDS, partitions=st.integers(1, 9), limits=LIMITS, data=st.data())
def test_the_log_is_a_list_per_partition(
    appends: list[Any], partitions: int, limits: dict[str, int], data: st.DataObject
) -> None:
    """Every partition is the list of its rows, whatever the batches, from every place. R-A9"""
    small = {"journal_bytes_first": 16 << 10, "journal_bytes_max": 16 << 10}
    options: dict[str, Any] = {**small, **limits, "durability": "os", "background": False}
    oracle: list[list[int]] = [[] for _ in range(partitions)]
    entries: list[tuple[int, list[tuple[int, int]]]] = []
    with tempfile.TemporaryDirectory() as base:
        folder = f"{base}/log"
        log = hr.connect(folder, **options)
        log.create_topic("t", "k bigint, a bigint", key="k", partitions=partitions)
        number = 0
        for step in appends:
            if step in ("reopen", "forget"):
                log.close()
                if step == "forget":
                    forget_live(folder)
                log = hr.connect(folder, **options)
                continue
            if step in ("empty", "conflict"):
                before = log.sync()
                with contextlib.suppress(hr.errors.Conflict):
                    log.append("t", [], expect={"c": 9} if step == "conflict" else {})
                assert log.sync() == before
                continue
            new = [{"k": key, "a": number + index} for index, key in enumerate(step)]
            number += len(new)
            form = data.draw(st.sampled_from(["dicts", "arrow"]))
            schema = pa.schema([("k", pa.int64()), ("a", pa.int64())])
            rows = pa.Table.from_pylist(new, schema=schema) if form == "arrow" else new
            receipt = log.append("t", rows)
            here = []
            for row in new:
                partition = int(partitions_of([pa.array([row["k"]], pa.int64())], partitions)[0])
                oracle[partition].append(row["a"])
                here.append((partition, row["a"]))
            entries.append((receipt.position, here))
        newest = log.sync()
        assert log.ends("t") == [len(rows) for rows in oracle]
        found = places(log.read("t"))
        for partition, expected in enumerate(oracle):
            assert [(o, a) for p, o, a in found if p == partition] == list(enumerate(expected))
        start = {
            p: data.draw(st.integers(0, len(oracle[p]))) for p in range(partitions) if oracle[p]
        }
        if start:
            found = places(log.read("t", start=start))
            for partition, offset in start.items():
                here_found = [(o, a) for p, o, a in found if p == partition]
                assert here_found == list(enumerate(oracle[partition]))[offset:]
        after = data.draw(st.integers(0, newest))
        through = data.draw(st.integers(after, newest))
        found = places(log.read("t", after=after, through=through))
        expected_rows = [
            r for position, here in entries if after < position <= through for r in here
        ]
        assert sorted((p, a) for p, _, a in found) == sorted(expected_rows)
        for batch in log.read("t"):
            assert batch.positions.to_pylist()[-1] <= batch.position
            assert batch.data.num_rows == len(batch.partition) == len(batch.offset)
        log.close()
        checked(folder)
