"""What the requests work on: a project's log, its status, its parts. All blocking calls are here.

Everything in this file blocks and is called in a thread; `app` asks for it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.types as pt

from headrace import errors
from headrace.clock import Clock, SystemClock
from headrace.derived.postgres_text import from_json
from headrace.model.ddl import ddl_type
from headrace.model.schema import RESERVED
from headrace.serving.feed import (
    Token,
    begin_of,
    changes,
    current_rows,
    entries_of,
    pieces,
    row_objects,
)
from headrace.serving.hops import last_changes
from headrace.serving.live import Rates, Status, read_checks
from headrace.serving.problems import problem

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog
    from headrace.model.topic import Topic
    from headrace.runtime.project import Project

LIMIT_MAX = 10_000


class Site:
    """A project, seen through its log."""

    def __init__(
        self,
        project: Project,
        log: EmbeddedLog,
        status: Callable[[Project, EmbeddedLog], Status] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`status` is by default that of the project."""
        self.project = project
        self.log = log
        self._status = status or _project_status
        self._clock = clock or SystemClock()
        self._rates = Rates()
        self._verifying: dict[str, dict[str, Any]] = {}
        self._turn = threading.Lock()

    # -- status -----------------------------------------------------------------------------

    def status(self) -> Status:
        """The project's status, with what only somebody who stays can know: rates and hops."""
        with self._turn:
            found = dict(self._status(self.project, self.log))
            self._rates.add(self._clock.monotonic(), found.get("topics", []))
            found["changes"] = last_changes(self.log, found)
            found["verifying"] = list(self._verifying.values())
            if "checks" not in found:
                found["checks"] = self._checks()
            return found

    def _checks(self) -> list[dict[str, Any]]:
        try:
            return read_checks((self.project.run_folder / "checks.json").read_text())
        except OSError:
            return []

    # -- topics, tables, views --------------------------------------------------------------

    def topics(self) -> list[dict[str, Any]]:
        """All topics."""
        return [self._told(topic) for topic in self.log.topics()]

    def topic(self, name: str) -> dict[str, Any]:
        """One topic."""
        return self._told(self.log.topic(name))

    def _told(self, topic: Topic) -> dict[str, Any]:
        return {
            "topic": topic.name,
            "kind": topic.kind,
            "value": topic.value,
            "key": list(topic.key),
            "event_time": topic.event_time,
            "partitions": topic.partitions,
            "version": topic.schema.version,
            "columns": {
                one.name: ddl_type(one.type)
                for one in topic.schema.live
                if one.name not in RESERVED
            },
            "rows": sum(self.log.ends(topic.name)),
            "since": self.log.since_of(topic.name),
            "position": self.log.position,
        }

    def views(self) -> list[dict[str, Any]]:
        """All views of all pipelines, as the status has them, each with how far it is."""
        with self._turn:
            found = self._status(self.project, self.log)
        return [
            view | {"pipeline": one["name"], "through": one["through"], "behind": one["behind"]}
            for one in found.get("pipelines", ())
            for view in one["views"]
        ]

    def view(self, name: str) -> dict[str, Any]:
        """One view: how far it is, its columns, its text."""
        views = {one["topic"]: one for one in self.views()}
        if name not in views:
            raise errors.UnknownTopic(
                f"there is no view '{name}'",
                place=self.log.path,
                fix=errors.nearest(name, views) or "see /v1/views",
            )
        return views[name]

    # -- rows -------------------------------------------------------------------------------

    def topic_rows(
        self, name: str, after: int | None, through: int | None, page: str | None, limit: int
    ) -> dict[str, Any]:
        """The rows of a topic in the order of their entries, a page of them."""
        log = self.log
        token = self._page(name, page) or Token(begin_of(log, log.topic(name)), after or 0)
        upper = log.position if through is None else min(through, log.position)
        of, done, sent = token.of, token.position, token.rows
        found: list[dict[str, Any]] = []
        skip = sent
        reading = log.read(name, after=done, through=upper) if done < upper else ()
        for batch in reading:
            for rows, position, received, ends in entries_of(batch):
                left = rows.slice(min(skip, rows.num_rows))
                skip -= rows.num_rows - left.num_rows
                taken = left.slice(0, limit - len(found))
                extra = {"position": position, "received": received}
                found += [extra | one for one in changes(taken)] if taken.num_rows else []
                sent += taken.num_rows
                if taken.num_rows < left.num_rows:
                    return {"rows": found, "next": str(Token(of, done, sent)), "through": upper}
                if ends:
                    done, sent = position, 0
                if len(found) >= limit:
                    return {"rows": found, "next": str(Token(of, done, sent)), "through": upper}
        return {"rows": found, "next": None, "through": upper}

    def _page(self, name: str, page: str | None, *, snapshot: bool = False) -> Token | None:
        """Where a page begins; None: it is the first one."""
        if page is None:
            return None
        token = Token.read(page, self.log, self.log.topic(name))
        if token.snapshot != snapshot:
            raise errors.BadFeedToken(f"'{page}' is not of these pages", place=self.log.path)
        return token

    def rows(self, name: str, at: int, page: str | None, limit: int) -> dict[str, Any]:
        """The rows of a topic as they are at a position, a page of them."""
        topic = self.log.topic(name)
        token = self._page(name, page, snapshot=True) or Token(begin_of(self.log, topic), at)
        position, sent = token.position, token.rows
        found: list[dict[str, Any]] = []
        if not topic.key and topic.kind != "changes":
            self.log.table(name)  # says why it is not a table
        for rows in pieces(current_rows(self.log, name, position), sent):
            taken = rows.slice(0, limit - len(found))
            found += row_objects(taken)
            sent += taken.num_rows
            if len(found) >= limit:
                following = str(Token(token.of, position, sent, snapshot=True))
                return {"position": position, "rows": found, "next": following}
        return {"position": position, "rows": found, "next": None}

    def get(self, name: str, keys: Sequence[str], at: int) -> dict[str, Any]:
        """The rows of some keys as they are at a position."""
        topic = self.log.topic(name)
        table = self.log.table(name)
        found = table.get(key_table(topic, keys), at=at)
        index = found.column("_index").to_pylist()
        batches = found.drop_columns(["_index", "_position"]).to_batches()
        absent = [key for i, key in enumerate(keys) if i not in set(index)]
        rows = [row for batch in batches for row in row_objects(batch)]
        return {"position": at, "rows": rows, "absent": absent}

    # -- waiting ----------------------------------------------------------------------------

    def at(self, name: str, at: int | None, after: str | None, *, view: bool) -> int:
        """The position to read at, if it is there by now: else an error that passes."""
        from headrace.runtime import tokens

        if after is not None:
            if view:
                pipeline, _, own = name.rpartition(".")
                return tokens.wait_view(self.log, pipeline, after, 0.0, view=own)
            return tokens.wait_topic(self.log, name, after, 0.0)
        if at is None:
            return self.log.position
        since = self.log.since_of(name)
        if at < since:
            raise errors.BadPosition(
                f"position {at} is no longer whole",
                place=name,
                why=f"the topic is whole from position {since} to {self.log.position}",
            )
        self.log.wait(at, 0.0)
        return at

    def shows(self, name: str, after: int | str) -> dict[str, Any]:
        """Whether the target of a follower has a token by now: else an error that passes."""
        from headrace.runtime.tokens import wait_for

        kept = {one.name: one.to_kept() for one in self.project.followers().values()}
        return {"name": name, "position": wait_for(self.log, name, kept, after, 0.0)}

    # -- parts and verification -------------------------------------------------------------

    def ask(self, do: str, part: str) -> dict[str, Any]:
        """Ask the supervisor to kill or restart a part."""
        from headrace.runtime.control import ask

        return ask(self.project, do, part)

    def verified(self) -> dict[str, Any]:
        """The last result of each verification, and those that were started here."""
        from headrace.runtime.verify import last

        running = list(self._verifying.values())
        return {"verified": list(last(self.log).values()), "running": running}

    def start_verify(self, name: str) -> dict[str, Any]:
        """Hold a follower's tables against the log, or a captured topic against its database."""
        running = self._verifying.get(name)
        if running is None or running["state"] != "running":
            work = self._verification(name)
            running = self._verifying[name] = {"name": name, "state": "running"}
            threading.Thread(target=self._verify, args=[name, work], daemon=True).start()
        return running

    def _verification(self, name: str) -> Callable[[], list[Any]]:
        from headrace.runtime import verify

        followers = self.project.followers()
        if name in followers:
            kept = followers[name].to_kept()
            return lambda: verify.verify_kept(self.log, kept)
        tables = {
            one["topic"]: (capture["name"], table)
            for capture in self._status(self.project, self.log).get("captures", ())
            for table, one in capture["tables"].items()
        }
        if name not in tables:
            near = errors.nearest(name, [*followers, *tables])
            raise errors.CannotVerify(f"there is nothing kept under '{name}'", fix=near)
        return lambda: [verify.verify_source(self.log, *tables[name])]

    def _verify(self, name: str, work: Callable[[], list[Any]]) -> None:
        told: dict[str, Any] = {"name": name}
        try:
            told |= {"state": "done", "results": [one.to_json() for one in work()]}
        except errors.HeadraceError as error:
            told |= {"state": "failed", "error": problem(error)}
        except Exception as error:  # noqa: BLE001 - nobody else would say it
            told |= {"state": "failed", "error": {"detail": f"{type(error).__name__}: {error}"}}
        self._verifying[name] = told


def _project_status(project: Project, log: EmbeddedLog) -> Status:
    from headrace.runtime.status import project_status

    return project_status(project, log)


def key_table(topic: Topic, texts: Sequence[str]) -> pa.Table:
    """Keys as they stand in an address: a value, a JSON array, or a JSON object."""
    names = topic.key
    rows = [_key_of(topic, text) for text in texts]
    columns = []
    for i, name in enumerate(names):
        kind = topic.schema.column(name).type
        given: Iterable[Any] = (row[i] for row in rows)
        values = [
            None if value is None else value if isinstance(value, str) else json.dumps(value)
            for value in given
        ]
        try:
            if pt.is_binary(kind) or pt.is_temporal(kind):  # as they are written in answers
                columns.append(pa.array([from_json(value, kind) for value in values], kind))
            else:
                columns.append(pa.array(values, pa.string()).cast(kind))
        except (ValueError, pa.ArrowNotImplementedError) as error:
            raise errors.BadParameter(
                f"'{texts[0][:60]}' is not a key of topic '{topic.name}'",
                place="key",
                why=f"{name} is {ddl_type(kind)}: {error}",
                fix="give a value, a JSON array of the key's columns, or a JSON object",
            ) from None
    return pa.table(columns, names=list(names))


def _key_of(topic: Topic, text: str) -> list[Any]:
    names = topic.key
    if text.startswith(("{", "[")):
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if isinstance(value, dict) and set(value) == set(names):
            return [value[name] for name in names]
        if isinstance(value, list) and len(value) == len(names):
            return value
    if len(names) == 1:
        return [text]
    raise errors.BadParameter(
        f"'{text[:60]}' is not a key of topic '{topic.name}'",
        place="key",
        why=f"its key has the columns {', '.join(names)}",
        fix="give a JSON array of the key's columns, or a JSON object",
    )
