"""From a name to a capture that can run: what the log knows of it, and what is said now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headrace import errors
from headrace.sources.postgres import settings as asked
from headrace.sources.postgres.capture import Capture

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog


def entered(
    log: EmbeddedLog,
    name: str,
    dsn: str | None,
    tables: Sequence[str] | None,
    options: Mapping[str, Any],
) -> Capture:
    """The capture of this name; what is said of it is kept in the log, if it is new."""
    asked.check_name(name)
    there = asked.find(log, name)
    if dsn is None:
        dsn = asked.get(log, name).dsn
    said = replace(there or asked.Settings(""), dsn=asked.without_password(dsn)[0])
    if tables is not None:
        said = replace(said, tables=asked.patterns(tables))
    if "numeric_as_text" in options:
        said = replace(said, numeric_as_text=options["numeric_as_text"])
    try:
        capture = Capture(
            log, name, dsn, said.tables, **{"numeric_as_text": said.numeric_as_text, **options}
        )
    except TypeError as error:
        raise errors.BadSetting(str(error).partition("() ")[2] or str(error), place=name) from None
    if said != there:
        kept = {one: getattr(said, one) for one in ("dsn", "tables", "numeric_as_text")}
        asked.change(log, name, lambda now: replace(now or said, **kept))
    return capture
