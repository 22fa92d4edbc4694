"""The parts of a project, each in a process of its own: what the children of the supervisor do.

A part says how it is over an inherited pipe, a JSON object a line: `ready`, `note`, `error`, and
what else may be of interest, which is shown as it is. It ends by an exit code (`passing`).

**Ending.** SIGTERM asks a part to end after the work at hand. It never interrupts work by an
exception: a part that only waits ends at once, one that works is asked, and after `END_SECONDS` it
ends as if killed, which is as safe as any crash.

**All pipelines share one Spark**, and take turns: a round of each, then the next. One that fails is
closed, and made again later if its error passes; the others do not notice. When none has work all
wait for the next entry of the log. If the JVM is gone, so are all of them: the part ends, and the
supervisor starts it anew.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace import errors
from headrace.clock import SystemClock
from headrace.runtime.passing import CRASHED, DONE, PASSES, STAYS, verdict
from headrace.runtime.processes import die_with_parent
from headrace.runtime.project import FollowerOf, Project, digest, find_project

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog
    from headrace.pipelines.pipeline import Pipeline
    from headrace.pipelines.views.run import Progress, Runner
    from headrace.sources.postgres.capture import Capture

END_SECONDS = 0.7
PULSE_SECONDS = 1.0
"""So often a part says that it is there (`supervisor.HUNG_SECONDS`)."""
JVM_SECONDS = 60.0
"""A JVM that does not answer for so long hangs."""
SAY_SECONDS = 0.25
"""What changes all the time is said this often."""
RETRY_SECONDS = 0.3
JVM_FAILURES = 3
"""A pipeline that Spark fails more often in a row needs another JVM."""
APPLIED = 50
"""So many of the last applied cuts are shown."""


class Stopped(BaseException):
    """SIGTERM came while nothing was at hand."""


class Voice:
    """The pipe to the supervisor, and its wish that we end."""

    def __init__(self, descriptor: int | None) -> None:
        """Without a descriptor nobody listens."""
        self._descriptor = descriptor
        self._saying = threading.Lock()
        self._idle = False
        self.ending = False
        self.stops: list[Callable[[], None]] = []
        """Called when the part is asked to end."""

    def say(self, **what: Any) -> None:
        """Say something, a line."""
        if self._descriptor is not None:
            line = json.dumps(what, default=str).encode() + b"\n"
            with contextlib.suppress(OSError), self._saying:
                os.write(self._descriptor, line)

    def pulse(self) -> None:
        """Say that the process is there, for ever."""
        while True:
            self.say()
            time.sleep(PULSE_SECONDS)

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """Here nothing is at hand: the part may end at once."""
        if self.ending:
            raise Stopped
        self._idle = True
        try:
            yield
        finally:
            self._idle = False

    def asked_to_end(self, *signal_and_frame: object) -> None:
        """The handler of SIGTERM."""
        self.ending = True
        timer = threading.Timer(END_SECONDS, os._exit, [DONE])
        timer.daemon = True
        timer.start()
        for stop in self.stops:
            stop()
        if self._idle:
            raise Stopped


Part = Callable[[Project, str, Voice], None]
EMPTY: Mapping[str, Part] = {}


def run_part(kind: str, name: str, folder: str, more: Mapping[str, Part] = EMPTY) -> int:
    """Be a part until it ends; its exit code. `more`: kinds of a layer above this one."""
    descriptor = os.environ.pop("HEADRACE_PART_FD", None)
    die_with_parent(0 if descriptor else None)
    if descriptor:
        os.set_inheritable(int(descriptor), False)
    voice = Voice(int(descriptor) if descriptor else None)
    signal.signal(signal.SIGTERM, voice.asked_to_end)
    threading.Thread(target=voice.pulse, name="pulse", daemon=True).start()
    try:
        {**PARTS, **more}[kind](find_project(folder), name, voice)
    except Stopped:
        return DONE
    except errors.HeadraceError as error:
        voice.say(error=error.to_json())
        sys.stderr.write(error.render() + "\n")
        return verdict(error)
    except Exception:  # noqa: BLE001 - the supervisor is told, whatever it is
        traceback.print_exc()
        return DONE if voice.ending else CRASHED
    return DONE


# --- a capture ------------------------------------------------------------------------------------


def run_capture(project: Project, name: str, voice: Voice) -> None:
    """Take the changes of a database into the log."""
    import headrace
    from headrace.sources.postgres.client import need_psycopg

    need_psycopg()
    from headrace.sources.postgres import settings as asked

    of = next(one for one in project.captures if one.name == name)
    away = threading.Event()

    def lost(error: Exception) -> None:
        away.set()
        voice.say(note=f"waiting: {_line(error)}")

    with headrace.connect(project.log) as log:
        if asked.saved_state(log, name) is None:
            _check_source(of.name, of.dsn, of.tables)
        capture = headrace.capture(
            log,
            name,
            of.dsn,
            of.tables,
            numeric_as_text=of.numeric_as_text,
            lost=lost,
        )
        voice.stops.append(capture.stop)
        threading.Thread(target=_say_when, args=[voice, capture, away], daemon=True).start()
        while not voice.ending:
            settings = asked.find(log, name)
            if settings is not None and settings.paused:
                voice.say(note="paused", ready=True)
                with voice.idle():
                    log.wait(log.position + 1)
                continue
            voice.say(note="")
            capture.run()


def _say_when(voice: Voice, capture: Capture, away: threading.Event) -> None:
    """Say that the stream flows: first, and each time after the server was away."""
    seen = capture.state.starts if capture.state else 0
    while True:
        while capture.state is None or capture.state.starts == seen:
            time.sleep(0.05)
        seen = capture.state.starts
        away.clear()
        voice.say(ready=True, note="")
        away.wait()


def _check_source(name: str, dsn: str, tables: tuple[str, ...]) -> None:
    """Refuse a database that is not ready, before anything is made there."""
    from headrace.sources.postgres.prepare import prepared, reached, wanted

    with reached(dsn) as connection:
        found, _ = prepared(connection, wanted(name, tables), fix=False)
    wrong = [one for one in found if one.level == "error"]
    if wrong:
        one = wrong[0]
        raise errors.SourceNotReady(
            f"{one.where}: {one.what}" + (f", and {len(wrong) - 1} more" if wrong[1:] else ""),
            place=f"capture '{name}'",
            why=one.why,
            fix="; ".join(one.statements) or f"headrace capture check {name}",
        )


def _line(error: object) -> str:
    return " ".join(str(getattr(error, "fact", error)).split())


# --- all pipelines --------------------------------------------------------------------------------


def run_pipelines(project: Project, _: str, voice: Voice) -> None:
    """Keep the views of all pipeline files right, in one Spark application."""
    import pyarrow as pa

    import headrace
    from headrace.pipelines.spark import session

    pa.set_memory_pool(pa.system_memory_pool())
    with headrace.connect(project.log) as log:
        voice.say(note="Spark starts")
        # What is imported later, while this process waits for the JVM.
        late = "headrace.pipelines.views.run"
        threading.Thread(target=importlib.import_module, args=[late], daemon=True).start()
        session(memory=project.spark_memory, quick=project.spark_quick)
        threading.Thread(target=_end_with_jvm, args=[voice], daemon=True).start()
        turns = [Turns(file, log) for file in project.pipelines]
        _tell_apart(turns)
        project.note_followers(_kept(project, turns))
        states = {turn.name: turn.to_json() for turn in turns}
        voice.say(ready=True, note="", followers=True, pipelines=states)
        _take_turns(project, log, turns, voice)


def _kept(project: Project, turns: list[Turns]) -> list[FollowerOf]:
    """What the files ask for; where one cannot be read, its followers stay as they are."""
    kept = [one for turn in turns for one in turn.kept]
    if any(turn.pipeline is None for turn in turns):
        read = {turn.name for turn in turns if turn.pipeline}
        kept += [one for one in project.followers().values() if one.pipeline not in read]
    return kept


def _take_turns(project: Project, log: EmbeddedLog, turns: list[Turns], voice: Voice) -> None:
    said: dict[str, Any] = {}
    said_at = 0.0
    recorder: list[subprocess.Popen[bytes]] | None = None
    while not voice.ending:
        position = log.position
        busy = sum(turn.take() for turn in turns) > 0  # each of them
        now = {turn.name: turn.to_json() for turn in turns}
        if now != said and (not busy or time.monotonic() - said_at > SAY_SECONDS):
            said, said_at = now, time.monotonic()
            voice.say(pipelines=now)
        if all(turn.state == "stopped" for turn in turns):
            stopped = next(turn.error for turn in turns if turn.error is not None)
            raise stopped
        for turn in turns:
            if turn.needs_jvm and turn.error is not None:
                raise turn.error
        if recorder is None and all(turn.state == "live" for turn in turns):
            recorder = _record_archive(project)
        if not busy:
            tries = [turn.try_at for turn in turns if turn.try_at is not None]
            left = max(0.0, min(tries) - time.monotonic()) if tries else None
            with voice.idle(), contextlib.suppress(errors.WaitTimeout):
                log.wait(position + 1, timeout=left)
    raise Stopped


class Turns:
    """One pipeline of several that take turns."""

    def __init__(self, file: Path, log: EmbeddedLog) -> None:
        """Read the file; what is wrong with it stops this pipeline only."""
        from headrace.pipelines.files import load_pipeline

        self._log = log
        self.name = file.stem
        self.file, self.read = file, digest(file)
        self.pipeline: Pipeline | None = None
        self.runner: Runner | None = None
        self.state = "starting"
        self.error: errors.HeadraceError | None = None
        self.progress: dict[str, Any] | None = None
        self.try_at: float | None = time.monotonic()
        self._failures = 0
        self.needs_jvm = False
        """Spark failed again and again: another JVM may do better."""
        self.kept: list[FollowerOf] = []
        self._defined: dict[str, Any] = {}
        """What the file says, for those who look: made once, for it is said after each batch."""
        try:
            self.pipeline = load_pipeline(str(file))
            self.name = self.pipeline.name
            self.kept = [FollowerOf.of(one) for one in self.pipeline.kept.values()]
            views = self.pipeline.views.values()
            self._defined = {
                "inputs": {one.name: one.topic for one in self.pipeline.inputs.values()},
                "views": {one.name: list(one.reads or ()) for one in views},
                "definitions": {one.name: _source(one.definition) for one in views},
            }
        except errors.HeadraceError as error:
            self.fail(error)

    def take(self) -> bool:
        """One round; whether there was work."""
        pipeline = self.pipeline
        if pipeline is None or self.state == "stopped":
            return False
        if not pipeline.views:  # inputs that are kept as they are: nothing to compute
            self.state, self.try_at = "live", None
            return False
        try:
            if self.runner is None:
                if self.try_at is not None and time.monotonic() < self.try_at:
                    return False
                if too_early(self._log, pipeline):
                    self.state, self.try_at = "building", time.monotonic() + RETRY_SECONDS
                    return False
                self._begin(pipeline)
            assert self.runner is not None
            busy, _ = self.runner.turn()
        except Exception as error:  # noqa: BLE001 - the other pipelines go on
            self.fail(error)
            return False
        self.state = "building" if self.runner.build is not None else "live"
        if self.state == "live":
            self.error, self._failures, self.progress = None, 0, None
        return busy

    def _begin(self, pipeline: Pipeline) -> None:
        from headrace.pipelines.views.run import Runner

        self.runner = Runner(pipeline, self._log, report=self._built)
        self.try_at = None

    def _built(self, progress: Progress) -> None:
        self.progress = {"rows": progress.rows, "of": progress.of, "seconds": progress.seconds}

    def fail(self, error: Exception) -> None:
        """Close it; again later, unless the error stays."""
        from headrace.runtime.supervisor import crash_delay, passing_delay

        if self.runner is not None:
            with contextlib.suppress(Exception):
                self.runner.close()
            self.runner = None
        code = verdict(error)
        if not isinstance(error, errors.HeadraceError):
            traceback.print_exception(error)
            error = errors.SparkFailed(
                f"{type(error).__name__}: {_line(error)[:500]}", place=self.name
            )
        else:
            self.needs_jvm = isinstance(error, errors.SparkFailed) and (
                self._failures >= JVM_FAILURES
            )
            if str(error) != str(self.error or ""):
                sys.stderr.write(f"pipeline {self.name}: {error.render()}\n")
        self.error = error
        self._failures += 1
        self.state, self.try_at = "stopped", None
        if code != STAYS:
            self.state = "waiting" if code == PASSES else "failing"
            delay = passing_delay if code == PASSES else crash_delay
            missing = isinstance(error, errors.UnknownTopic)  # a capture is about to make it
            self.try_at = time.monotonic() + (RETRY_SECONDS if missing else delay(self._failures))

    def to_json(self) -> dict[str, Any]:
        """As it is said and shown."""
        return {
            "state": self.state,
            "error": self.error.to_json() if self.error else None,
            "progress": self.progress,
            "file": self.file.name,
            "read": self.read,
            **(self._defined if self.pipeline is not None else {}),
        }


def too_early(log: EmbeddedLog, pipeline: Pipeline) -> bool:
    """Whether an input is new and still read for the first time: no view is right before."""
    from headrace.pipelines.views.reading import status_of

    taken = status_of(log, pipeline.name).taken
    return being_read(log, [t.topic for t in pipeline.inputs.values() if t.topic not in taken])


def being_read(log: EmbeddedLog, topics: list[str]) -> bool:
    """Whether one of these is the topic of a captured table whose snapshot has not ended.

    A capture makes the topics first, and says a moment later that it reads these tables.
    """
    try:
        from headrace.sources.postgres import settings
        from headrace.sources.postgres.state import SNAPSHOTTING
    except ImportError:
        return False
    captures = settings.everything(log)
    states = [settings.saved_state(log, name) for name in captures]
    said = {
        one.topic: one.status
        for state in states
        if state is not None
        for one in state.tables.values()
    }
    there = {one.name for one in log.topics()}
    return any(
        said[topic] == SNAPSHOTTING
        if topic in said
        else topic in there
        and topic.count(".") > 1
        and topic.partition(".")[0] in captures
        and not sum(log.ends(topic))
        for topic in topics
    )


def _source(definition: Callable[..., Any] | str) -> str:
    """The text of a definition, for people."""
    if isinstance(definition, str):
        return textwrap.dedent(definition).strip()
    try:
        return textwrap.dedent(inspect.getsource(definition)).strip()
    except (OSError, TypeError):
        return ""


def _tell_apart(turns: list[Turns]) -> None:
    """Of two pipelines with one name the later is stopped: they would fence each other."""
    seen: dict[str, Path] = {}
    for turn in turns:
        first = seen.setdefault(turn.name, turn.file)
        if first != turn.file:
            turn.pipeline = None
            turn.fail(
                errors.BadPipeline(
                    f"{first.name} and {turn.file.name} define pipelines of one name",
                    place=str(turn.file),
                    fix="give one of them another name",
                )
            )
            turn.name = f"{turn.name} ({turn.file.name})"


def _end_with_jvm(voice: Voice) -> None:
    """Without its JVM, or with one that hangs, the process can do nothing, and would wait."""
    from pyspark import SparkContext

    gateway: Any = SparkContext._gateway
    answered = [time.monotonic()]

    def ping() -> None:
        with contextlib.suppress(Exception):  # it has ended
            while gateway.jvm.System.nanoTime():
                answered[0] = time.monotonic()
                time.sleep(PULSE_SECONDS)

    threading.Thread(target=ping, daemon=True).start()
    code = None
    while code is None and time.monotonic() - answered[0] < JVM_SECONDS:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = gateway.proc.wait(PULSE_SECONDS)
    fact = "does not answer" if code is None else f"has ended, with code {code}"
    error = errors.SparkFailed(f"Spark's JVM {fact}", place="pipelines")
    if not voice.ending:
        voice.say(error=error.to_json())
        sys.stderr.write(error.render() + "\n")
    os._exit(PASSES)


def _record_archive(project: Project) -> list[subprocess.Popen[bytes]]:
    """Record Spark's class archive, if there is none, in a process that dies with this one."""
    from headrace.pipelines.spark import RECORDING, find_archive

    if project.spark_quick or find_archive().exists():
        return []
    command = [sys.executable, "-m", "headrace", "part", "archive"]
    environment = os.environ | {RECORDING: "1"}
    return [subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)]


def run_archive(_: Project, __: str, ___: Voice) -> None:
    """Record Spark's class archive, when nobody else needs the processor."""
    os.nice(19)
    from headrace.pipelines.spark import record

    record()


# --- a follower -----------------------------------------------------------------------------------


def run_follower(project: Project, name: str, voice: Voice) -> None:
    """Keep a target at the log's position."""
    import headrace
    from headrace.derived.follower import Follower, State

    spec = project.followers()[name]
    applied: deque[dict[str, Any]] = deque(maxlen=APPLIED)
    states: deque[State] = deque(maxlen=1)
    news = threading.Event()
    clock = SystemClock()

    def report(state: State) -> None:
        cut = state.cut
        if cut is not None and (not states or states[-1].cut != cut):
            at = datetime.fromtimestamp(clock.now_us() / 1e6, UTC).isoformat()
            applied.append({"through": cut.through, "position": cut.position, "at": at})
        states.append(state)
        news.set()

    def tell() -> None:
        while news.wait():
            news.clear()
            state = states[-1]
            voice.say(
                ready=state.doing not in ("starting", "loading"),
                note="" if state.doing == "following" else state.doing,
                state=state.doing,
                through=state.cut.through if state.cut else None,
                position=state.cut.position if state.cut else None,
                aside=state.aside,
                problem=state.error,
                applied=list(applied),
            )
            time.sleep(SAY_SECONDS)

    threading.Thread(target=tell, daemon=True).start()
    with (
        headrace.connect(project.log) as log,
        Follower(
            log, spec.to_kept(), report=report, being_read=partial(being_read, log)
        ) as follower,
    ):
        voice.stops.append(follower.stop)
        follower.run()


# --- the keeper -----------------------------------------------------------------------------------


def run_keeper(project: Project, _: str, voice: Voice) -> None:
    """Keep the log.

    In a process of its own: sealing takes seconds of Python now and then, which a capture, a
    pipeline or a follower would not have for its rows. With the others' priority: it takes the
    log's locks, and must not be kept from giving them back. Without this part appends seal for
    themselves, above the budget.
    """
    import headrace

    with headrace.connect(project.log) as log, log.keeper() as keeper:
        voice.say(ready=True)
        while True:
            with voice.idle():
                time.sleep(PULSE_SECONDS)
            voice.say(note="" if keeper.problem is None else _line(keeper.problem))


PARTS: dict[str, Part] = {
    "capture": run_capture,
    "pipelines": run_pipelines,
    "follower": run_follower,
    "keeper": run_keeper,
    "archive": run_archive,
}
