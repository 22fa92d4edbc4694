"""The file of a project, what passes and what does not, and what `init` and `doctor` make of it.

Caught: a misspelt or wrong line that is taken, an error class without a verdict, a follower that
does not survive its way through the file, a new project that overwrites something or does not work.
Not caught: whether the advice of the doctor helps.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click import unstyle

import headrace as hr
from headrace import errors
from headrace.cli.status import shown
from headrace.interfaces import Kept
from headrace.runtime import passing
from headrace.runtime.doctor import examined
from headrace.runtime.project import FollowerOf, Project, digest, find_project, write_whole
from headrace.runtime.status import project_status
from headrace.testing.postgres import Server, fresh_database
from tests.cli.conftest import Headrace, folder, headrace

__all__ = ["folder", "headrace"]


def made(root: Path, text: str) -> Project:
    (root / "headrace.toml").write_text(text)
    return find_project(root)


def test_an_empty_file_is_a_project(tmp_path: Path) -> None:
    project = made(tmp_path, "")
    assert (project.name, project.log) == (tmp_path.name, tmp_path / "data")
    assert (project.captures, project.pipelines, project.port) == ((), (), 8321)


def test_everything_that_a_file_may_say(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("")
    project = made(
        tmp_path,
        '\ufeffname = "shop"\nlog = "elsewhere"\npipelines = ["a.py"]\n'
        '[capture.main]\ndsn = "host=a"\ntables = ["x.*"]\nnumeric_as_text = true\n'
        '[page]\nport = false\n[spark]\nmemory = "512m"\nquick = true\n',
    )
    assert (project.name, project.log) == ("shop", tmp_path / "elsewhere")
    assert project.pipelines == (tmp_path / "a.py",)
    (capture,) = project.captures
    assert (capture.name, capture.dsn, capture.tables) == ("main", "host=a", ("x.*",))
    assert capture.numeric_as_text
    assert (project.port, project.spark_memory, project.spark_quick) == (None, "512m", True)


def test_the_environment_goes_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_LOG", "other")
    monkeypatch.setenv("HEADRACE_PORT", "0")
    monkeypatch.setenv("HEADRACE_CAPTURE_MY_SHOP_DSN", "host=b")
    project = made(tmp_path, "[capture.my-shop]\n[page]\nport = 9\n")
    assert (project.log, project.port) == (tmp_path / "other", 0)
    assert project.captures[0].dsn == "host=b"
    monkeypatch.setenv("HEADRACE_LOG", "")  # set to nothing is not set: not the project's folder
    assert made(tmp_path, "").log == tmp_path / "data"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lgo = 'data'", "did you mean 'log'"),
        ("log = 3", "log is not text"),
        ("pipelines = ['gone.py']", "no file gone.py"),
        ("pipelines = [3]", "not a list of file names"),
        ("[capture.shop]", "HEADRACE_CAPTURE_SHOP_DSN"),
        ("[capture.shop]\ndsn = 'a'\ntables = []", "not a list of patterns"),
        ("[capture.'a b']\ndsn = 'a'", "cannot be a capture"),
        ("[capture.shop]\ndsn = 'a'\nslot = 'b'", "'slot' is not known"),
        ("[page]\nport = 70000", "cannot be a port"),
        ("[page]\nport = true", "cannot be a port"),
        ("[spark]\nmemory = 'much'", "size of memory"),
        ("not toml", "cannot be read"),
    ],
)
def test_what_a_file_may_not_say_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(errors.BadProject) as caught:
        made(tmp_path, text)
    assert said in caught.value.render()
    assert str(tmp_path) in caught.value.place


def test_a_folder_without_the_file_is_no_project(tmp_path: Path) -> None:
    with pytest.raises(errors.NoProject):
        find_project(tmp_path / "nowhere")


def test_a_follower_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    project = made(tmp_path, "")
    assert project.followers() == {}
    topics = {"orders": "shop.public.orders", "revenue": "shop.revenue"}
    kept = Kept("shop", "main", topics, frozenset({"shop.revenue"}), hr.Table("host=a", "kept"))
    project.note_followers([FollowerOf.of(kept)])
    assert project.followers()["shop/main"].to_kept() == kept
    mode = (project.run_folder / "followers.json").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600, "an address may have a password"


def test_a_target_that_no_other_process_can_make_is_refused() -> None:
    class Mine:
        """Of the pipeline file, and no dataclass."""

    kept = Kept("shop", "main", {}, frozenset(), Mine())  # type: ignore[arg-type]
    with pytest.raises(errors.BadPipeline, match="in a module of its own"):
        FollowerOf.of(kept)


def test_every_error_has_a_verdict_and_the_nearest_class_decides() -> None:
    for kind in errors.catalogue().values():
        assert passing.verdict(kind("x")) in (passing.PASSES, passing.STAYS, passing.CRASHED)
    expected = {
        errors.SourceAway: passing.PASSES, errors.LockTimeout: passing.PASSES,
        errors.SlotInUse: passing.PASSES, errors.SparkFailed: passing.PASSES,
        errors.UnknownTopic: passing.PASSES, errors.TargetAway: passing.PASSES,
        errors.BadPipeline: passing.STAYS, errors.BadSetting: passing.STAYS,
        errors.SlotMissing: passing.STAYS, errors.Fenced: passing.STAYS,
        errors.LogDamaged: passing.STAYS, errors.LogPoisoned: passing.CRASHED,
    }  # fmt: skip
    assert {kind: passing.verdict(kind("x")) for kind in expected} == expected
    assert passing.verdict(RuntimeError()) == passing.CRASHED


def test_the_supervisor_imports_nothing_heavy() -> None:
    script = (
        "import sys, headrace.runtime.supervisor, headrace.runtime.control;"
        "sys.exit(', '.join({'pyarrow', 'numpy', 'pyspark', 'psycopg'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_init_overwrites_nothing(headrace: Headrace, tmp_path: Path) -> None:
    (tmp_path / "pipeline.py").write_text("mine")
    done = headrace("init", str(tmp_path))
    assert done.code == 1
    assert "HR-PROJECT-008" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["pipeline.py"]


def test_the_status_says_what_has_changed_since_and_no_error_that_is_over(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("")
    project = made(tmp_path, 'pipelines = ["p.py"]\n')
    target = hr.SQLite(str(tmp_path / "t.db"))
    project.note_followers([FollowerOf.of(Kept("p", "main", {"t": "t"}, frozenset(), target))])
    read = {"file": "p.py", "read": digest(tmp_path / "p.py")}
    part = {"state": "running", "pid": 1, "note": "", "error": {"fact": "long ago"}}
    told: dict[str, Any] = {
        "supervisor": {"pid": os.getpid(), "file": digest(tmp_path / "headrace.toml")},
        "parts": [
            {**part, "name": "pipelines", "said": {"pipelines": {"p": read}}},
            {**part, "name": "follower/p/main", "ready": True, "said": {"through": 7}},
        ],
    }
    write_whole(project.parts_file, json.dumps(told))
    hr.connect(project.log).close()
    with open(project.run_folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status = project_status(project)
        assert status["followers"][0]["error"] is None
        assert (status["supervisor"]["changed"], status["parts"][0]["note"]) == (False, "")
        (tmp_path / "p.py").write_text("# more")
        with open(tmp_path / "headrace.toml", "a") as file:
            file.write("# more")
        status = project_status(project)
        assert status["supervisor"]["changed"]
        assert "p.py has changed since" in status["parts"][0]["note"]
        assert "headrace.toml has changed since" in "\n".join(shown({**status, "parts": []}, None))
        told["parts"][1]["ready"] = False
        write_whole(project.parts_file, json.dumps(told))
        assert project_status(project)["followers"][0]["error"] == {"fact": "long ago"}


def test_init_in_odd_places(headrace: Headrace, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in ("file", "file/deeper"):
        done = headrace("init", str(tmp_path / place))
        assert (done.code, "no project can be made" in done.err) == (2, True)
    under_git = tmp_path / "a b"
    under_git.mkdir()
    (under_git / ".gitignore").write_text("mine")
    done = headrace("init", str(under_git))
    assert done.code == 0
    assert f"cd '{under_git}'" in done.err
    assert (under_git / ".gitignore").read_text() == "mine"
    assert "should have data/, run/" in done.err


def test_init_makes_a_project_and_the_doctor_finds_it_well(
    headrace: Headrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADRACE_LOG")
    monkeypatch.setenv("HEADRACE_PORT", "0")
    root = tmp_path / "first"
    done = headrace("init", str(root))
    assert done.code == 0
    assert f"cd {root}" in done.err
    project = find_project(root)
    assert project.pipelines == (root / "pipeline.py",)
    status = headrace("status", "--json", "--project", str(root)).json
    assert status["supervisor"] is None
    assert {one["name"]: one["rows"] for one in status["topics"]} == {"visits": 3}
    with hr.connect(project.log) as log:
        log.hold("mine", 2, topics=["visits"])
    (held,) = headrace("status", "--json", "--project", str(root)).json["holds"]
    assert (held["name"], held["position"], held["topics"]) == ("mine", 2, ["visits"])
    assert "does not run" in headrace("status", "--project", str(root)).out
    done = headrace("doctor", "--quick", "--json", "--project", str(root))
    assert done.code == 0
    assert {one["level"] for one in done.json} <= {"ok", "warning"}


def test_status_says_what_is_wrong_and_where_and_which_table_was_verified() -> None:
    stopped = {"status": "stopped", "rows_read": 0, "reason": "column x is of type y"}
    capture = {"name": "shop", "last_commit_age_seconds": None, "tables": {"public.a": stopped}}
    found = {"name": "shop/main", "table": "a", "against": "log", "through": 7, "rows": 5}
    kept: dict[str, Any] = {
        "name": "shop/main",
        "state": "waiting for the target",
        "target": "PostgreSQL x",
    }
    kept |= dict.fromkeys(("through", "behind", "aside")) | {"error": "connection refused"}
    wrong = {"code": "HR-VIEW-022", "fact": "NameError: a", "place": "p.py:7", "why": "", "fix": ""}
    part: dict[str, Any] = {
        "name": "pipelines",
        "state": "stopped",
        "pid": None,
        "restarts": 0,
        "note": "",
    }
    part |= {"said": {}, "error": wrong}
    nothing: dict[str, Any] = {"parts": [part], "pipelines": [], "followers": [kept], "topics": []}
    nothing["holds"] = [{"name": "mine", "position": 7, "until": "soon", "topics": ["a", "b"]}]
    now = {"project": "p", "supervisor": None, "position": 1, "captures": [capture]} | nothing
    text = "\n".join(shown(now | {"verified": [found | {"differing": 0}]}, None))
    assert "column x is of type y" in text
    assert re.search(r"shop/main +waiting for the target .* PostgreSQL x +connection refused", text)
    assert "at: p.py:7" in text
    assert re.search(r"shop/main +a +log +7 +5 +0", unstyle(text))
    assert re.search(r"mine +7 +soon +a, b", unstyle(text))


def test_the_doctor_says_what_is_in_the_way(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        dsn = "host=127.0.0.1 port=1 dbname=none"
        project = made(tmp_path, f'[page]\nport = {port}\n[capture.shop]\ndsn = "{dsn}"\n')
        wrong = {one.what: one for one in examined(project, quick=True) if one.level == "error"}
    assert set(wrong) == {"page", "capture shop"}
    assert "HR-CAPTURE-024" in wrong["capture shop"].found
    assert all(one.fix for one in wrong.values())


@pytest.mark.parametrize(("module", "said"), [(object(), "in C"), (None, "in Python")])
def test_the_doctor_says_whether_the_short_cut_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: object, said: str
) -> None:
    """Both are well: without it the log is the same, and slower."""
    monkeypatch.delenv("HEADRACE_SHORTCUT", raising=False)
    monkeypatch.setattr("headrace.log.embedded.shortcut.compiled", lambda: module)
    project = made(tmp_path, "[page]\nport = false\n")
    (found,) = [one for one in examined(project, quick=True) if one.what == "short cut"]
    assert found.level == "ok"
    assert found.found.endswith(said)


def test_the_doctor_says_what_a_target_does_not_allow(tmp_path: Path, postgres: Server) -> None:
    """Each statement that it names takes it to the next thing that is missing, and then to none."""
    with fresh_database(postgres, "lacks") as name, postgres.connect(name) as owner:
        owner.execute("create role poor login")
        try:
            owner.execute("revoke all on database lacks from public")
            owner.execute("grant connect on database lacks to poor")
            target = hr.Table(postgres.dsn(name, user="poor"), "kept")
            project = made(tmp_path, "[page]\nport = false\n")
            spec = FollowerOf.of(Kept("p", "main", {"t": "t"}, frozenset(), target))
            project.note_followers([spec])
            said: list[str] = []
            while len(said) < 9:
                (found,) = [one for one in examined(project, quick=True) if "kept" in one.what]
                if found.level == "ok":
                    break
                said.append(found.fix)
                owner.execute(found.fix)
                if len(said) == 2:
                    owner.execute("create schema kept; create table kept.t()")
            assert [one.partition(" on ")[0] for one in said] == [
                "grant temporary", "grant create", "grant usage, create",
                "alter table kept.t owner to poor",
            ]  # fmt: skip
        finally:
            owner.execute("drop owned by poor cascade; drop role poor")


def test_a_folder_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    project = made(tmp_path, "[page]\nport = false\n")
    tmp_path.chmod(0o500)
    try:
        wrong = [one.what for one in examined(project, quick=True) if one.level == "error"]
    finally:
        tmp_path.chmod(0o700)
    assert wrong == ["project folder", "log folder"]
