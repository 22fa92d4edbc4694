"""A project with a real log, a real server on the loopback, and plain clients of it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from headrace.log.embedded.log import EmbeddedLog
from headrace.pipelines.views.reading import Status, commits_topic, writer_name
from headrace.runtime.project import Project, find_project, write_whole
from headrace.serving.server import Server

DEFINITION = "@shop.view(key='country')\ndef revenue(orders):\n    return orders.groupBy('country')"
ORDERS = "id bigint not null, country string, amount decimal(10,2), at timestamp"


def make_project(folder: Path) -> Project:
    """A project without captures and pipelines; nothing runs."""
    folder.mkdir(exist_ok=True)
    (folder / "headrace.toml").write_text('log = "data"\n[page]\nport = 0\n')
    return find_project(folder)


def make_topics(log: EmbeddedLog) -> None:
    """A captured table, a topic of events without a key, changes without one, and a view."""
    log.create_topic("src.public.orders", ORDERS, key="id", kind="changes", partitions=2)
    log.create_topic("clicks", "user bigint, url string")
    log.create_topic("bag", "name string, n bigint", kind="changes")
    view = "country string not null, revenue decimal(20,2)"
    log.create_topic("shop.revenue", view, key="country", kind="changes")
    commits_topic(log, "shop")


def order(number: int, country: str = "de", **more: Any) -> dict[str, Any]:
    """A row of the captured table."""
    return {"id": number, "country": country, "amount": Decimal("1.50"), **more}


def commit_view(log: EmbeddedLog, through: int, rows: list[tuple[int, str, str]]) -> int:
    """What a pipeline's commit is: rows of its views, through where, and its state; one entry."""
    writer = log.writer(writer_name("shop"))
    taken = {"src.public.orders": sum(log.ends("src.public.orders"))}
    state = Status(through, writer.version, 0, (), {"revenue": "1"}, taken).to_json()
    changes = [{"_weight": w, "country": c, "revenue": Decimal(r)} for w, c, r in rows]
    with writer.transaction(state=state) as entry:
        entry.append("shop.revenue", changes)
        entry.append("shop._commits", [{"through": through, "views": ["revenue"]}])
    return log.position


def say_parts(project: Project) -> None:
    """What a supervisor that has ended left behind: parts, and what the pipelines said."""
    said = {
        "state": "live",
        "file": "pipeline.py",
        "inputs": {"orders": "src.public.orders"},
        "views": {"revenue": ["orders"]},
        "definitions": {"revenue": DEFINITION},
    }
    part = {"name": "pipelines", "kind": "pipelines", "state": "running", "pid": 1, "restarts": 2}
    told = {"supervisor": {"pid": 1}, "parts": [part | {"said": {"pipelines": {"shop": said}}}]}
    write_whole(project.parts_file, json.dumps(told))


@contextmanager
def served(project: Project, **more: Any) -> Iterator[Server]:
    """The page of a project, in a thread."""
    server = Server(project, **more)
    ready = threading.Event()
    thread = threading.Thread(target=server.run, args=[lambda url: ready.set()])
    thread.start()
    try:
        assert ready.wait(20)
        yield server
    finally:
        server.stop()
        thread.join(20)
        assert not thread.is_alive()


class Answer(NamedTuple):
    """What the server answered."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(url: str, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> Answer:
    """One request; POST says that it is JSON, unless told otherwise."""
    place = urlsplit(url)
    client = http.client.HTTPConnection(place.hostname or "", place.port, timeout=30)
    sent = ({"Content-Type": "application/json"} if method == "POST" else {}) | (headers or {})
    client.putrequest(method, path, skip_host="Host" in sent)
    for name, value in sent.items():
        if value:
            client.putheader(name, value)
    client.endheaders()
    answer = client.getresponse()
    try:
        named = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, named, answer.read())
    finally:
        client.close()


class Event(NamedTuple):
    """An event of SSE."""

    name: str
    id: str
    data: Any


def parse_events(text: str) -> list[Event]:
    """The whole events of a stream; what follows the last empty line was cut off."""
    found = []
    for block in text.split("\n\n")[:-1]:
        lines = [line.partition(": ") for line in block.split("\n")]
        fields = {name: value for name, _, value in lines}
        if "data" in fields:
            found.append(Event(fields["event"], fields.get("id", ""), json.loads(fields["data"])))
    return found


class Listener:
    """Reads a stream of events, as far as it is told to."""

    def __init__(self, url: str, path: str, token: str = "") -> None:
        place = urlsplit(url)
        self._socket = socket.create_connection((place.hostname, place.port), timeout=30)
        last = f"Last-Event-ID: {token}\r\n" if token else ""
        head = f"GET {path} HTTP/1.1\r\nHost: {place.netloc}\r\n{last}\r\n"
        self._socket.sendall(head.encode())
        self._raw = b""
        while b"\r\n\r\n" not in self._raw:
            self._raw += self._received()
        head_bytes, _, self._raw = self._raw.partition(b"\r\n\r\n")
        self.head = head_bytes.decode()
        self.body = b""

    def _received(self) -> bytes:
        data = self._socket.recv(65536)
        if not data:
            raise EOFError
        return data

    def more(self) -> None:
        """Wait for the next chunk."""
        while b"\r\n" not in self._raw:
            self._raw += self._received()
        size, _, rest = self._raw.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            raise EOFError
        while len(rest) < length + 2:
            rest += self._received()
        self.body += rest[:length]
        self._raw = rest[length + 2 :]

    def until(self, wanted: Any) -> list[Event]:
        """All events so far, once `wanted` is true of them."""
        while not wanted(events := self.events()):
            self.more()
        return events

    def events(self) -> list[Event]:
        """All whole events so far."""
        return parse_events(self.body.decode(errors="ignore"))

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
