"""The newcomer's commands: ./run, and what ./run test says at its end."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import check, setup, system

ROOT = Path(__file__).resolve().parent.parent

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.a" name="one"/>
<testcase classname="tests.a" name="two[1]"><skipped message="no strace"/></testcase>
<testcase classname="tests.a" name="two[2]"><skipped message="no strace"/></testcase>
<testcase classname="tests.b" name="three"><failure message="x"/></testcase>
<testcase classname="tests.b" name="four"><error message="x"/></testcase>
</testsuite></testsuites>"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "run"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_run_without_arguments_says_what_it_can_do() -> None:
    done = run()
    assert done.returncode == 0
    assert "demo" in done.stdout
    assert "test" in done.stdout


def test_the_help_of_the_tests_runs_none() -> None:
    done = run("test", "--help")
    assert done.returncode == 0
    assert "./run pytest --help" in done.stdout
    assert "summary" not in done.stdout.splitlines()


def test_run_names_the_benchmarks_there_are() -> None:
    done = run("bench", "nonsense")
    assert done.returncode == 2
    assert "there is no benchmark 'nonsense'" in done.stderr
    assert "kit" not in done.stderr


def test_run_passes_on_what_it_does_not_know_with_its_exit_code() -> None:
    done = run("python", "-c", "import headrace, sys; print('in'); sys.exit(7)")
    assert (done.stdout, done.returncode) == ("in\n", 7)


def test_run_works_through_a_link_from_any_folder(tmp_path: Path) -> None:
    link = tmp_path / "hr"
    link.symlink_to(ROOT / "run")
    command = [str(link), "python", "-c", "import headrace; print(headrace.__file__)"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(ROOT / "src" / "headrace" / "__init__.py"), done.stderr


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Give a function that puts a clone at a place, with all but what comes from an index."""

    def at(name: str) -> Path:
        root = tmp_path / name
        root.mkdir(exist_ok=True)
        for file in ("requirements.lock", "pyproject.toml"):
            shutil.copy(ROOT / file, root)
        places = {"ROOT": root, "VENV": root / ".venv", "PYTHON": root / ".venv/bin/python"}
        places |= {"READY": root / ".venv/.ready", "LOCK": root / "requirements.lock"}
        places |= {"TURN": root / ".venv/.setup-lock", "CACHE": root / ".venv/.uv-cache"}
        for which, place in places.items():
            monkeypatch.setattr(setup, which, place)
        return setup.VENV

    return at


def test_a_broken_off_installation_is_begun_anew(
    clone: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a package that was half there uv says that it is installed."""
    venv = clone("here")

    def half(uv: str, *arguments: str) -> None:
        (setup.site() / "half-1.0.dist-info").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(setup, "pip_install", half)
    assert setup.main() == 130
    assert "interrupted" in capsys.readouterr().err
    monkeypatch.setattr(setup, "pip_install", lambda uv, *arguments: None)
    assert setup.main() == 0
    assert setup.packages() == []
    assert (venv / ".ready").read_bytes() == setup.wanted()


def test_a_new_lock_is_installed_into_what_is_there(
    clone: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = clone("here")
    monkeypatch.setattr(setup, "pip_install", lambda uv, *arguments: None)
    assert setup.main() == 0
    (venv / "old").touch()
    with open(setup.LOCK, "a") as lock:
        lock.write("# changed")
    assert setup.main() == 0
    assert (venv / "old").exists()
    assert (venv / ".ready").read_bytes() == setup.wanted()


def test_a_folder_that_was_moved_gets_a_venv_of_its_own(
    clone: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The programs in a venv name its Python by its path: they would run the code over there."""
    old = clone("here")
    monkeypatch.setattr(setup, "pip_install", lambda uv, *arguments: None)
    assert setup.main() == 0
    (old / "bin" / "pytest").write_text(f"#!{old}/bin/python")
    shutil.copytree(tmp_path / "here", tmp_path / "there", symlinks=True)
    new = clone("there")
    assert setup.main() == 0
    assert (new / "bin" / "python").exists()
    assert not (new / "bin" / "pytest").exists()


def test_what_keeps_setup_from_writing_is_said_in_one_line(
    clone: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    clone("here").write_text("a file")
    assert setup.main() == 1
    assert capsys.readouterr().err.startswith("run: failed: ")


def test_the_lock_names_no_host_and_has_a_hash_for_everything() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    assert "://" not in lock
    pins = [line for line in lock.splitlines() if "==" in line and not line.startswith(" ")]
    assert pins
    assert all(line.endswith("\\") for line in pins)


def test_what_was_skipped_is_counted_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "junit.xml"
    report.write_text(JUNIT)
    counts, skipped, fallen = check.read_report(report)
    assert counts == {"passed": 1, "failed": 2, "skipped": 2}
    assert len(fallen) == 2
    check.summarise(["tests"], ["strace not found"], skipped, [])
    shown = capsys.readouterr().out
    assert "skipped: tests.a::two: no strace (2 times)" in shown
    assert "not available: strace not found" in shown
    assert "failed: tests" in shown


def test_tests_that_never_started_are_not_counted_as_passed(tmp_path: Path) -> None:
    counts, skipped, fallen = check.read_report(tmp_path / "absent.xml")
    assert fallen == []
    assert sum(counts.values()) == 0
    assert skipped == Counter()


@pytest.mark.parametrize("twice", [True, False])
def test_what_failed_is_run_again_alone_and_named_when_it_passes_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], twice: bool
) -> None:
    """The steps are told how they end: a first run with two failures, a second good or not."""

    def passes(step: check.Step) -> bool:
        if step.name == "tests":
            report = next(one for one in step.command if one.startswith("--junit-xml="))
            Path(report.partition("=")[2]).write_text(JUNIT)
        return step.name != "tests" and not (twice and step is check.AGAIN)

    monkeypatch.setattr(check, "passes", passes)
    monkeypatch.setattr(check, "RECORD", ["true"])
    monkeypatch.setattr(check, "KAFKA", ["true"])
    monkeypatch.setattr(system, "provide", list)
    assert check.main([]) == int(twice)
    shown = capsys.readouterr().out
    assert ("UNSTEADY: tests." in shown) is not twice
    assert ("1 passed, 2 failed" if twice else "3 passed, 0 failed") in shown


def test_what_the_system_lacks_is_said_and_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    lines = system.provide()
    assert [line.partition(":")[0] for line in lines] == [
        f"{program.name} not found" for program in system.PROGRAMS
    ]
    assert all("install it with" in line for line in lines)
