"""``headrace topic set`` and ``delete``: what is kept of a topic, and the end of one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.options import (
    Command,
    ask,
    counted,
    json_option,
    lasting,
    log_option,
    open_log,
    outcome,
    pairs,
    sized,
    talk,
)

if TYPE_CHECKING:
    from headrace.model.policy import Policy, Pressure

HELP = """Change settings of topic NAME, from now on; without any, list those there are.

\b
retention_seconds  rows received longer ago may go; none: they stay
retention_bytes    the oldest go when all are larger; none: they stay
compact            true: of each key the newest row is enough
grace_seconds      what says that a key is gone stays for so long
archive            where files that go are kept instead; none: nowhere
flow               when consumers are slower: buffer, drop or backpressure
flow_rows          with drop, backpressure: how far the slowest group may be behind
flow_seconds       with backpressure: how long a producer waits before it gets an error
"""
WORDS = {"none": None, "true": True, "false": False}


@click.command(
    "set",
    cls=Command,
    help=HELP,
    short_help="Change what is kept of a topic, and its flow.",
    example="headrace topic set clicks retention_seconds=604800 flow=backpressure flow_rows=10000",
)
@click.argument("name")
@click.argument("settings", nargs=-1, metavar="SETTING=VALUE...")
@log_option
@json_option
def set_(name: str, settings: tuple[str, ...], path: str, as_json: bool) -> None:
    """See HELP."""
    changes = {
        key: _value(text) for key, text in pairs(settings, "set", "retention_seconds=86400").items()
    }
    with open_log(path) as log:
        topic = log.set_topic(name, **changes)
    if as_json or not changes:
        click.echo(json.dumps(asdict(topic.policy)))
        return
    for what, how in described(topic.policy, topic.pressure):
        talk(f"topic '{name}': {what or 'and'}: {how}")


def _value(text: str) -> Any:
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@click.command(
    cls=Command,
    short_help="Delete a topic with its rows.",
    example="headrace topic delete clicks --yes",
)
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@log_option
@json_option
def delete(name: str, yes: bool, path: str, as_json: bool) -> None:
    """Delete topic NAME: its rows are gone; the name can be used again."""
    with open_log(path) as log:
        rows = sum(log.ends(name)) - sum(log.starts(name))
        if not yes:
            said = f"This deletes topic '{name}' and its {counted(rows, 'row')}."
            ask(said, f"Delete '{name}'?", as_json=as_json)
        log.delete_topic(name)
    words = f"topic '{name}' is deleted, with {counted(rows, 'row')}"
    outcome({"topic": name, "rows": rows}, words, as_json=as_json)


def described(
    policy: Policy, pressure: Mapping[str, Pressure] | None = None
) -> Iterator[tuple[str, str]]:
    """Say what is kept, for people; `pressure`: the groups that say `backpressure` themselves."""
    seconds, size = policy.retention_seconds, policy.retention_bytes
    kept = [f"for {lasting(seconds)}"] if seconds is not None else []
    kept += [f"up to {sized(size)}"] if size is not None else []
    yield "rows stay", " and ".join(kept) if kept else "for ever"
    if policy.compact:
        yield "compacted", f"deletions stay for {lasting(policy.grace_seconds)}"
    if policy.archive is not None:
        yield "archive", policy.archive
    flows = {
        "buffer": "buffer: producers never wait, and nothing is dropped",
        "drop": f"drop: what finds the slowest group {policy.flow_rows:,} rows behind",
        "backpressure": f"backpressure: producers wait {lasting(policy.flow_seconds)} while the"
        f" slowest group would be more than {policy.flow_rows:,} rows behind",
    }
    said = [
        f"backpressure: producers wait {lasting(limit.seconds)} while group '{group}' would be more"
        f" than {limit.rows:,} rows behind"
        for group, limit in (pressure or {}).items()
    ]
    if policy.flow != "buffer" or not said:
        said.insert(0, flows[policy.flow])
    yield from zip(("flow", *[""] * len(said)), said, strict=False)
