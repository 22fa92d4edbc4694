"""The commands of `headrace group`, and `headrace topic set` and `delete`, as somebody types them.

Caught: commands that do something else than they say, figures that differ from those of the log,
warnings that do not come. Not caught: how it looks to the eye.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import headrace as hr
from headrace.log.embedded.log import EmbeddedLog
from tests.cli.conftest import Headrace
from tests.log.kit import Machine, machine_log


@pytest.fixture
def log(folder: str) -> EmbeddedLog:
    """A log in which group g has read 6 of 10 rows of t, and h nothing of them."""
    log = hr.connect(folder)
    log.create_topic("t", "n bigint", partitions=2)
    log.append("t", [{"n": n} for n in range(6)], partition=0)
    with log.consumer("t", "g", follow=False) as consumer:
        next(consumer)
        consumer.commit()
    log.append("t", [{"n": n} for n in range(6, 10)], partition=1)
    with log.transaction() as transaction:
        transaction.commit_offsets("h", {"t": {0: 0}})
    return log


def test_ls_and_show_say_how_far_behind(headrace: Headrace, log: EmbeddedLog) -> None:
    """R-A12."""
    found = {one["group"]: one for one in headrace("group", "ls", "--json").json}
    assert {name: one["lag"]["events"] for name, one in found.items()} == {"g": 4, "h": 6}
    assert found["h"]["lag"]["unknown"] == 1
    assert found["g"]["warning"] is None
    out = headrace("group", "ls").out
    assert "behind" in out.splitlines()[0]
    assert "6 + ?" in out
    shown = headrace("group", "show", "g", "--json").json
    assert [one["events"] for one in shown["partitions"]] == [0, 4]
    assert shown["partitions"][0]["fall"] == "nothing to read"
    assert shown["members"] == []
    text = headrace("group", "show", "h").out
    assert "never" in text
    assert "no members" in text


def test_an_archive_out_of_reach_is_said_and_the_rest_shown(
    headrace: Headrace, log: EmbeddedLog, tmp_path: Path
) -> None:
    archive = tmp_path / "archive"
    log.create_topic("old", "n bigint")
    log.set_topic("old", retention_seconds=0, archive=str(archive))
    log.consumer("old", "late").close()
    log.append("old", [{"n": 1}])
    log.keeper().turn(close=True)
    shutil.rmtree(archive)
    listed = headrace("group", "ls")
    assert listed.code == 0
    late = next(line for line in listed.out.splitlines() if line.startswith("late"))
    assert "?" in late
    assert "cannot be read: the archived file" in late
    found = {one["group"]: one for one in headrace("group", "ls", "--json").json}
    assert set(found) == {"g", "h", "late"}
    assert found["late"]["lag"]["seconds"] is None
    assert found["late"]["lag"]["events"] == 1
    assert "archived file" in found["late"]["warning"]
    shown = headrace("group", "show", "late")
    assert "cannot be read" in shown.err


def test_members_are_shown_while_they_live(headrace: Headrace, log: EmbeddedLog) -> None:
    with log.consumer("t", "g"):
        (member,) = headrace("group", "show", "g", "--json").json["members"]
        assert (member["alive"], member["partitions"]) == (True, {"t": [0, 1]})
        assert "t 0, 1" in headrace("group", "show", "g").out
        refused = headrace("group", "reset", "g", "--to", "earliest", "--json")
        assert (refused.code, refused.error["code"]) == (1, "HR-GROUP-004")
        assert headrace("group", "reset", "g", "--to", "earliest", "--force").code == 0
    assert log.offsets("g") == {"t": {0: 0, 1: 0}}


def test_a_group_that_will_lose_rows_is_marked(headrace: Headrace, folder: str) -> None:
    """R-A12: the alert fires, for a stopped group on a quiet topic."""
    machine = Machine()
    machine.clock_us = 10**15
    with machine_log(folder, machine, background=False) as log:
        log.create_topic("t", "n bigint")
        log.set_topic("t", retention_seconds=1e9)
        log.append("t", [{"n": 1}])
        log.consumer("t", "g").close()
    (one,) = headrace("group", "ls", "--json").json
    left = one["lag"]["falls_off_seconds"]
    assert one["warning"] is None
    assert 0 < left < 1e9
    (warned,) = headrace("group", "ls", "--json", "--warn", str(left + 10)).json
    assert warned["warning"].startswith("loses events in")
    assert "! loses events in" in headrace("group", "ls", "--warn", str(left + 10)).out
    assert "warning: loses" in headrace("group", "show", "g", "--warn", str(left + 10)).err


def test_reset_shows_a_preview_and_does_it(headrace: Headrace, log: EmbeddedLog) -> None:
    """R-A13."""
    preview = headrace("group", "reset", "g", "--to", "earliest", "--dry-run", "--json").json
    assert preview[0] == {"topic": "t", "partition": 0, "from": 6, "to": 0, "events": 6}
    assert log.offsets("g")["t"][0] == 6
    done = headrace("group", "reset", "g", "--to", "earliest", "--dry-run")
    assert "6 again" in done.out
    assert "nothing was moved" in done.err
    headrace("group", "reset", "g", "--to", "2", "--topic", "t", "--partition", "0")
    assert log.offsets("g")["t"] == {0: 2, 1: 0}
    assert "4 not read" in headrace("group", "reset", "g", "--to", "latest").out
    assert log.offsets("g")["t"] == {0: 6, 1: 4}
    headrace("group", "reset", "g", "--to", "2001-01-01")
    assert log.offsets("g")["t"] == {0: 0, 1: 0}
    headrace("group", "reset", "g", "--to", f"position:{log.position}")
    assert log.offsets("g")["t"] == {0: 6, 1: 4}


def test_copy_and_delete(headrace: Headrace, log: EmbeddedLog) -> None:
    assert headrace("group", "copy", "g", "again", "--to", "earliest").code == 0
    assert log.offsets("again") == {"t": {0: 0, 1: 0}}
    assert headrace("group", "copy", "g", "again", "--json").error["code"] == "HR-GROUP-005"
    assert headrace("group", "delete", "again", stdin="n\n").code != 0
    assert "again" in log.groups()
    assert headrace("group", "delete", "again", "--json").code == 2
    assert headrace("group", "delete", "again", "--yes", "--json").json == {"group": "again"}
    assert log.groups() == ["g", "h"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("show", "gg"), "did you mean 'g'?"),
        (("reset", "g", "--to", "yesterday"), "is not a place"),
        (("reset", "g"), "--to"),
        (("reset", "g", "--to", "earliest", "--topic", "x"), "there is no topic 'x'"),
        (("reset", "g", "--to", "earliest", "--partition", "7"), "no partition 7"),
    ],
)
def test_mistakes_are_explained(
    headrace: Headrace, log: EmbeddedLog, arguments: tuple[str, ...], said: str
) -> None:
    done = headrace("group", *arguments)
    assert done.code != 0
    assert said in done.err


def test_without_groups(headrace: Headrace, folder: str) -> None:
    with hr.connect(folder):
        pass
    done = headrace("group", "ls")
    assert (done.out, "there are no groups yet" in done.err) == ("", True)
    assert headrace("group", "ls", "--json").json == []


# --- topic set, delete ----------------------------------------------------------------------------


def test_settings_of_a_topic_are_changed_and_shown(headrace: Headrace, log: EmbeddedLog) -> None:
    done = headrace("topic", "set", "t", "retention_seconds=3600", "flow=drop", "flow_rows=10")
    assert "rows stay: for 1 h 0 min" in done.err
    policy = log.topic("t").policy
    assert (policy.retention_seconds, policy.flow, policy.flow_rows) == (3600, "drop", 10)
    shown = headrace("topic", "show", "t", "--json").json
    assert shown["settings"]["retention_seconds"] == 3600
    log.append("t", [{"n": n} for n in range(9)])
    text = headrace("topic", "show", "t").out
    assert "drop: what finds the slowest group 10 rows behind" in text
    assert f"{log.dropped('t')} rows found no room" in text
    assert headrace("topic", "show", "t", "--json").json["dropped"] == log.dropped("t") > 0
    made = headrace(
        "topic", "set", "t", "retention_seconds=none", "grace_seconds=60", "--json"
    ).json
    assert (made["retention_seconds"], made["grace_seconds"]) == (None, 60)
    assert headrace("topic", "set", "t").json == made


@pytest.mark.parametrize(
    ("setting", "said"),
    [("retention=5", "has no setting"), ("flow=fast", "no value"), ("flow", "NAME=VALUE")],
)
def test_settings_that_cannot_be(
    headrace: Headrace, log: EmbeddedLog, setting: str, said: str
) -> None:
    done = headrace("topic", "set", "t", setting)
    assert done.code != 0
    assert said in done.err


def test_a_topic_is_deleted_when_asked_twice(headrace: Headrace, log: EmbeddedLog) -> None:
    assert headrace("topic", "delete", "t", stdin="n\n").code != 0
    assert headrace("topic", "delete", "t", "--json").code == 2
    assert [topic.name for topic in log.topics()] == ["t"]
    done = headrace("topic", "delete", "t", stdin="y\n")
    assert "10 rows" in done.err
    assert log.topics() == []
    assert headrace("topic", "delete", "t", "--yes", "--json").error["code"] == "HR-LOG-010"


def test_what_retention_took_is_not_counted_as_rows(headrace: Headrace, log: EmbeddedLog) -> None:
    """What is shown is what is held; what went is said."""
    headrace("topic", "set", "t", "retention_seconds=0")
    headrace("log", "seal")
    log.append("t", [{"n": 1}], partition=0)
    (listed,) = headrace("topic", "ls", "--json").json
    assert (listed["rows"], listed["starts"], listed["ends"]) == (1, [6, 4], [7, 4])
    shown = headrace("topic", "show", "t").out
    assert "1 in 2 partitions" in shown
    assert "10 older ones are gone by retention" in shown
    assert "first offset" in shown
    assert headrace("log", "stats", "--json").json["rows"] == 1
    assert headrace("topic", "delete", "t", "--yes", "--json").json["rows"] == 1
    row = headrace("group", "ls").out.splitlines()[1].split()
    assert row == ["g", "0", "-", "0", "-", "-"]  # nothing to read, so nothing is old
    assert "none of its topics is there" in headrace("group", "show", "g").out


@pytest.mark.parametrize(
    ("setting", "fix"),
    [
        ("flow=bufer", "one of buffer, drop, backpressure"),
        ("compact=yes", "true or false"),
        ("retention_bytes=1.5", "a whole number of bytes, not below 0 or none"),
        ("flow_rows=0", "a whole number of rows, not below 1"),
    ],
)
def test_a_setting_that_cannot_be_says_what_it_can(
    headrace: Headrace, log: EmbeddedLog, setting: str, fix: str
) -> None:
    assert headrace("topic", "set", "t", setting, "--json").error["fix"] == fix


def test_a_partition_that_is_not_there_is_told_how_many_there_are(
    headrace: Headrace, log: EmbeddedLog
) -> None:
    done = headrace("group", "reset", "g", "--to", "earliest", "--partition", "7", "--json")
    assert done.error["fix"] == "name one from 0 to 1"


def test_a_group_that_producers_wait_for_is_shown_and_released(
    headrace: Headrace, log: EmbeddedLog
) -> None:
    """R-A3: whom they wait for can be seen, and ended without losing its place."""
    log.consumer("t", "g", flow="backpressure", flow_rows=5000).close()
    shown = headrace("group", "show", "g").out
    assert "producers wait 30.0 s while it would be more than 5,000 rows behind" in shown
    assert headrace("group", "show", "g", "--json").json["pressure"]["rows"] == 5000
    assert (
        "while group 'g' would be more than 5,000 rows behind" in headrace("topic", "show", "t").out
    )
    assert headrace("topic", "show", "t", "--json").json["pressure"]["g"]["seconds"] == 30.0
    before = log.offsets("g")
    assert headrace("group", "release", "g", "--json").json == {"group": "g", "released": True}
    assert headrace("group", "release", "g", "--json").json["released"] is False
    assert "no producer waits" in headrace("group", "release", "g").err
    assert log.offsets("g") == before
    assert headrace("topic", "show", "t", "--json").json["pressure"] == {}
    assert headrace("group", "release", "nobody", "--json").error["code"] == "HR-GROUP-003"
