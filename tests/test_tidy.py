"""What the linters do not see: rules of the house, checked over the sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "headrace"
FOLDERS = ("src", "tests", "benchmarks", "tools", "examples")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
SOURCES += [ROOT / "hatch_build.py"]
TEXTS = sorted(
    path
    for pattern in ("*.md", "*.toml", "*.lock", "run", ".ci/run", "docs/**/*.md", "src/**/*.c")
    for path in ROOT.glob(pattern)
)

TALKERS = (PACKAGE / "cli", PACKAGE / "testing", ROOT / "benchmarks", ROOT / "tools")
CLOCKS = (PACKAGE / "clock.py", PACKAGE / "log" / "embedded" / "system.py")
NOW = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.datetime.now"}

# Spelt so that this file does not contain what it looks for.
MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:root|work|(?:home|Users)/\w+|tm" + r"p)/[\w.]")
INDEX_HOSTS = re.compile(r"https?://[^\s\"]*/(?:simple|maven2|packages|debian)/")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_a_source_file_keeps_the_rules_of_the_house(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "the module says what it is for"
    assert "FIX" + "ME" not in text
    for line, function in calls(tree):
        if function == "print":
            assert any(path.is_relative_to(folder) for folder in (*TALKERS, ROOT / "examples")), (
                f"line {line}: print() outside of what talks to people"
            )
        if path.is_relative_to(PACKAGE) and path not in CLOCKS:
            assert function not in NOW, f"line {line}: ask headrace.clock what time it is"


@pytest.mark.parametrize("path", [*SOURCES, *TEXTS], ids=name)
def test_a_file_names_no_machine(path: Path) -> None:
    text = path.read_text()
    assert not MACHINE_PATHS.search(text)
    assert not INDEX_HOSTS.search(text)


def test_the_rules_find_what_they_look_for() -> None:
    assert MACHINE_PATHS.search("open('/ro" + "ot/x')")
    assert MACHINE_PATHS.search("/tm" + "p/x")
    assert not MACHINE_PATHS.search("tests/work/x and a/home/b")
    assert INDEX_HOSTS.search("https://example.org/sim" + "ple/uv")
    assert list(calls(ast.parse("time.time()"))) == [(1, "time.time")]


def test_every_decision_is_in_the_list() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = (folder / "README.md").read_text()
    assert [path.name for path in sorted(folder.glob("0*.md")) if path.name not in listed] == []
