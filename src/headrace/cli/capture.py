"""``headrace capture``: take the changes of a PostgreSQL database into the log."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.options import (
    Command,
    Group,
    aligned,
    ask,
    counted,
    in_place,
    json_option,
    lasting,
    listed,
    log_option,
    open_log,
    outcome,
    sized,
    talk,
)
from headrace.errors import BadUsage, SourceAway, SourceNotReady, UnknownTopic, nearest

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog
    from headrace.sources.postgres.capture import Capture
    from headrace.sources.postgres.preflight import Finding
    from headrace.sources.postgres.snapshots import Progress
    from headrace.sources.postgres.status import Status

AGAIN_SECONDS = 60.0
"""The same trouble is not said more often than that."""
AT_ONCE = 3
"""Tables whose progress is shown in one line."""
POLL_SECONDS = 0.5


class Captures(Command):
    """A command that needs the client library of PostgreSQL; its help does not."""

    def __init__(self, *args: Any, callback: Callable[..., Any], **kwargs: Any) -> None:
        """`callback` is what it does."""

        def checked(*arguments: Any, **options: Any) -> Any:
            from headrace.sources.postgres.client import need_psycopg

            need_psycopg()
            return callback(*arguments, **options)

        super().__init__(*args, callback=checked, **kwargs)


class CaptureGroup(Group):
    """The commands on captures."""

    command_class = Captures


@click.group(cls=CaptureGroup)
def capture() -> None:
    """Take the changes of a PostgreSQL database into the log."""


tables_option = click.option(
    "--tables",
    metavar="PATTERN",
    multiple=True,
    help="Tables, e.g. 'public.*' or '!public.tmp_*'; may be given several times, or with commas."
    " By default 'public.*'.",
)


def _patterns(tables: Iterable[str]) -> tuple[str, ...]:
    from headrace.sources.postgres.settings import patterns

    return patterns(pattern for text in tables for pattern in listed(text))


# --- add, check -----------------------------------------------------------------------------------


@capture.command(
    short_help="Add a capture of a database.",
    example="headrace capture add shop postgresql://user@host/shop --tables 'public.*'",
)
@click.argument("name")
@click.argument("address")
@tables_option
@click.option("--numeric-as-text", is_flag=True, help="Numerics as text: for NaN and infinity.")
@click.option("--fix", is_flag=True, help="Run statements that help and need no restart.")
@log_option
@json_option
def add(
    name: str,
    address: str,
    tables: tuple[str, ...],
    numeric_as_text: bool,
    fix: bool,
    path: str,
    as_json: bool,
) -> None:
    """Add capture NAME of the database at ADDRESS, if the database is ready for it.

    Makes the publication; the slot is made when the capture first runs. A password in ADDRESS is
    used now and not kept: PGPASSWORD or ~/.pgpass supplies it later.
    """
    from headrace.sources.postgres import settings as asked
    from headrace.sources.postgres.prepare import prepared, reached, refuse_another_log, wanted

    asked.check_name(name)
    kept, secret = asked.without_password(address)
    settings = asked.Settings(kept, _patterns(tables), numeric_as_text)
    with open_log(path, create=True) as log:
        asked.check_free(log, name)
        want = wanted(name, settings.tables)
        with reached(address) as connection:
            refuse_another_log(connection, want, log.journal.log_id.hex())
            found, refused = prepared(connection, want, fix=fix)
        _refuse(name, kept, found, refused, as_json=as_json)
        asked.add(log, name, settings)
    if as_json:
        said = {"capture": name, "address": kept, "tables": list(settings.tables)}
        click.echo(json.dumps(said | {"findings": _as_json(found)}, ensure_ascii=False))
        return
    chosen = [one.where.removeprefix("table ") for one in found if one.where.startswith("table ")]
    number = len(dict.fromkeys(chosen))
    talk(f"'{name}' captures {counted(number, 'table')}; 'headrace capture run {name}' starts it")
    if secret:
        talk("the password is not kept: PGPASSWORD or ~/.pgpass supplies it when it runs")


def _refuse(
    name: str, address: str, found: list[Finding], refused: dict[str, str], *, as_json: bool
) -> None:
    """Say what was found; errors end it."""
    wrong = [one for one in found if one.level == "error"]
    if not as_json:
        for line in _told([one for one in found if one.level != "ok"], refused):
            talk(line)
    if wrong:
        verb = "stands" if len(wrong) == 1 else "stand"
        fix = "run the statements shown, or add --fix for those that need no restart"
        tables = [one.where[6:] for one in wrong if one.where.startswith("table ")]
        left_out = " ".join(f"--tables '!{one}'" for one in dict.fromkeys(tables))
        raise SourceNotReady(
            f"{counted(len(wrong), 'thing')} {verb} in the way of capture '{name}'",
            place=address,
            fix=f"{fix}; a table can be left out: {left_out}" if left_out else fix,
            findings=_as_json(wrong),
            refused=refused,
        )


def _as_json(found: Iterable[Finding]) -> list[dict[str, Any]]:
    return [
        {
            "level": one.level,
            "where": one.where,
            "what": one.what,
            "why": one.why,
            "statements": list(one.statements),
            "restart": one.restart,
        }
        for one in found
    ]


def _told(found: list[Finding], refused: dict[str, str]) -> list[str]:
    """Findings for the eye, each with what helps."""
    heads = aligned([(one.level, one.where, one.what) for one in found]).splitlines()
    lines = []
    for head, one in zip(heads, found, strict=True):
        lines.append(head)
        if one.why:
            lines.append(f"         why: {one.why}")
        lines += [f"         fix: {statement};" for statement in one.statements]
        if one.restart:
            lines.append("         and restart the server")
        if f"{one.where}: {one.what}" in refused:
            lines.append(f"         the server refused: {refused[f'{one.where}: {one.what}']}")
    return lines


@capture.command(
    short_help="Look whether a database is ready.",
    example="headrace capture check postgresql://user@host/shop",
)
@click.argument("what", metavar="NAME|ADDRESS")
@tables_option
@log_option
@json_option
def check(what: str, tables: tuple[str, ...], path: str, as_json: bool) -> None:
    """Look whether a database is ready to be captured; only looks. Exit code 1 if it is not."""
    from headrace.sources.postgres import preflight
    from headrace.sources.postgres import settings as asked
    from headrace.sources.postgres.prepare import reached, wanted

    if "://" in what or "=" in what:
        address, want = what, wanted("check", _patterns(tables))
    else:
        with open_log(path) as log:
            settings, state = asked.get(log, what), asked.saved_state(log, what)
        patterns = _patterns(tables) if tables else settings.tables
        address, want = settings.dsn, wanted(what, patterns, state.slot if state else "")
    with reached(address) as connection:
        found = preflight.findings(connection, want)
    if address == what:  # what `add` makes by itself is not missing
        found = [one for one in found if one.where != f"publication {want.publication}"]
    if as_json:
        click.echo(json.dumps(_as_json(found), ensure_ascii=False))
    else:
        for line in _told(found, {}):
            click.echo(line)
    if any(one.level == "error" for one in found):
        raise click.exceptions.Exit(1)


# --- run ------------------------------------------------------------------------------------------


@capture.command(short_help="Run a capture.", example="headrace capture run shop --until-caught-up")
@click.argument("name")
@click.option("--until-caught-up", is_flag=True, help="End when the log has all that is there now.")
@click.option(
    "--readers",
    type=click.IntRange(0, 64),
    default=4,
    show_default=True,
    help="Connections that read tables at the same time; 0: none but the one it has.",
)
@log_option
@json_option
def run(name: str, until_caught_up: bool, readers: int, path: str, as_json: bool) -> None:
    """Run capture NAME until it is interrupted, going on where it ended.

    Tables that are not in the log yet are read while changes go on. A server that goes away is
    waited for; one that cannot be reached at the start is an error.
    """
    import headrace
    from headrace.sources.postgres import settings as asked
    from headrace.sources.postgres.catalog import lsn_text
    from headrace.sources.postgres.prepare import reached

    began = time.monotonic()
    with open_log(path) as log:
        settings = asked.get(log, name)
        if settings.paused and until_caught_up:
            raise BadUsage(f"'{name}' is paused", fix=f"headrace capture resume {name}")
        with reached(settings.dsn):
            pass
        said = Said(as_json)
        said.capture = running = headrace.capture(
            log, name, report=said.progress, lost=said.lost, stopped=said.stopped, readers=readers
        )
        try:
            _run(log, running, said, until_caught_up=until_caught_up)
        except KeyboardInterrupt:
            pass
        finally:
            said.end()
        state = running.state
        lsn = lsn_text(state.lsn if state else 0)
        tables = state.tables if state else {}
    counts: dict[str, int] = {}
    for one in tables.values():
        counts[one.status] = counts.get(one.status, 0) + 1
    seconds = time.monotonic() - began
    if as_json:
        done = {"capture": name, "lsn": lsn, "tables": counts, "seconds": round(seconds, 3)}
        click.echo(json.dumps(done))
        return
    shown = ", ".join(f"{count} {status}" for status, count in counts.items()) or "none"
    talk(f"'{name}' has all through {lsn} after {lasting(seconds)}; tables: {shown}")


def _run(log: EmbeddedLog, running: Capture, said: Said, *, until_caught_up: bool) -> None:
    """Run, stand still while it is paused, end when it is removed."""
    from headrace.sources.postgres import settings as asked

    name = running.name
    while True:
        settings = asked.find(log, name)
        if settings is None:
            said.line(f"'{name}' was removed")
            return
        if settings.paused:
            said.once(f"'{name}' is paused until 'headrace capture resume {name}'")
            time.sleep(POLL_SECONDS)
            continue
        running.run("caught up" if until_caught_up else None)
        if until_caught_up:
            return


class Said:
    """What a running capture says on stderr: little, and nothing twice in a row."""

    def __init__(self, quiet: bool) -> None:
        """`quiet`: nothing at all."""
        self.capture: Capture | None = None
        self._quiet = quiet
        self._last = ("", 0.0)
        self._far: dict[str, str] = {}
        """How far each table is that is being read."""
        self._open = False

    def line(self, text: str) -> None:
        """A line of its own."""
        self.end()
        if not self._quiet:
            talk(text)

    def once(self, text: str) -> None:
        """A line, unless it was said a short while ago."""
        now = time.monotonic()
        if self._last[0] != text or now - self._last[1] >= AGAIN_SECONDS:
            self._last = (text, now)
            self.line(text)

    def lost(self, error: Exception) -> None:
        """The server is away; it is tried again."""
        self.once(f"waiting: {' '.join(str(getattr(error, 'fact', error)).split())}")

    def stopped(self, table: str, why: str) -> None:
        """The others go on."""
        self._far.pop(table, None)
        self.once(f"{table} is stopped: {why}")

    def progress(self, progress: Progress) -> None:
        """How far a snapshot is: on a terminal as it goes, else when it is done."""
        table = progress.table
        if progress.waits:
            self.once(f"{table} {progress.waits}")
            return
        assert self.capture is not None
        assert self.capture.state is not None
        if self.capture.state.tables[table].status == "live":
            self._far.pop(table, None)
            self.line(f"{table}: {counted(progress.rows, 'row')} read, now following its changes")
        elif not self._quiet and sys.stderr.isatty():
            self._open = True
            self._far[table] = progress_line(progress)
            shown = "; ".join([*self._far.values()][:AT_ONCE])
            more = f"; and {len(self._far) - AT_ONCE} more" if len(self._far) > AT_ONCE else ""
            in_place(shown + more)

    def end(self) -> None:
        """Take away the line of progress."""
        if self._open:
            self._open = False
            in_place("")


def _reading(of: dict[str, Any]) -> str:
    """How far the snapshot of a table is, in `status`; nothing if there is none."""
    if "rows_per_second" not in of:
        return ""
    about = of["rows_estimated"]
    text = "" if about is None else f"of about {about:,} rows"
    text += f"{', ' if text else ''}{of['rows_per_second']:,.0f} a second"
    return text if of["seconds_left"] is None else f"{text}, {lasting(of['seconds_left'])} left"


def progress_line(progress: Progress) -> str:
    """Rows, rate and time left; how many rows there are is the planner's estimate."""
    text = f"{progress.table}: {counted(progress.rows, 'row')}"
    if progress.of >= progress.rows:
        text = f"{progress.table}: {progress.rows:,} of about {progress.of:,} rows"
    if progress.rate > 0:
        text += f", {progress.rate:,.0f} a second"
    if progress.seconds_left is not None:
        text += f", {lasting(progress.seconds_left)} left"
    return text


# --- what is asked of a capture -------------------------------------------------------------------


@capture.command(
    short_help="Read a table anew.",
    example="headrace capture snapshot shop public.orders",
)
@click.argument("name")
@click.argument("table")
@log_option
@json_option
def snapshot(name: str, table: str, path: str, as_json: bool) -> None:
    """Ask capture NAME to read TABLE anew, while changes go on; for one that was stopped too."""
    from headrace.sources.postgres import settings as asked

    full = table if "." in table else f"public.{table}"
    with open_log(path) as log:
        asked.get(log, name)
        state = asked.saved_state(log, name)
        names = list(state.tables) if state else []
        if full not in names:
            raise UnknownTopic(
                f"capture '{name}' has no table '{full}'",
                place=log.path,
                why="a capture has the tables that its patterns choose, from its first run on",
                fix=nearest(full, names) or f"the tables are {', '.join(names) or 'none yet'}",
            )
        asked.ask_snapshot(log, name, full)
    words = f"{full} is read anew by the capture: at once, or when it runs again"
    outcome({"capture": name, "table": full}, words, as_json=as_json)


@capture.command(short_help="Let a capture stand still.", example="headrace capture pause shop")
@click.argument("name")
@log_option
@json_option
def pause(name: str, path: str, as_json: bool) -> None:
    """Let capture NAME stand still; meanwhile the server keeps all changes for it."""
    words = f"'{name}' stands still; the server keeps its changes, and its disk may fill"
    _set_paused(name, path, words, as_json=as_json, paused=True)


@capture.command(short_help="Let a paused capture go on.", example="headrace capture resume shop")
@click.argument("name")
@log_option
@json_option
def resume(name: str, path: str, as_json: bool) -> None:
    """Let capture NAME go on after a pause."""
    _set_paused(name, path, f"'{name}' may go on", as_json=as_json, paused=False)


def _set_paused(name: str, path: str, words: str, *, as_json: bool, paused: bool) -> None:
    from headrace.sources.postgres import settings as asked

    with open_log(path) as log:
        asked.update(log, name, paused=paused)
    outcome({"capture": name, "paused": paused}, words, as_json=as_json)


@capture.command(
    short_help="Remove a capture; its topics stay.",
    example="headrace capture remove shop --yes",
)
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--gone", is_flag=True, help="The server is gone for good: only in the log.")
@log_option
@json_option
def remove(name: str, yes: bool, gone: bool, path: str, as_json: bool) -> None:
    """Remove capture NAME: drop its slot and publication at the server; its topics stay."""
    from headrace.sources.postgres import remove as ending
    from headrace.sources.postgres import settings as asked
    from headrace.sources.postgres.prepare import reached

    with open_log(path) as log:
        settings = asked.get(log, name)
        if not yes:
            ask(
                f"This drops the slot and the publication of '{name}' at {settings.dsn}; its"
                " topics stay.",
                f"Remove '{name}'?",
                as_json=as_json,
            )
        if gone:
            dropped, left = ending.remove(log, name, None)
        else:
            try:
                with reached(settings.dsn) as connection:
                    dropped, left = ending.remove(log, name, connection)
            except SourceAway as error:
                error.fix = "start the server; if it is gone for good: --gone"
                raise
    if as_json:
        click.echo(json.dumps({"capture": name, "dropped": dropped, "left": left}))
        return
    for one in dropped:
        talk(f"dropped {one}")
    for one in left:
        talk(f"left {one}: its owner may drop it")
    talk(f"'{name}' is removed; its topics are kept")


# --- status ---------------------------------------------------------------------------------------


@capture.command(short_help="Show how captures are.", example="headrace capture status shop")
@click.argument("name", required=False)
@log_option
@json_option
def status(name: str | None, path: str, as_json: bool) -> None:
    """Show how capture NAME is, or all: how far, how far behind, and what the server keeps for it.

    The server is looked at twice, a second apart, to tell how what it keeps grows.
    """
    from headrace.sources.postgres import settings as asked
    from headrace.sources.postgres.status import statuses

    with open_log(path) as log:
        names = [name] if name is not None else list(asked.everything(log))
        found = statuses(log, names)
    if as_json:
        click.echo(json.dumps([one.to_json() for one in found], ensure_ascii=False))
        return
    if not found:
        talk("there are no captures yet; 'headrace capture add NAME ADDRESS' makes one")
    for one in found:
        for line in _status_lines(one):
            click.echo(line)


def _status_lines(one: Status) -> list[str]:
    lines = [f"{one.capture}: {one.state}, {one.address}"]
    facts: list[tuple[str, str]] = []
    if one.away:
        facts.append(("server", f"away: {one.away}"))
    elif one.failed:
        facts.append(("failed", f"{one.failed}; it is tried again"))
    if one.ended:
        facts.append(("ended", one.ended))
    if one.waits:
        facts.append(("waits for", one.waits))
    if one.state == "starting":
        facts.append(("log", "nothing yet; it begins when these have ended"))
    elif one.lsn is None:
        facts.append(("log", f"nothing yet; 'headrace capture run {one.capture}' starts it"))
    else:
        age = one.last_commit_age_seconds
        last = "" if age is None else f"; the last commit is {lasting(age)} old"
        facts.append(("log", f"has all through {one.lsn}{last}"))
    if one.lag_bytes is not None:
        facts.append(("behind", sized(one.lag_bytes)))
    if one.held_bytes is not None:
        facts.append(("held back", _held(one)))
    lines.append(aligned(facts, indent="  "))
    rows = [
        (table, of["status"], f"{of['rows_read']:,}", of["reason"] or _reading(of) or of["topic"])
        for table, of in one.tables.items()
    ]
    if rows:
        head = ("table", "status", "rows read", "topic, or why it is stopped")
        lines.append(aligned([head, *rows], indent="  ", right=(2,)))
    return lines


def _held(one: Status) -> str:
    """What the server keeps, how that grows, and how long it can."""
    text = f"{sized(one.held_bytes or 0)} of WAL at the server"
    growth = one.growth_bytes_per_second
    if growth is not None and growth > 0:
        text += f", growing by {sized(growth)} a second"
    if one.room_seconds is not None:
        text += f"; room for {lasting(one.room_seconds)}"
    elif one.room_bytes is not None:
        text += f"; room for {sized(one.room_bytes)}"
    return text
