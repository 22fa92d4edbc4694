"""``headrace group``: consumer groups: who is in them, how far behind; moving and copying them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.options import (
    Group,
    aligned,
    ask,
    counted,
    json_option,
    lasting,
    log_option,
    open_log,
    outcome,
    talk,
)
from headrace.errors import BadUsage

if TYPE_CHECKING:
    from headrace.log.groups.admin import GroupFacts, Move
    from headrace.model.lag import Lag, Summary

WARN_SECONDS = 3600.0
PARTITIONS_SHOWN = 24


@click.group(cls=Group)
def group() -> None:
    """List, show, move, copy, release and delete consumer groups."""


def warn_option(command: Any) -> Any:
    """Add `--warn SECONDS`."""
    return click.option(
        "--warn",
        "within",
        metavar="SECONDS",
        type=float,
        default=WARN_SECONDS,
        help="Warn of groups that lose rows within so many seconds; by default an hour.",
    )(command)


@group.command(
    short_help="List the groups and how far behind they are.",
    example="headrace group ls --json | jq '.[] | select(.warning)'",
)
@warn_option
@log_option
@json_option
def ls(within: float, path: str, as_json: bool) -> None:
    """List the groups: members, events not yet committed, the age of the oldest of them.

    A group that has lost rows to retention, or will within --warn seconds, is marked.
    """
    with open_log(path) as log:
        found = [log.group(name) for name in log.groups()]
    if as_json:
        said = [one.to_json() | {"warning": _warning(one.lag, within)} for one in found]
        click.echo(json.dumps(said, ensure_ascii=False))
        return
    if not found:
        talk("there are no groups yet; log.consumer(topic, group=NAME) makes one")
        return
    head = ("group", "members", "topics", "behind", "oldest", "falls off in", "")
    rows = [
        (
            one.name,
            str(len(one.alive)),
            ", ".join(dict.fromkeys(lag.topic for lag in one.lags)) or "-",
            _events(one.lag),
            _age(one.lag),
            _falls(one.lags),
            "! " + warning if (warning := _warning(one.lag, within)) else "",
        )
        for one in found
    ]
    click.echo(aligned([head, *rows], right=(1, 3)))


@group.command(
    short_help="Show members, partitions and lag.",
    example="headrace group show billing",
)
@click.argument("name")
@warn_option
@log_option
@json_option
def show(name: str, within: float, path: str, as_json: bool) -> None:
    """Show group NAME: its members, and each partition with its offset and lag."""
    with open_log(path) as log:
        found = log.group(name)
    if as_json:
        said = found.to_json() | {"warning": _warning(found.lag, within)}
        click.echo(json.dumps(said, ensure_ascii=False))
        return
    click.echo("\n".join(_shown(found)))
    warning = _warning(found.lag, within)
    if warning:
        talk(f"warning: {warning}")


@group.command(
    short_help="Move a group to another place.",
    example="headrace group reset billing --to 2024-01-31T12:00Z --dry-run",
)
@click.argument("name")
@click.option(
    "--to",
    required=True,
    metavar="PLACE",
    help="earliest, latest, an offset, a time or position:P.",
)
@click.option("--topic", "topics", metavar="TOPIC", multiple=True, help="Only this; repeatable.")
@click.option(
    "--partition", "partitions", metavar="N", type=int, multiple=True, help="Only this; repeatable."
)
@click.option("--dry-run", is_flag=True, help="Only show what would move.")
@click.option("--force", is_flag=True, help="Put out members who are alive; they join again.")
@log_option
@json_option
def reset(
    name: str,
    to: str,
    topics: tuple[str, ...],
    partitions: tuple[int, ...],
    dry_run: bool,
    force: bool,
    path: str,
    as_json: bool,
) -> None:
    """Move group NAME to another place: what is behind it is read again, what is before it is not.

    Refused while members are alive, unless --force. A time is the first event received then.
    """
    with open_log(path) as log:
        moves = log.reset_group(
            name,
            place_of(to),
            topics=list(topics) or None,
            partitions=list(partitions) or None,
            dry_run=dry_run,
            force=force,
        )
    _say_moves(moves, as_json=as_json)
    if not as_json:
        talk("nothing was moved" if dry_run else f"group '{name}' is moved")


@group.command(
    short_help="Make a group that starts where another is.",
    example="headrace group copy billing billing-replay --to 2024-01-31T12:00Z",
)
@click.argument("source")
@click.argument("name")
@click.option(
    "--to",
    metavar="PLACE",
    help="Start here instead: earliest, latest, an offset, a time or position:P.",
)
@log_option
@json_option
def copy(source: str, name: str, to: str | None, path: str, as_json: bool) -> None:
    """Make group NAME, which starts at the offsets of group SOURCE, or at another place.

    A consumer of the new group reads what the other reads, without touching it.
    """
    with open_log(path) as log:
        moves = log.copy_group(source, name, None if to is None else place_of(to))
    _say_moves(moves, as_json=as_json)
    if not as_json:
        talk(f"group '{name}' is made")


@group.command(
    short_help="Let producers go on without a group.",
    example="headrace group release billing",
)
@click.argument("name")
@log_option
@json_option
def release(name: str, path: str, as_json: bool) -> None:
    """Let producers wait for group NAME no more; its offsets stay.

    For a group whose consumers say flow="backpressure" and that does not come back soon. A consumer
    that says so and joins makes producers wait again.
    """
    with open_log(path) as log:
        waited = log.group(name).state.pressure is not None
        log.release_group(name)
    words = f"no producer waits for group '{name}' by its own flow"
    if waited:
        words = f"producers wait for group '{name}' no more"
    outcome({"group": name, "released": waited}, words, as_json=as_json)


@group.command(
    short_help="Forget a group and its offsets.",
    example="headrace group delete billing --yes",
)
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Although members are alive.")
@log_option
@json_option
def delete(name: str, yes: bool, force: bool, path: str, as_json: bool) -> None:
    """Forget group NAME and its offsets; producers of its topics wait for it no more."""
    with open_log(path) as log:
        found = log.group(name)
        if not yes:
            said = f"This forgets the offsets of '{name}', {_events(found.lag)} events behind."
            ask(said, f"Delete '{name}'?", as_json=as_json)
        log.delete_group(name, force=force)
    outcome({"group": name}, f"group '{name}' is deleted", as_json=as_json)


def place_of(text: str) -> str | int | datetime:
    """Understand a place."""
    if text in ("earliest", "latest") or text.startswith("position:"):
        return text
    if text.isdecimal():
        return int(text)
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise BadUsage(
            f"--to {text} is not a place",
            why="it is earliest, latest, an offset, a time or position:P",
            fix="e.g. --to 2024-01-31T12:00:00Z",
        ) from None


# --- what is shown --------------------------------------------------------------------------------


def _shown(found: GroupFacts) -> Iterator[str]:
    yield f"group {found.name}, generation {found.state.generation}"
    pressure = found.state.pressure
    if pressure is not None:
        yield (
            f"producers wait {lasting(pressure.seconds)} while it would be more than"
            f" {pressure.rows:,} rows behind in a topic"
        )
    yield ""
    members = [("member", "process", "", "partitions")]
    for number, one in found.state.members.items():
        owned = found.state.owned(number)
        parts = "; ".join(f"{t} {', '.join(map(str, sorted(p)))}" for t, p in owned.items())
        alive = "" if number in found.alive else "dead"
        members.append((str(number), str(one.pid), alive, parts or "none"))
    yield aligned(members, indent="  ") if len(members) > 1 else "  no members"
    yield ""
    head = ("topic", "partition", "committed", "end", "behind", "oldest", "falls off in", "skipped")
    rows = [
        (
            lag.topic,
            str(lag.partition),
            "never" if lag.committed is None else f"{lag.committed:,}",
            f"{lag.end:,}",
            "?" if lag.events is None else f"{lag.events:,}",
            _age(lag),
            _falls([lag]),
            f"{lag.skipped:,}" if lag.skipped else "",
        )
        for lag in found.lags[:PARTITIONS_SHOWN]
    ]
    if not rows:
        yield "  none of its topics is there"
        return
    yield aligned([head, *rows], indent="  ", right=(1, 2, 3, 4, 7))
    if len(found.lags) > PARTITIONS_SHOWN:
        yield f"  ... {len(found.lags)} partitions; --json lists them"


def _warning(lag: Summary, within: float) -> str | None:
    if lag.gone:
        return f"{counted(lag.gone, 'event')} gone unread"
    if lag.warns(within):
        return f"loses events in {lasting(lag.falls_off_seconds or 0.0)}"
    return None if lag.problem is None else f"its oldest event cannot be read: {lag.problem}"


def _events(lag: Summary) -> str:
    some = f"{lag.events:,}"
    return f"{some} + ?" if lag.unknown else some


def _age(lag: Summary | Lag) -> str:
    if lag.seconds is None:
        return "-" if lag.events == 0 and not getattr(lag, "unknown", 0) else "?"
    return "-" if not lag.events else lasting(lag.seconds)


def _falls(lags: Iterable[Lag]) -> str:
    """The soonest; else why there is no time to name."""
    every = list(lags)
    soonest = [lag.falls_off_seconds for lag in every if lag.falls_off_seconds is not None]
    if soonest:
        return lasting(min(soonest))
    words = {"by time": "?", "by size": "by size", "kept": "never", "never committed": "?"}
    for word, said in words.items():
        if any(lag.fall == word for lag in every):
            return said
    return "-"


def _say_moves(moves: list[Move], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps([move.to_json() for move in moves]))
        return
    head = ("topic", "partition", "from", "to", "events")
    rows = [
        (
            move.topic,
            str(move.partition),
            "-" if move.before is None else f"{move.before:,}",
            f"{move.after:,}",
            "" if move.events is None else _effect(move.events),
        )
        for move in moves
    ]
    click.echo(aligned([head, *rows], right=(1, 2, 3)))


def _effect(events: int) -> str:
    if events == 0:
        return "stays"
    return f"{events:,} again" if events > 0 else f"{-events:,} not read"
