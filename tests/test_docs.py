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

from headrace.testing.shop import write_project

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def printed(program: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=True, timeout=300
    )
    return done.stdout


@pytest.mark.timeout(400)
@pytest.mark.parametrize("program", EXAMPLES, ids=lambda path: path.stem)
def test_a_page_shows_each_example_and_its_output(program: Path) -> None:
    """The programs in first-steps.md are those of examples/, with what they really print."""
    page = (ROOT / "docs" / "first-steps.md").read_text()
    shown = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", page, re.DOTALL)
    outputs = [output for text, output in shown if program.read_text().endswith(f"\n{text}")]
    assert outputs == [printed(program)]


def test_the_readme_shows_the_pipeline_of_the_demo(tmp_path: Path) -> None:
    """What the README calls a pipeline is what `./run demo` runs."""
    write_project(tmp_path, "postgresql://user@host/shop", "postgresql://user@host/views")
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown == [(tmp_path / "pipeline.py").read_text()]


RUN = re.compile(r"<!-- run -->\n```python\n(.*?)```\n\n```\n(.*?)```", re.DOTALL)
SHOWN = [
    pytest.param(*found, id=f"{page.stem}-{number}")
    for page in sorted((ROOT / "docs").glob("*.md"))
    for number, found in enumerate(RUN.findall(page.read_text()))
]


@pytest.mark.parametrize(("program", "output"), SHOWN)
def test_a_page_shows_a_program_and_its_output(program: str, output: str, tmp_path: Path) -> None:
    """Programs in docs that are marked with `run` print what stands below them."""
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert (done.stdout, done.stderr) == (output, "")


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
