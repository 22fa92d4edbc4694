"""The HTTP interface: every path, over a real server, with a plain client.

Caught: a path that does not answer, or not with what the OpenAPI document says; an error that is
not problem+json from the catalogue; a page of rows that skips or repeats one; a read that does not
wait for its token; a request of a foreign page that is answered; a server that does not stop while
feeds are open; a slow reader that makes the server fill its memory. Not caught: browsers that do
not do what they say in `Origin`; views under a running pipeline, which the slice test has. R-B8,
R-B12, R-D2, R-D5.
"""

from __future__ import annotations

import json
import random
import re
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pytest
from starlette.datastructures import Headers

import headrace as hr
from headrace import errors
from headrace.derived.follower import Follower
from headrace.interfaces import Kept
from headrace.log.embedded.log import EmbeddedLog
from headrace.pipelines.views.reading import commits_topic
from headrace.runtime.project import FollowerOf, Project
from headrace.serving import feed as feeding
from headrace.serving.app import WAYS, make_app
from headrace.serving.guard import refusal
from headrace.serving.hops import Through, Transaction, changed, last_changes, newest
from headrace.serving.live import Rates, read_checks
from headrace.serving.server import Server, bound
from headrace.serving.ways import openapi
from headrace.sources.postgres.capture import TRANSACTIONS
from tests.serving.kit import (
    DEFINITION,
    Event,
    Listener,
    ask,
    commit_view,
    make_project,
    make_topics,
    order,
    parse_events,
    say_parts,
    served,
)

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = make_project(tmp_path_factory.mktemp("project"))
    say_parts(project)
    return project


@pytest.fixture(scope="module")
def log(project: Project) -> Iterator[EmbeddedLog]:
    with hr.connect(str(project.log)) as log:
        make_topics(log)
        log.append("src.public.orders", [order(number) for number in range(50)])
        log.append("clicks", [{"user": number, "url": "/"} for number in range(30)])
        log.append("bag", [{"name": "a", "n": 1}] * 3)
        commit_view(log, log.position, [(1, "de", "75.00")])
        yield log


@pytest.fixture(scope="module")
def url(project: Project, log: EmbeddedLog) -> Iterator[str]:
    with served(project) as server:
        yield server.url


# --- every path -----------------------------------------------------------------------------------

SAMPLES = {
    "topic": "src.public.orders",
    "view": "shop.revenue",
    "part": "pipelines",
    "name": "shop/main",
    "of": "src.public.orders",
    "code": "HR-LOG-010",
    "file": "page.js",
}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.method} {way.path}")
def test_a_path_answers_what_the_document_says(way: Any, url: str) -> None:
    """Each path of the list; those that need a running project say that there is none."""
    path = re.sub(r"\{(\w+)(?::path)?\}", lambda found: SAMPLES[found[1]], way.path)
    document = ask(url, "/openapi.json").json
    shown = document["paths"][way.path.replace(":path}", "}")][way.method.lower()]
    assert {one["name"] for one in shown["parameters"] if one["in"] == "path"} == set(
        re.findall(r"\{(\w+)", way.path)
    )
    method = "HEAD" if way.media == "text/event-stream" else way.method
    answer = ask(url, path, method)
    kind = answer.headers["content-type"].partition(";")[0]
    if way.method == "POST":
        assert answer.status in (400, 503)
        assert kind == "application/problem+json"
        assert answer.json["code"] in ("HR-PROJECT-004", "HR-VERIFY-002")
    else:
        assert answer.status == way.status
        assert kind == way.media or way.media == "*/*"


def test_the_document_has_the_paths_of_the_router(project: Project) -> None:
    routes = {
        (method, route.path.replace(":path}", "}"))  # type: ignore[attr-defined]
        for route in make_app(project).routes
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
    }
    document = openapi(WAYS)
    told = {(m.upper(), path) for path, methods in document["paths"].items() for m in methods}
    assert routes == told
    assert document["openapi"].startswith("3.1")
    assert json.loads(json.dumps(document)) == document
    for way in WAYS:
        shown = document["paths"][way.path.replace(":path}", "}")][way.method.lower()]
        assert ("requestBody" in shown) == (way.method == "POST")  # without JSON it is refused
        for one in shown["parameters"]:
            pattern = re.compile(one["schema"].get("pattern", ""))
            if one["name"] == "after" and "pattern" in one["schema"]:
                good = "5ac3d1f0.7-120s500" if "feed" in way.path else "lsn:shop:0/16B3748"
                assert (bool(pattern.match(good)), bool(pattern.match(""))) == (True, False)


def test_a_method_that_is_not_there_is_said_so(url: str) -> None:
    for method in ("TRACE", "OPTIONS"):
        assert ask(url, "/v1/topics", method).status == 405


def test_the_status_has_what_the_page_shows(url: str, project: Project) -> None:
    checks = [{"label": "money", "ok": True, "text": "money adds up"}]
    (project.run_folder / "checks.json").write_text(json.dumps(checks))
    found = ask(url, "/v1/status").json
    assert found["checks"] == checks
    assert {"name": "clicks", "rows": 30}.items() <= next(
        one for one in found["topics"] if one["name"] == "clicks"
    ).items()
    with Listener(url, "/v1/events") as listener:
        events = listener.until(lambda found: len(found) >= 2)
    assert [event.name for event in events[:2]] == ["status", "status"]
    assert events[-1].data["topics"][0]["rate"] is not None


@pytest.mark.parametrize("text", ["", "{", "7", '["x", {"no": 1}]'])
def test_checks_that_are_not_understood_are_left_out(text: str) -> None:
    assert read_checks(text) == []


def test_a_topic_and_its_rows_by_position(url: str, log: EmbeddedLog) -> None:
    assert ask(url, "/v1/topics/clicks").json["columns"] == {"user": "bigint", "url": "string"}
    users: list[int] = []
    page = ""
    while True:
        found = ask(url, f"/v1/topics/clicks/rows?limit=7{page}").json
        users += [one["row"]["user"] for one in found["rows"]]
        if found["next"] is None:
            break
        page = f"&page={quote(found['next'])}"
    assert users == list(range(30))
    assert ask(url, f"/v1/topics/bag/rows?limit=7{page}").status == 410
    entry = found["rows"][0]["position"]
    assert ask(url, f"/v1/topics/clicks/rows?through={entry - 1}").json["rows"] == []
    assert ask(url, f"/v1/topics/clicks/rows?after={entry}").json["rows"] == []


@pytest.mark.parametrize("name", ["tables/src.public.orders", "tables/bag", "views/shop.revenue"])
def test_all_rows_page_by_page_at_one_position(name: str, url: str, log: EmbeddedLog) -> None:
    """A write between two pages is not seen: all are of one position."""
    topic = name.partition("/")[2]
    whole = ask(url, f"/v1/{name}/rows?limit=1000").json
    assert whole["next"] is None
    rows, page = [], f"at={whole['position']}"
    while page:
        found = ask(url, f"/v1/{name}/rows?limit=1&{page}").json
        assert found["position"] == whole["position"]
        rows += found["rows"]
        page = f"page={quote(found['next'])}" if found["next"] else ""
        if len(rows) == 1:
            if topic == "bag":
                log.append("bag", [{"name": "b", "n": 1}])
            elif topic == "shop.revenue":
                commit_view(log, log.position, [(1, f"x{log.position}", "1.00")])
            else:
                log.append(topic, [order(1000 + log.position)])
        if len(rows) > 4:
            break
    assert rows == whole["rows"][: len(rows)]
    if page:
        assert ask(url, f"/v1/topics/{topic}/rows?{page}").status == 410


def test_rows_by_key(url: str, log: EmbeddedLog) -> None:
    path = "/v1/tables/src.public.orders/rows"
    before = log.position
    found = ask(url, f"{path}?key=7&key=[8]&key={quote(json.dumps({'id': 9}))}&key=99999").json
    assert [row["id"] for row in found["rows"]] == [7, 8, 9]
    assert found["rows"][0]["amount"] == "1.50"
    assert found["absent"] == ["99999"]
    log.append("src.public.orders", [order(7, _weight=-1), order(7, "fr")])
    assert ask(url, f"{path}?key=7").json["rows"][0]["country"] == "fr"
    assert ask(url, f"{path}?key=7&at={before}").json["rows"][0]["country"] == "de"


def test_a_key_is_given_as_it_is_written_in_answers(url: str, log: EmbeddedLog) -> None:
    log.create_topic("odd", "t timestamp, b binary, v int", key=["t", "b"], kind="changes")
    far = pa.scalar(2**63 - 1, pa.int64()).cast(pa.timestamp("us", "UTC"))
    columns = {"t": pa.array([far, None]), "b": [b"\x00\xff", b""], "v": [1, 2]}
    log.append("odd", pa.table(columns))
    for row in ask(url, "/v1/tables/odd/rows").json["rows"]:
        key = quote(json.dumps([row["t"], row["b"]]))
        assert ask(url, f"/v1/tables/odd/rows?key={key}").json["rows"] == [row]
    wrong = ask(url, f"/v1/tables/odd/rows?key={quote(json.dumps(['10000-13-01', 'x']))}")
    assert (wrong.status, wrong.json["code"]) == (400, "HR-HTTP-003")


def test_a_read_waits_for_its_token(url: str, log: EmbeddedLog) -> None:
    """R-B12: of a table for the log, of a view for a commit that is through the token."""
    written = log.append("src.public.orders", [order(555)]).position
    found = ask(url, f"/v1/tables/src.public.orders/rows?key=555&after={written}").json
    assert found["rows"]
    late = ask(url, f"/v1/views/shop.revenue/rows?after={written}&timeout=0.2")
    assert (late.status, late.json["code"]) == (504, "HR-READ-002")
    assert "0.2 s" in late.json["detail"]
    timer = threading.Timer(0.3, commit_view, [log, written, [(1, "token", "9.00")]])
    timer.start()
    try:
        found = ask(url, f"/v1/views/shop.revenue/rows?after={written}&timeout=20").json
    finally:
        timer.join()
    assert {"country": "token", "revenue": "9.00"} in found["rows"]
    ahead = log.position + 1
    timer = threading.Timer(0.3, log.append, ["clicks", [{"user": -1}]])
    timer.start()
    found = ask(url, f"/v1/tables/src.public.orders/rows?at={ahead}&timeout=20&limit=1").json
    timer.join()
    assert found["position"] == ahead


def test_a_target_is_waited_for_over_http_and_on_the_command_line(
    url: str, log: EmbeddedLog, project: Project, tmp_path: Path
) -> None:
    target = hr.SQLite(str(tmp_path / "t.db"))
    kept = Kept("shop", "late", {"orders": "src.public.orders"}, frozenset(), target)
    project.note_followers([*project.followers().values(), FollowerOf.of(kept)])
    written = log.append("src.public.orders", [order(777)]).position

    def told(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "headrace", "wait", "shop/late", str(written), "--json"]
        return subprocess.run(
            [*command, "--project", str(project.folder), *more],
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    late = ask(url, f"/v1/wait/shop/late?after={written}&timeout=0.2")
    assert (late.status, late.json["code"]) == (504, "HR-READ-002")
    assert "HR-READ-002" in told("--timeout", "0.2").stderr
    assert ask(url, "/v1/wait/shop/nobody").json["code"] == "HR-PROJECT-005"
    assert ask(url, "/v1/wait/nobody").status == 404
    with Follower(log, kept) as follower:
        timer = threading.Timer(0.3, follower.run, ["caught up"])
        timer.start()
        try:
            found = ask(url, f"/v1/wait/shop/late?after={written}&timeout=20").json
        finally:
            timer.join()
    assert found["position"] >= written
    assert json.loads(told().stdout)["position"] >= written
    assert ask(url, "/v1/wait/shop/late").json["position"] >= written
    project.note_followers([one for one in project.followers().values() if one.kept != "late"])


def test_a_view_comes_with_its_text(url: str) -> None:
    (view,) = ask(url, "/v1/views").json["views"]
    assert view == ask(url, "/v1/views/shop.revenue").json
    assert view["definition"] == DEFINITION
    assert view["reads"] == ["orders"]
    assert view["columns"] == {"country": "string", "revenue": "decimal(20,2)"}
    assert view["key"] == ["country"]


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/nothing", 404, "HR-HTTP-001"),
        ("/web/../app.py", 404, "HR-HTTP-001"),
        ("/web/%2e%2e%2fapp.py", 404, "HR-HTTP-001"),
        ("/web/nothing.js", 404, "HR-HTTP-001"),
        ("/errors/HR-LOG-999", 404, "HR-HTTP-001"),
        ("/v1/topics/clikcs", 404, "HR-LOG-010"),
        ("/v1/feed/clikcs", 404, "HR-LOG-010"),
        ("/v1/views/shop.revenu", 404, "HR-LOG-010"),
        ("/v1/tables/clicks/rows", 400, "HR-TABLE-002"),
        ("/v1/tables/src.public.orders/rows?key=x", 400, "HR-HTTP-003"),
        ("/v1/tables/src.public.orders/rows?key=[1,2]", 400, "HR-HTTP-003"),
        ("/v1/topics/clicks/rows?limit=0", 400, "HR-HTTP-003"),
        ("/v1/topics/clicks/rows?limit=x", 400, "HR-HTTP-003"),
        ("/v1/topics/clicks/rows?lmit=1", 400, "HR-HTTP-003"),
        ("/v1/topics/clicks/rows?page=x", 410, "HR-HTTP-004"),
        ("/v1/feed/clicks?start=never", 400, "HR-HTTP-003"),
        ("/v1/feed/clicks?after=00000000-1", 410, "HR-HTTP-004"),
        ("/v1/views/shop.revenue/rows?after=soon", 400, "HR-READ-001"),
        ("/v1/views/shop.revenue/rows?at=99999999&timeout=0", 504, "HR-LOG-026"),
    ],
)
def test_errors_are_problems_of_the_catalogue(path: str, status: int, code: str, url: str) -> None:
    answer = ask(url, path)
    assert answer.status == status
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json
    assert body["code"] == code
    assert body["status"] == status
    assert body["title"] == errors.catalogue()[code].title
    assert body["detail"]
    assert body["fix"]
    assert ask(url, body["type"]).json["code"] == code


def test_a_wrong_method_is_a_problem_too(url: str) -> None:
    answer = ask(url, "/v1/status", "POST")
    assert answer.json["status"] == 405
    assert "GET" in answer.headers["allow"]
    assert ask(url, "/v1/status", "DELETE", {"Content-Type": "application/json"}).status == 405


# --- who may ask ----------------------------------------------------------------------------------

OURS = "127.0.0.1:8321"


ABROAD = {"origin": "http://evil.example"}
CROSS = {"sec-fetch-site": "cross-site"}
LINK = CROSS | {"sec-fetch-mode": "navigate"}
HERE = {"host": OURS}
POSTED = HERE | {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("method", "path", "headers", "answered"),
    [
        ("GET", "/v1/status", HERE, True),
        ("GET", "/v1/status", {"host": "localhost:8321"}, True),
        ("GET", "/v1/status", {"host": "[::1]:8321"}, True),
        ("GET", "/v1/status", {"host": "LOCALHOST"}, True),
        ("GET", "/v1/status", {}, False),
        ("GET", "/v1/status", {"host": "evil.example"}, False),
        ("GET", "/v1/status", {"host": "127.0.0.1.evil.example"}, False),
        ("GET", "/v1/status", {"host": "localhost.evil.example:8321"}, False),
        ("GET", "/", {"host": "evil.example"}, False),
        ("GET", "/v1/status", HERE | {"origin": f"http://{OURS}"}, True),
        ("GET", "/v1/status", HERE | ABROAD, False),
        ("GET", "/v1/status", HERE | {"origin": "null"}, False),
        ("GET", "/v1/status", HERE | {"origin": "http://127.0.0.1:9999"}, False),
        ("GET", "/v1/status", HERE | CROSS, False),
        ("GET", "/v1/status", HERE | {"sec-fetch-site": "same-site"}, False),
        ("GET", "/v1/status", HERE | {"sec-fetch-site": "same-origin"}, True),
        ("GET", "/v1/status", HERE | LINK, False),
        ("GET", "/", HERE | LINK, True),
        ("GET", "/", HERE | CROSS | {"sec-fetch-mode": "no-cors"}, False),
        ("POST", "/v1/parts/x/kill", HERE, False),
        ("POST", "/v1/parts/x/kill", HERE | {"content-type": "text/plain"}, False),
        ("POST", "/v1/parts/x/kill", POSTED, True),
        ("POST", "/v1/parts/x/kill", POSTED | {"origin": f"http://{OURS}"}, True),
        ("POST", "/v1/parts/x/kill", POSTED | ABROAD, False),
        ("POST", "/", POSTED | LINK, False),
        ("OPTIONS", "/v1/parts/x/kill", HERE | ABROAD, False),
    ],
)
def test_only_this_machine_and_our_own_page_are_answered(
    method: str, path: str, headers: dict[str, str], answered: bool
) -> None:
    assert (refusal(method, path, Headers(headers)) == "") is answered


def test_two_hosts_are_refused() -> None:
    raw = [(b"host", OURS.encode()), (b"host", b"evil.example")]
    assert refusal("GET", "/", Headers(raw=raw))


def test_a_foreign_request_is_refused_before_it_does_anything(url: str) -> None:
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        answer = ask(url, "/v1/topics", headers=headers)
        assert (answer.status, answer.json["code"]) == (403, "HR-HTTP-002")
        assert b"clicks" not in answer.body
        assert ask(url, "/v1/parts/page/kill", "POST", headers).status == 403
    assert ask(url, "/v1/parts/page/kill", "POST", {"Content-Type": ""}).status == 403


def test_answers_can_be_used_by_our_page_only(url: str) -> None:
    headers = ask(url, "/").headers
    assert "access-control-allow-origin" not in headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.1", "::", "example.org", ""])
def test_nothing_listens_beyond_this_machine(host: str) -> None:
    with pytest.raises(errors.NotLoopback):
        bound(host, 0)


def test_a_port_that_is_taken(project: Project) -> None:
    with bound("127.0.0.1", 0) as taken, pytest.raises(errors.PortTaken):
        Server(project, port=taken.getsockname()[1])


def test_the_page_takes_nothing_from_elsewhere() -> None:
    """No address but our own stands in its files, and none is inline that the policy forbids."""
    web = ROOT / "src" / "headrace" / "serving" / "web"
    for path in web.iterdir():
        text = path.read_text().replace("http://www.w3.org/", "")
        assert not re.search(r"https?://|url\(|@import", text), path.name
    page = (web / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", page)


def test_the_wheel_has_the_page(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    web = ROOT / "src" / "headrace" / "serving" / "web"
    assert {f"headrace/serving/web/{path.name}" for path in web.iterdir()} <= names


# --- feeds over HTTP ------------------------------------------------------------------------------


def test_a_feed_over_http_cut_anywhere_is_whole(url: str, log: EmbeddedLog) -> None:
    """The connection is cut in the middle of whatever is sent, while somebody writes."""
    choices = random.Random(7)
    log.create_topic("cut", "n bigint not null", key="n", kind="changes")
    log.append("cut", [{"n": n} for n in range(2_000)])
    written, token = 2_000, ""
    rows: list[int] = []

    def told(found: list[Event]) -> list[int]:
        first = [row["n"] for e in found if e.name == "snapshot" for row in e.data["rows"]]
        return first + [
            one["row"]["n"] for e in found if e.name == "changes" for one in e.data["changes"]
        ]

    while written < 3_000 or len(rows) < written:
        if written < 3_000:
            log.append("cut", [{"n": n} for n in range(written, written + 50)])
            written += 50
        wanted = choices.randrange(30_000)
        with Listener(url, "/v1/feed/cut", token) as listener:
            while len(listener.body) < wanted and told(listener.events())[-1:] != [written - 1]:
                listener.more()
            got = parse_events(listener.body[:wanted].decode(errors="ignore"))
        rows += told(got)
        token = got[-1].id if got else token
    assert rows == list(range(written))


def test_a_slow_reader_does_not_fill_the_memory(
    url: str, log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody asks for 60 MB and takes nothing: what is made for it stays small."""
    log.create_topic("wide", "text string")
    for _ in range(20):
        log.append("wide", [{"text": "x" * 3_000} for _ in range(1_000)])
    made: list[int] = []
    take = feeding.Feed.take

    def counted(feed: feeding.Feed) -> bytes:
        found = take(feed)
        made.append(len(found))
        return found

    monkeypatch.setattr(feeding.Feed, "take", counted)
    place = url.removeprefix("http://").partition(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        client.connect((place[0], int(place[2])))
        head = f"GET /v1/feed/wide?start=earliest HTTP/1.1\r\nHost: {place[0]}:{place[2]}\r\n\r\n"
        client.sendall(head.encode())
        before = -1
        while not made or before != sum(made):  # until nothing more is made
            before = sum(made)
            time.sleep(0.5)
        assert sum(made) < 12 << 20


def test_the_server_stops_with_feeds_open_and_readers_that_do_not_read(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    with hr.connect(str(project.log)) as log:
        make_topics(log)
        log.append("clicks", [{"user": 1, "url": "x" * 3_000}] * 10_000)
        with served(project) as server:
            idle = Listener(server.url, "/v1/feed/bag")
            idle.until(lambda found: found)
            stuck = Listener(server.url, "/v1/feed/clicks?start=earliest")
            status = Listener(server.url, "/v1/events")
            status.until(lambda found: found)
        for one in (idle, stuck, status):
            one.close()


def test_what_goes_wrong_in_a_feed_is_said_in_it(
    url: str, log: EmbeddedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer has begun, and cannot become a problem: a value comes that cannot be written."""
    far = pa.table({"day": pa.array([2**31 - 1], pa.int32()).cast(pa.date32())})
    log.create_topic("far", "day date")
    with Listener(url, "/v1/feed/far?start=earliest") as listener:
        log.append("far", far)
        (event,) = listener.until(lambda found: found)
    assert event.data["changes"][0]["row"] == {"day": "infinity"}

    def fails(column: pa.Array) -> list[Any]:
        raise errors.WrongType(f"{column.type} cannot be written", place="far")

    monkeypatch.setattr(feeding, "json_values", fails)
    with Listener(url, "/v1/feed/far?start=earliest") as listener:
        (event,) = listener.until(lambda found: found)
    assert (event.name, event.data["code"]) == ("problem", "HR-LOG-016")


# --- the figures ----------------------------------------------------------------------------------


def test_rates_are_rows_a_second_over_the_last_seconds() -> None:
    rates = Rates()
    seen = []
    for second in range(12):
        topics: list[dict[str, Any]] = [
            {"name": "t", "rows": second * 10 + (500 if second > 5 else 0)}
        ]
        rates.add(float(second), topics)
        seen.append(topics[0]["rate"])
    assert seen[:2] == [None, 10.0]
    assert seen[6] == 110.0
    assert seen[11] == 10.0


def at(second: float) -> int:
    return round(second * 1e6)


def test_the_time_of_each_hop() -> None:
    """The slowest of several pipelines and targets decides; what has not come has no time."""
    one = Transaction("shop", 7, 3, position=20, committed=at(1), logged=at(1.05))
    commits = {
        "a": [Through(10, at(1)), Through(25, at(1.2))],
        "b": [Through(9, at(1)), Through(20, at(1.3))],
    }
    applied = {"x": [Through(10, at(1)), Through(25, at(1.5))]}
    told = changed(one, commits, applied)
    assert told["hops"] == [
        {"hop": "log", "ms": 50.0},
        {"hop": "views", "ms": 250.0},
        {"hop": "target", "ms": 200.0},
    ]
    assert told["ms"] == 500.0
    assert changed(one, commits, {})["hops"][-1]["hop"] == "views"
    pending = changed(one, commits, {"x": [Through(10, at(1))]})
    assert pending["hops"][-1] == {"hop": "target", "ms": None}
    unknown = changed(one, commits, {"x": [Through(99, at(2))]})  # it was before all we know
    assert unknown["hops"][-1] == {"hop": "target", "ms": None}


def test_the_last_changes_are_mostly_those_that_have_arrived() -> None:
    many = [Transaction("s", n, 1, n, at(n / 100), at(n / 100)) for n in range(200)]
    commits = {"p": [Through(n, at(n / 100)) for n in range(0, 150, 5)]}
    shown = newest(many, commits, {})
    waiting = [one["xid"] for one in shown if one["hops"][-1]["ms"] is None]
    assert waiting == [199, 198, 197]
    assert shown[3]["xid"] == 145
    assert len(shown) == 12


def test_the_hops_are_read_from_the_log(tmp_path: Path) -> None:
    """From the topics of a capture and a pipeline, and what a follower said; again as they grow."""
    with hr.connect(tmp_path / "log") as log:
        log.create_topic("db._transactions", TRANSACTIONS)
        commits_topic(log, "shop")
        says: dict[str, Any] = {
            "captures": [{"name": "db"}],
            "pipelines": [{"name": "shop"}],
            "followers": [{"name": "shop/main", "applied": []}],
        }
        assert last_changes(log, says) == []
        now = datetime.now(UTC)
        row = {"lsn": 1, "commit_time": now, "rows": 2}
        log.append("shop._commits", [{"through": 0, "views": []}])
        first = log.append("db._transactions", [row | {"xid": 1}, row | {"xid": 2}]).position
        (_, told) = last_changes(log, says)
        assert (told["xid"], told["rows"], told["position"]) == (1, 2, first)
        assert datetime.fromisoformat(told["committed"]) == now
        assert told["hops"][1:] == [{"hop": "views", "ms": None}]
        done = log.append("shop._commits", [{"through": first, "views": []}]).received_time
        says["followers"][0]["applied"] = [
            {"through": 0, "at": now.isoformat()},
            {"through": first, "at": (done + timedelta(seconds=2)).isoformat()},
        ]
        hops = last_changes(log, says)[0]["hops"]
        assert [one["hop"] for one in hops] == ["log", "views", "target"]
        assert hops[-1]["ms"] == 2000.0


def test_amounts_are_not_made_floats(url: str, log: EmbeddedLog) -> None:
    """R-B5: a decimal is text in JSON, whatever its size."""
    log.append("src.public.orders", [order(777) | {"amount": Decimal("12345678.01")}])
    assert b'"12345678.01"' in ask(url, "/v1/tables/src.public.orders/rows?key=777").body
