"""A folder of packs as version 1 wrote it: it stays readable, and so does what its hashes name.

Catches: a change of the format of packs, manifests or hashes that would strand state on disk. A
change on purpose gets a new version and a golden folder of its own; this one stays. Cannot catch:
formats of what is rebuilt anyway (the manifests of tables).

    ./run python -m tests.tables.test_golden     makes the folder of the newest version, once
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.errors import PackDamaged
from headrace.tables.collection import Collection
from headrace.tables.packs import MAGIC, Packs, Ref
from tests.tables.kit import ORDERED, change, key, rows_of

FOLDER = Path(__file__).parent.parent / "golden" / "packs-v1"
ROWS = [((number % 3, text), weight) for number, (text, weight) in enumerate(
    [("a", 1), (None, 2), ("long " * 9, -1), ("", 1), ("é\0", 3), ("b", 1)]
)]  # fmt: skip


def make() -> None:
    packs = Packs(str(FOLDER))
    attempt = packs.attempt(1)
    collection = Collection(packs, ORDERED).plus(change(ROWS, ORDERED), attempt)
    ref = attempt.add_json({"golden": collection.to_manifest(attempt)})
    attempt.finish()
    (FOLDER / "ref.json").write_text(json.dumps(ref) + "\n")


def test_packs_of_version_1_are_read() -> None:
    packs = Packs(str(FOLDER))
    ref = Ref(*json.loads((FOLDER / "ref.json").read_text()))
    collection = Collection.from_manifest(packs.json(ref)["golden"], packs, ORDERED)
    world = dict(ROWS)
    assert rows_of(collection.scan()) == world
    assert rows_of([collection.probe(key([1]))]) == {r: w for r, w in world.items() if r[0] == 1}


def test_a_pack_of_another_version_is_refused(tmp_path: Path) -> None:
    ref = Ref(*json.loads((FOLDER / "ref.json").read_text()))
    data = (FOLDER / ref.pack).read_bytes()
    (tmp_path / ref.pack).write_bytes(MAGIC.replace(b"\1", b"\2") + data[len(MAGIC) :])
    with pytest.raises(PackDamaged, match="a pack of version 1"):
        Packs(str(tmp_path)).json(ref)


if __name__ == "__main__":
    make()
