"""``headrace log``: check a log, see what is in it, make a backup and restore it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.options import (
    Group,
    Progress,
    aligned,
    counted,
    is_log,
    json_option,
    lasting,
    log_option,
    no_log,
    open_log,
    pairs,
    sized,
    talk,
)

if TYPE_CHECKING:
    from headrace.log.embedded.check import Report
    from headrace.log.embedded.log import EmbeddedLog

FILES_SHOWN = 12


@click.group(cls=Group)
def log() -> None:
    """Check a log, see what is in it, make a backup and restore it."""


@log.command(example="headrace log check --log ./data")
@log_option
@json_option
@click.pass_context
def check(ctx: click.Context, path: str, as_json: bool) -> None:
    """Read every byte of the log that counts and say what is wrong, with file and place.

    It takes no lock and changes nothing, so it can run while others write. The exit code is 1 if
    the log is damaged.
    """
    from headrace.log.embedded.check import Report
    from headrace.log.embedded.check import check as check_log
    from headrace.log.embedded.system import OsSystem, os_errors

    if not is_log(path):
        raise no_log(path)
    progress = Progress()
    folder = os.path.abspath(path)

    def show(done: int, total: int) -> None:
        progress.show(lambda seconds: _progress(done, total, seconds))

    from headrace.errors import LogDamaged

    try:
        with os_errors("checking the log", folder):
            report = check_log(OsSystem(), folder, show)
    except LogDamaged as damage:  # not even its format file
        report = Report(folder, problems=[damage])
    finally:
        progress.clear()
    if as_json:
        click.echo(json.dumps(report.to_json() | {"seconds": round(progress.seconds, 3)}))
    else:
        click.echo("\n".join(_reported(report, path, progress.seconds)))
    if not report.ok:
        ctx.exit(1)


@log.command(example="headrace log seal --log ./data")
@log_option
@json_option
def seal(path: str, as_json: bool) -> None:
    """Seal the whole journal now, let go what the topics' settings let go, delete what is left.

    A log that somebody keeps (`headrace run`, `headrace log keep`) is sealed by itself.
    """
    _turn(path, as_json, compact=False)


@log.command(example="headrace log compact --log ./data")
@log_option
@json_option
def compact(path: str, as_json: bool) -> None:
    """Seal, and compact every topic that has `compact` set, also where it saves little."""
    _turn(path, as_json, compact=True)


def _turn(path: str, as_json: bool, *, compact: bool) -> None:
    with open_log(path, create=False) as found:
        keeper = found.keeper()
        try:
            done = keeper.turn(close=True, compact=compact).to_json()
        finally:
            keeper.release()
    if as_json:
        click.echo(json.dumps(done))
        return
    for what, names in done.items():
        if names:
            click.echo(f"{what}: {counted(len(names), 'topic' if what == 'compacted' else 'file')}")
    if not any(done.values()):
        click.echo("nothing to do")


@log.command(example="headrace log keep --log ./data")
@log_option
def keep(path: str) -> None:
    """Be the keeper of a log until Ctrl-C: seal, let go, compact and delete in the background."""
    import threading

    with open_log(path, create=False) as found, found.keeper() as keeper:
        talk("keeping the log; Ctrl-C ends it" if keeper.take() else "waiting for the keeper to go")
        threading.Event().wait()


def _progress(done: int, total: int, seconds: float) -> str:
    rate = done / seconds
    share = f"{100 * done // total} %" if total else ""
    left = lasting((total - done) / rate) if rate else "?"
    return f"{share}  {sized(done)} of {sized(total)}  {sized(rate)}/s  {left} left"


def _reported(report: Report, path: str, seconds: float) -> Iterator[str]:
    parts = [
        counted(report.files, "journal file"),
        counted(report.entries, "entry", "entries"),
        counted(report.rows, "row"),
        sized(report.bytes),
    ]
    if report.pieces:
        parts.append(counted(report.pieces, "staged piece"))
    if report.sealed:
        parts.append(counted(report.sealed, "sealed file"))
    yield f"checked {path}: {', '.join(parts)}, in {lasting(seconds)}"
    if report.torn:
        yield f"torn tail at {report.torn}: the end of an append that was never acknowledged"
    if report.orphans:
        orphans = counted(len(report.orphans), "file")
        yield f"{orphans} that no entry names, such as {report.orphans[0]}"
    if report.ok:
        right = "checksums, chain, offsets, counters and times are right"
        yield f"sound: {right} through position {report.position}"
        return
    yield f"DAMAGED: {counted(len(report.problems), 'problem')}"
    for problem in report.problems:
        details = problem.details
        yield ""
        yield f"  {problem.fact}"
        facts = [
            ("file", str(details.get("file", problem.place))),
            ("place", f"byte {details['offset']:,}" if "offset" in details else problem.place),
            ("expected", str(details.get("expected", "?"))),
            ("found", str(details.get("found", "?"))),
        ]
        yield aligned(facts, indent="    ")
    yield ""
    yield "nothing was changed, and what is intact can still be read"
    yield "fix: copy the folder, then put the files named here back from a backup"
    yield "     ('headrace explain HR-LOG-006' says more)"


@log.command(example="headrace log stats --json | jq .position")
@log_option
@json_option
def stats(path: str, as_json: bool) -> None:
    """Show what is in the log: positions, topics, rows, files, counters, and who holds a lock."""
    if not is_log(path):
        raise no_log(path)
    held = _locks(path)
    for lock in held:
        if lock["stopped"]:
            talk(f"the {lock['lock']} lock is held by process {lock['pid']}, which is stopped")
    with open_log(path) as found:
        facts = _facts(found) | {"locks": held}
    if as_json:
        click.echo(json.dumps(facts))
        return
    click.echo(f"log {path}\n")
    click.echo(aligned(list(_said(facts)), indent="  "))


@log.command(example="headrace log backup ../backup-of-data")
@click.argument("to")
@log_option
@json_option
def backup(to: str, path: str, as_json: bool) -> None:
    """Copy the log to folder TO, as it is at one position, while others write.

    A folder that holds an older backup of this log is brought up to date. Indexes of tables and the
    state of views are left out: they are built again.
    """
    with open_log(path) as found:
        made = found.backup(to)
    if as_json:
        facts = {"log": made.log, "history": made.history, "position": made.position}
        sizes = {"files": len(made.files), "bytes": made.size, "written": made.written}
        archived = [asdict(one) for one in made.archived]
        click.echo(json.dumps({"folder": made.folder, **facts, **sizes, "archived": archived}))
        return
    files, size, new = counted(len(made.files), "file"), sized(made.size), sized(made.written)
    click.echo(f"{to}: position {made.position}, {files}, {size}, of which {new} are new")
    for address in dict.fromkeys(one.archive for one in made.archived):
        some = [one.size for one in made.archived if one.archive == address]
        what = f"{counted(len(some), 'archived file')}, {sized(sum(some))},"
        talk(f"{what} not in it: a restored log reads them in {address}")


@log.command(example="headrace log restore ../backup-of-data ./restored")
@click.argument("source", metavar="FROM")
@click.argument("to")
@click.option(
    "--archive",
    "archives",
    metavar="OLD=NEW",
    multiple=True,
    help="The archive OLD has the address NEW now; repeatable.",
)
@json_option
def restore(source: str, to: str, archives: tuple[str, ...], as_json: bool) -> None:
    """Make a log of the backup in folder FROM, in folder TO, which must be empty or not there.

    Rows in an archive are not in a backup: the log reads them where the archive is. What of it
    cannot be reached from here is listed.
    """
    from headrace.log.embedded.backup import restore as restored

    made = restored(source, to, archives=pairs(archives, "--archive", "/mnt/old=/mnt/new"))
    if as_json:
        facts = {"folder": to, "log": made.log, "position": made.position}
        away = [asdict(one) for one in made.unreachable]
        total = len(made.archived)
        click.echo(json.dumps({**facts, "archived": total, "unreachable": away}))
        return
    click.echo(f"{to}: a log at position {made.position}")
    if made.archived and not made.unreachable:
        talk(f"its {counted(len(made.archived), 'archived file')} can be reached")
    for address in dict.fromkeys(one.archive for one in made.unreachable):
        here = [one for one in made.unreachable if one.archive == address]
        talk(f"warning: {counted(len(here), 'archived file')} cannot be reached in {address}:")
        for one in here[:FILES_SHOWN]:
            rows = f"topic '{one.topic}', positions {one.first} to {one.through}"
            talk(f"  {one.name}, {sized(one.size)}: {rows}")
        if len(here) > FILES_SHOWN:
            talk(f"  ... {len(here)} files; --json lists them")
        talk(
            "until they are there these rows cannot be read; if they are elsewhere, restore with"
            f" --archive {address}=NEW"
        )
    talk("captures and followers that have gone further will say so: see docs/backup.md")


def _facts(found: EmbeddedLog) -> dict[str, Any]:
    from headrace.log.embedded import live
    from headrace.log.embedded.format import place_of

    journal = found.journal
    tail, words = journal.live.tail(), journal.live.words
    topics = found.topics()
    newest, offset = place_of(tail.end)
    journal_files = [(journal.files.path(n), n) for n in journal.files.numbers()]
    pieces = [entry.stat().st_size for entry in os.scandir(os.path.join(found.path, "pieces"))]
    state = "poisoned" if words[live.POISONED] else "damaged" if words[live.DAMAGED] else "sound"

    def place(address: int) -> dict[str, int]:
        number, at = place_of(address)
        return {"file": number, "byte": at}

    return {
        "folder": found.path,
        "state": state,
        "position": found.position,
        "since": max((found.since_of(topic.name) for topic in topics), default=0),
        "sealed": {
            "files": len(journal.control.sealed.files),
            "bytes": sum(file.bytes for file in journal.control.sealed.files.values()),
            "through": journal.control.sealed.through,
        },
        "holds": found.holds(),
        "topics": len(topics),
        "partitions": sum(topic.partitions for topic in topics),
        "rows": sum(sum(found.ends(one.name)) - sum(found.starts(one.name)) for one in topics),
        "counters": len(journal.live.counters()),
        "journal": {
            "files": len(journal_files),
            "bytes": sum(os.stat(file).st_size for file, _ in journal_files),
            "used": sum(file.end for file in journal.closed_files if file.number < newest) + offset,
        },
        "pieces": {"files": len(pieces), "bytes": sum(pieces)},
        "bytes": sum(_sizes(found.path)),
        "end": place(tail.end),
        "synced": place(words[live.SYNCED]),
        "marked": place(tail.marked),
        "unsynced": tail.end - words[live.SYNCED] if words[live.SYNCED] >> 40 == newest else None,
        "last_received_us": tail.received,
    }


def _sizes(folder: str) -> Iterator[int]:
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                yield os.lstat(os.path.join(parent, name)).st_blocks * 512
            except FileNotFoundError:  # gone meanwhile
                continue


def _said(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from headrace.model.records import time_of

    states = {
        "sound": "sound, as far as it was looked at ('headrace log check' looks at all)",
        "poisoned": "POISONED: an fsync failed; see 'headrace explain HR-LOG-007'",
        "damaged": "DAMAGED: 'headrace log check' says where",
    }
    journal, pieces = facts["journal"], facts["pieces"]
    yield "state", states[facts["state"]]
    yield "position", f"{facts['position']:,}, the newest entry that readers see"
    yield "since", f"{facts['since']:,}, the oldest position at which the log is whole"
    last = time_of(facts["last_received_us"]).strftime("%Y-%m-%d %H:%M:%S UTC")
    yield "last entry", last if facts["position"] else "none yet"
    yield "topics", f"{facts['topics']:,} with {counted(facts['partitions'], 'partition')}"
    yield "rows", f"{facts['rows']:,}"
    yield "counters", f"{facts['counters']:,}"
    used, whole = sized(journal["used"]), sized(journal["bytes"])
    yield "journal", f"{counted(journal['files'], 'file')}, {used} used of {whole}"
    if pieces["files"]:
        yield "pieces", f"{counted(pieces['files'], 'file')}, {sized(pieces['bytes'])}"
    sealed = facts["sealed"]
    if sealed["files"]:
        what = f"{counted(sealed['files'], 'file')}, {sized(sealed['bytes'])}"
        yield "sealed", f"{what}, all rows through position {sealed['through']:,}"
    for name, hold in facts["holds"].items():
        topics = "all topics" if hold["topics"] is None else ", ".join(hold["topics"])
        until = time_of(hold["until"]).strftime("%Y-%m-%d %H:%M:%S UTC")
        yield "hold", f"{name}: position {hold['position']:,} of {topics}, until {until}"
    yield "on disk", f"{sized(facts['bytes'])} in all"
    synced = "everything written is synced"
    if facts["synced"] != facts["end"]:
        left = f"{sized(facts['unsynced'])}" if facts["unsynced"] is not None else "some"
        synced = f"{left} behind it not synced yet"
    yield "synced end", f"{_place(facts['synced'])}: {synced}"
    marked = "the log is quiet" if facts["marked"] == facts["end"] else "written to since"
    yield "last mark", f"{_place(facts['marked'])}: {marked}"
    yield "locks", "; ".join(map(_holder, facts["locks"])) or "nobody holds one"


def _place(place: dict[str, int]) -> str:
    return f"journal file {place['file']}, byte {place['byte']:,}"


def _holder(lock: dict[str, Any]) -> str:
    who = f"process {lock['pid']} ({lock['command']})" if lock["pid"] else "a process"
    stopped = f", stopped: continue it with 'kill -CONT {lock['pid']}'" if lock["stopped"] else ""
    return f"{lock['lock']} lock: {who}{stopped}"


def _locks(path: str) -> list[dict[str, Any]]:
    """Who holds a lock of the log right now, as the kernel knows it; no lock is taken for it."""
    held = _held_inodes()
    found = []
    for name in ("append", "sync", "keeper"):
        try:
            inode = os.stat(os.path.join(path, "locks", name)).st_ino
        except FileNotFoundError:
            continue
        if inode in held:
            pid = held[inode]
            command, stopped = _process(pid)
            found.append({"lock": name, "pid": pid, "command": command, "stopped": stopped})
    return found


def _held_inodes() -> dict[int, int]:
    """Every flock on the machine: inode -> pid."""
    held: dict[int, int] = {}
    try:
        with open("/proc/locks", encoding="ascii") as file:
            for line in file:
                words = line.split()
                if words[1] == "FLOCK":
                    held[int(words[5].rpartition(":")[2])] = int(words[4])
    except (OSError, ValueError, IndexError):
        return held
    return held


def _process(pid: int) -> tuple[str, bool]:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            stopped = file.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return "gone", False
    return words[:60], stopped
