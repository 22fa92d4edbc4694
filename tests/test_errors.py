"""The catalogue of errors: whole, stable, explained."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from typing import Any

import click
import pytest

from headrace.cli.main import cli, run
from headrace.errors import (
    Conflict,
    Fenced,
    HeadraceError,
    LogDamaged,
    UsageError,
    catalogue,
    nearest,
)
from tools import errors_page

ERRORS = list(catalogue().values())


def test_codes_are_in_order_and_without_gaps() -> None:
    log = [code for code in catalogue() if code.startswith("HR-LOG-")]
    assert log == [f"HR-LOG-{number:03}" for number in range(1, len(log) + 1)]
    assert list(catalogue()) == sorted(catalogue())


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.code)
def test_every_error_says_what_why_and_what_to_do(error: type[HeadraceError]) -> None:
    assert re.fullmatch(r"HR-[A-Z]+-\d{3}", error.code)
    assert error.__doc__
    for text in (error.title, error.why, error.fix):
        assert text
        assert not text.endswith(".")
        assert text == " ".join(text.split())


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.code)
def test_every_error_can_be_explained(
    error: type[HeadraceError], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["explain", error.code.lower()]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert error.code in shown
    assert error.why in shown
    assert error.fix in shown


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.code)
def test_a_command_in_a_fix_has_all_its_arguments_or_none(error: type[HeadraceError]) -> None:
    for *names, given in re.findall(r"headrace (\w+) (\w+)((?: [A-Z]+\b)+)", error.fix):
        command: Any = cli
        for name in names:
            command = command.get_command(click.Context(command), name)
            assert command is not None, error.fix
        needed = [one for one in command.params if isinstance(one, click.Argument) and one.required]
        assert len(given.split()) == len(needed), error.fix


def test_a_code_is_given_only_once() -> None:
    with pytest.raises(TypeError, match="HR-LOG-001 is taken by NotALog"):
        type("Again", (HeadraceError,), {"code": "HR-LOG-001"})


def test_an_error_says_fact_place_why_and_fix() -> None:
    error = LogDamaged("checksum differs", place="journal-7 at 4096", why="a bit flipped", found=3)
    assert str(error) == error.render()
    assert error.render().splitlines() == [
        "error[HR-LOG-006]: checksum differs",
        "  at: journal-7 at 4096",
        "  why: a bit flipped",
        f"  fix: {LogDamaged.fix}",
    ]


def test_an_error_without_code_is_rendered_too() -> None:
    assert UsageError("odd").render() == "error: odd"


def test_an_error_survives_the_way_to_another_process() -> None:
    error = Fenced("fenced", place="here", fix="claim it", expected=1, found={"a": [b"x"]})
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is Fenced
    assert copy.render() == error.render()
    assert copy.details == error.details


def test_an_error_as_json() -> None:
    error = Conflict("moved", counter="orders/7", expected=3, found=(4, b"x"))
    made = json.loads(json.dumps(error.to_json()))
    assert made["code"] == "HR-LOG-020"
    assert made["details"] == {"counter": "orders/7", "expected": 3, "found": [4, "b'x'"]}


def test_the_nearest_names_are_proposed() -> None:
    assert nearest("ordesr", ["orders", "clicks"]) == "did you mean 'orders'?"
    assert nearest("Orders", ["orders"]) == "did you mean 'orders'?"
    assert nearest("zebra", ["orders", "clicks"]) == ""


def test_the_list_of_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(ERRORS)
    assert run(["explain", "--json"]) == 0
    assert [one["code"] for one in json.loads(capsys.readouterr().out)] == list(catalogue())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["explain", "HR-LOG-999"], "there is no error 'HR-LOG-999'"),
        (["explian"], "did you mean 'explain'"),
        (["explain", "--jsno"], "see 'headrace explain --help'"),
        ([], "Usage: headrace"),
    ],
)
def test_wrong_usage_is_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.out == ""


def test_help_imports_nothing_heavy() -> None:
    """The counted twin of "--help answers in under 300 ms"."""
    code = (
        "import sys; from headrace.cli.main import run; run(['--help']);"
        "print(*sorted(m for m in sys.modules if '.' not in m))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(done.stdout.splitlines()[-1].split())
    assert not imported & {"numpy", "pandas", "polars", "pyarrow", "pyspark", "xxhash"}


def test_the_module_runs_as_the_command() -> None:
    command = [sys.executable, "-m", "headrace", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"headrace \d+\.\d+\.\d+\n", done.stdout)


def test_the_page_of_errors_is_up_to_date() -> None:
    assert errors_page.PAGE.read_text() == errors_page.page(), "./run python -m tools.errors_page"
