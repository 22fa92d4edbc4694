"""``headrace status``: how a project is, part by part."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from headrace.cli.options import (
    Command,
    aligned,
    json_option,
    lasting,
    project_option,
    styled,
)

COLOURS = {"running": "green", "live": "green", "following": "green", "stopped": "red",
           "failing": "red", "waiting": "yellow", "starting": "yellow", "building": "yellow",
           "loading": "yellow", "paused": "yellow"}  # fmt: skip


@click.command(cls=Command, short_help="Show how a project is.", example="headrace status --watch")
@click.option("--watch", is_flag=True, help="Show it again every second, until Ctrl-C.")
@project_option
@json_option
def status(watch: bool, folder: str, as_json: bool) -> None:
    """Show the parts of the project, how far each is, and what went wrong last."""
    from headrace.runtime.project import find_project
    from headrace.runtime.status import project_status

    project = find_project(folder)
    before: dict[str, Any] | None = None
    while True:
        now = project_status(project)
        if as_json:
            click.echo(json.dumps(now, ensure_ascii=False))
        else:
            lines = shown(now, before)
            click.echo(("\x1b[H\x1b[2J" if watch else "") + "\n".join(lines))
        if not watch:
            return
        before = now
        time.sleep(1.0)


Rows = list[tuple[str, ...]]


def shown(now: dict[str, Any], before: dict[str, Any] | None) -> list[str]:
    """The status for the eye; with the one before, rates too."""
    running = now["supervisor"]
    head = f"runs as process {running['pid']}" if running else "does not run"
    name = styled(now["project"], bold=True)
    lines = [f"project {name}: {head}, position {now['position']:,}"]
    if running and running.get("changed"):
        lines += ["headrace.toml has changed since: stop the project, and run it again"]
    if now["parts"]:
        lines += ["", *_parts(now)]
    tables = [(_captures, (3,)), (_pipelines, (2, 3, 4)), (_followers, (2, 3, 4))]
    for table, right in [*tables, (_verified, (3, 4, 5)), (_holds, (1,))]:
        rows = table(now)
        if len(rows) > 1:
            lines += ["", *_set(rows, right)]
    if now["topics"]:
        lines += ["", *_set(_topics(now, before), (2, 3))]
    return lines


def _number(value: int | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:,}{unit}"


def _captures(now: dict[str, Any]) -> Rows:
    rows: Rows = [("capture", "table", "state", "rows read", "last commit", "")]
    for one in now["captures"]:
        age = one["last_commit_age_seconds"]
        last = "-" if age is None else f"{lasting(age)} ago"
        for table, of in one["tables"].items():
            cells = (one["name"], table, of["status"], _number(of["rows_read"]), last)
            rows.append((*cells, of["reason"]))
    return rows


def _pipelines(now: dict[str, Any]) -> Rows:
    rows: Rows = [("pipeline", "state", "through", "behind", "commits", "views")]
    for one in now["pipelines"]:
        views = ", ".join(view["name"] for view in one["views"] if view["state"] == "kept")
        numbers = (_number(one["through"]), _number(one["behind"], " rows"))
        rows.append((one["name"], _state(one), *numbers, _number(one["commits"]), views or "-"))
    return rows


def _followers(now: dict[str, Any]) -> Rows:
    rows: Rows = [("kept", "state", "through", "behind", "set aside", "in", "")]
    for one in now["followers"]:
        numbers = [_number(one[name]) for name in ("through", "behind", "aside")]
        problem = one["error"] if isinstance(one["error"], str) else ""  # else told with its part
        rows.append((one["name"], one["state"] or "-", *numbers, one["target"], problem))
    return rows


def _verified(now: dict[str, Any]) -> Rows:
    rows: Rows = [("verified", "table", "against", "through", "rows", "differing")]
    for one in now["verified"]:
        numbers = [_number(one[name]) for name in ("through", "rows", "differing")]
        rows.append((one["name"], one["table"], one["against"], *numbers))
    return rows


def _holds(now: dict[str, Any]) -> Rows:
    rows: Rows = [("hold", "position", "until", "topics")]
    for one in now["holds"]:
        topics = "all" if one["topics"] is None else ", ".join(one["topics"])
        rows.append((one["name"], _number(one["position"]), one["until"], topics))
    return rows


def _topics(now: dict[str, Any], before: dict[str, Any] | None) -> Rows:
    rates = _rates(now, before)
    rows: Rows = [("topic", "kind", "rows", *(["a second"] if before else []))]
    for one in now["topics"]:
        rate = [f"{rates[one['name']]:,.0f}"] if before else []
        rows.append((one["name"], one["kind"], _number(one["rows"]), *rate))
    return rows


def _parts(now: dict[str, Any]) -> list[str]:
    rows: Rows = [("part", "state", "process", "restarts", "")]
    for part in now["parts"]:
        note = part["said"].get("url", "") or part["note"]
        rows.append(
            (part["name"], part["state"], str(part["pid"] or "-"), str(part["restarts"]), note)
        )
    lines = _set(rows, (2, 3))
    told = [(part["name"], part["error"], part["state"]) for part in now["parts"] if part["error"]]
    told += [
        (f"pipeline {one['name']}", one["error"], "") for one in now["pipelines"] if one["error"]
    ]
    for name, error, state in told:
        code = f"[{error['code']}]" if error["code"] else ""
        at = f", {error['at'][11:19]}" if error.get("at") else ""
        lines += ["", f"{name}, last error{at}: {styled(code, fg='red')} {error['fact']}"]
        words = {"at": "place", "why": "why", "fix": "fix"}
        lines += [f"  {word}: {error[of]}" for word, of in words.items() if error[of]]
        if state == "stopped" and now["supervisor"]:
            lines.append(f"  then: headrace restart {name}")
    return lines


def _state(pipeline: dict[str, Any]) -> str:
    progress = pipeline["progress"]
    if pipeline["state"] == "building" and progress and progress["of"]:
        return f"building {100 * progress['rows'] // progress['of']} %"
    return str(pipeline["state"])


def _set(rows: Rows, right: tuple[int, ...]) -> list[str]:
    """Columns, with the states in colour: set first, so that colours take no room."""
    lines = aligned(rows, right=[i for i in right if i < len(rows[0])]).splitlines()
    coloured = [styled(lines[0], dim=True)]
    for row, line in zip(rows[1:], lines[1:], strict=True):
        state = next((cell for cell in row[1:3] if cell in COLOURS), None)
        style = styled(state, fg=COLOURS[state]) if state else ""
        coloured.append(line.replace(f" {state}", f" {style}", 1) if state else line)
    return coloured


def _rates(now: dict[str, Any], before: dict[str, Any] | None) -> dict[str, float]:
    """Rows a second of each topic, from two looks."""
    if before is None:
        return {}
    from datetime import datetime

    seconds = (
        datetime.fromisoformat(now["at"]) - datetime.fromisoformat(before["at"])
    ).total_seconds()
    rows = {one["name"]: one["rows"] for one in before["topics"]}
    return {
        one["name"]: (one["rows"] - rows.get(one["name"], 0)) / max(seconds, 1e-3)
        for one in now["topics"]
    }
