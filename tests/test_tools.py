"""The newcomer's commands: ./run, and what ./run test says at its end."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import hatch_build
from tools import check, setup, system

ROOT = Path(__file__).resolve().parent.parent

DECIDING = ("requirements.lock", *setup.DECIDING)

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
        compiled = root / hatch_build.FOLDER / hatch_build.MADE
        compiled.parent.mkdir(parents=True, exist_ok=True)
        compiled.touch()
        for file in DECIDING:
            shutil.copy(ROOT / file, root / file)
        places = {"ROOT": root, "VENV": root / ".venv", "PYTHON": root / ".venv/bin/python"}
        places |= {"READY": root / ".venv/.ready", "LOCK": root / "requirements.lock"}
        places |= {"SHORT_CUT": compiled, "CC_LOCK": root / "requirements-cc.lock"}
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


@pytest.mark.parametrize("file", DECIDING)
def test_what_has_changed_is_installed_into_what_is_there(
    clone: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """A new lock, or a C source that is to be compiled."""
    venv = clone("here")
    installed: list[str] = []
    monkeypatch.setattr(setup, "pip_install", lambda uv, *arguments: installed.extend(arguments))
    assert setup.main() == 0
    (venv / "old").touch()
    with open(venv.parent / file, "a") as changed:
        changed.write("# changed")
    installed.clear()
    assert setup.main() == 0
    assert str(setup.ROOT) in installed
    assert (venv / "old").exists()
    assert (venv / ".ready").read_bytes() == setup.wanted()


@pytest.mark.parametrize("file", DECIDING)
def test_run_calls_the_set_up_when_something_has_changed_and_only_then(
    clone: Callable[[str], Path], file: str
) -> None:
    root = clone("here").parent
    shutil.copy(ROOT / "run", root)
    (root / "tools").mkdir()
    (root / "tools" / "setup.py").write_text("print('sets up')")
    setup.PYTHON.parent.mkdir(parents=True)
    setup.PYTHON.symlink_to(sys.executable)
    setup.READY.write_bytes(setup.wanted())
    run = [str(root / "run"), "true"]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == ""
    with open(root / file, "a") as changed:
        changed.write("# changed")
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "sets up\n"


@pytest.mark.parametrize(
    ("reasons", "fetches", "fails"),
    [
        (["no C compiler (...)", ""], True, False),
        (["no C compiler (...)", "ld: error"], True, False),
        (["no C compiler (...)"], True, True),
        (["this Python came without Python.h"], False, False),
    ],
)
def test_a_compiler_is_fetched_where_there_is_none_and_without_it_all_goes_on(
    clone: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reasons: list[str],
    fetches: bool,
    fails: bool,
) -> None:
    clone("here")
    setup.SHORT_CUT.unlink()
    asked: list[str] = []

    def pip_install(uv: str, *arguments: str, quiet: bool = False) -> None:
        asked.extend(arguments)
        if fails and quiet:
            raise subprocess.CalledProcessError(1, "pip")

    tries = iter(reasons)
    monkeypatch.setattr(setup, "pip_install", pip_install)
    monkeypatch.setattr(setup, "not_compiled", lambda: next(tries))
    assert setup.main() == 0
    assert (str(setup.CC_LOCK) in asked) is fetches
    said = [line for line in capsys.readouterr().err.splitlines() if "short cut" in line]
    assert len(said) == bool(reasons[-1])
    assert all(reasons[-1] in line for line in said)
    assert list(tries) == []


def wheel_of(root: Path) -> tuple[str, set[str], str]:
    """Build a wheel; give its name, the names of its files, and what was said."""
    for file in ("README.md", "LICENSE", ".gitignore", "src/headrace/__init__.py"):
        shutil.copy(ROOT / file, root / file)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "made"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    (wheel,) = (root / "made").iterdir()
    return wheel.name, {Path(name).name for name in zipfile.ZipFile(wheel).namelist()}, done.stderr


def test_a_wheel_has_the_short_cut_compiled_without_a_warning(
    clone: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    obstacle = hatch_build.obstacle()
    if obstacle:
        pytest.skip(obstacle)
    root = clone("here").parent
    monkeypatch.setenv("CC", f"{shlex.join(hatch_build.compiler())} -Werror")
    name, files, said = wheel_of(root)
    assert "-cp311-abi3-linux_" in name, said
    assert hatch_build.MADE in files
    assert "shortcut.c" not in files
    assert setup.SHORT_CUT.stat().st_size
    assert list(setup.SHORT_CUT.parent.glob("_shortcut.*")) == [setup.SHORT_CUT]


@pytest.mark.parametrize("compiler", ["false", "true", "not-there", "'"])
def test_without_a_compiler_that_works_the_wheel_is_the_pure_one_and_says_why(
    clone: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    """What was compiled before does not stay: it may be of another source."""
    root = clone("here").parent
    monkeypatch.setenv("CC", compiler)
    name, files, said = wheel_of(root)
    assert "-py3-none-any" in name
    assert hatch_build.MADE not in files
    assert [line for line in said.splitlines() if "without its short cut in C: " in line]
    assert not setup.SHORT_CUT.exists()


def test_the_set_up_looks_for_what_the_build_makes() -> None:
    assert setup.SHORT_CUT == ROOT / hatch_build.FOLDER / hatch_build.MADE
    assert str(hatch_build.FOLDER / "shortcut.c") in setup.DECIDING


def test_what_is_in_the_way_of_compiling_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: None)
    assert str(hatch_build.obstacle()).startswith("no C compiler")  # setup.py knows these words
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert "Python.h" in str(hatch_build.obstacle())
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: 1)
    assert "global lock" in str(hatch_build.obstacle())
    monkeypatch.setattr("sys.platform", "darwin")
    assert "Linux" in str(hatch_build.obstacle())


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


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-cc.lock"])
def test_a_lock_names_no_host_and_has_a_hash_for_everything(name: str) -> None:
    lock = (ROOT / name).read_text()
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
