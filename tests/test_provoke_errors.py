"""Every error of the catalogue, provoked for real: by a call, a disk, a signal or a damaged file.

Caught: a code that nothing raises any more or that no test provokes, an error without a place or a
fix, a text with a hole in it, a code that the page of errors does not have. Not caught: whether the
advice helps; a reader must judge that. Where the surroundings do not allow the real thing (no mount
without root) the operating system's answer is put in by hand.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from xxhash import xxh3_64_hexdigest

import headrace as hr
from headrace import errors
from headrace.cli.main import as_usage, cli
from headrace.log.embedded import system
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.producer import Producer
from headrace.sources.postgres import capture as capturing
from headrace.sources.postgres import settings as asked
from headrace.sources.postgres.prepare import reached
from headrace.sources.postgres.protocol import frame
from headrace.sources.postgres.transactions import Assembler
from headrace.sources.postgres.values import PgType, arrow_type, convert
from headrace.testing.postgres import Server, fresh_database
from tests.capture.provocations import PROVOCATIONS as OF_RESUME
from tests.derived.provocations import PROVOCATIONS as OF_FOLLOWERS
from tests.log.kit import Child, Machine, flip, machine_log
from tests.log.provocations import PROVOCATIONS as OF_GROUPS
from tests.pipelines.provocations import PROVOCATIONS as OF_VIEWS
from tests.queries.provocations import PROVOCATIONS as OF_QUERIES
from tests.runtime.provocations import PROVOCATIONS as OF_PROJECTS
from tests.serving.provocations import PROVOCATIONS as OF_SERVING

ERRORS_PAGE = Path(__file__).parent.parent / "docs" / "errors.md"


@dataclass
class Bench:
    """Where an error is provoked."""

    folder: str
    stack: ExitStack
    patch: pytest.MonkeyPatch
    request: pytest.FixtureRequest

    @property
    def postgres(self) -> Server:
        """A PostgreSQL server, started when it is first asked for."""
        server = self.request.getfixturevalue("postgres")
        assert isinstance(server, Server)
        return server

    def log(self, **settings: Any) -> EmbeddedLog:
        """A log with the topic t (a bigint not null, b string, key a, two partitions)."""
        log = self.stack.enter_context(hr.connect(self.folder, **settings))
        log.create_topic("t", "a bigint not null, b string", key="a", partitions=2, exist_ok=True)
        return log

    def machine_log(self, **settings: Any) -> tuple[EmbeddedLog, Machine]:
        machine = Machine()
        log = machine_log(self.folder, machine, background=False, **settings)
        self.stack.callback(log.close)
        log.create_topic("t", "a bigint")
        return log, machine


Provocation = Callable[[Bench], object]
PROVOCATIONS: dict[str, list[Provocation]] = {}


def provokes(*codes: str) -> Callable[[Provocation], Provocation]:
    """Mark a function that ends in the error of this code."""

    def register(function: Provocation) -> Provocation:
        for code in codes:
            PROVOCATIONS.setdefault(code, []).append(function)
        return function

    return register


# --- the log as a folder --------------------------------------------------------------------------


@provokes("HR-LOG-001")
def foreign_files(bench: Bench) -> None:
    os.makedirs(bench.folder)
    Path(bench.folder, "holiday.jpg").touch()
    hr.connect(bench.folder)


@provokes("HR-LOG-001")
def a_file(bench: Bench) -> None:
    Path(bench.folder).touch()
    hr.connect(bench.folder)


@provokes("HR-LOG-001")
def not_there(bench: Bench) -> None:
    hr.connect(bench.folder, create=False)


@provokes("HR-LOG-001")
def check_of_no_log(bench: Bench) -> None:
    from headrace.log.embedded.check import check

    os.makedirs(bench.folder)
    check(system.OsSystem(), bench.folder)


@provokes("HR-LOG-002")
def newer_format(bench: Bench) -> None:
    bench.log().close()
    path = Path(bench.folder, "headrace.json")
    content = json.loads(path.read_text())
    content["format"] = 2
    content["checksum"] = xxh3_64_hexdigest(f"2 {content['log']}".encode())
    path.write_text(json.dumps(content))
    hr.connect(bench.folder)


@provokes("HR-LOG-003")
def network_filesystem(bench: Bench) -> None:
    bench.patch.setattr(system, "filesystem_of", lambda path: "nfs4")
    hr.connect(bench.folder)


ROOT = os.geteuid() == 0


def may_mount() -> bool:
    """Whether this process can have mounts of its own."""
    if not ROOT or shutil.which("unshare") is None:
        return False
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


IN_A_MOUNT = """
import pickle, sys
import headrace as hr
from headrace import errors
try:
    log = hr.connect(sys.argv[1], journal_bytes_first=16384, journal_bytes_max=32768)
    log.create_topic("mounted", "a string")
    for _ in range(10000):
        log.append("mounted", [{"a": "x" * 5000}])
except errors.HeadraceError as error:
    sys.stdout.write(pickle.dumps(error).hex())
"""


def in_a_mount(folder: str, mount: str) -> None:
    """Append to a log in a folder that a shell command has mounted, and raise what came of it."""
    script = f'{mount} && exec "$0" "$@"'
    command = ["unshare", "-m", "sh", "-c", script, sys.executable, "-c", IN_A_MOUNT, folder]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    raise pickle.loads(bytes.fromhex(done.stdout))


@provokes("HR-LOG-004")
def read_only(bench: Bench) -> None:
    bench.log().close()
    folder = bench.folder
    if may_mount():
        in_a_mount(folder, f"mount --bind {folder} {folder} && mount -o remount,ro,bind {folder}")
    elif not ROOT:
        shutil.rmtree(os.path.join(folder, "live"))
        os.chmod(folder, 0o555)
        bench.stack.callback(os.chmod, folder, 0o755)
        hr.connect(folder).create_topic("new", "a bigint")
    else:
        refused_by_the_system(bench, errno.EROFS)


def refused_by_the_system(bench: Bench, number: int) -> None:
    def refuse(self: Any, path: str, size: int) -> Any:
        raise OSError(number, os.strerror(number), path)

    bench.patch.setattr(system.OsSystem, "map", refuse)
    hr.connect(bench.folder).create_topic("new", "a bigint")


@provokes("HR-LOG-004")
def not_permitted(bench: Bench) -> None:
    refused_by_the_system(bench, errno.EACCES)


@provokes("HR-LOG-005")
def full_disk(bench: Bench) -> None:
    if may_mount():
        os.makedirs(bench.folder)
        in_a_mount(bench.folder, f"mount -t tmpfs -o size=200k none {bench.folder}")
    no_room(bench, errno.ENOSPC)


@provokes("HR-LOG-005")
def quota(bench: Bench) -> None:
    no_room(bench, errno.EDQUOT)


def no_room(bench: Bench, number: int) -> None:
    log, machine = bench.machine_log()
    failures = iter([OSError(number, os.strerror(number))])
    machine.fails = lambda call, path: next(failures, None) if call == "pwritev" else None
    log.append("t", [{"a": 1}])


@provokes("HR-LOG-006")
def damaged_rows(bench: Bench) -> None:
    log = bench.log()
    log.append("t", [{"a": 1, "b": "a text that can be found"}])
    path = os.path.join(bench.folder, "journal", "00000001.log")
    flip(path, Path(path).read_bytes().index(b"a text that"))
    list(log.read("t"))


@provokes("HR-LOG-006")
def missing_journal(bench: Bench) -> None:
    bench.log().close()
    shutil.rmtree(os.path.join(bench.folder, "journal"))
    shutil.rmtree(os.path.join(bench.folder, "live"))
    hr.connect(bench.folder)


@provokes("HR-LOG-007")
def failed_sync(bench: Bench) -> None:
    log, machine = bench.machine_log()
    error = OSError(errno.EIO, "Input/output error")
    machine.fails = lambda call, path: error if call == "fdatasync" else None
    with pytest.raises(errors.Unknown):
        log.append("t", [{"a": 1}])
    log.append("t", [{"a": 2}])


@provokes("HR-LOG-008")
def stopped_holder(bench: Bench) -> None:
    log = bench.log(lock_timeout_seconds=0.2)
    code = "log = hr.connect(folder); log.journal.append_lock.acquire(5); say(1); time.sleep(60)"
    child = bench.stack.enter_context(Child(bench.folder, code))
    child.line()
    os.kill(child.pid, signal.SIGSTOP)
    time.sleep(0.1)
    with pytest.raises(errors.LockTimeout) as caught:
        log.append("t", [{"a": 1}])
    child.kill()
    assert str(child.pid) in caught.value.fact
    assert "stopped" in caught.value.render()
    raise caught.value


@provokes("HR-LOG-009")
def closed(bench: Bench) -> None:
    log = bench.log()
    log.close()
    log.append("t", [{"a": 1}])


# --- topics and rows ------------------------------------------------------------------------------


@provokes("HR-LOG-010")
def unknown_topic(bench: Bench) -> None:
    bench.log().read("tt")


@provokes("HR-LOG-011")
def topic_exists(bench: Bench) -> None:
    bench.log().create_topic("t", "a bigint")


@provokes("HR-LOG-012")
def bad_topic_name(bench: Bench) -> None:
    bench.log().create_topic("no spaces", "a bigint")


@provokes("HR-LOG-013")
def bad_schema(bench: Bench) -> None:
    bench.log().create_topic("u", "a number")


@provokes("HR-LOG-014")
def schema_change_refused(bench: Bench) -> None:
    bench.log().alter_topic("t", add="c int not null")


@provokes("HR-LOG-015")
def wrong_column(bench: Bench) -> None:
    bench.log().append("t", [{"a": 1, "c": 2}])


@provokes("HR-LOG-016")
def wrong_type(bench: Bench) -> None:
    bench.log().append("t", [{"a": "one"}])


@provokes("HR-LOG-017")
def missing_key(bench: Bench) -> None:
    bench.log().append("t", [{"b": "x"}])


@provokes("HR-LOG-018")
def batch_too_large(bench: Bench) -> None:
    bench.log(append_bytes_max=1000).append("t", [{"a": 1, "b": "x" * 5000}])


@provokes("HR-LOG-019")
def bad_rows(bench: Bench) -> None:
    bench.log().append("t", 5)


@provokes("HR-LOG-019")
def bad_headers(bench: Bench) -> None:
    bench.log().append("t", [{"a": 1}], headers=[{}, {}])


@provokes("HR-LOG-019")
def bad_condition(bench: Bench) -> None:
    bench.log().append("t", [{"a": 1}], expect={"x": -1})


@provokes("HR-LOG-020")
def conflict(bench: Bench) -> None:
    bench.log().append("t", [{"a": 1}], expect={"x": 3})


@provokes("HR-LOG-021")
def unknown(bench: Bench) -> None:
    log, machine = bench.machine_log()
    error = OSError(errno.EIO, "Input/output error")
    machine.fails = lambda call, path: error if call == "fdatasync" else None
    log.append("t", [{"a": 1}])


@provokes("HR-LOG-022")
def fenced(bench: Bench) -> None:
    log = bench.log()
    zombie = log.writer("w")
    log.writer("w")
    zombie.append("t", [{"a": 1}])


@provokes("HR-LOG-023")
def bad_position(bench: Bench) -> None:
    log = bench.log()
    log.read("t", after=log.position + 1)


@provokes("HR-LOG-023")
def bad_offset(bench: Bench) -> None:
    bench.log().read("t", start={0: 99})


@provokes("HR-LOG-031")
def rows_that_are_gone(bench: Bench) -> None:
    log = bench.log()
    log.append("t", [{"a": 1}])
    log.set_topic("t", retention_seconds=0)
    log.keeper().turn(close=True)
    list(log.read("t", 0))


@provokes("HR-LOG-032")
def two_keepers(bench: Bench) -> None:
    log, first = bench.log(), bench.log().keeper()
    assert first.take()
    log.keeper().turn()


@provokes("HR-LOG-024")
def piece_invalid(bench: Bench) -> None:
    log = bench.log()
    piece = log.stage("t", [{"a": 1}])
    os.unlink(os.path.join(bench.folder, "pieces", piece.name))
    log.append("t", piece)


@provokes("HR-LOG-025")
def reserved_name(bench: Bench) -> None:
    bench.log().create_topic("u", "_mine bigint")


@provokes("HR-LOG-026")
def wait_timeout(bench: Bench) -> None:
    log = bench.log()
    log.wait(log.position + 1, timeout=0.01)


@provokes("HR-LOG-027")
def bad_input_line(bench: Bench) -> None:
    bench.log()
    lines = Path(bench.folder + ".ndjson")
    lines.write_text('{"a": 1}\n{"a": \n')
    command = ["topic", "append", "t", "--log", bench.folder, "--file", str(lines), "--strict"]
    cli.main(command, prog_name="headrace", standalone_mode=False)


@provokes("HR-LOG-028")
def producer_full(bench: Bench) -> None:
    enough = threading.Event()

    class Stuck:
        def append(self, topic: str, rows: Any, *, headers: Any = None) -> Any:
            enough.wait(60)
            return bench.log().append(topic, rows)

        def taken_in(self, topic: str, rows: Any, headers: Any = None) -> Any:
            return bench.log().taken_in(topic, rows, headers)

    producer = Producer(Stuck(), "t", rows_max=1, batch_rows_max=1, timeout_seconds=0.05)
    bench.stack.callback(producer.close)
    bench.stack.callback(enough.set)
    for a in range(3):
        producer.send({"a": a})


@provokes("HR-LOG-029")
def io_failed(bench: Bench) -> None:
    log, machine = bench.machine_log()
    failures = iter([OSError(errno.EIO, "Input/output error")])
    machine.fails = lambda call, path: next(failures, None) if call == "pwritev" else None
    log.append("t", [{"a": 1}])


@provokes("HR-LOG-030")
def bad_setting(bench: Bench) -> None:
    hr.connect(bench.folder, durability="sometimes")


@provokes("HR-LOG-030")
def unknown_setting(bench: Bench) -> None:
    hr.connect(bench.folder, durabilty="fsync")


@provokes("HR-LOG-030")
def kafka(bench: Bench) -> None:
    hr.connect("kafka://localhost:9092")


@provokes("HR-TABLE-001")
def pack_damaged(bench: Bench) -> None:
    import pyarrow as pa

    from headrace.tables.packs import Packs

    attempt = Packs(bench.folder).attempt(1)
    ref = attempt.add(pa.record_batch({"a": [1, 2, 3]}))
    attempt.finish()
    flip(f"{bench.folder}/{ref.pack}", ref.offset + ref.length // 2)
    Packs(bench.folder).open(ref)


@provokes("HR-TABLE-002")
def not_a_table(bench: Bench) -> None:
    log = bench.log()
    log.create_topic("plain", "a bigint")
    log.table("plain")


@provokes("HR-CLI-001")
def bad_usage(bench: Bench) -> None:
    import click

    try:
        cli.main(["topic", "lst"], prog_name="headrace", standalone_mode=False)
    except click.ClickException as error:
        raise as_usage(error) from error


# --- views: with the Spark session of the tests in tests/pipelines, in the same worker ------------


def of_view(provocation: Callable[[str, pytest.MonkeyPatch], None]) -> Provocation:
    def function(bench: Bench) -> None:
        provocation(bench.folder, bench.patch)

    function.__name__ = provocation.__name__
    return function


OF_OTHERS: list[tuple[str, Any]] = [*OF_VIEWS.items(), *OF_PROJECTS.items(), *OF_GROUPS.items()]
for view_code, view_provocations in [*OF_OTHERS, *OF_FOLLOWERS.items()]:
    for view_provocation in view_provocations:
        provokes(view_code)(of_view(view_provocation))


# --- capture: values ------------------------------------------------------------------------------


@provokes("HR-CAPTURE-020")
def composite_type(bench: Bench) -> None:
    arrow_type(PgType(16400, "address", "c"), column="home")


@provokes("HR-CAPTURE-021")
def not_a_number_as_decimal(bench: Bench) -> None:
    convert_one(b"NaN", PgType(1700, "numeric", "b"), (5 << 16 | 2) + 4)


@provokes("HR-CAPTURE-021")
def timestamp_beyond_64_bits(bench: Bench) -> None:
    convert_one(b"294276-12-31 23:59:59", PgType(1114, "timestamp", "b"))


@provokes("HR-CAPTURE-021")
def two_dimensions(bench: Bench) -> None:
    integer = PgType(23, "int4", "b")
    convert_one(b"{{1},{2}}", PgType(1007, "_int4", "b", element=integer))


@provokes("HR-CAPTURE-021")
def not_as_the_server_prints(bench: Bench) -> None:
    convert_one(b"17.3.2024", PgType(1082, "date", "b"))


def convert_one(text: bytes, pg_type: PgType, modifier: int = -1) -> None:
    convert(pa.array([text]), pg_type, modifier, column="a")


# --- capture: the replication stream --------------------------------------------------------------


@provokes("HR-CAPTURE-022")
def message_of_no_known_kind(bench: Bench) -> None:
    Assembler().feed(b"?", 0x16B3748)


@provokes("HR-CAPTURE-022")
def frame_cut_short(bench: Bench) -> None:
    frame(b"w\0\0")


# --- capture: while it runs -----------------------------------------------------------------------


@provokes("HR-CAPTURE-023")
def row_that_the_log_does_not_have(bench: Bench) -> None:
    log = bench.log()
    with (
        fresh_database(bench.postgres, "provoked") as name,
        bench.postgres.connect(name) as source,
    ):
        source.execute("create table t(id int primary key, a int)")
        source.execute("insert into t values (1, 1)")
        capture = capturing.Capture(log, "shop", bench.postgres.dsn(name))
        capture.run("caught up")
        log.append("shop.public.t", [{"id": 1, "a": 1, "_weight": -1}])
        source.execute("update t set a = 2")
        capture.run("caught up")


@provokes("HR-CAPTURE-024")
def database_that_is_away(bench: Bench) -> None:
    bench.patch.setattr(capturing, "PATIENCE_SECONDS", 0.0)
    capturing.Capture(bench.log(), "shop", "host=127.0.0.1 port=1 dbname=nowhere").run("caught up")


# --- capture: as it is asked for ------------------------------------------------------------------


@provokes("HR-CAPTURE-025")
def psycopg_not_installed(bench: Bench) -> None:
    bench.patch.setitem(sys.modules, "psycopg", None)
    hr.capture(bench.log(), "shop", "host=127.0.0.1 dbname=shop")


@provokes("HR-CAPTURE-026")
def capture_that_was_not_added(bench: Bench) -> None:
    hr.capture(bench.log(), "shop")


@provokes("HR-CAPTURE-027")
def two_captures_of_one_name(bench: Bench) -> None:
    log = bench.log()
    for _ in range(2):
        asked.add(log, "shop", asked.Settings("host=127.0.0.1 dbname=shop"))


@provokes("HR-CAPTURE-028")
def capture_of_no_table(bench: Bench) -> None:
    command = ["capture", "add", "shop", bench.postgres.dsn(), "--log", bench.folder]
    cli.main([*command, "--tables", "nothing.*"], standalone_mode=False)


@provokes("HR-CAPTURE-028")
def statement_that_is_refused(bench: Bench) -> None:
    with reached(bench.postgres.dsn()) as connection:
        connection.execute("drop publication nothing")


# --- capture: started again; the other ways to each of these are in tests/capture/test_resume.py --


@pytest.fixture(scope="module")
def postgres() -> Iterator[Server]:
    with Server() as server:
        yield server


def of_resume(code: str) -> Provocation:
    provocation = OF_RESUME[code][0]

    def function(bench: Bench) -> None:
        with fresh_database(bench.postgres, "provoked") as database:
            provocation(bench.postgres, database)

    function.__name__ = provocation.__name__
    return function


for resume_code in OF_RESUME:
    provokes(resume_code)(of_resume(resume_code))


# --- verify and tokens ----------------------------------------------------------------------------


@provokes("HR-VERIFY-001")
def not_in_the_order_of_the_key(bench: Bench) -> None:
    from headrace.derived.verify import Comparison

    rows = pa.RecordBatch.from_pydict({"k": ["a", "B"]})
    list(Comparison([rows.slice(1)], [rows], ["k"]))


@provokes("HR-VERIFY-002")
def a_follower_that_is_not_there(bench: Bench) -> None:
    from headrace.runtime.verify import Known, verify

    verify(bench.log(), "shop/main", Known())


@provokes("HR-VERIFY-003")
def a_cut_that_is_passed(bench: Bench) -> None:
    from headrace.derived.sqlite import SQLiteTarget
    from headrace.interfaces import Cut

    target = SQLiteTarget(f"{bench.folder}.db", "shop/main")
    bench.stack.callback(target.close)
    target.mark(1, "log")
    target.wipe(1, [])
    target.swap(1, Cut(7, 7), [], lambda refused: None)
    target.apply(1, Cut(6, 6), [], lambda refused: None)


@provokes("HR-READ-001")
def a_token_of_nothing(bench: Bench) -> None:
    hr.rows(bench.log(), "t", after="yesterday")


@provokes("HR-READ-002")
def a_token_from_the_future(bench: Bench) -> None:
    hr.rows(bench.log(), "t", after=4711, timeout=0.01)


# --- backups --------------------------------------------------------------------------------------


@provokes("HR-BACKUP-001")
def a_folder_without_a_manifest(bench: Bench) -> None:
    os.makedirs(bench.folder)
    hr.restore(bench.folder, f"{bench.folder}.restored")


@provokes("HR-BACKUP-002")
def a_backup_with_a_bad_byte(bench: Bench) -> None:
    made = bench.log().backup(f"{bench.folder}.backup")
    newest = next(file for file in made.files if file.path.startswith("journal/"))
    flip(f"{made.folder}/{newest.stored}", 100)
    hr.restore(made.folder, f"{bench.folder}.restored")


@provokes("HR-BACKUP-003")
def a_backup_of_another_log(bench: Bench) -> None:
    with hr.connect(f"{bench.folder}.other") as other:
        other.backup(f"{bench.folder}.backup")
    bench.log().backup(f"{bench.folder}.backup")


@provokes("HR-BACKUP-004")
def a_restore_over_a_log(bench: Bench) -> None:
    bench.log().backup(f"{bench.folder}.backup")
    hr.restore(f"{bench.folder}.backup", bench.folder)


# --- the HTTP interface ---------------------------------------------------------------------------


def of_serving(code: str) -> Provocation:
    def by_request(bench: Bench) -> None:
        OF_SERVING[code](bench.folder)

    return by_request


for serving_code in OF_SERVING:
    provokes(serving_code)(of_serving(serving_code))


# --- queries --------------------------------------------------------------------------------------


def of_queries(code: str) -> Provocation:
    def by_query(bench: Bench) -> None:
        OF_QUERIES[code](bench.folder, bench.patch)

    return by_query


for query_code in OF_QUERIES:
    provokes(query_code)(of_queries(query_code))


# --- the walk -------------------------------------------------------------------------------------

HOLES = re.compile(r"\{[a-z_.]*\}|\bNone\b|<[a-z_. ]+ object|%[sd]|\S  +|\bTODO\b")
CASES = [
    pytest.param(
        code,
        function,
        id=f"{code}-{function.__name__}",
    )
    for code, functions in PROVOCATIONS.items()
    for function in functions
]


@pytest.mark.parametrize("code", errors.catalogue())
def test_every_code_is_provoked_and_documented(code: str) -> None:
    """Each code of the catalogue has a provocation here and its text on the page of errors. R-D3"""
    assert code in PROVOCATIONS, f"nothing here provokes {code}"
    assert f"## {code}:" in ERRORS_PAGE.read_text()


def test_nothing_else_is_provoked() -> None:
    """Every provocation is for a code that there is. R-D3"""
    assert set(PROVOCATIONS) <= set(errors.catalogue())


@pytest.mark.parametrize(("code", "provocation"), CASES)
def test_an_error_says_what_where_and_what_to_do(
    code: str,
    provocation: Provocation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Provoked, an error has its code, a fact, a place, a reason and a fix, and no holes. R-D3"""
    with ExitStack() as stack:
        stack.callback(monkeypatch.undo)
        bench = Bench(str(tmp_path / "log"), stack, monkeypatch, request)
        with pytest.raises(errors.HeadraceError) as caught:
            provocation(bench)
    error = caught.value
    assert error.code == code, str(error)
    assert type(error) is errors.catalogue()[code]
    head, *rest = error.render().splitlines()
    assert head == f"error[{code}]: {error.fact}"
    assert error.fact
    assert error.fact == error.fact.strip().rstrip(".")
    expected = ["why", "fix"] if code == "HR-CLI-001" else ["at", "why", "fix"]
    assert [line.split(":")[0].strip() for line in rest] == expected, error.render()
    assert not HOLES.search(error.render()), error.render()
    assert json.loads(json.dumps(error.to_json()))["code"] == code
    again = pickle.loads(pickle.dumps(error))
    assert again.render() == error.render()
