"""Change feeds: first the rows, then every change; cut anywhere, nothing is missed or repeated.

The oracle is a plain list: the rows appended, in order. Random histories (entries of any size, two
partitions, updates, deletes, large entries that are read in chunks) are fed to a reader that is cut
off after a random number of bytes, again and again, and goes on with the last token it has, in a
new `Feed` each time. Caught: a row lost, repeated or out of order at any cut, in the snapshot, in
the middle of an entry or between entries; a snapshot that is not the table at its position; an
entry whose end is not marked. Not caught: what a proxy between the two does; that is HTTP's part.
R-B8.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace import errors
from headrace.log.embedded.log import EmbeddedLog
from headrace.serving import feed as feeding
from headrace.serving.feed import Feed, Token, begin_of
from tests.serving.kit import Event, parse_events

TOPICS = {"keyed": "k", "bag": "", "events": ""}


def make(folder: Path, **more: Any) -> EmbeddedLog:
    log = hr.connect(folder, background=False, **more)
    log.create_topic("keyed", "k bigint not null, v string", key="k", kind="changes", partitions=2)
    log.create_topic("bag", "k bigint, v string", kind="changes")
    log.create_topic("events", "k bigint, v string")
    return log


class World:
    """A log that is written to at random, and the plain list of what was written."""

    def __init__(self, log: EmbeddedLog, choices: random.Random) -> None:
        self.log, self.choices = log, choices
        self.rows: dict[str, list[tuple[int, int, Any, Any]]] = {name: [] for name in TOPICS}
        self.table: dict[int, str] = {}
        self.bag: list[tuple[int, str]] = []

    def write(self) -> None:
        """One entry; now and then a large one."""
        choices = self.choices
        count = choices.choice([1, 1, 2, 3, 40])
        entry: dict[str, list[tuple[int, int, str]]] = {name: [] for name in TOPICS}
        changed = set()
        for _ in range(count):
            key, value = choices.randrange(12), str(choices.randrange(1000))
            name = choices.choice(list(TOPICS))
            if name == "keyed" and key not in changed:
                changed.add(key)
                if key in self.table:
                    entry[name].append((-1, key, self.table.pop(key)))
                if choices.random() < 0.7:
                    entry[name].append((1, key, value))
                    self.table[key] = value
            elif name == "bag":
                if self.bag and choices.random() < 0.4:
                    entry[name].append((-1, *self.bag.pop(choices.randrange(len(self.bag)))))
                else:
                    entry[name].append((1, key, value))
                    self.bag.append((key, value))
            elif name == "events":
                entry[name].append((1, key, value))
        if not any(entry.values()):
            return
        before = self.log.position
        with self.log.transaction() as tx:
            for name, rows in entry.items():
                weighted = name != "events"
                if rows:
                    tx.append(
                        name,
                        [
                            {"k": k, "v": v} | ({"_weight": w} if weighted else {})
                            for w, k, v in rows
                        ],
                    )
        position = self.log.position
        for name, rows in entry.items():
            found: list[tuple[int, int, Any, Any]] = [(position, w, k, v) for w, k, v in rows]
            if name == "keyed" and rows:  # an entry may be ordered by partition: as it is stored
                found = stored(self.log, before, position, rows)
            self.rows[name] += found


def stored(
    log: EmbeddedLog, before: int, position: int, rows: list[Any]
) -> list[tuple[int, int, Any, Any]]:
    """The rows of the last entry in the order of the log, by another way than the feed's."""
    found: list[tuple[int, int, Any, Any]] = []
    for batch in log.read("keyed", after=before, through=position):
        found += [(position, r["_weight"], r["k"], r["v"]) for r in batch.to_pylist()]
    assert Counter((w, k, v) for _, w, k, v in found) == Counter(rows)
    return found


def heard(events: list[Event]) -> tuple[list[tuple[int, str]], list[tuple[int, int, Any, Any]]]:
    """Rows of the snapshot, and changes, as the reader has them."""
    first = [(row["k"], row["v"]) for e in events if e.name == "snapshot" for row in e.data["rows"]]
    changes = [
        (e.data["position"], one["weight"], one["row"]["k"], one["row"]["v"])
        for e in events
        if e.name == "changes"
        for one in e.data["changes"]
    ]
    return first, changes


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_feed_cut_at_random_misses_nothing_and_repeats_nothing(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    choices = random.Random(seed)
    name = choices.choice(list(TOPICS))
    folder = tmp_path_factory.mktemp("log") / "log"
    with (
        make(folder, read_rows_max=choices.choice([1, 7, 1000])) as log,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(feeding, "ROWS_MAX", choices.choice([1, 3, 500]))
        world = World(log, choices)
        for _ in range(choices.randrange(25)):
            world.write()
        start = choices.choice(["rows", "now", "earliest"])
        events: list[Event] = []
        token, begun = None, 0
        for _ in range(15):
            if token is None:  # nothing was heard: it begins anew
                begun = 0 if start == "earliest" else log.position
            feed = Feed(log, name, token, start)
            text = b""
            for _ in range(choices.randrange(4)):
                if choices.random() < 0.5:
                    world.write()
                text += feed.take() or feed.beat()
            feed.close()
            cut = text[: choices.randrange(len(text) + 1)]
            got = parse_events(cut.decode(errors="ignore"))
            events += got
            token = got[-1].id if got else token
        begun = begun if token or start == "earliest" else log.position
        feed = Feed(log, name, token, start)
        while text := feed.take():
            events += parse_events(text.decode())
        feed.close()
        snapshot, changes = heard(events)
        live = [event.data["position"] for event in events if event.name == "live"]
        assert changes == [row for row in world.rows[name] if row[0] > begun]
        if start == "rows" and name != "events":
            assert live == [begun]
            rows = [row for row in world.rows[name] if row[0] <= begun]
            total: Counter[tuple[int, str]] = Counter()
            for _, weight, key, value in rows:
                total[key, value] += weight
            assert Counter(snapshot) == +total
            if name == "keyed":
                assert snapshot == sorted(snapshot)
        else:
            assert snapshot == []


def test_a_large_entry_is_resumed_in_the_middle(tmp_path: Path) -> None:
    """An entry of several chunks, and one event after another of it."""
    with make(tmp_path / "log", inline_bytes_max=10_000, chunk_bytes=20_000) as log:
        log.append("events", [{"k": i, "v": "x" * 50} for i in range(2_000)])
        token: str | None = f"{begin_of(log, log.topic('events'))}-0"
        seen: list[int] = []
        lasts: list[bool] = []
        while True:
            feed = Feed(log, "events", token)
            events = parse_events(feed.take().decode())[:1]  # one event, then it is cut off
            feed.close()
            if not events:
                break
            token = events[0].id
            assert len(events[0].data["changes"]) <= feeding.ROWS_MAX
            seen += [one["row"]["k"] for one in events[0].data["changes"]]
            lasts.append(events[0].data["last"])
        assert seen == list(range(2_000))
        assert lasts == [False] * (len(lasts) - 1) + [True]
        assert token == f"{begin_of(log, log.topic('events'))}-{log.position}"


def test_the_bytes_of_an_event_are_bounded(tmp_path: Path) -> None:
    with make(tmp_path / "log") as log:
        log.append("events", [{"k": i, "v": "x" * 100_000} for i in range(20)])
        feed = Feed(log, "events", start="earliest")
        sizes = []
        while text := feed.take():
            sizes.append(len(text))
        assert sum(sizes) > 2_000_000
        assert max(sizes) < 2 * feeding.BYTES_MAX + 200_000


def test_a_quiet_feed_says_through_where_nothing_came(tmp_path: Path) -> None:
    """So that a token does not fall behind while other topics move."""
    with make(tmp_path / "log") as log:
        feed = Feed(log, "events")
        log.append("bag", [{"k": 1}])
        assert feed.take() == b""
        (event,) = parse_events(feed.beat().decode())
        assert (event.name, event.data) == ("through", {"position": log.position})
        assert parse_events(feed.beat().decode()) == []
        log.append("events", [{"k": 2}])
        (event,) = parse_events(Feed(log, "events", event.id).take().decode())
        assert event.data["changes"] == [{"weight": 1, "op": None, "row": {"k": 2, "v": None}}]


@pytest.mark.parametrize("text", ["", "x", "12", "00000000.1-1", "ffffffffff.1-1", "0.1-1s", "%0A"])
def test_a_token_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    with make(tmp_path / "log") as log, pytest.raises(errors.BadFeedToken):
        Feed(log, "events", text)


def test_a_topic_that_is_begun_anew_ends_the_feed_and_its_tokens(tmp_path: Path) -> None:
    """Rows of the older generation are gone, and no change says so: the reader must begin anew."""
    with hr.connect(tmp_path / "log") as log:
        log.create_topic("t", "id bigint, v int", key="id", kind="changes")
        log.append("t", [{"id": 1, "v": 1}])
        feed, all_of_it = Feed(log, "t"), Feed(log, "t", start="earliest")
        feed.take()
        log.alter_topic("t", add="w int")  # the same generation
        log.append("t", [{"id": 2, "v": 2}])
        assert b'"id":2' in feed.take()
        token = str(feed.token)
        log.alter_topic("t", retype={"v": "string"})
        log.append("t", [{"id": 3, "v": "x"}])
        with pytest.raises(errors.BadFeedToken, match="generation 2"):
            feed.take()
        with pytest.raises(errors.BadFeedToken, match="generation 2"):
            Feed(log, "t", token)
        anew = Feed(log, "t")
        told = anew.take()
        assert b'"id":3' in told
        assert b'"id":2' not in told
        log.append("t", [{"id": 4, "v": "y"}])
        assert b'"id":4' in Feed(log, "t", str(anew.token)).take()
        assert all_of_it.take().count(b'"row":') == 4
        assert Feed(log, "t", str(all_of_it.token)).take() == b""


def test_a_token_ahead_of_the_log_is_refused(tmp_path: Path) -> None:
    """A log that was put back from a backup does not have it: waiting would be silent."""
    with make(tmp_path / "log") as log, pytest.raises(errors.BadFeedToken, match="ahead"):
        Feed(log, "events", str(Token(begin_of(log, log.topic("events")), log.position + 1)))


def test_a_token_of_another_topic_is_refused(tmp_path: Path) -> None:
    """It would leave out rows of this one: those that its reader has of the other."""
    with make(tmp_path / "log") as log, pytest.MonkeyPatch.context() as patch:
        patch.setattr(feeding, "BYTES_MAX", 1)
        log.append("keyed", [{"k": i} for i in range(9)])
        feed, alive = Feed(log, "keyed"), Feed(log, "keyed")
        feed.take()
        assert feed.token.snapshot
        with pytest.raises(errors.BadFeedToken, match="not of topic 'bag'"):
            Feed(log, "bag", str(feed.token))
        while alive.take():
            pass
        log.delete_topic("keyed")
        with pytest.raises(errors.UnknownTopic):
            alive.take()
        log.create_topic("keyed", "k bigint, v string", key="k", kind="changes")
        log.append("keyed", [{"k": i} for i in range(9)])
        with pytest.raises(errors.BadFeedToken, match="not of topic 'keyed'"):
            Feed(log, "keyed", str(feed.token))


def test_a_feed_ends_when_its_topic_is_made_anew(tmp_path: Path) -> None:
    with make(tmp_path / "log") as log:
        feed = Feed(log, "keyed")
        feed.take()
        log.delete_topic("keyed")
        log.create_topic("keyed", "k bigint, v string", key="k", kind="changes")
        log.append("keyed", [{"k": 1}])
        with pytest.raises(errors.BadFeedToken, match="made anew"):
            feed.take()


def test_a_token_behind_which_rows_are_gone_is_refused_at_once(tmp_path: Path) -> None:
    """Not within the answer: a browser would come back with it for ever."""
    with make(tmp_path / "log") as log:
        log.set_topic("keyed", compact=True)
        token = str(Feed(log, "keyed", start="now").token)
        for value in range(5):
            log.append("keyed", [{"k": 1, "v": str(value)}])
        keeper = log.keeper()
        assert keeper.take()
        for _ in range(3):
            keeper.turn(close=True, compact=True)
        keeper.release()
        assert log.since_of("keyed") > 0
        with pytest.raises(errors.BadFeedToken, match="too old"):
            Feed(log, "keyed", token)
        assert b'"v":"4"' in Feed(log, "keyed").take()
