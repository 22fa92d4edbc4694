"""The commands of `headrace topic`, as somebody would type them."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headrace as hr
from headrace.log.embedded.log import EmbeddedLog
from tests.cli.conftest import Headrace

ROWS = "".join(f'{{"user": {n}, "url": "/{n}"}}\n' for n in range(10))


# --- create, ls, show, alter ----------------------------------------------------------------------


def test_create_says_what_it_made(headrace: Headrace, folder: str) -> None:
    """The first topic makes the log, and both are named on stderr; stdout stays empty."""
    done = headrace("topic", "create", "clicks", "user bigint, url string", "--key", "user")
    assert (done.code, done.out) == (0, "")
    assert f"a new log was made in {folder}" in done.err
    assert "topic 'clicks' created: 2 columns, key user, 1 partition" in done.err


def test_create_twice(clicks: Headrace) -> None:
    """An existing topic is an error, unless --if-missing and it is equal."""
    again = ("topic", "create", "clicks", "user bigint")
    assert "HR-LOG-011" in clicks(*again).err
    assert clicks(*again).code == 1
    assert "HR-LOG-011" in clicks(*again, "--if-missing").err
    clicks("topic", "create", "x", "a int", "--if-missing")
    done = clicks("topic", "create", "x", "a int", "--if-missing")
    assert (done.code, "is there already" in done.err) == (0, True)


def test_create_of_changes_with_all_options(headrace: Headrace) -> None:
    """Kind, event time, several keys and partitions come out of `show --json` again."""
    options = ("--key", "a, b", "--event-time", "t", "--partitions", "4", "--kind", "changes")
    made = headrace("topic", "create", "x", "a int, b string, t timestamp", *options, "--json")
    shown = headrace("topic", "show", "x", "--json").json
    assert made.json == shown
    assert (shown["kind"], shown["key"], shown["event_time"]) == ("changes", ["a", "b"], "t")
    assert shown["ends"] == [0, 0, 0, 0]
    assert shown["ddl"].endswith("_weight bigint not null, _op string")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("a b", "x int"), "HR-LOG-012"),
        (("x", "x itn"), "HR-LOG-013"),
        (("x", "_x int"), "HR-LOG-025"),
        (("x", "x int", "--key", "y"), "HR-LOG-015"),
        (("x", "x int", "--partitions", "0"), "HR-LOG-030"),
        (("x", "x int", "--event-time", "x"), "HR-LOG-013"),
    ],
)
def test_create_refuses(headrace: Headrace, arguments: tuple[str, ...], code: str) -> None:
    """What cannot be a topic is an error of the catalogue, exit code 1."""
    done = headrace("topic", "create", *arguments)
    assert done.code == 1
    assert f"error[{code}]" in done.err


def test_ls(clicks: Headrace) -> None:
    """All topics are listed, with rows and columns, as a table and as JSON."""
    clicks("topic", "create", "notes", "text")
    clicks("topic", "append", "clicks", stdin=ROWS)
    head, *lines = clicks("topic", "ls").out.splitlines()
    assert head.split() == ["topic", "kind", "rows", "partitions", "key", "columns"]
    assert lines[0].startswith("clicks  events    10           3  user  user bigint not null")
    assert lines[1].endswith("(text)")
    assert [topic["rows"] for topic in clicks("topic", "ls", "--json").json] == [10, 0]


def test_ls_of_an_empty_log(headrace: Headrace, folder: str) -> None:
    """A log without topics lists nothing and says what to do."""
    hr.connect(folder).close()
    done = headrace("topic", "ls")
    assert (done.code, done.out) == (0, "")
    assert "topic create" in done.err


def test_show_for_a_newcomer(clicks: Headrace) -> None:
    """`show` explains kind, key, columns, partitions and versions, and what to type next."""
    clicks("topic", "append", "clicks", stdin=ROWS)
    clicks("topic", "alter", "clicks", "--add", "country string", "--rename", "url=link")
    out = clicks("topic", "show", "clicks").out
    for said in (
        "events: rows are only added",
        "10 in 3 partitions",
        "equal keys are in one partition",
        "user     bigint         key, not null",
        "renamed from 'url'",
        "retired: only older rows have it",
        "2  renamed 'url' to 'link', added 'country'",
        "headrace topic read clicks --limit 5",
    ):
        assert said in out


def test_show_of_many_partitions(headrace: Headrace) -> None:
    """Hundreds of partitions are summed up, not listed."""
    headrace("topic", "create", "x", "a int", "--partitions", "300")
    out = headrace("topic", "show", "x").out
    assert "partitions hold 0 to 0 rows" in out
    assert len(out.splitlines()) < 20


def test_alter_says_what_it_means(clicks: Headrace) -> None:
    """Each change is named with its meaning for old rows; a retype says: new generation."""
    change = (
        "--widen",
        "price=decimal(12,2)",
        "--retire",
        "at",
        "--add",
        "a int",
        "--add",
        "b int",
    )
    done = clicks("topic", "alter", "clicks", *change)
    assert "schema version 2, generation 1" in done.err
    assert "older rows are converted" in done.err
    assert "'at' was retired" in done.err
    assert "'b' (int) was added: it is null in older rows" in done.err
    done = clicks("topic", "alter", "clicks", "--retype", "url=binary")
    assert "schema version 3, generation 2" in done.err
    assert "'url' is now binary, in a new generation" in done.err
    done = clicks("topic", "alter", "clicks", "--nullable", "a")
    assert done.code == 1


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 2, "nothing to change is named"),
        (("--widen", "price"), 2, "is not NAME=VALUE"),
        (("--rename", "url=a", "--rename", "url=b"), 2, "names 'url' twice"),
        (("--widen", "url=int"), 1, "HR-LOG-014"),
        (("--retire", "urk"), 1, "did you mean 'url'"),
    ],
)
def test_alter_refuses(clicks: Headrace, arguments: tuple[str, ...], code: int, said: str) -> None:
    """A change that cannot be is refused with its reason, and the topic stays as it was."""
    done = clicks("topic", "alter", "clicks", *arguments)
    assert done.code == code
    assert said in done.err
    assert len(clicks("topic", "show", "clicks", "--json").json["schemas"]) == 1


# --- append ---------------------------------------------------------------------------------------


def test_append_and_read(clicks: Headrace) -> None:
    """Rows from stdin come out of `read`; the summary goes to stderr with the position."""
    done = clicks("topic", "append", "clicks", stdin=ROWS)
    assert (done.code, done.out) == (0, "")
    assert done.err == "10 rows appended to 'clicks' in 1 entry, through position 2\n"
    rows = clicks("topic", "read", "clicks").rows
    assert sorted(row["user"] for row in rows) == list(range(10))
    assert rows[0].keys() == {"user", "url", "at", "price"}


def test_append_in_batches(clicks: Headrace, tmp_path: Path) -> None:
    """--batch N makes entries of N lines; --json gives the summary on stdout."""
    file = tmp_path / "rows"
    file.write_text(ROWS)
    done = clicks("topic", "append", "clicks", "--file", str(file), "--batch", "4", "--json")
    assert done.json == {
        "topic": "clicks",
        "rows": 10,
        "entries": 3,
        "position": 4,
        "set_aside": 0,
        "read": 10,
    }


BAD = '{"user": 1}\n{"user": "x"}\n\nnot json\n{"usr": 2}\n{"url": "/"}\n{"user": 3}\n'


def test_half_a_surrogate_is_set_aside_with_the_lines_behind_it(
    clicks: Headrace, tmp_path: Path
) -> None:
    aside = tmp_path / "aside.ndjson"
    lines = [r'{"user": 1, "url": "\ud800"}', r'{"\udfff": 1}', "nonsense", '{"user": 2}']
    done = clicks("topic", "append", "clicks", "--aside", str(aside), stdin="\n".join(lines))
    assert (done.code, done.err.splitlines()[-1][:14]) == (3, "1 row appended")
    bad = [json.loads(line) for line in aside.read_text(encoding="utf-8").splitlines()]
    assert [one["text"] for one in bad] == lines[:3]


def test_a_number_of_thousands_of_digits_is_json_all_the_same(headrace: Headrace) -> None:
    """It is no bigint, and is said to be none; where values are JSON it is one."""
    digits = "9" * 5000
    headrace("topic", "create", "t", "a bigint")
    done = headrace("topic", "append", "t", stdin=f'{{"a": {digits}}}\n')
    assert (done.code, "not JSON" in done.err) == (3, False)
    assert "column 'a': 9999" in done.err
    headrace("topic", "create", "j", "json")
    headrace("topic", "append", "j", stdin=f'{{"value": {digits}}}\n')
    assert headrace("topic", "read", "j", "--format", "lines").out == f"{digits}\n"


def test_a_number_with_an_exponent_is_named_as_such(clicks: Headrace) -> None:
    done = clicks("topic", "append", "clicks", stdin='{"user": 1e0}')
    assert "column 'user': 1e0 is not a bigint" in done.err


def test_bad_lines_are_set_aside_and_the_rest_goes_on(clicks: Headrace) -> None:
    """Each bad line is said with its number, code, reason and text; exit code 3."""
    done = clicks("topic", "append", "clicks", stdin=BAD)
    assert done.code == 3
    assert done.err.splitlines() == [
        "line 2 set aside [HR-LOG-016]: column 'user': \"x\" is not a bigint",
        '  {"user": "x"}',
        "line 4 set aside [HR-LOG-027]: not JSON at character 1: Expecting value",
        "  not json",
        "line 5 set aside [HR-LOG-015]: there is no column 'usr' (did you mean 'user' or 'url'?)",
        '  {"usr": 2}',
        "line 6 set aside [HR-LOG-017]: column 'user' is missing, and is part of the key",
        '  {"url": "/"}',
        "2 rows appended to 'clicks' in 1 entry, through position 2; 4 lines set aside",
    ]
    assert sorted(row["user"] for row in clicks("topic", "read", "clicks").rows) == [1, 3]


def test_bad_lines_into_a_file(clicks: Headrace, tmp_path: Path) -> None:
    """--aside FILE holds the bad lines as NDJSON; corrected, their text can be appended."""
    aside = tmp_path / "aside.ndjson"
    done = clicks("topic", "append", "clicks", "--aside", str(aside), stdin=BAD)
    assert done.code == 3
    assert f"4 lines set aside in {aside}" in done.err
    found = [json.loads(line) for line in aside.read_text().splitlines()]
    assert [(bad["line"], bad["code"]) for bad in found] == [
        (2, "HR-LOG-016"),
        (4, "HR-LOG-027"),
        (5, "HR-LOG-015"),
        (6, "HR-LOG-017"),
    ]
    assert (found[0]["column"], found[0]["text"]) == ("user", '{"user": "x"}')


def test_strict_stops_at_the_first_bad_line(clicks: Headrace) -> None:
    """With --strict what comes before the bad line is taken, nothing from it on; exit code 1."""
    done = clicks("topic", "append", "clicks", "--strict", stdin=BAD)
    assert done.code == 1
    assert "error[HR-LOG-027]: column 'user'" in done.err
    assert "at: standard input, line 2" in done.err
    assert "1 row appended" in done.err
    assert [row["user"] for row in clicks("topic", "read", "clicks").rows] == [1]


def test_an_error_on_the_way_says_how_far_it_came(
    clicks: Headrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When an append fails, the summary still says what was appended before."""
    append = EmbeddedLog.append
    calls = []

    def failing(log: EmbeddedLog, topic: str, rows: object, **options: Any) -> object:
        calls.append(topic)
        if len(calls) == 3:
            raise hr.errors.DiskFull("writing an entry: No space left on device")
        return append(log, topic, rows, **options)

    monkeypatch.setattr(EmbeddedLog, "append", failing)
    done = clicks("topic", "append", "clicks", "--batch", "2", stdin=ROWS)
    assert done.code == 1
    assert "4 rows appended to 'clicks' in 2 entries" in done.err
    assert "error[HR-LOG-005]" in done.err


def test_append_of_nothing(clicks: Headrace) -> None:
    """No lines are no rows, and no entry."""
    done = clicks("topic", "append", "clicks")
    assert (done.code, done.err) == (0, "0 rows appended to 'clicks'\n")


def test_append_of_bare_lines(headrace: Headrace) -> None:
    """Lines of text go into a text topic and come out as they were, blank ones too."""
    headrace("topic", "create", "notes", "text")
    headrace("topic", "append", "notes", "--format", "lines", stdin="a\n\n  b\n")
    assert headrace("topic", "read", "notes", "--format", "lines").out == "a\n\n  b\n"
    assert headrace("topic", "read", "notes").rows[2] == {"key": None, "value": "  b"}


def test_json_lines_are_checked(headrace: Headrace) -> None:
    """In a json topic a bare line that is no JSON is set aside."""
    headrace("topic", "create", "events", "json")
    lines = '{"a": 1.10}\nnope\n'
    done = headrace("topic", "append", "events", "--format", "lines", stdin=lines)
    assert done.code == 3
    assert "line 2 set aside [HR-LOG-016]" in done.err
    assert headrace("topic", "read", "events").out == '{"key": null, "value": {"a": 1.10}}\n'
    assert headrace("topic", "read", "events", "--format", "lines").out == '{"a": 1.10}\n'


def test_lines_are_for_opaque_topics(clicks: Headrace) -> None:
    """Bare lines cannot be rows with columns, in or out."""
    assert "use --format ndjson" in clicks("topic", "append", "clicks", "--format", "lines").err
    clicks("topic", "append", "clicks", stdin=ROWS)
    assert clicks("topic", "read", "clicks", "--format", "lines").code == 2


def test_headers_and_places_through_a_pipe(clicks: Headrace, folder: str) -> None:
    """--with-position output is taken back: headers are kept, places are new, and that is said."""
    with hr.connect(folder) as log:
        log.append("clicks", [{"user": 1}, {"user": 1}], headers=[{"a": "b", "c": b"\xff"}, None])
    out = clicks("topic", "read", "clicks", "--with-position").out
    first = json.loads(out.splitlines()[0])
    assert first["_headers"] == {"a": "b", "c": {"base64": "/w=="}}
    assert (first["_position"], first["_offset"]) == (2, 0)
    assert "_headers" not in json.loads(out.splitlines()[1])
    clicks("topic", "create", "copy", "user bigint, url string, at timestamp, price decimal(10,2)")
    done = clicks("topic", "append", "copy", stdin=out)
    assert done.code == 0
    assert "got new places" in done.err
    copied = clicks("topic", "read", "copy", "--with-position").rows
    assert [row.get("_headers") for row in copied] == [first["_headers"], None]


def test_headers_through_a_pipe_of_arrow(clicks: Headrace, folder: str) -> None:
    headers = {"a": b"b", "c": b"\xff"}
    with hr.connect(folder) as log:
        log.append("clicks", [{"user": 1}, {"user": 1}], headers=[headers, None])
    out = clicks("topic", "read", "clicks", "--with-position", "--format", "arrow").data
    assert clicks("topic", "append", "clicks", "--format", "arrow", stdin=out).code == 0
    with hr.connect(folder) as log:
        (batch,) = log.read("clicks")
        assert batch.headers.to_pylist() == [[*headers.items()], None] * 2


def arrow(data: dict[str, pa.Array], form: Any = pa.ipc.new_stream) -> bytes:
    sink = io.BytesIO()
    batch = pa.record_batch(data)
    with form(sink, batch.schema) as writer:
        writer.write_batch(batch)
        writer.write_batch(batch)
    return sink.getvalue()


def test_an_arrow_file_is_taken_too(clicks: Headrace) -> None:
    """What pyarrow and pandas write as `x.arrow`; its footer is not needed, so a pipe will do."""
    data = arrow({"user": pa.array([1, 2])}, pa.ipc.new_file)
    assert clicks("topic", "append", "clicks", "--format", "arrow", stdin=data).code == 0
    assert [row["user"] for row in clicks("topic", "read", "clicks").rows] == [1, 2, 1, 2]


def test_bad_rows_of_arrow_are_set_aside(clicks: Headrace) -> None:
    """In an Arrow stream a row without its key is set aside by its number; the rest goes on."""
    data = arrow({"user": pa.array([1, None, 3], pa.int32()), "url": pa.array(["a", "b", "c"])})
    done = clicks("topic", "append", "clicks", "--format", "arrow", stdin=data)
    assert done.code == 3
    assert "line 2 set aside [HR-LOG-017]" in done.err
    assert "line 5 set aside" in done.err
    assert "4 rows appended to 'clicks' in 2 entries, through position 3; 2 rows set" in done.err


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "HR-LOG-019"),
        (b"no arrow at all", "HR-LOG-019"),
        (arrow({"usr": pa.array([1])}), "HR-LOG-015"),
        (arrow({"user": pa.array(["1"])}), "HR-LOG-016"),
        (arrow({"user": pa.array([1])})[:-60], "HR-LOG-019"),
    ],
)
def test_arrow_that_does_not_fit_at_all(clicks: Headrace, data: bytes, code: str) -> None:
    """A stream of other columns, or of no Arrow, is one error, not one for each row."""
    done = clicks("topic", "append", "clicks", "--format", "arrow", stdin=data)
    assert done.code == 1
    assert code in done.err


# --- read, tail -----------------------------------------------------------------------------------


@pytest.fixture
def three(clicks: Headrace) -> Headrace:
    """Three entries: positions 2, 3 and 4."""
    for number in (1, 2, 3):
        clicks("topic", "append", "clicks", stdin=f'{{"user": {number}, "url": "/"}}\n' * 2)
    return clicks


@pytest.mark.parametrize(
    ("arguments", "users"),
    [
        ((), [1, 1, 2, 2, 3, 3]),
        (("--start", "latest"), []),
        (("--after", "2"), [2, 2, 3, 3]),
        (("--after", "2", "--through", "3"), [2, 2]),
        (("--limit", "3"), [1, 1, 2]),
        (("--limit", "0"), []),
        (("--start", "2100-01-01"), []),
        (("--start", "2000-01-01T00:00:00Z"), [1, 1, 2, 2, 3, 3]),
        (("--start", "1", "--partition", "1"), None),
    ],
)
def test_read_from_anywhere_to_anywhere(
    three: Headrace, arguments: tuple[str, ...], users: list[int] | None
) -> None:
    """A reading starts and ends where it is told: position, offset, time, number of rows."""
    done = three("topic", "read", "clicks", "--json", "--with-position", *arguments)
    assert done.code == 0, done.err
    if users is not None:
        assert [row["user"] for row in done.rows] == users
    else:
        assert done.rows
        assert all(row["_partition"] == 1 and row["_offset"] >= 1 for row in done.rows)


def test_read_chosen_columns(three: Headrace) -> None:
    """--columns chooses and orders; a retired column can still be named."""
    three("topic", "alter", "clicks", "--retire", "url")
    done = three("topic", "read", "clicks", "--columns", "url,user", "--limit", "1")
    assert done.out == '{"url": "/", "user": 1}\n'


def test_read_as_a_table(three: Headrace) -> None:
    """--format table is for the eye: a head, a rule, numbers to the right."""
    head, rule, *rows = three("topic", "read", "clicks", "--format", "table").out.splitlines()
    assert head.split() == ["user", "url", "at", "price"]
    assert set(rule) == {"-", " "}
    assert rows[0] == "   1  /    null   null"


def test_read_as_arrow_has_a_schema_even_without_rows(clicks: Headrace) -> None:
    """An Arrow stream of no rows is whole, and has the columns asked for."""
    data = clicks("topic", "read", "clicks", "--format", "arrow").data
    table = pa.ipc.open_stream(data).read_all()
    assert table.schema.names == ["user", "url", "at", "price"]
    data = clicks("topic", "read", "clicks", "--format", "arrow", "--columns", "url").data
    assert pa.ipc.open_stream(data).read_all().schema.names == ["url"]


def test_arrow_of_two_generations(three: Headrace) -> None:
    """An Arrow stream cannot change its schema: the error names the position to part it at."""
    three("topic", "alter", "clicks", "--retype", "url=int")
    three("topic", "append", "clicks", stdin='{"user": 1, "url": 5}\n')
    done = three("topic", "read", "clicks")
    assert [row["url"] for row in done.rows][-2:] == ["/", 5]
    done = three("topic", "read", "clicks", "--format", "arrow")
    assert done.code == 1
    assert "the schema changes after position 5" in done.err
    for part, rows in (("--through", 6), ("--after", 1)):
        data = three("topic", "read", "clicks", "--format", "arrow", part, "5").data
        assert pa.ipc.open_stream(data).read_all().num_rows == rows


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("clik",), 1, "did you mean 'clicks'?"),
        (("clicks", "--columns", "usr"), 1, "did you mean 'user'"),
        (("clicks", "--partition", "3"), 1, "its partitions are 0 to 2"),
        (("clicks", "--start", "99"), 1, "is not there yet"),
        (("clicks", "--start", "soon"), 2, "is not a place to start"),
        (("clicks", "--start", "0", "--after", "1"), 2, "exclude each other"),
        (("clicks", "--after", "99"), 1, "HR-LOG-023"),
        (("clicks", "--json", "--format", "table"), 2, "exclude each other"),
        (("clicks", "--through", "99", "--timeout", "0.05"), 1, "HR-LOG-026"),
    ],
)
def test_read_refuses(three: Headrace, arguments: tuple[str, ...], code: int, said: str) -> None:
    """What cannot be read is an error with its fix, and nothing else happens."""
    done = three("topic", "read", *arguments)
    assert done.code == code
    assert said in done.err


@pytest.mark.parametrize("count", [0, 1, 3, 5, 6, 100])
def test_tail_begins_with_the_last_rows(three: Headrace, count: int) -> None:
    """`tail -n N` gives the last N rows over all partitions, in order."""
    done = three("topic", "tail", "clicks", "-n", str(count), "--no-follow", "--columns", "user")
    assert [row["user"] for row in done.rows] == [1, 1, 2, 2, 3, 3][-count:] * (count > 0)


def test_tail_of_one_partition(three: Headrace) -> None:
    """--partition holds for the last rows too."""
    places = three("topic", "read", "clicks", "--with-position").rows
    partition = places[-1]["_partition"]
    wanted = [row["_offset"] for row in places if row["_partition"] == partition]
    arguments = ("-n", "2", "--no-follow", "--with-position", "--partition", str(partition))
    rows = three("topic", "tail", "clicks", *arguments).rows
    assert [row["_offset"] for row in rows] == wanted[-2:]


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ("topic", "ls"),
        ("topic", "show", "x"),
        ("topic", "read", "x"),
        ("topic", "tail", "x"),
        ("topic", "append", "x"),
        ("topic", "alter", "x", "--retire", "y"),
        ("log", "stats"),
        ("log", "check"),
    ],
)
def test_only_create_makes_a_log(headrace: Headrace, folder: str, command: tuple[str, ...]) -> None:
    """Every other command says that there is no log, and makes none."""
    done = headrace(*command, "--json")
    assert done.code == 1
    assert done.error["code"] == "HR-LOG-001"
    assert not os.path.exists(folder)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: path.mkdir(), "the folder is empty"),
        (lambda path: path.write_text("x"), "it is a file"),
        (lambda path: (path / "photos").mkdir(parents=True), "such as 'photos'"),
    ],
)
def test_what_is_not_a_log(headrace: Headrace, folder: str, make: object, why: str) -> None:
    """A file, an empty and a foreign folder are told apart, and stay as they are."""
    make(Path(folder))  # type: ignore[operator]
    done = headrace("topic", "ls")
    assert done.code == 1
    assert why in done.err
    assert "--log PATH or HEADRACE_LOG" in done.err


def test_errors_as_json(clicks: Headrace) -> None:
    """With --json errors are JSON objects on stderr, those of usage too."""
    done = clicks("topic", "read", "clik", "--json")
    assert (done.code, done.out) == (1, "")
    assert done.error["fix"] == "did you mean 'clicks'?"
    done = clicks("topic", "read", "--json")
    assert (done.code, done.error["code"]) == (2, "HR-CLI-001")


def test_the_log_may_be_named_anywhere(headrace: Headrace, tmp_path: Path) -> None:
    """--log wins over HEADRACE_LOG."""
    other = str(tmp_path / "other")
    headrace("topic", "create", "x", "a int", "--log", other)
    assert [one["name"] for one in headrace("topic", "ls", "--log", other, "--json").json] == ["x"]
    assert headrace("topic", "ls").code == 1


def test_a_command_that_does_not_exist(headrace: Headrace) -> None:
    """A misspelt command names the nearest."""
    done = headrace("topic", "raed", "x")
    assert done.code == 2
    assert "did you mean 'read'" in done.err


def test_what_retention_took_is_neither_counted_nor_looked_for(clicks: Headrace) -> None:
    """`tail` asks for the last rows, held or not; the others are not asked for at all."""
    clicks("topic", "set", "clicks", "retention_bytes=1")
    clicks("topic", "append", "clicks", stdin='{"user": 1}\n{"user": 2}\n{"user": 3}')
    assert clicks("log", "seal").code == 0
    done = clicks("topic", "tail", "clicks", "--no-follow")
    assert (done.code, done.out) == (0, "")
    clicks("topic", "append", "clicks", stdin='{"user": 4}')
    done = clicks("topic", "tail", "clicks", "--no-follow")
    assert [row["user"] for row in done.rows] == [4]
    facts = clicks("topic", "show", "clicks", "--json").json
    assert (facts["rows"], sum(facts["starts"]), sum(facts["ends"])) == (1, 3, 4)
    assert clicks("log", "stats", "--json").json["rows"] == 1


def test_a_new_log_is_said_also_where_the_topic_is_refused(headrace: Headrace) -> None:
    done = headrace("topic", "create", "t", "a nonsense")
    assert done.code == 1
    assert done.err.startswith("a new log was made in ")
