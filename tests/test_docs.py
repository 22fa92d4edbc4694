"""What README, docs and examples show is what happens.

These tests run the programs that are shown and compare what they print. They cannot tell whether
the text around them is true.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def printed(program: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=True, timeout=100
    )
    return done.stdout


@pytest.mark.parametrize("program", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(program: Path) -> None:
    """Every example runs to its end and says something."""
    assert printed(program)


def test_the_readme_shows_the_first_example_and_its_output() -> None:
    """The program in the README is examples/first_steps.py, with what it really prints."""
    readme = (ROOT / "README.md").read_text()
    shown = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", readme, re.DOTALL)
    assert shown is not None
    program = ROOT / "examples" / "first_steps.py"
    assert program.read_text().endswith(f"\n{shown[1]}")
    assert printed(program) == shown[2]


def test_links_between_pages_lead_somewhere() -> None:
    """Every relative link in README, CONTRIBUTING and docs names a file that is there."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    missing = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / link).exists()
    ]
    assert not missing
