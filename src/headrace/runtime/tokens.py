"""Read your own writes: a token makes a read wait until what was written is there (R-B12).

    receipt = log.append("orders", rows)                  an application that writes to the log
    hr.rows(log, "shop.revenue", after=receipt.position)

    select pg_current_wal_lsn()                           one that writes to the database, asked
    hr.rows(log, "shop.revenue", after="lsn:0/16B3748")   behind its commit

**A token** is a position of the log; what is right for all entries up to it has the write. An LSN
is turned into one: the capture's resume point says that everything committed before it is in the
log, and the topic of its transactions says in which entry. So an LSN is there when the resume point
has passed it, and its position is that of the newest transaction that ends at or before it. (On a
quiet database the resume point moves every ten seconds; who waits asks the capture to be quicker.)

**A view has a token** when it is `through` it; or when nothing that it reads is left: `through`
moves only when an input does, and an entry of other topics has nothing to say to it.
"""

from __future__ import annotations

import re
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from headrace import errors
from headrace.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

    from headrace.interfaces import Cut, Kept
    from headrace.log.embedded.log import EmbeddedLog

Token = int | str
Figures = dict[str, int | float | str | None]
TIMEOUT_SECONDS = 5.0
PATIENCE_SECONDS = 0.1
"""So long an LSN may take by itself, before the capture is asked to be quicker."""
LOOK_SECONDS = 1.0
"""So often it is looked whether a target has nothing left to show."""
BLOCK = 1000
"""Transactions that are looked at first."""
LSN = re.compile(r"lsn:(?:([a-z][a-z0-9_]*):)?([0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8})")


class Deadline:
    """What is left of a timeout; None: for ever."""

    def __init__(self, timeout: float | None) -> None:
        """It runs from now on."""
        self.timeout = timeout
        self._began = time.monotonic()

    @property
    def waited(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    @property
    def left(self) -> float | None:
        """Seconds, never below 0."""
        return None if self.timeout is None else max(0.0, self.timeout - self.waited)


def position_of(log: EmbeddedLog, token: Token, timeout: float | None = TIMEOUT_SECONDS) -> int:
    """The position of a token; for an LSN, wait until its capture has it.

    `4711`, `"4711"`, `"lsn:0/16B3748"`, or where there are several captures
    `"lsn:NAME:0/16B3748"`. Raises `BadToken`, and `NotYetThere` when the time is over.
    """
    text = str(token)
    if isinstance(token, int) or text.isdecimal():
        if int(token) >= 0 and not isinstance(token, bool):
            return int(token)
    elif found := LSN.fullmatch(text):
        from headrace.sources.postgres.catalog import lsn_number

        return _of_lsn(log, found[1], lsn_number(found[2]), Deadline(timeout))
    raise errors.BadToken(f"{token!r} is not a token", place=log.path)


def wait_log(log: EmbeddedLog, token: Token, timeout: float | None = TIMEOUT_SECONDS) -> int:
    """Wait until the log has it; the newest position, at which all topics have it."""
    deadline = Deadline(timeout)
    position = position_of(log, token, timeout)
    try:
        return log.wait(position, deadline.left)
    except errors.WaitTimeout:
        _late(token, position, log.position, deadline, "the log", {"position": log.position})


def wait_topic(
    log: EmbeddedLog, name: str, token: Token, timeout: float | None = TIMEOUT_SECONDS
) -> int:
    """Wait until a topic has it, which may be that of a view; a position at which it does."""
    pipeline, _, view = name.partition(".")
    if is_view(log, name):
        return wait_view(log, pipeline, token, timeout, view=view)
    return wait_log(log, token, timeout)


def is_view(log: EmbeddedLog, name: str) -> bool:
    """Whether a topic is that of a view, also of one that is built for the first time."""
    from headrace.pipelines.views.reading import status_of

    pipeline, _, view = name.partition(".")
    status = status_of(log, pipeline)
    if view in status.views:
        return True
    if "." in view or view[:1] in ("", "_") or log.topic(name).kind != "changes":
        return False
    commits = f"{pipeline}._commits"
    return name not in status.taken and commits in {one.name for one in log.topics()}


def wait_view(
    log: EmbeddedLog,
    pipeline: str,
    token: Token,
    timeout: float | None = TIMEOUT_SECONDS,
    *,
    view: str | None = None,
) -> int:
    """Wait until the views of a pipeline have it; a position at which all of them do.

    `view`: this one must be right by then, and not be built.
    """
    from headrace.pipelines.views.reading import status_of

    deadline = Deadline(timeout)
    position = position_of(log, token, timeout)
    while True:
        seen = log.position
        status = status_of(log, pipeline)
        behind = status.behind(log) if status.batch else None
        right = status.batch and (view is None or status.views.get(view))
        if right and (status.through >= position or (behind == 0 and seen >= position)):
            return log.position
        try:
            log.wait(max(seen + 1, position if seen < position else 0), deadline.left)
        except errors.WaitTimeout:
            figures: Figures = {
                "through": status.through,
                "rows": behind,
                "position": log.position,
                "seconds": _age(log, list(status.taken), status.through),
            }
            _late(token, position, status.through, deadline, f"pipeline '{pipeline}'", figures)


def wait_for(
    log: EmbeddedLog,
    name: str,
    kept: Mapping[str, Kept],
    token: Token,
    timeout: float | None = TIMEOUT_SECONDS,
) -> int:
    """Wait until a follower's target, or a topic, has it; a position at which it does."""
    if name in kept:
        return wait_target(log, kept[name], token, timeout).through
    if "/" in name:
        fix = errors.nearest(name, kept) or f"there are {', '.join(kept) or 'none'}"
        raise errors.UnknownPart(f"there is no follower '{name}'", place=log.path, fix=fix)
    log.topic(name)
    return wait_topic(log, name, token, timeout)


def wait_target(
    log: EmbeddedLog, kept: Kept, token: Token, timeout: float | None = TIMEOUT_SECONDS
) -> Cut:
    """Wait until a follower's target shows it; the cut that does.

    A cut has a token if it is through it, or if nothing that it shows lies between the two.
    """
    from headrace.derived.wait import wait
    from headrace.pipelines.views.reading import status_of

    deadline = Deadline(timeout)
    position = position_of(log, token, timeout)
    target = kept.target.open(kept.follower)
    try:
        while True:
            left = deadline.left
            try:
                return wait(
                    target, position, LOOK_SECONDS if left is None else min(left, LOOK_SECONDS)
                )
            except errors.NotYetThere:
                cut = target.mark().cut
            status = status_of(log, kept.pipeline) if kept.views else None
            topics = set(kept.topics.values()) - kept.views | set(status.taken if status else ())
            seen = log.position
            behind = _rows_between(log, sorted(topics), cut, min(position, seen))
            if cut is not None and seen >= position and not behind:
                return cut
            if deadline.left == 0:
                through = None if cut is None else cut.through
                age = None if cut is None else _age(log, sorted(topics), cut.through)
                figures: Figures = {"rows": behind, "seconds": age, "through": through}
                _late(token, position, through or 0, deadline, f"'{kept.follower}'", figures)
    finally:
        target.close()


def _rows_between(log: EmbeddedLog, topics: list[str], cut: Cut | None, through: int) -> int | None:
    """Rows of some topics that are behind a cut, up to a position; None: there is no cut yet."""
    if cut is None or not topics:
        return None if cut is None else 0
    if through <= cut.through:
        return 0
    with closing(log.read(topics, after=cut.through, through=through)) as reading:
        return sum(len(batch) for batch in reading)


def rows(
    log: EmbeddedLog,
    name: str,
    *,
    after: Token | None = None,
    timeout: float | None = TIMEOUT_SECONDS,
    at: int | None = None,
) -> pa.Table:
    """The rows of a view (`shop.revenue`) or of another topic of changes or with a key.

    `after`: a token; the rows are those of a moment that has it, or `NotYetThere` is raised when
    the time is over. `at`: as visible at this position of the log instead; one that is not there
    yet is waited for as long (`WaitTimeout`).
    """
    from headrace.pipelines.views.reading import added_up

    topic = log.topic(name)
    if after is not None and at is None:
        at = wait_topic(log, name, after, timeout)
    elif at is not None:
        log.wait(at, timeout)
    if (topic.kind == "changes" and not topic.key) or is_view(log, name):
        return added_up(log, name, at)
    found = log.table(name).scan(at=at).read_all()
    return found.drop_columns(["_position"])


def _of_lsn(log: EmbeddedLog, name: str | None, lsn: int, deadline: Deadline) -> int:
    from headrace.sources.postgres import settings
    from headrace.sources.postgres.catalog import lsn_text

    captures = settings.everything(log)
    if name is None and len(captures) == 1:
        (name,) = captures
    if name is None:
        raise errors.BadToken(
            f"lsn:{lsn_text(lsn)} does not say of which capture it is",
            place=log.path,
            why=f"the log has {', '.join(captures) or 'none'}",
        )
    settings.get(log, name)
    asked = False
    while True:
        seen = log.position
        state = settings.saved_state(log, name)
        have = 0 if state is None else state.lsn
        if have >= lsn:
            return _entry_of(log, name, lsn)
        over = deadline.left == 0
        patient = not over and deadline.waited < PATIENCE_SECONDS
        if not patient:
            awaited = settings.get(log, name).awaited
            # Once also where more is awaited: perhaps somebody named an LSN that never comes.
            if awaited < lsn or (awaited > lsn and not asked):
                settings.update(log, name, awaited=lsn)
            asked = True
        if over:
            token = f"lsn:{name}:{lsn_text(lsn)}"
            at: Figures = {"lsn": lsn_text(have), "bytes": lsn - have}
            _late(token, None, None, deadline, f"capture '{name}'", at)
        limits = [PATIENCE_SECONDS if patient else None, deadline.left]
        with suppress(errors.WaitTimeout):
            log.wait(seen + 1, min((one for one in limits if one is not None), default=None))


def _entry_of(log: EmbeddedLog, name: str, lsn: int) -> int:
    """The entry of the newest transaction that ends at or before an LSN; 0 if there is none."""
    topic = f"{name}._transactions"
    if topic not in {one.name for one in log.topics()}:
        return 0
    (end,) = log.ends(topic)
    block = BLOCK
    while True:
        start = max(0, end - block)
        found = 0
        older = start == 0
        for batch in log.read(topic, start, columns=["lsn"]):
            ends = batch.data.column("lsn").to_numpy()
            count = int(np.searchsorted(ends, lsn, "right"))
            if count:
                found, older = batch.positions[count - 1].as_py(), True
            if count < len(ends):
                break
        if older:
            return int(found)
        block *= 10


def _age(log: EmbeddedLog, topics: list[str], through: int) -> float | None:
    """How long the oldest entry of these topics waits that is not taken in."""
    if not topics:
        return None
    with closing(log.read(topics, after=through)) as reading:
        batch = next(reading, None)
    if batch is None:
        return 0.0
    received: int = batch.received_time[0].value
    return round(max(0.0, (SystemClock().now_us() - received) / 1e6), 3)


def _late(
    token: Token,
    position: int | None,
    through: int | None,
    deadline: Deadline,
    who: str,
    figures: Figures,
) -> NoReturn:
    figures.pop("through", None)
    behind = None if position is None or through is None else max(0, position - through)
    facts = [f"{who} does not have {token} after {deadline.waited:.1f} s"]
    if behind is not None:
        facts.append(f"it is through {through}, {behind} positions behind")
    facts += [f"{name} {value}" for name, value in figures.items() if value is not None]
    details: dict[str, Any] = {"token": str(token), "through": through, "behind": behind, **figures}
    raise errors.NotYetThere("; ".join(facts), place=who, **details)
