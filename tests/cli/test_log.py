"""`headrace log check` and `headrace log stats`."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest

import headrace as hr
from tests.cli.conftest import Headrace

ROWS = "".join(f'{{"user": {n}, "url": "/{n}"}}\n' for n in range(10))


def test_check_of_a_sound_log(clicks: Headrace) -> None:
    """A sound log is called so, with what was read; exit code 0."""
    clicks("topic", "append", "clicks", "--batch", "3", stdin=ROWS)
    done = clicks("log", "check")
    assert (done.code, done.err) == (0, "")
    first, second = done.out.splitlines()
    assert "1 journal file, 5 entries, 10 rows" in first
    assert second.startswith("sound: ")
    report = clicks("log", "check", "--json").json
    assert (report["ok"], report["rows"], report["position"]) == (True, 10, 5)


def damage(folder: str) -> tuple[Path, int]:
    """Change a byte of the rows in the journal; the file and the place."""
    file = next(Path(folder, "journal").glob("*"))
    data = bytearray(file.read_bytes())
    at = data.index(b"/7")
    data[at] ^= 1
    file.write_bytes(data)
    return file, at


def test_check_names_file_place_expected_and_found(clicks: Headrace, folder: str) -> None:
    """A changed byte is found: file, place, expected and found are named; exit code 1."""
    clicks("topic", "append", "clicks", stdin=ROWS)
    file, _ = damage(folder)
    done = clicks("log", "check")
    assert done.code == 1
    assert "DAMAGED: 1 problem" in done.out
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in done.out.splitlines() if line}
    assert lines["file"] == str(file)
    assert lines["place"].startswith("byte ")
    assert lines["expected"] != lines["found"]
    report = clicks("log", "check", "--json")
    assert report.code == 1
    (problem,) = report.json["problems"]
    assert problem["code"] == "HR-LOG-006"
    assert problem["details"]["file"] == str(file)
    assert {"offset", "expected", "found"} <= set(problem["details"])


def test_check_of_a_broken_format_file(clicks: Headrace, folder: str) -> None:
    """A log whose format file is broken does not open; check still reports it as damage."""
    Path(folder, "headrace.json").write_text("{}")
    done = clicks("log", "check", "--json")
    assert done.code == 1
    assert done.json["problems"][0]["details"]["file"].endswith("headrace.json")
    assert "DAMAGED" in clicks("log", "check").out


def test_a_newer_format_is_refused(clicks: Headrace, folder: str) -> None:
    """A log of a newer version is refused by its name, not read by guess."""
    from headrace.log.embedded.format import checksum

    path = Path(folder, "headrace.json")
    content = json.loads(path.read_text())
    content["format"] = 999
    content["checksum"] = f"{checksum(('999 ' + content['log']).encode()):016x}"
    path.write_text(json.dumps(content))
    for command in (("topic", "ls"), ("log", "check")):
        done = clicks(*command)
        assert done.code == 1
        assert "HR-LOG-002" in done.err


def test_stats(clicks: Headrace, folder: str) -> None:
    """Stats count topics, rows, files, bytes and counters, and say where the synced end is."""
    clicks("topic", "append", "clicks", stdin=ROWS)
    with hr.connect(folder) as log:
        log.append("clicks", [{"user": n} for n in range(400_000)])  # becomes a staged piece
    facts = clicks("log", "stats", "--json").json
    assert facts["state"] == "sound"
    assert (facts["position"], facts["since"], facts["topics"]) == (3, 0, 1)
    assert facts["rows"] == 400_010
    assert facts["pieces"]["files"] == 1
    assert facts["pieces"]["bytes"] > 3_000_000
    assert facts["journal"]["files"] == 1
    assert 0 < facts["journal"]["used"] < facts["journal"]["bytes"] <= facts["bytes"]
    assert facts["synced"] == facts["end"] == facts["marked"]
    assert facts["locks"] == []
    out = clicks("log", "stats").out
    assert "everything written is synced" in out
    assert "the log is quiet" in out
    assert "nobody holds one" in out


def test_stats_name_who_holds_a_lock(clicks: Headrace, folder: str) -> None:
    """A held lock is shown with the process that holds it, and not waited for."""
    with open(Path(folder, "locks", "append"), "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        facts = clicks("log", "stats", "--json").json
        assert [(lock["lock"], lock["pid"]) for lock in facts["locks"]] == [("append", os.getpid())]
        assert f"append lock: process {os.getpid()}" in clicks("log", "stats").out


@pytest.mark.parametrize("command", ["check", "stats"])
def test_an_empty_log(headrace: Headrace, folder: str, command: str) -> None:
    """A log in which nothing happened yet is fine."""
    hr.connect(folder).close()
    assert headrace("log", command).code == 0
    assert headrace("log", command, "--json").json["position"] == 0


def test_a_backup_is_made_and_restored(clicks: Headrace, tmp_path: Path) -> None:
    clicks("topic", "append", "clicks", stdin='{"user": 1, "url": "/"}')
    backup, restored = str(tmp_path / "backup"), str(tmp_path / "restored")
    made = clicks("log", "backup", backup, "--json").json
    assert made["position"] == 2
    assert made["written"] == made["bytes"] > 0
    assert "position 2" in clicks("log", "backup", backup).out
    assert clicks("log", "restore", backup, restored, "--json").json["position"] == 2
    assert clicks("topic", "read", "clicks", "--log", restored).rows[0]["url"] == "/"
    assert clicks("log", "check", "--log", restored).code == 0
    again = clicks("log", "restore", backup, restored, "--json")
    assert (again.code, again.error["code"]) == (1, "HR-BACKUP-004")


def test_what_is_archived_is_named_by_backup_and_restore(
    clicks: Headrace, folder: str, tmp_path: Path
) -> None:
    """Somebody who restores on another machine knows what else is needed, and says where it is."""
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    clicks("topic", "set", "clicks", "retention_seconds=0", f"archive={old}")
    clicks("topic", "append", "clicks", stdin='{"user": 1}\n{"user": 2}\n')
    clicks("log", "seal")
    backup, restored = str(tmp_path / "backup"), str(tmp_path / "restored")
    made = clicks("log", "backup", backup)
    assert f"1 archived file, {made.err.split(', ')[1]}" in made.err
    assert f"not in it: a restored log reads them in {old}" in made.err
    (one,) = clicks("log", "backup", backup, "--json").json["archived"]
    assert (one["archive"], one["topic"]) == (old, "clicks")
    assert "its 1 archived file can be reached" in clicks("log", "restore", backup, restored).err
    Path(old).rename(new)
    there = str(tmp_path / "there")
    told = clicks("log", "restore", backup, there)
    assert f"warning: 1 archived file cannot be reached in {old}:" in told.err
    assert f"{one['name']}" in told.err
    assert f"--archive {old}=NEW" in told.err
    assert clicks("topic", "read", "clicks", "--log", there).code != 0
    last = str(tmp_path / "last")
    done = clicks("log", "restore", backup, last, "--archive", f"{old}={new}", "--json").json
    assert (done["archived"], done["unreachable"]) == (1, [])
    assert len(clicks("topic", "read", "clicks", "--log", last, "--json").rows) == 2
    wrong = clicks("log", "restore", backup, str(tmp_path / "x"), "--archive", "y", "--json")
    assert "NAME=VALUE" in wrong.error["fact"]


def test_check_says_a_problem_once(headrace: Headrace, folder: str) -> None:
    """A run of counters that is gone is named by two checkpoints."""
    with hr.connect(folder, journal_bytes_first=16 << 10, journal_bytes_max=16 << 10) as log:
        log.create_topic("t", "s string")
        for i in range(60):
            log.append("t", [{"s": "x" * 500}], expect={f"c{i}": 0})
        log.keeper().turn(close=True)
    for run in os.listdir(f"{folder}/counters"):
        os.unlink(f"{folder}/counters/{run}")
    problems = headrace("log", "check", "--json").json["problems"]
    assert len(problems) == len({json.dumps(one) for one in problems}) > 0
