"""The bank, in short: JVMs and Python workers are killed; no total is ever wrong.

Can catch: what `headrace.testing.views_bank` says. Cannot catch: instants that did not happen; the
crash enumerator (tests/faults/test_views_crashes.py) goes through all of them, without Spark.
`./run faults views --only bank --minutes 10` is the long form, which kills drivers too; so does the
slice (tests/faults/test_slice.py).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from headrace.testing.views_bank import audit, day, open_bank


@pytest.mark.timeout(1500)
def test_no_total_is_ever_wrong_while_jvms_and_workers_are_killed(tmp_path: Any) -> None:
    found = day(str(tmp_path), "test", ["jvm", "worker", "two drivers"])
    assert found.wrong == []
    workers = found.kills.pop("worker")
    assert workers > 2
    assert found.kills == Counter({"jvm": 1, "two drivers": 1})
    assert found.audit.commits >= 4
    assert found.reads > 10


def test_the_audit_sees_a_transfer_of_which_half_is_missing(tmp_path: Any) -> None:
    with open_bank(str(tmp_path)) as log:
        for view, columns in (
            ("credits", "account bigint, credit bigint"),
            ("debits", "account bigint, debit bigint"),
            ("balance", "account bigint, balance bigint"),
            ("total", "total bigint, accounts bigint"),
        ):
            log.create_topic(f"bank.{view}", columns, kind="changes")
        log.append("moves", [{"id": 1, "account": 1, "amount": 5, "_weight": 1}])
        log.append("moves", [{"id": 1, "account": 2, "amount": -5, "_weight": 1}])
        with log.transaction() as half:
            half.append("bank.credits", [{"account": 1, "credit": 5, "_weight": 1}])
            half.append("bank.balance", [{"account": 1, "balance": 5, "_weight": 1}])
            half.append("bank.total", [{"total": 5, "accounts": 1, "_weight": 1}])
        found = audit(log)
    assert found.commits == 1
    assert "the total is [(5, 1)]" in found.wrong[0]
