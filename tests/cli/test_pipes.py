"""Real processes and real pipes between them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import headrace as hr
from headrace.log.embedded.log import EmbeddedLog
from tests.cli.conftest import started

PIPE = subprocess.PIPE
PATIENCE = 60

TYPES = (
    "b boolean, i8 tinyint, i16 smallint, i32 int, i64 bigint not null, f float, d double,"
    " n decimal(38,10), s string, x binary, day date, at timestamp, local timestamp_ntz, t time,"
    " span interval day to second, l array<date>, m map<int, binary>,"
    " r struct<a: decimal(5,2), b: array<timestamp>>"
)
ROW = {
    "b": True,
    "i8": -1,
    "i16": 2,
    "i32": 3,
    "i64": 9007199254740993,
    "f": 0.1,
    "d": "NaN",
    "n": "1234567890.0123456789",
    "s": "ä\n",
    "x": "AP8=",
    "day": "2024-02-29",
    "at": "2024-01-31T12:00:00.000001Z",
    "local": "2024-01-31T12:00:00",
    "t": "23:59:59.5",
    "span": "P1DT0.5S",
    "l": ["2024-01-01", None],
    "m": [[1, "AA=="], [2, None]],
    "r": {"a": "1.50", "b": ["2024-01-01T00:00:00Z"]},
}


@pytest.fixture
def log(folder: str) -> Iterator[EmbeddedLog]:
    with hr.connect(folder) as log:
        log.create_topic("from", TYPES, key="i64", partitions=2)
        log.create_topic("to", TYPES, key="i64")
        yield log


@pytest.mark.parametrize("form", ["ndjson", "arrow"])
def test_rows_of_every_type_through_a_pipe(folder: str, log: object, form: str) -> None:
    """`topic read | topic append` between two processes copies every type exactly."""
    lines = [json.dumps(ROW), json.dumps(dict.fromkeys(ROW) | {"i64": 1})]
    first = started(folder, "topic", "append", "from", stdin=PIPE, stderr=PIPE)
    _, said = first.communicate("\n".join(lines).encode(), PATIENCE)
    assert (first.returncode, b"2 rows appended" in said) == (0, True), said
    reader = started(folder, "topic", "read", "from", "--format", form, stdout=PIPE)
    writer = started(
        folder, "topic", "append", "to", "--format", form, stdin=reader.stdout, stderr=PIPE
    )
    assert reader.stdout is not None
    reader.stdout.close()
    _, said = writer.communicate(timeout=PATIENCE)
    assert (writer.returncode, reader.wait(PATIENCE)) == (0, 0), said
    shown = started(folder, "topic", "read", "to", stdout=PIPE)
    out, _ = shown.communicate(timeout=PATIENCE)
    found = sorted(map(json.loads, out.splitlines()), key=lambda row: row["i64"])
    assert found == [dict.fromkeys(ROW) | {"i64": 1}, ROW]


@pytest.mark.parametrize("form", ["ndjson", "arrow"])
def test_a_reader_that_has_seen_enough(folder: str, form: str) -> None:
    """When the other end of the pipe closes, `read` ends at once, quietly, with exit code 0."""
    with hr.connect(folder) as log:
        log.create_topic("x", "a bigint")
        log.append("x", [{"a": n} for n in range(200_000)])
    reader = started(folder, "topic", "read", "x", "--format", form, stdout=PIPE, stderr=PIPE)
    assert reader.stdout is not None
    assert reader.stderr is not None
    assert reader.stdout.read(5)
    reader.stdout.close()
    assert (reader.wait(PATIENCE), reader.stderr.read()) == (0, b"")
    reader.stderr.close()


def lines_of(process: subprocess.Popen[bytes], count: int) -> list[bytes]:
    """The next lines of a process, which must come in time."""
    assert process.stdout is not None
    found = []
    for _ in range(count):
        assert select.select([process.stdout], [], [], PATIENCE)[0], "nothing came"
        found.append(process.stdout.readline())
    return found


@pytest.fixture
def tail(folder: str, log: EmbeddedLog) -> Iterator[subprocess.Popen[bytes]]:
    """A `topic tail` of 'to' that has shown its first row and waits."""
    log.append("to", [{"i64": 1}])
    process = started(folder, "topic", "tail", "to", "--columns", "i64", stdout=PIPE, stderr=PIPE)
    try:
        assert lines_of(process, 1) == [b'{"i64": 1}\n']
        yield process
    finally:
        process.kill()
        process.communicate()


def test_tail_is_woken_by_another_process(
    folder: str,
    log: EmbeddedLog,
    tail: subprocess.Popen[bytes],
) -> None:
    """A row appended by another process is printed without delay; Ctrl-C ends it quietly."""
    for number in (2, 3):
        log.append("to", [{"i64": number}])
        assert lines_of(tail, 1) == [b'{"i64": %d}\n' % number]
    writer = started(folder, "topic", "append", "to", stdin=PIPE, stderr=PIPE)
    writer.communicate(b'{"i64": 4}\n', PATIENCE)
    assert lines_of(tail, 1) == [b'{"i64": 4}\n']
    tail.send_signal(signal.SIGINT)
    assert tail.wait(PATIENCE) == 0
    assert tail.stderr is not None
    assert tail.stderr.read() == b""


def test_tail_ends_when_nobody_reads(tail: subprocess.Popen[bytes]) -> None:
    """`tail | head -1` ends with head, though no row comes any more."""
    assert tail.stdout is not None
    assert tail.stderr is not None
    tail.stdout.close()
    assert tail.wait(PATIENCE) == 0
    assert tail.stderr.read() == b""
    tail.stdout = None


def test_tail_ends_where_nobody_ever_read(folder: str, log: object) -> None:
    """Also where the shell has it ignore Ctrl-C, as it does with what runs in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for _ in range(4):  # sooner or later than the reading begins
            with started(folder, "topic", "tail", "to", stdout=PIPE, stderr=PIPE) as process:
                assert process.stdout is not None
                assert process.stderr is not None
                process.stdout.close()
                assert process.wait(PATIENCE) == 0
                assert process.stderr.read() == b""
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_waiting_tail_does_nothing(tail: subprocess.Popen[bytes]) -> None:
    """A tail that waits is not running: no system call wakes it while nothing is appended."""

    def switches() -> int:
        status = Path(f"/proc/{tail.pid}/status").read_text()
        words = dict(line.split(":\t", 1) for line in status.splitlines())
        return int(words["voluntary_ctxt_switches"])

    time.sleep(0.3)
    before = switches()
    time.sleep(1)
    assert switches() - before <= 1


def test_a_trickling_pipe_is_not_kept_waiting(folder: str, log: EmbeddedLog) -> None:
    """Lines that come one by one are appended as they come, not when a batch is full."""
    writer = started(folder, "topic", "append", "to", stdin=PIPE, stderr=PIPE)
    assert writer.stdin is not None
    for number in (1, 2, 3):
        writer.stdin.write(b'{"i64": %d}\n' % number)
        writer.stdin.flush()
        deadline = time.monotonic() + PATIENCE
        while log.ends("to") != [number] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert log.ends("to") == [number]
    _, said = writer.communicate(timeout=PATIENCE)
    assert b"3 rows appended to 'to' in 3 entries" in said


def test_ctrl_c_while_appending(folder: str, log: EmbeddedLog) -> None:
    """Ctrl-C says what was appended before, with exit code 130."""
    writer = started(folder, "topic", "append", "to", stdin=PIPE, stderr=PIPE)
    assert writer.stdin is not None
    assert writer.stderr is not None
    writer.stdin.write(b'{"i64": 1}\n')
    writer.stdin.flush()
    log.wait(3, PATIENCE)
    time.sleep(0.1)
    writer.send_signal(signal.SIGINT)
    assert writer.wait(PATIENCE) == 130
    assert b"1 row appended" in writer.stderr.read()
    writer.communicate()


def test_arrow_is_not_for_a_terminal(folder: str, log: object) -> None:
    """Binary output on a terminal is refused with what to do instead."""
    ours, theirs = os.openpty()
    done = started(
        folder, "topic", "read", "to", "--format", "arrow", stdout=theirs, stderr=PIPE, stdin=theirs
    )
    _, said = done.communicate(timeout=PATIENCE)
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 2
    assert b"not for a terminal" in said


def _shown(folder: str, arguments: list[str], columns: int, extra: dict[str, str]) -> str:
    """What a terminal so wide gets to see."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    child = started(folder, *arguments, stdout=theirs, stderr=theirs, extra=extra)
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # all who had it open are gone
        while more := os.read(ours, 4096):
            seen += more
    os.close(ours)
    child.wait(PATIENCE)
    return seen.decode()


def test_colours_are_left_out_where_nobody_wants_them(folder: str, log: object) -> None:
    arguments = ["topic", "show", "form"]
    assert "\x1b[31m" in _shown(folder, arguments, 80, {"NO_COLOR": ""})
    assert "\x1b" not in _shown(folder, arguments, 80, {"NO_COLOR": "1"})


def test_progress_stays_on_one_line_of_a_narrow_terminal(
    folder: str, log: EmbeddedLog, tmp_path: Path
) -> None:
    """A line that wraps cannot be taken away again."""
    log.create_topic("n", "a bigint")
    lines = tmp_path / "lines"
    lines.write_text("".join(f'{{"a": {i}}}\n' for i in range(100_000)))
    arguments = ["topic", "append", "n", "--file", str(lines)]
    seen = _shown(folder, arguments, 20, {"COLUMNS": ""})
    drawn = [line for line in seen.partition(" appended")[0].split("\r\x1b[K") if line]
    assert len(drawn) > 1
    assert max(map(len, drawn[:-1])) <= 19


def test_a_file_that_takes_nothing_is_named(folder: str, log: object) -> None:
    with started(
        folder, "topic", "append", "to", "--aside", "/dev/full", stdin=PIPE, stderr=PIPE
    ) as (process):
        _, complaint = process.communicate(b"{}\n", PATIENCE)
    assert process.returncode == 1
    assert b"at: /dev/full" in complaint


@pytest.mark.parametrize("command", ["ls", "read"])
def test_an_output_that_takes_nothing_is_an_error_in_words(folder: str, command: str) -> None:
    """A full disk under `> file`, and no standard output at all, are no reason for a traceback."""
    with hr.connect(folder) as log:
        log.create_topic("t", "a bigint")
        log.append("t", [{"a": 1}])
    arguments = ["topic", command, *(["t"] if command == "read" else [])]
    with open("/dev/full", "wb") as full:
        child = started(folder, *arguments, stdout=full, stderr=PIPE)
    _, said = child.communicate(timeout=PATIENCE)
    assert (child.returncode, said.splitlines()[:2]) == (
        1,
        [b"error[HR-LOG-029]: No space left on device", b"  at: standard output"],
    )
    for form in ("ndjson", "arrow") if command == "read" else ():
        asked = [*arguments, "--format", form]
        child = started(folder, *asked, stderr=PIPE, preexec_fn=lambda: os.close(1))
        _, said = child.communicate(timeout=PATIENCE)
        assert (child.returncode, said.splitlines()[0]) == (
            2,
            b"error[HR-CLI-001]: standard output is closed",
        )


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["topic", "--help"]])
def test_help_that_nobody_can_read_is_no_reason_for_a_traceback(
    folder: str, arguments: list[str]
) -> None:
    with open("/dev/full", "wb") as full:
        child = started(folder, *arguments, stdout=full, stderr=PIPE)
    _, said = child.communicate(timeout=PATIENCE)
    assert child.returncode == 1
    assert said.splitlines()[0] == b"error[HR-LOG-029]: No space left on device"


def test_a_command_works_without_a_standard_error(folder: str) -> None:
    """Nor does the log get the number of a stream that anybody may write to."""
    with hr.connect(folder) as log:
        log.create_topic("t", "a bigint")
    for arguments in (["log", "check"], ["topic", "append", "t"]):
        child = started(folder, *arguments, stdin=PIPE, stdout=PIPE, preexec_fn=lambda: os.close(2))
        child.communicate(b'{"a": 1}\n', timeout=PATIENCE)
        assert child.returncode == 0
    with hr.connect(folder) as log:
        assert [row for batch in log.read("t") for row in batch.to_pylist()] == [{"a": 1}]


def _stream(batch: pa.RecordBatch) -> bytearray:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return bytearray(sink.getvalue().to_pybytes())


@pytest.mark.parametrize("what", ["letter", "offset"])
def test_rows_of_a_damaged_arrow_stream_are_set_aside(
    folder: str, tmp_path: Path, what: str
) -> None:
    """Arrow believes what it reads; taken as it came, no reader would get past such a row."""
    with hr.connect(folder) as log:
        log.create_topic("t", "a bigint, s string")
    data = _stream(pa.record_batch({"a": [1, 2, 3], "s": ["one", "two", "three"]}))
    if what == "letter":
        data[data.index(b"two")] = 0xFF
    else:
        at = data.index(b"".join(end.to_bytes(4, "little") for end in (3, 6, 11)))
        data[at : at + 4] = (2**30).to_bytes(4, "little")
    aside = tmp_path / "aside"
    arguments = ["topic", "append", "t", "--format", "arrow", "--json", "--aside", str(aside)]
    child = started(folder, *arguments, stdin=PIPE, stdout=PIPE)
    out, _ = child.communicate(bytes(data), timeout=PATIENCE)
    assert child.returncode == 3
    bad = [json.loads(line) for line in aside.read_text().splitlines()]
    assert [(one["line"], one["reason"], json.loads(one["text"])) for one in bad][-1] == (
        2,
        "not valid Arrow",
        {"a": 2},
    )
    assert json.loads(out)["rows"] == 3 - len(bad)
    with hr.connect(folder) as log:
        kept = [row["a"] for batch in log.read("t") for row in batch.to_pylist()]
    assert kept == ([1, 3] if what == "letter" else [3])
