"""How a project is: the one source for `headrace status`, the HTTP interface and the page.

Read from three places, none of which is asked to do anything: `run/parts.json` (what the supervisor
and the parts say of themselves), the log (how far captures and pipelines are), and the values that
followers keep. It takes milliseconds; no database is asked.
"""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from headrace import errors
from headrace.clock import SystemClock
from headrace.runtime.project import FILE, Project, digest

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog


def parts_of(project: Project) -> dict[str, Any]:
    """What the supervisor says; parts of one that is gone are shown as such."""
    try:
        found: dict[str, Any] = json.loads(project.parts_file.read_text())
    except (OSError, ValueError):
        return {"supervisor": None, "parts": []}
    if not _runs(found["supervisor"]["pid"], project):
        for part in found["parts"]:
            part |= {"state": "stopped", "pid": None, "ready": False, "next_try": None}
        found["supervisor"] = None
    return found


def _runs(pid: int, project: Project) -> bool:
    """Whether that process holds the lock of the project: a process number may be used again."""
    import fcntl

    try:
        with open(project.run_folder / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return os.path.exists(f"/proc/{pid}")
    except OSError:
        return False


def project_status(project: Project, log: EmbeddedLog | None = None) -> dict[str, Any]:
    """Everything that is known of a project; `log`: an open handle, if the caller has one."""
    import headrace

    parts = parts_of(project)
    at = datetime.fromtimestamp(SystemClock().now_us() / 1e6, UTC).isoformat()
    found: dict[str, Any] = {
        "project": project.name,
        "folder": str(project.folder),
        "at": at,
        "position": 0,
        **parts,
        "captures": [], "pipelines": [], "followers": [], "verified": [], "holds": [], "topics": [],
    }  # fmt: skip
    if log is None and not (project.log / "headrace.json").is_file():
        return found
    by_name = {part["name"]: part for part in parts["parts"]}
    if parts["supervisor"]:
        _note_changes(project, parts["supervisor"], by_name)
    from headrace.model.records import time_of

    opened = headrace.connect(project.log, create=False) if log is None else nullcontext(log)
    with opened as reading:
        found["position"] = reading.position
        found["topics"] = [
            {"name": one.name, "kind": one.kind, "rows": sum(reading.ends(one.name)),
             "key": list(one.key)} for one in reading.topics()
        ]  # fmt: skip
        found["captures"] = _captures(project, reading, by_name)
        found["pipelines"] = _pipelines(reading, by_name.get("pipelines", {}).get("said", {}))
        found["followers"] = _followers(project, reading, by_name)
        found["verified"] = _verified(reading)
        found["holds"] = [
            {"name": name, **one, "until": time_of(one["until"]).isoformat()}
            for name, one in reading.holds().items()
        ]
    return found


def _note_changes(project: Project, supervisor: dict[str, Any], parts: dict[str, Any]) -> None:
    """Say of what runs that its file says something else by now."""
    supervisor["changed"] = supervisor.pop("file", "") != digest(project.folder / FILE)
    read = parts.get("pipelines", {}).get("said", {}).get("pipelines", {}).values()
    running = {one["file"]: one.get("read") for one in read}
    changed = [
        one.name for one in project.pipelines if running.get(one.name) not in (None, digest(one))
    ]
    if changed:
        verb = "has" if len(changed) == 1 else "have"
        fix = "'headrace plan' says what that means, 'headrace restart pipelines' does it"
        note = f"{', '.join(changed)} {verb} changed since: {fix}"
        parts["pipelines"]["note"] = "; ".join(filter(None, [parts["pipelines"]["note"], note]))


def _captures(project: Project, log: EmbeddedLog, parts: dict[str, Any]) -> list[dict[str, Any]]:
    try:
        from headrace.sources.postgres import settings as asked
        from headrace.sources.postgres import status as captures
    except ImportError:
        return []
    found = []
    for name in (one.name for one in project.captures):
        settings = asked.find(log, name)
        if settings is None:
            continue
        one = captures._status(log, name, settings, asked.saved_state(log, name), "", "")
        part = parts.get(f"capture/{name}", {})
        state = "paused" if one.state == "paused" else part.get("state", "stopped")
        found.append(one.to_json() | {"name": name, "state": state})
    return found


def _pipelines(log: EmbeddedLog, said: dict[str, Any]) -> list[dict[str, Any]]:
    from headrace.model.ddl import ddl_type
    from headrace.pipelines.views.reading import own_columns, pipelines, topic_of

    committed = pipelines(log)
    live = said.get("pipelines", {})
    found = []
    for name in dict.fromkeys([*live, *committed]):
        status, now = committed.get(name), live.get(name, {})
        views = []
        for view, identity in (status.views if status else {}).items():
            topic = log.topic(topic_of(name, view))
            arrow = topic.schema.arrow
            columns = {
                arrow.field(i).name: ddl_type(arrow.field(i).type) for i in own_columns(arrow)
            }
            views.append(
                {
                    "name": view,
                    "topic": topic.name,
                    "key": list(topic.key),
                    "columns": columns,
                    "state": "kept" if identity else "ended",
                    "changes": sum(log.ends(topic.name)),
                    "reads": now.get("views", {}).get(view, []),
                    "definition": now.get("definitions", {}).get(view, ""),
                }
            )
        found.append(
            {
                "name": name,
                "state": now.get("state", "stopped"),
                "error": now.get("error"),
                "progress": now.get("progress"),
                "file": now.get("file"),
                "inputs": now.get("inputs", {}),
                "through": status.through if status else 0,
                "behind": status.behind(log) if status else None,
                "commits": status.batch if status else 0,
                "views": views,
            }
        )
    return found


def _followers(project: Project, log: EmbeddedLog, parts: dict[str, Any]) -> list[dict[str, Any]]:
    """How far targets are: as their followers say. What is behind is counted in positions."""
    from headrace.pipelines.views.reading import status_of

    found = []
    for name, spec in project.followers().items():
        part = parts.get(f"follower/{name}", {})
        said = part.get("said", {})
        through = said.get("through")
        goal = status_of(log, spec.pipeline).through if spec.views else log.position
        try:
            target = spec.to_kept().target.describe()
        except (ImportError, AttributeError, TypeError) as error:
            target = f"cannot be read: {error}"
        found.append(
            {
                "name": name,
                "pipeline": spec.pipeline,
                "topics": list(spec.topics.values()),
                "tables": spec.topics,
                "target": target,
                "state": said.get("state") if part.get("pid") else part.get("state", "stopped"),
                "through": through,
                "position": said.get("position"),
                "behind": None if through is None else max(0, goal - through),
                "aside": said.get("aside", 0),
                "applied": said.get("applied", []),
                "error": said.get("problem") or (None if part.get("ready") else part.get("error")),
            }
        )
    return found


def _verified(log: EmbeddedLog) -> list[dict[str, Any]]:
    try:
        from headrace.runtime.verify import last

        return list(last(log).values())
    except (errors.UnknownTopic, ImportError):
        return []
