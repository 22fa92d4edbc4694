"""Whether all that a project needs is there: each check says what it found, and the exact fix.

It only looks: nothing is started but a Spark session (in a process of its own, and not with
`quick`), nothing is made but a file in the project's folder, which is removed again.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from headrace import errors
from headrace.runtime.processes import mark, marked
from headrace.runtime.project import CaptureOf, FollowerOf, Project
from headrace.runtime.status import parts_of

FREE_BYTES = 2 << 30
OLDEST = (3, 11)
START = "from headrace.pipelines.spark import session; print(session(quick=True).version)"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    level: str
    """`ok`, `warning` (it works, and may hurt later) or `error` (a part cannot run)."""
    what: str
    found: str
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        """As it is."""
        return asdict(self)


def of_error(what: str, error: errors.HeadraceError) -> Check:
    """What an error says, as a finding."""
    return Check("error", what, f"[{error.code}] {error.fact}", error.fix)


def examined(project: Project, *, quick: bool = False) -> Iterator[Check]:
    """Look at everything, one after the other."""
    yield _python()
    yield from _packages(project)
    yield _short_cut()
    if project.pipelines:
        yield from _spark(quick=quick)
    yield from _folders(project)
    for capture in project.captures:
        yield from _capture(project, capture)
    followers = project.followers()
    if project.pipelines and not followers:
        yield Check("ok", "followers", "none known; they are when the project has run once")
    for spec in followers.values():
        yield _target(spec)
    yield from _running(project)


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST:
        return Check("error", "Python", version, "install Python 3.11 or newer")
    return Check("ok", "Python", f"{version}, {sys.executable}")


def _packages(project: Project) -> Iterator[Check]:
    wanted = {"pyarrow": "", "numpy": ""}
    wanted |= {"pyspark": "spark", "pandas": "spark"} if project.pipelines else {}
    wanted |= {"psycopg": "postgres"} if project.captures else {}
    wanted |= {"starlette": "serve", "uvicorn": "serve"} if project.port is not None else {}
    there = []
    for name, extra in wanted.items():
        try:
            there.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            package = f"headrace[{extra}]" if extra else "headrace"
            yield Check("error", name, "is not installed", f"pip install '{package}'")
    yield Check("ok", "packages", ", ".join([f"headrace {metadata.version('headrace')}", *there]))


def _short_cut() -> Check:
    from headrace.log.embedded.shortcut import compiled

    here = "compiled: appends run in C" if compiled() else "none compiled: appends run in Python"
    left_out = os.environ.get("HEADRACE_SHORTCUT") == "0"
    return Check("ok", "short cut", "HEADRACE_SHORTCUT=0 leaves it out" if left_out else here)


def _spark(*, quick: bool) -> Iterator[Check]:
    from headrace.pipelines.spark import find_archive, find_java

    try:
        java, version = find_java()
    except errors.HeadraceError as error:
        yield of_error("Java", error)
        return
    yield Check("ok", "Java", f"{version}, {java}")
    if quick:
        return
    done = subprocess.run(
        [sys.executable, "-c", START],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False, timeout=180,
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        yield Check(
            "error", "Spark", f"does not start: {last}", "HEADRACE_SPARK_LOG=info shows why"
        )
        return
    fast = "with its class archive" if find_archive().exists() else "without a class archive yet"
    yield Check("ok", "Spark", f"{done.stdout.strip()} starts, {fast}")


def _folders(project: Project) -> Iterator[Check]:
    from headrace.log.embedded.system import OsSystem

    for what, folder in (("project folder", project.folder), ("log folder", project.log)):
        there = folder
        while not there.exists():
            there = there.parent
        try:
            with tempfile.NamedTemporaryFile(dir=there, prefix=".headrace-doctor-"):
                pass
        except OSError as error:
            said = f"{there}: {error.strerror}"
            yield Check("error", what, said, f"chown -R $(id -un) {there}; chmod u+rwx {there}")
            continue
        yield Check("ok", what, f"{folder} can be written")
    there = project.log if project.log.exists() else project.folder
    try:
        OsSystem().check_folder(str(there))
        yield Check("ok", "filesystem", "can lock, and share memory between processes")
    except errors.HeadraceError as error:
        yield of_error("filesystem", error)
    free = shutil.disk_usage(there).free
    level = "ok" if free >= FREE_BYTES else "warning"
    fix = "" if level == "ok" else f"free space below {there}: the log grows with what it takes in"
    yield Check(level, "disk", f"{free / (1 << 30):.1f} GiB free", fix)


def _capture(project: Project, of: CaptureOf) -> Iterator[Check]:
    what = f"capture {of.name}"
    try:
        from headrace.sources.postgres.client import need_psycopg

        need_psycopg()
        from headrace.sources.postgres import preflight
        from headrace.sources.postgres.prepare import reached, wanted

        want = wanted(of.name, of.tables, _slot(project, of.name))
        with reached(of.dsn) as connection:
            found = preflight.findings(connection, want)
    except errors.HeadraceError as error:
        yield of_error(what, error)
        return
    made_by_run = f"publication {want.publication}"  # the capture's own: it is not missing
    for one in found:
        if one.level != "ok" and not (one.level == "error" and one.where == made_by_run):
            fix = "; ".join(one.statements) + (", and restart the server" if one.restart else "")
            yield Check(one.level, what, f"{one.where}: {one.what}", fix)
    if not any(one.level == "error" and one.where != made_by_run for one in found):
        yield Check("ok", what, "the database is ready")


def _slot(project: Project, name: str) -> str:
    """The slot of a capture that has run before."""
    if not (project.log / "headrace.json").is_file():
        return ""
    import headrace
    from headrace.sources.postgres import settings as asked

    with headrace.connect(project.log, create=False) as log:
        state = asked.saved_state(log, name)
    return state.slot if state else ""


def _target(spec: FollowerOf) -> Check:
    """Whether a target answers, gives the mark of its follower, and can be written to."""
    what = f"kept {spec.name}"
    try:
        kept = spec.to_kept()
        target = kept.target.open(kept.follower)
        try:
            lacks = target.lacks(list(spec.topics)) if hasattr(target, "lacks") else None
            cut = None if lacks else target.mark().cut
        finally:
            target.close()
    except errors.HeadraceError as error:
        return of_error(what, error)
    except (ImportError, AttributeError, TypeError) as error:
        return Check("error", what, f"the target cannot be made: {error}", "headrace run reads it")
    if lacks is not None:
        return Check("error", what, f"{kept.target.describe()}: {lacks[0]}", lacks[1])
    said = "nothing yet" if cut is None else f"through {cut.through:,}"
    return Check("ok", what, f"{kept.target.describe()} answers; it has {said}")


def _running(project: Project) -> Iterator[Check]:
    running = parts_of(project)["supervisor"]
    if running:
        yield Check("ok", "project", f"runs, as process {running['pid']}")
        return
    left = marked(mark(project.folder))
    if left:
        said = f"processes {', '.join(map(str, left))} of a run before are left"
        yield Check("error", "project", said, f"kill -9 {' '.join(map(str, left))}")
    else:
        yield Check("ok", "project", "does not run; nothing is left of a run before")
    if project.port:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", project.port))
                yield Check("ok", "page", f"port {project.port} is free")
            except OSError as error:
                fix = "[page] port = 0 takes a free one"
                yield Check("error", "page", f"port {project.port}: {error.strerror}", fix)
    if not os.access(Path("/proc/self/environ"), os.R_OK):
        yield Check("warning", "/proc", "cannot be read", "mount /proc: leftovers are found by it")
