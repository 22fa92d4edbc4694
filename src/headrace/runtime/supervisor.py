"""The supervisor: starts the parts of a project, and starts them again. It knows nothing else.

::

    supervisor ---stdin (never written; its end means: die)---> part (a process of its own)
               <--said: JSON lines (ready, note, error, ...)---
               <--output: what it prints -----------------------> run/logs/PART.log, rotated
               <--pidfd: it has ended, exit code: what now?

One thread, one loop, the standard library only: no database, no Arrow, no Spark and no pipeline
file can make it fail. What a part is, only the part knows (`parts`).

**The end of a part.** 0: it was asked to; if not by us, again. 75: what it met passes; again, after
0.5 s, 1 s, ... 30 s. 78: it does not pass; it stays stopped, with its error, until somebody says
`restart`. Else it has crashed, or was killed: again at once (0.1 s, 0.2 s, ...), but after `BUDGET`
such ends within `BUDGET_SECONDS` it is `failing`: tried after 5 s, 10 s, ... 60 s, for ever, and
shown as such. A part that was ready for `CALM_SECONDS` has its delays forgotten. One that hangs is
killed, and counts as crashed: each says every second that it is there, and nothing was heard of it
for `HUNG_SECONDS` (unless this process was away itself). Before a part is started again all that is
left of it is killed (`processes`): two of one name never run at once because of us. (Were they to,
the later would fence the earlier: being one at a time is a courtesy here, not a safeguard.)

**Stopping** goes with the flow: captures, pipelines, followers, keeper, page; each group is asked,
and killed when it takes longer than its share of `STOP_SECONDS`. Nothing depends on their ending
well.

**The supervisor killed**: each part dies with it (`processes.die_with_parent`). The lock on
`run/lock` is the kernel's and ends with the process; the next one kills what may be left, first.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import IO, Any

from headrace.clock import SystemClock
from headrace.errors import (
    AlreadyRunning,
    BadProject,
    BadUsage,
    HeadraceError,
    UnknownPart,
    nearest,
)
from headrace.runtime.control import short
from headrace.runtime.passing import DONE, PASSES, STAYS
from headrace.runtime.processes import MARK, end_marked, mark
from headrace.runtime.project import FILE, FollowerOf, Project, digest, write_whole
from headrace.runtime.streams import Client, Lines, Output, Source

BUDGET = 5
BUDGET_SECONDS = 60.0
CALM_SECONDS = 10.0
HUNG_SECONDS = 15.0
STOP_SECONDS = 4.0
KINDS = ("capture", "pipelines", "follower", "keeper", "page")
"""In the order in which they are stopped."""


def crash_delay(crashes: int) -> float:
    """Seconds before the next try, after so many crashes within the budget's time."""
    if crashes <= BUDGET:
        return 0.1 * 2.0 ** max(0, crashes - 1)
    return min(5.0 * 2.0 ** (crashes - BUDGET - 1), 60.0)


def passing_delay(times: int) -> float:
    """Seconds before the next try, after what passes has been met so many times in a row."""
    return min(0.5 * 2.0 ** (times - 1), 30.0)


class Part:
    """One part, whether a process of it is there or not."""

    def __init__(self, project: Project, kind: str, name: str, spec: FollowerOf | None) -> None:
        """Not started yet."""
        self.kind, self.own = kind, name
        self.name = f"{kind}/{name}" if name else kind
        self.spec = spec
        self.state = "starting"
        self.ready = False
        self.restarts = 0
        self.note = ""
        self.error: dict[str, Any] | None = None
        self.said: dict[str, Any] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.output = Output(project, self.name)
        self.mark = ""
        self.since_us = self.try_us = 0
        self.try_at: float | None = 0.0
        """When it is to be started (monotonic); None: it runs, or shall not."""
        self.kill_at: float | None = None
        self.started_at = self.heard_at = 0.0
        self.crashes: deque[float] = deque()
        self.passing = 0
        self.asked = ""
        """Why it is being ended: `restart`, `kill`, `stop`, `gone`, `hung`."""

    def to_json(self, project: Project) -> dict[str, Any]:
        """As `parts.json` has it."""
        return {
            "name": self.name,
            "kind": self.kind,
            "state": self.state,
            "pid": self.process.pid if self.process else None,
            "ready": self.ready,
            "restarts": self.restarts,
            "since": iso(self.since_us),
            "note": self.note,
            "error": self.error,
            "next_try": iso(self.try_us) if self.try_at is not None else None,
            "output": str(self.output.path.relative_to(project.folder)),
            "said": self.said,
        }


def iso(us: int) -> str | None:
    """A time as others read it."""
    return datetime.fromtimestamp(us / 1e6, UTC).isoformat() if us else None


class Supervisor:
    """Runs a project until it is told to stop."""

    def __init__(self, project: Project, report: Callable[[str], None] | None = None) -> None:
        """`report` is told in words what happens."""
        self.project = project
        self._report = report or (lambda text: None)
        self._clock = SystemClock()
        self.parts: dict[str, Part] = {}
        self._selector = selectors.DefaultSelector()
        self._stopping = False
        self._started_us = self._clock.now_us()
        self._turned = 0.0
        self._file = digest(project.folder / FILE)
        self._written = ""

    # -- the loop ---------------------------------------------------------------------------

    def run(self) -> None:
        """Start everything; return when it was told to stop and all has ended."""
        if not (self.project.captures or self.project.pipelines or self.project.port is not None):
            raise BadProject(
                "it names nothing to run",
                place=str(self.project.folder),
                fix='name a capture or a pipeline, e.g. pipelines = ["pipeline.py"]',
            )
        folder = self.project.run_folder
        folder.mkdir(mode=0o700, exist_ok=True)
        with open(folder / "lock", "a+") as lock:
            self._lock(lock)
            left = end_marked(mark(self.project.folder))
            if left:
                self._report(f"{left} processes of a run before were left, and are ended now")
            with self._signals(), self._listen():
                self._add_parts()
                try:
                    while self.parts and not (self._stopping and not self._alive()):
                        self._turn()
                finally:
                    for part in self._alive():
                        end_marked(part.mark)
                    self._publish()

    def _lock(self, lock: IO[str]) -> None:
        for left in range(20, -1, -1):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if left:  # somebody may only look whether it is held
                    time.sleep(0.02)
                    continue
                lock.seek(0)
                holder = lock.read().strip()
                raise AlreadyRunning(
                    f"project '{self.project.name}' runs already, as process {holder}",
                    place=str(self.project.folder),
                    fix=f"see 'headrace status'; to start it here: kill {holder}",
                    pid=holder,
                ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()

    @contextlib.contextmanager
    def _signals(self) -> Any:
        """Signals become bytes in a pipe, which the loop reads."""
        inner, outer = socket.socketpair()
        inner.setblocking(False)
        outer.setblocking(False)
        before = signal.set_wakeup_fd(outer.fileno(), warn_on_full_buffer=False)
        caught = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        old = [signal.signal(one, lambda *_: None) for one in caught]

        def stop() -> None:
            inner.recv(64)
            self._stop()

        self._selector.register(inner, selectors.EVENT_READ, stop)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            for one, handler in zip(caught, old, strict=True):
                signal.signal(one, handler)
            inner.close()
            outer.close()

    @contextlib.contextmanager
    def _listen(self) -> Any:
        path = self.project.socket
        new = path.with_name(".control.sock")
        new.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as server:
            with short(new) as name:
                server.bind(name)
            os.chmod(new, 0o600)
            server.listen()
            server.setblocking(False)
            os.replace(new, path)  # whoever sees it is answered

            def accept() -> None:
                with contextlib.suppress(OSError):
                    client, _ = server.accept()
                    client.setblocking(False)
                    Client(self._selector, client, self._answer)

            self._selector.register(server, selectors.EVENT_READ, accept)
            try:
                yield
            finally:
                path.unlink(missing_ok=True)

    def _add_parts(self) -> None:
        project = self.project
        if project.port is not None:
            self._add("page", "")
        for capture in project.captures:
            self._add("capture", capture.name)
        if project.pipelines:
            self._add("pipelines", "")
            self._reconcile()
        self._add("keeper", "")

    def _add(self, kind: str, name: str, spec: FollowerOf | None = None) -> None:
        part = Part(self.project, kind, name, spec)
        self.parts[part.name] = part

    def _reconcile(self) -> None:
        """The followers that the files ask for now: new ones, changed ones, some no longer."""
        wanted = self.project.followers()
        for name, spec in wanted.items():
            part = self.parts.get(f"follower/{name}")
            if part is None:
                self._add("follower", name, spec)
            elif part.spec != spec:
                part.spec = spec
                self._restart(part)
        for part in list(self.parts.values()):
            if part.kind == "follower" and part.own not in wanted:
                if part.process is None:
                    del self.parts[part.name]
                else:
                    self._end(part, "gone")

    def _alive(self) -> list[Part]:
        return [part for part in self.parts.values() if part.process is not None]

    def _turn(self) -> None:
        """What is due, then wait for news."""
        now = self._clock.monotonic()
        if now - self._turned > HUNG_SECONDS / 2:  # it was us who heard nothing
            for part in self.parts.values():
                part.heard_at = now
        self._turned = now
        if self._stopping:
            self._stop_next(now)
        for part in list(self.parts.values()):
            if part.try_at is not None and part.try_at <= now and not self._stopping:
                self._start(part)
            if part.kill_at is not None and part.kill_at <= now:
                part.kill_at = None
                if part.process is not None:
                    part.process.kill()
            if part.process is not None and part.heard_at + HUNG_SECONDS <= now and not part.asked:
                part.asked = "hung"
                part.process.kill()
        self._publish()
        times = [t for part in self.parts.values() for t in (part.try_at, part.kill_at) if t]
        wait = max(0.0, min([*times, now + 1.0]) - self._clock.monotonic())
        for key, _ in self._selector.select(wait):
            key.data()

    # -- one part ---------------------------------------------------------------------------

    def _start(self, part: Part) -> None:
        part.try_at, part.asked, part.ready, part.note, part.said = None, "", False, "", {}
        part.state = "starting"
        part.started_at, part.since_us = self._clock.monotonic(), self._clock.now_us()
        part.heard_at = part.started_at
        part.mark = mark(self.project.folder, part.name, secrets.token_hex(4))
        try:
            self._spawn(part)
        except OSError as error:  # no memory, no descriptors, no processes: it may pass
            part.process = None
            end_marked(part.mark)
            self._again(part, f"it could not be started: {error}")

    def _spawn(self, part: Part) -> None:
        said, child_says = os.pipe()
        environment = os.environ | {
            MARK: part.mark,
            "HEADRACE_PART_FD": str(child_says),
            "PYTHONUNBUFFERED": "1",
        }
        command = [sys.executable, "-m", "headrace", "part", part.kind]
        command += [part.own] if part.own else []
        try:
            process = part.process = subprocess.Popen(
                [*command, "--project", str(self.project.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=[child_says],
                cwd=self.project.folder,
                start_new_session=True,
                bufsize=0,
            )
        except OSError:
            os.close(said)
            raise
        finally:
            os.close(child_says)
        ended = os.pidfd_open(process.pid)
        lines = Lines()

        def hear(data: bytes) -> None:
            for one in lines.add(data):
                self._hear(part, one)

        assert process.stdout is not None
        sources = [
            Source(self._selector, os.fdopen(said, "rb", buffering=0), hear),
            Source(self._selector, process.stdout, part.output.write),
        ]

        def end() -> None:
            self._selector.unregister(ended)
            os.close(ended)
            for source in sources:
                source.close()
            self._ended(part)

        self._selector.register(ended, selectors.EVENT_READ, end)

    def _hear(self, part: Part, said: dict[str, Any]) -> None:
        """A part says something of itself, or only that it is there."""
        part.heard_at = self._clock.monotonic()
        if said.pop("ready", False) and not part.ready:
            part.ready, part.state = True, "running"
            seconds = self._clock.monotonic() - part.started_at
            self._report(f"{part.name} runs, after {seconds:.1f} s")
        if said.pop("followers", False):
            self._reconcile()
        if "error" in said:
            error = said.pop("error")
            part.error = error and error | {"at": iso(self._clock.now_us())}
        part.note = said.pop("note", part.note)
        part.said |= said

    def _ended(self, part: Part) -> None:
        """It has ended: all that is left of it too, then what shall become of it."""
        process = part.process
        assert process is not None
        end_marked(part.mark)  # while its number is still taken
        code = process.wait()
        if process.stdin is not None:
            process.stdin.close()
        part.output.close()
        part.process = part.kill_at = None
        now = self._clock.monotonic()
        if part.ready and now - part.started_at >= CALM_SECONDS:
            part.passing = 0
        part.ready, part.since_us = False, self._clock.now_us()
        if part.asked == "gone":
            del self.parts[part.name]
            self._reconcile()  # it may be wanted again by now
        elif self._stopping or part.asked == "stop":
            part.state = "stopped"
        elif part.asked in ("restart", "kill"):
            part.restarts += 1
            part.state, part.try_at = "starting", now
            part.crashes.clear()
        elif part.asked == "hung":
            self._again(part, f"it hung: nothing was heard of it for {HUNG_SECONDS:g} s")
        elif code == DONE:  # no part ends by itself: somebody else has sent it SIGTERM
            self._again(part, "it has ended, and nobody here had asked it to")
        elif code == STAYS:
            part.state = "stopped"
            self._report(f"{part.name} is stopped: {_fact(part.error)}")
        elif code == PASSES:
            part.passing += 1
            self._later(part, "waiting", passing_delay(part.passing))
        else:
            self._again(part, _how(code, part.output.last))

    def _again(self, part: Part, fact: str) -> None:
        """It crashed: again, at once or later."""
        now = self._clock.monotonic()
        part.crashes.append(now)
        while part.crashes[0] < now - BUDGET_SECONDS:
            part.crashes.popleft()
        part.error = {
            "code": "", "fact": fact, "place": str(part.output.path), "why": "", "fix": "",
            "details": {"last": list(part.output.last)}, "at": iso(self._clock.now_us()),
        }  # fmt: skip
        crashes = len(part.crashes)
        self._later(part, "waiting" if crashes <= BUDGET else "failing", crash_delay(crashes))

    def _later(self, part: Part, state: str, seconds: float) -> None:
        part.restarts += 1
        part.state = state
        part.try_at = self._clock.monotonic() + seconds
        part.try_us = self._clock.now_us() + int(seconds * 1e6)
        self._report(f"{part.name} is {state}, again in {seconds:.1f} s: {_fact(part.error)}")

    def _end(self, part: Part, why: str, seconds: float = STOP_SECONDS / 2) -> None:
        """Ask it to end; it is killed when it takes longer."""
        if part.process is None or part.asked:
            return
        part.asked = why
        part.kill_at = self._clock.monotonic() + seconds
        part.process.terminate()

    def _restart(self, part: Part) -> None:
        part.passing = 0
        part.crashes.clear()
        if part.process is None:
            part.try_at = self._clock.monotonic()
        else:
            self._end(part, "restart")

    # -- stopping ---------------------------------------------------------------------------

    def _stop(self) -> None:
        if not self._stopping:
            self._stopping = True
            self._report("stopping")

    def _stop_next(self, now: float) -> None:
        """Ask the next group to end, once those before it have."""
        for part in self.parts.values():
            if part.process is None:
                part.try_at = None
        for kind in KINDS:
            alive = [part for part in self._alive() if part.kind == kind]
            for part in alive:
                if part.asked in ("", "restart", "kill"):
                    part.asked = ""
                    self._end(part, "stop", STOP_SECONDS / len(KINDS))
            if alive:
                return

    # -- what others see --------------------------------------------------------------------

    def _listed(self) -> dict[str, Any]:
        return {
            "supervisor": {
                "pid": os.getpid(),
                "since": iso(self._started_us),
                "state": "stopping" if self._stopping else "running",
                "file": self._file,
            },
            "parts": [part.to_json(self.project) for part in self.parts.values()],
        }

    def _publish(self) -> None:
        text = json.dumps(self._listed(), ensure_ascii=False, indent=1)
        if text != self._written:
            with contextlib.suppress(OSError):
                write_whole(self.project.parts_file, text)
                self._written = text

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what is asked over the control socket."""
        do, name = request.get("do"), str(request.get("part", ""))
        try:
            if do == "list":
                return {"ok": True, **self._listed()}
            if do == "stop":
                self._stop()
                return {"ok": True}
            if do not in ("kill", "restart"):
                raise BadUsage(f"{do!r} cannot be asked for", fix="list, kill, restart or stop")
            part = self.parts.get(name)
            if part is None:
                raise UnknownPart(
                    f"there is no part '{name}'",
                    place=str(self.project.folder),
                    fix=nearest(name, self.parts) or f"the parts are {', '.join(self.parts)}",
                )
            pid = part.process.pid if part.process else None
            if do == "restart":
                self._restart(part)
            elif part.process is not None:
                part.asked = part.asked or "kill"
                part.process.kill()
            return {"ok": True, "part": name, "pid": pid}
        except HeadraceError as error:
            return {"ok": False, "error": error.to_json()}


def _fact(error: dict[str, Any] | None) -> str:
    if error is None:
        return "it said no reason"
    code = f"[{error['code']}] " if error.get("code") else ""
    at = f" (at {error['place']})" if error.get("place") else ""
    return f"{code}{error.get('fact', '')}{at}"


def _how(code: int, last: Iterable[str]) -> str:
    """How a process has ended, in words."""
    if code < 0:
        return f"it was killed by {signal.Signals(-code).name}"
    lines = [line for line in last if line.strip()]
    return f"it ended with code {code}" + (f": {lines[-1].strip()}" if lines else "")
