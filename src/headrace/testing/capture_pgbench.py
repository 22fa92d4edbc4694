"""PostgreSQL's own benchmark as the load: a bank whose sums are known at every instant.

`pgbench` moves amounts: each transaction adds the same amount to an account, a teller and a branch,
and writes it down in the history. So at every entry of the log, when no table is being read, all
four sums are equal, and they are so for each transaction alone; else an entry holds half of one.
Scripts of our own make it mean, and keep that rule: large transactions (the server streams them),
empty ones, rollbacks, savepoints, accounts that change their key, that go and come back.

The capture, its server and their connections are killed meanwhile. Afterwards the tables equal the
database, row by row. The server is the embedded one, or Debian's (`postgres.debian`).
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random

import headrace as hr
from headrace.log.embedded.log import EmbeddedLog
from headrace.testing.capture_case import NAME, SETTINGS, Audit, all_live
from headrace.testing.capture_process import Case, Child, caught_up, crash, cut, ended
from headrace.testing.postgres import Server, fresh_database

Sums = Counter[str]
BALANCES = {
    "pgbench_accounts": "abalance",
    "pgbench_tellers": "tbalance",
    "pgbench_branches": "bbalance",
    "pgbench_history": "delta",
}
ACCOUNTS = 2000
KILLS_AT_FIRST = 4
"""While tables are read."""
PATIENCE_SECONDS = 180.0
BEGIN = """
\\set aid random(1, :accounts)
\\set tid random(1, 10)
\\set delta random(-5000, 5000)
begin;
"""
MOVE = """
with changed as ({change} returning *), moved as (select ({amount})::int as amount from changed),
told as (
    insert into pgbench_history (tid, bid, aid, delta, mtime)
    select :tid, 1, :aid, amount, now() from moved
), paid as (
    update pgbench_tellers set tbalance = tbalance + (select amount from moved) where tid = :tid
)
update pgbench_branches set bbalance = bbalance + (select amount from moved);
"""
ONE = MOVE.format(
    change="update pgbench_accounts set abalance = abalance + :delta where aid = :aid",
    amount="count(*) * :delta",
)
MANY = MOVE.format(
    change="update pgbench_accounts set abalance = abalance + 1"
    " where aid between :aid and :aid + 300",
    amount="count(*)",
)
CLOSE = MOVE.format(
    change="delete from pgbench_accounts where aid = :aid",
    amount="coalesce(-sum(abalance), 0)",
)
OPEN = "insert into pgbench_accounts values (:aid, 1, 0, '') on conflict do nothing;\n"
RENAME = """
update pgbench_accounts set aid = -aid where aid = {}
    and not exists (select from pgbench_accounts where aid = -({}));
"""
SCRIPTS = {
    "one": (20, f"{BEGIN}{ONE}end;"),
    "undone": (2, f"{BEGIN}{ONE}rollback;"),
    "savepoint": (3, f"{BEGIN}savepoint s;{ONE}rollback to s;{ONE}end;"),
    "empty": (1, "begin;\nend;"),
    "many": (1, f"{BEGIN}{MANY}end;"),
    "key": (3, f"{BEGIN}{ONE}{RENAME.format(':aid', ':aid')}{RENAME.format('-:tid', '-:tid')}end;"),
    "gone": (3, f"{BEGIN}{CLOSE}{OPEN}end;"),
}
"""Name -> how often, and what."""


def make_bank(server: Server, database: str) -> None:
    """The tables of pgbench, with fewer accounts, and a key for the history."""
    _pgbench(server, database, Path(os.devnull), "-i", "-q", "-s", "1", "-I", "dtgp").wait()
    with server.connect(database) as connection:
        connection.execute("delete from pgbench_accounts where aid > %s", [ACCOUNTS])
        connection.execute("alter table pgbench_history add column n bigserial primary key")


class Load:
    """pgbench in a thread, begun anew when its server goes away."""

    def __init__(
        self, server: Server, database: str, folder: Path, seed: str, rate: int | None = None
    ) -> None:
        """The scripts are written into the folder; `rate`: transactions a second."""
        self._server, self._database = server, database
        self._chance = Random(f"pgbench {seed}")
        self._said = folder / "pgbench"
        self._files = [] if rate is None else ["-R", str(rate)]
        for name, (weight, script) in SCRIPTS.items():
            (folder / f"{name}.sql").write_text(script)
            self._files += ["-f", f"{folder / name}.sql@{weight}"]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.failed = ""

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            process = _pgbench(
                self._server, self._database, self._said, "-n", "-c", "3", "-T", "3600",
                "--max-tries=100", "-D", f"accounts={ACCOUNTS}", *self._files,
                f"--random-seed={self._chance.randrange(1 << 30)}",
            )  # fmt: skip
            while process.poll() is None and not self._stop.wait(0.05):
                continue
            process.terminate()
            process.wait()
            said = self._said.read_text(errors="replace")
            if "ERROR" in said:
                self.failed = f"pgbench: {said[-800:]}"
                return


def _pgbench(server: Server, database: str, said: Path, *arguments: str) -> subprocess.Popen[bytes]:
    with open(said, "wb") as output:
        return subprocess.Popen(
            [server.bin / "pgbench", *arguments, server.dsn(database)],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip


def case(
    seed: str,
    seconds: float = 20.0,
    *,
    binaries: Path | None = None,
    plan: Sequence[str] | None = None,
) -> Case:
    """One case: kills until all tables are live, and so many seconds more.

    With a plan only what it says happens, when they are: `kill` (the capture), `server`, `cut`.
    """
    with (
        tempfile.TemporaryDirectory(prefix="headrace-") as name,
        Server(None, binaries, deadlock_timeout="20ms", **SETTINGS) as server,
        fresh_database(server, "bank") as database,
        hr.connect(Path(name) / "log") as log,
    ):
        make_bank(server, database)
        return _case(server, database, Path(name), log, seed, seconds, plan)


def _case(
    server: Server,
    database: str,
    folder: Path,
    log: EmbeddedLog,
    seed: str,
    seconds: float,
    plan: Sequence[str] | None,
) -> Case:
    found, chance = Case(), Random(f"bank {seed}")
    child = Child(folder, server.dsn(database), chunk_rows=1000, group_rows=300)
    with ended(child), Load(server, database, folder, seed, 100 if plan else None) as load:
        child.start()
        waited, kills = 0.0, KILLS_AT_FIRST if plan is None else 0
        while not all_live(log, [*BALANCES], 1) and not found.wrong:
            time.sleep(0.1)
            waited += 0.1  # by looks, not by the clock: see `capture_process`
            if sum(found.events.values()) < kills:
                time.sleep(2)  # or it comes to nothing
                _break(server, database, child, chance, found)
            if waited > PATIENCE_SECONDS:
                found.wrong.append(f"stopped: the snapshots do not end. {child.kill()}")
        begin, end = log.position, time.monotonic() + seconds
        for kind in plan or ():
            _break(server, database, child, chance, found, kind)
        while plan is None and time.monotonic() < end and not found.wrong:
            _break(server, database, child, chance, found)
        found.wrong += [said for said in (child.kill(), load.failed) if said]
    if found.wrong:
        return found
    if not caught_up(server, database, log, [*BALANCES], found):
        return found
    found.audit = audit(log, begin)
    found.wrong += found.audit.wrong
    return found


def _break(
    server: Server, database: str, child: Child, chance: Random, found: Case, kind: str = ""
) -> None:
    """Wait a while, and kill something."""
    time.sleep(chance.choice([0.2, 0.5, 1.5]))
    kind = kind or chance.choice(["kill", "kill", "cut", "server"])
    found.events[kind] += 1
    if kind == "kill":
        said = child.kill()
        found.wrong += [said] if said else []
        child.start()
    elif kind == "cut":
        cut(server, database)
    else:
        crash(server, chance)


def audit(log: EmbeddedLog, begin: int) -> Audit:
    """Whether the sums are equal at every entry behind `begin`, and for each transaction there."""
    found = Audit()
    at_entry: dict[int, Sums] = defaultdict(Counter)
    of_transaction: dict[int, Sums] = defaultdict(Counter)
    places: dict[int, set[int]] = defaultdict(set)
    for name, column in BALANCES.items():
        for batch in log.read(f"{NAME}.public.{name}"):
            found.rows += len(batch)
            rows = batch.data.select([column, "_weight", "_xid"]).to_pydict()
            for value, weight, xid, position in zip(
                *rows.values(), batch.positions.to_pylist(), strict=True
            ):
                at_entry[position][name] += value * weight
                if xid is not None:
                    of_transaction[xid][name] += value * weight
                    places[xid].add(position)
    totals: Sums = Counter()
    for position in sorted(at_entry):
        found.entries += 1
        totals.update(at_entry[position])
        if position > begin and len({totals[name] for name in BALANCES}) > 1:
            found.wrong.append(f"whole: the sums at entry {position} are {dict(totals)}")
    for xid, sums in of_transaction.items():
        found.transactions += 1
        if len(places[xid]) > 1:
            found.wrong.append(f"whole: transaction {xid} is in entries {sorted(places[xid])}")
        if min(places[xid]) > begin:
            found.summed += 1
            if len({sums[name] for name in BALANCES}) > 1:
                found.wrong.append(f"whole: transaction {xid} moves {dict(sums)}")
    told = [r for batch in log.read(f"{NAME}._transactions") for r in batch.to_pylist()]
    if any(one["lsn"] >= other["lsn"] for one, other in pairwise(told)):
        found.wrong.append("order: transactions are not in the order of their commits")
    if sorted(row["xid"] for row in told) != sorted(of_transaction):
        found.wrong.append("order: other transactions are told of than have rows, or one twice")
    return found
