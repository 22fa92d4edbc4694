"""Help is quick and says enough."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from tests.cli.conftest import Headrace

TOPIC = ("create", "ls", "show", "append", "read", "tail", "alter", "set", "delete")
CAPTURE = ("add", "run", "status", "snapshot", "pause", "resume", "remove", "check")
COMMANDS = [
    *(("topic", name) for name in TOPIC),
    *(("group", name) for name in ("ls", "show", "reset", "copy", "delete")),
    *(("capture", name) for name in CAPTURE),
    ("table", "get"),
    ("table", "scan"),
    ("log", "check"),
    ("log", "stats"),
    ("log", "backup"),
    ("log", "restore"),
    ("sql",),
    ("demo",),
    *((name,) for name in ("init", "run", "restart", "status", "doctor", "plan")),
]


@pytest.mark.parametrize(
    "arguments", [["--help"], ["topic", "--help"], ["topic", "read", "--help"], ["demo", "-h"]]
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    """--help answers without pyarrow and numpy: a matter of milliseconds."""
    script = (
        "import sys; from headrace.cli.main import run; code = run(sys.argv[1:]);"
        "heavy = {'pyarrow', 'numpy', 'pandas', 'headrace.log'} & set(sys.modules);"
        "sys.exit(code or ', '.join(heavy) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: headrace" in done.stdout


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_help_has_a_sentence_and_an_example(
    headrace: Headrace, command: tuple[str, ...]
) -> None:
    """Each command says in a sentence what it does, and gives an example of itself."""
    out = headrace(*command, "--help").out
    usage, sentence = [part for part in out.split("\n\n") if part][:2]
    assert usage.startswith(f"Usage: headrace {' '.join(command)} [OPTIONS]")
    assert sentence.rstrip().endswith(".")
    assert f"headrace {' '.join(command)}" in out.partition("Example:")[2]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_that_shows_something_has_json(command: tuple[str, ...]) -> None:
    """All commands take --json, and every option has a help text."""
    from headrace.cli.main import cli

    found: click.Command | None = cli
    for name in command:
        assert isinstance(found, click.Group)
        found = found.get_command(click.Context(found), name)
    assert found is not None
    options = [p for p in found.params if isinstance(p, click.Option)]
    assert any("--json" in option.opts for option in options)
    assert all(option.help for option in options)
