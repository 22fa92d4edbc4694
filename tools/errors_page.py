"""Writes docs/errors.md from the catalogue of errors: ./run python -m tools.errors_page."""

from __future__ import annotations

from pathlib import Path

from headrace import errors

PAGE = Path(__file__).resolve().parent.parent / "docs" / "errors.md"

GROUPS: dict[type[errors.HeadraceError], str] = {
    errors.UsageError: "change something; the same call would fail again",
    errors.TransientError: "it may pass; the same call can be tried again",
    errors.DamageError: "data on disk is wrong; the part concerned stops, nothing is cut",
    errors.Conflict: "the entry was not taken; decide anew",
    errors.Unknown: "the entry may have been taken or not; find out",
}

HEAD = """\
# Errors

Every error has a code that never changes, a fact, a place, the reason and what to do about it.
`headrace explain CODE` says the same as this page, which is made from the catalogue
(`src/headrace/errors.py`) by `./run python -m tools.errors_page`.
"""


def page() -> str:
    """Give the whole page."""
    return "\n".join([HEAD, *(_section(error) for error in errors.catalogue().values())])


def _section(error: type[errors.HeadraceError]) -> str:
    group = next(text for base, text in GROUPS.items() if issubclass(error, base))
    return (
        f"## {error.code}: {error.title}\n\n"
        f"`headrace.errors.{error.__name__}` ({group})\n\n"
        f"- **why:** {error.why}\n- **fix:** {error.fix}\n"
    )


if __name__ == "__main__":
    PAGE.write_text(page())
