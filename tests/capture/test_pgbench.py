"""A bank moved by pgbench while its capture and its server are killed once each (R-B1, B5).

Caught: an entry that holds half a transaction (the bank's sums differ there), a transaction twice,
lost or out of order, a table that is not the database's in the end. Not caught: what needs other
instants or more of them: `./run faults capture --only pgbench`, which is this at random and longer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import headrace as hr
from headrace.testing import capture_pgbench
from headrace.testing.capture_pgbench import BALANCES
from headrace.testing.postgres import debian


@pytest.mark.timeout(240)
@pytest.mark.parametrize("server", ["embedded", "debian"])
def test_a_bank(server: str) -> None:
    binaries: Path | None = None
    if server == "debian":
        binaries = debian()
        if binaries is None:
            pytest.skip("Debian's PostgreSQL is not there: apt-get install postgresql")
    found = capture_pgbench.case("1", binaries=binaries, plan=["kill", "server"])
    assert found.wrong == []
    assert found.audit.summed > 0


@pytest.mark.parametrize(
    ("entries", "wrong"),
    [
        ([{7: "abcd"}, {8: "abcd", 9: "abcd"}], ""),
        ([{7: "abc"}, {7: "d"}], "transaction 7 is in entries"),
        ([{7: "abc"}], "transaction 7 moves"),
        ([{8: "abcd", 7: "abcd"}], "not in the order"),
        ([{7: "abcd"}, {7: ""}], "or one twice"),
    ],
)
def test_what_the_audit_finds(entries: list[dict[int, str]], wrong: str, tmp_path: Path) -> None:
    """Entries of transactions that change tables a to d; one that does not change all is half."""
    with hr.connect(tmp_path / "log") as log:
        log.create_topic("shop._transactions", "xid bigint, lsn bigint")
        for name, column in BALANCES.items():
            columns = f"{column} bigint, _weight bigint not null, _op string, _xid bigint"
            log.create_topic(f"shop.public.{name}", columns, kind="changes")
        for entry in entries:
            with log.transaction() as made:
                for xid, tables in entry.items():
                    made.append("shop._transactions", [{"xid": xid, "lsn": 10 * xid}])
                    for letter, (name, column) in zip("abcd", BALANCES.items(), strict=True):
                        row = {column: 5, "_weight": 1, "_op": "c", "_xid": xid}
                        made.append(f"shop.public.{name}", [row] * (letter in tables))
        found = capture_pgbench.audit(log, 0)
    assert any(wrong in line for line in found.wrong) if wrong else not found.wrong
