"""``headrace init``: a small project that works, to begin with."""

from __future__ import annotations

import json
import os
import shlex
from keyword import iskeyword
from pathlib import Path

import click

from headrace.cli.options import Command, counted, json_option, talk
from headrace.errors import BadUsage, FileThere, SourceNotReady

STREAM_TOML = """\
# What 'headrace run' runs. docs/project.md says what else may stand here.
log = "data"
pipelines = ["pipeline.py"]

# [capture.shop]                    # the tables of a database, row by row
# dsn = "postgresql://user@localhost/shop"
# tables = ["public.*"]

[page]
port = 8321
"""
STREAM_PIPELINE = '''\
"""Visits of pages, counted: a plain PySpark query, kept right while rows come."""

import headrace as hr
from pyspark.sql import functions as F

web = hr.Pipeline("web")
web.stream("visits")  # a topic of the log: headrace topic append visits


@web.view(key="page")
def popular(visits):
    return visits.groupBy("page").agg(
        F.count("*").alias("visits"), F.countDistinct("visitor").alias("visitors")
    )


web.keep("popular", in_=hr.SQLite("kept.db"))
'''
STREAM_TEST = '''\
"""What the view says after each step of a history. Run it with: pytest"""

import headrace as hr
from pipeline import web


def test_visits_are_counted():
    after = hr.testing.history(
        [
            {"visits": [{"visitor": 1, "page": "/"}, {"visitor": 2, "page": "/"}]},
            {"visits": [{"visitor": 1, "page": "/"}, {"visitor": 1, "page": "/help"}]},
        ]
    ).rows(web, "popular")
    hr.testing.same(after[0], [{"page": "/", "visits": 2, "visitors": 2}])
    hr.testing.same(
        after[1],
        [
            {"page": "/", "visits": 3, "visitors": 2},
            {"page": "/help", "visits": 1, "visitors": 1},
        ],
    )
'''
TOPIC = ("visits", "visitor bigint, page string")
EXAMPLE = [
    {"visitor": 1, "page": "/"},
    {"visitor": 1, "page": "/help"},
    {"visitor": 2, "page": "/"},
]

TABLE_TOML = """\
# What 'headrace run' runs. docs/project.md says what else may stand here.
log = "data"
pipelines = ["pipeline.py"]

[capture.source]
dsn = {dsn}                         # a password: PGPASSWORD or ~/.pgpass
tables = [{table}]

[page]
port = 8321
"""
TABLE_PIPELINE = '''\
"""The rows of {topic}, counted: a plain PySpark query, kept right while the database changes."""

import headrace as hr
from pyspark.sql import functions as F

copy = hr.Pipeline("copy")
copy.table("{name}", of="{topic}")  # follows the database, row by row


@copy.view()
def {view}({name}):
    return {name}.agg(F.count("*").alias("rows"))


copy.keep("{view}", "{name}", in_=hr.SQLite("kept.db"))  # or hr.Table("postgresql://...")
'''
TABLE_TEST = '''\
"""What the view says after each step of a history. Run it with: pytest"""

import headrace as hr
from pipeline import copy


def test_rows_are_counted():
    after = hr.testing.history(
        [
            {{"{name}": [{{{key}: 1}}, {{{key}: 2}}]}},
            {{"-{name}": [{{{key}: 1}}]}},  # a row goes
        ]
    ).rows(copy, "{view}")
    hr.testing.same(after[0], [{{"rows": 2}}])
    hr.testing.same(after[1], [{{"rows": 1}}])
'''
IGNORED = ".gitignore"
IGNORE = "data/\nrun/\nkept.db*\n__pycache__/\n"


@click.command(
    cls=Command, short_help="Make a small project that works.", example="headrace init shop"
)
@click.argument("folder", metavar="[DIR]", default=".")
@click.option("--dsn", metavar="ADDRESS", help="A PostgreSQL database, to begin with its tables.")
@json_option
def init(folder: str, dsn: str | None, as_json: bool) -> None:
    """Make a project in DIR (by default here): headrace.toml, a pipeline, and a test of it.

    Without --dsn it begins with a stream of visits, some of which are there already. Nothing that
    is there is overwritten.
    """
    root = Path(folder)
    files = _of_stream() if dsn is None else _of_table(dsn)
    there = [name for name in [*files, "data"] if os.path.lexists(root / name)]
    if IGNORED in there:  # as in any folder under git
        there.remove(IGNORED)
        lines = ", ".join(files.pop(IGNORED).split())
        talk(f"{IGNORED} stays as it is; it should have {lines}")
    if there:
        raise FileThere(f"{root / there[0]} is there already", place=str(root.absolute()))
    try:
        root.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with open(root / name, "x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        said = f"no project can be made in {root}: {error.strerror}"
        raise BadUsage(said, fix="name another folder: headrace init DIR") from None
    if dsn is None:
        import headrace

        with headrace.connect(root / "data") as log:
            log.create_topic(*TOPIC)
            log.append(TOPIC[0], EXAMPLE)
    if as_json:
        click.echo(json.dumps({"folder": str(root.absolute()), "files": [*files]}))
        return
    talk(f"{counted(len(files), 'file')} in {root.absolute()}: {', '.join(files)}")
    talk("next:")
    steps = ["headrace run", "headrace status --watch", "pytest"]
    if dsn is None:
        row = json.dumps(EXAMPLE[1])
        steps[1:1] = [f"echo '{row}' | headrace topic append visits", "headrace view read popular"]
    else:
        steps[:0] = ["headrace doctor"]
    for step in ([f"cd {shlex.quote(folder)}"] if root != Path() else []) + steps:
        talk(f"  {step}")


def _of_stream() -> dict[str, str]:
    return {
        "headrace.toml": STREAM_TOML,
        "pipeline.py": STREAM_PIPELINE,
        "test_pipeline.py": STREAM_TEST,
        IGNORED: IGNORE,
    }


def _of_table(dsn: str) -> dict[str, str]:
    """The files for a database: its first table that has a key."""
    from headrace.sources.postgres.client import need_psycopg

    need_psycopg()
    from headrace.sources.postgres.catalog import tables
    from headrace.sources.postgres.prepare import reached
    from headrace.sources.postgres.settings import without_password
    from headrace.sources.postgres.state import full_name, topic_name

    kept, _ = without_password(dsn)
    with reached(dsn) as connection:
        found = [one for one in tables(connection, ("public.*",)) if one.identity]
    if not found:
        raise SourceNotReady(
            "there is no table with a primary key in schema public", place=kept, fix="make one"
        )
    first = min(found, key=lambda one: (not _plain(one.name), one.name))
    values = {
        "dsn": json.dumps(kept, ensure_ascii=False),  # TOML has no pairs of surrogates
        "table": json.dumps(f"{first.schema}.{first.name}", ensure_ascii=False),
        "topic": topic_name("source", full_name(first.schema, first.name)),
        "view": "counted" if first.name.lower() != "counted" else "rows_counted",
        "name": first.name if _plain(first.name) else "source",
        "key": json.dumps(first.identity[0], ensure_ascii=False),
    }
    return {
        "headrace.toml": TABLE_TOML.format_map(values),
        "pipeline.py": TABLE_PIPELINE.format_map(values),
        "test_pipeline.py": TABLE_TEST.format_map(values),
        IGNORED: IGNORE,
    }


def _plain(name: str) -> bool:
    """Whether an input can be named as its table, beside the other names of the file."""
    from headrace.pipelines.pipeline import NAME

    return bool(NAME.fullmatch(name)) and not iskeyword(name) and name != "F"
