"""Reaching the server of a capture, and making it ready: what the preflight found, put right.

The publication is the capture's own, so it is made without being asked for, but last: a table that
is published without a replica identity refuses updates, so everything else must be right before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from headrace import errors
from headrace.sources.postgres import catalog, preflight, resume
from headrace.sources.postgres.preflight import Finding, Wanted
from headrace.sources.postgres.session import SETTINGS, connected
from headrace.sources.postgres.settings import without_password

CONNECT_SECONDS = "10"


def wanted(name: str, tables: tuple[str, ...], slot: str = "") -> Wanted:
    """What a capture of this name needs; the slot gets its name when it is made."""
    return Wanted(slot or f"headrace_{name}", f"headrace_{name}", tables)


@contextmanager
def reached(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection in autocommit mode; what the server refuses has a name. Says no password."""
    place = without_password(dsn)[0]
    try:
        connection = connected(patient(dsn), SETTINGS, application_name="headrace")
    except psycopg.OperationalError as error:
        raise errors.SourceAway(
            f"the database cannot be reached: {one_line(error)}", place=place
        ) from None
    with connection, refusals(place):
        yield connection


def patient(dsn: str) -> str:
    """An address with a limit for how long to wait for an answer, if it has none; texts as UTF-8.

    (In a SQL_ASCII database psycopg would give bytes.)
    """
    limit = conninfo_to_dict(dsn).get("connect_timeout", CONNECT_SECONDS)
    return make_conninfo(dsn, connect_timeout=limit, client_encoding="UTF8")


@contextmanager
def refusals(place: str) -> Iterator[None]:
    """What the server refuses, or that it goes away, as errors with names."""
    try:
        yield
    except psycopg.OperationalError as error:
        raise errors.SourceAway(f"the database went away: {one_line(error)}", place=place) from None
    except psycopg.errors.CharacterNotInRepertoire as error:  # rows come otherwise: see `Stream`
        raise errors.SourceNotReady(
            f"a name in the database is not UTF-8: {one_line(error)}",
            place=place,
            why="the names of topics and columns are; the encoding of the database checks nothing",
            fix="find it with \\d in psql (PGCLIENTENCODING=SQL_ASCII), and rename it",
        ) from error
    except psycopg.Error as error:
        raise errors.SourceNotReady(
            f"the server refuses: {one_line(error)}", place=place
        ) from error


def one_line(error: Exception) -> str:
    """What an error says, as a fact."""
    return " ".join(str(error).split()).rstrip(".")


def refuse_another_log(connection: psycopg.Connection[Any], want: Wanted, log: str) -> None:
    """Raise `SlotInUse` if a new capture of this name would take over that of another log."""
    note = catalog.note(connection, want.publication)
    resume.check_new(want.publication, log, note, catalog.slots_of(connection, want.publication))


def prepared(
    connection: psycopg.Connection[Any], want: Wanted, *, fix: bool
) -> tuple[list[Finding], dict[str, str]]:
    """What is found when all was done that may be; and by finding why the server refused to."""
    found = preflight.findings(connection, want)
    refused: dict[str, str] = {}
    if fix:
        blocking = [one for one in found if one.level == "error" and not _own(one, want)]
        refused |= _fixed(connection, blocking)
        found = preflight.findings(connection, want)
    own = [one for one in found if _own(one, want)]
    others = [one for one in found if one.level == "error" and not _own(one, want)]
    if own and not others:
        refused |= _fixed(connection, own)
        found = preflight.findings(connection, want)
    if not others:
        return found, refused
    return [one for one in found if not _own(one, want)], refused


def _own(finding: Finding, want: Wanted) -> bool:
    """Whether it is the capture's own publication that is missing, or lacks tables."""
    starts = ("CREATE PUBLICATION ", "ALTER PUBLICATION ")
    return (
        finding.level == "error"
        and finding.where == f"publication {want.publication}"
        and any(one.startswith(starts) for one in finding.statements)
    )


def _fixed(connection: psycopg.Connection[Any], found: list[Finding]) -> dict[str, str]:
    tried = preflight.fix(connection, found)
    return {f"{one.where}: {one.what}": reason for one, reason in tried if reason}
