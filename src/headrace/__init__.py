"""Headrace keeps derived data correct and fresh, and proves it.

    import headrace as hr

    log = hr.connect("./data")
    log.create_topic("clicks", "user bigint, url string", key="user", partitions=4)
    receipt = log.append("clicks", [{"user": 1, "url": "/"}])
    for batch in log.read("clicks"):
        print(batch.data, batch.offset, batch.position)

Heavy modules are imported on first use, so that `import headrace` and `headrace --help` are quick.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace import errors
from headrace.settings import LogSettings

if TYPE_CHECKING:
    from headrace.derived.targets import SQLite, Table
    from headrace.log.embedded.backup import restore
    from headrace.log.embedded.log import EmbeddedLog
    from headrace.log.producer import Producer
    from headrace.log.transaction import Transaction
    from headrace.log.writer import Writer
    from headrace.model.records import Batch, Piece, Receipt
    from headrace.model.topic import Topic
    from headrace.pipelines.pipeline import Pipeline
    from headrace.queries.query import Query, sql
    from headrace.runtime.tokens import rows
    from headrace.sources.debezium import debezium
    from headrace.sources.postgres.capture import Capture

__version__ = "0.1.0"

_LAZY = {
    "Batch": "headrace.model.records",
    "Piece": "headrace.model.records",
    "Receipt": "headrace.model.records",
    "Topic": "headrace.model.topic",
    "Producer": "headrace.log.producer",
    "Transaction": "headrace.log.transaction",
    "Writer": "headrace.log.writer",
    "Pipeline": "headrace.pipelines.pipeline",
    "Query": "headrace.queries.query",
    "SQLite": "headrace.derived.targets",
    "Table": "headrace.derived.targets",
    "debezium": "headrace.sources.debezium",
    "restore": "headrace.log.embedded.backup",
    "rows": "headrace.runtime.tokens",
    "sql": "headrace.queries.query",
}


def connect(target: str | os.PathLike[str], *, create: bool = True, **settings: Any) -> EmbeddedLog:
    """Open a log: a folder, which is made if it is not there (unless `create` is False).

    `~` at the beginning is the home of the user.
    `settings` are those of `LogSettings`, e.g. `durability="interval"`.
    """
    try:
        name = os.path.expanduser(os.fsdecode(target))
    except TypeError:
        raise errors.BadSetting(f"{target!r} is no folder", place="connect") from None
    kind, sign, _ = name.partition("://")
    if sign and "/" not in kind:  # the rest may hold a password
        what = "logs on Kafka are" if kind == "kafka" else f"a log at {kind}:// is"
        raise errors.BadSetting(f"{what} not built yet", place=f"{kind}://", fix="name a folder")
    try:
        chosen = LogSettings(**settings)
    except TypeError as error:
        raise errors.BadSetting(str(error).partition("() ")[2] or str(error), place=name) from None
    from headrace.log.embedded.log import EmbeddedLog

    return EmbeddedLog(name, chosen, create=create)


def capture(
    log: EmbeddedLog,
    name: str,
    dsn: str | None = None,
    tables: Sequence[str] | None = None,
    **options: Any,
) -> Capture:
    """A capture of a PostgreSQL database into topics `NAME.schema.table`; `run` it.

    `tables` are patterns, as "public.*" or "!public.tmp_*"; by default all of schema `public`.
    `dsn` and `tables` are kept in the log, without the password: left out, they are as last time.
    `options` are those of `Capture`, e.g. `numeric_as_text=True`.
    """
    from headrace.sources.postgres.client import need_psycopg

    need_psycopg()
    from headrace.sources.postgres.entry import entered

    return entered(log, name, dsn, tables, options)


def __getattr__(name: str) -> Any:
    if name == "testing":
        return importlib.import_module("headrace.testing")
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'headrace' has no attribute '{name}'")
    return getattr(importlib.import_module(module), name)


__all__ = [
    "Batch",
    "LogSettings",
    "Piece",
    "Pipeline",
    "Producer",
    "Query",
    "Receipt",
    "SQLite",
    "Table",
    "Topic",
    "Transaction",
    "Writer",
    "__version__",
    "capture",
    "connect",
    "debezium",
    "errors",
    "restore",
    "rows",
    "sql",
]
