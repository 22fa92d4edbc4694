"""What the server says of itself: who it is, its tables and types, the publication, the slot.

Everything here only reads, except `write_note`. Positions are integers, as in the stream; the text
`16/B374D848` is made and read by `lsn_text` and `lsn_number`.

**The note.** A slot knows how far it was confirmed, not by whom. So the capture leaves a line of
its own in the database, as the comment of its publication: the log's id, how often the capture was
started, and a position up to which the log has everything on disk. `resume` compares it with what
the log knows. The comment needs no table and no right beyond owning the publication; where the
capture does not own it, or a person has written a comment there, there is no note.

**Timelines.** The control file names the timeline of the last checkpoint, which for a while after
a promotion is still the old one. The name of the current WAL file has the one that is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import namedtuple_row

from headrace.sources.postgres.values import PgType

Connection = psycopg.Connection[Any]
TableName = tuple[str, str]
"""Schema and table."""


@dataclass(frozen=True)
class Identity:
    """Which server and database this is."""

    system_id: str
    """Made by initdb; the same on all standbys and copies of one server."""
    timeline: int
    """Grows by one with each promotion and each recovery to a point in time."""
    database: str
    database_oid: int
    version: int
    """As in `server_version_num`: 180006 is 18.6."""


@dataclass(frozen=True)
class SlotState:
    """A replication slot, as `pg_replication_slots` has it."""

    name: str
    plugin: str | None
    """None: a physical slot."""
    database: str | None
    active: bool
    active_pid: int | None
    confirmed_flush: int | None
    restart: int | None
    wal_status: str | None
    invalidation_reason: str | None
    two_phase: bool
    failover: bool
    decoded: int = 0
    """Transactions that were streamed from it, as the server's statistics have it; these are lost
    when the server crashes."""


@dataclass(frozen=True)
class Publication:
    """A publication; `tables` are those it resolves to now, roots of partitions if `via_root`."""

    name: str
    oid: int
    owner: str
    tables: frozenset[TableName]
    members: Mapping[TableName, int]
    """The oid of the entry by which a table is in it: its own, its schema's, or, if it has all
    tables, the publication's. A table that was taken out and put back has another one."""
    all_tables: bool
    via_root: bool
    insert: bool
    update: bool
    delete: bool
    truncate: bool
    filtered: frozenset[TableName]
    """Those with a row filter, or a list of columns: not all of their changes come."""
    oids: Mapping[TableName, int] = field(default_factory=dict)
    """Of the tables, when it was looked at."""

    def member(self, table: TableInfo) -> int:
        """The entry of a table; 0: it has none, or its name is another table's by now."""
        name = table.schema, table.name
        return self.members.get(name, 0) if self.oids.get(name) == table.oid else 0


@dataclass(frozen=True)
class Note:
    """What the capture left in the database: see the top of this module."""

    log: str
    starts: int
    confirmed: int


@dataclass(frozen=True)
class ColumnInfo:
    """A column of a table."""

    name: str
    number: int
    """`attnum`: stays the same when the column is renamed, and is never used again."""
    type: PgType
    modifier: int
    not_null: bool
    has_default: bool
    missing: str | None
    """The value, as text, that rows have which are older than the column (a fast default)."""
    generated: str
    """`s` stored, `v` virtual, empty: not generated. Generated columns are not in the stream."""


@dataclass(frozen=True)
class TableInfo:
    """A table that can be captured: an ordinary one, or the root of a partitioned one."""

    schema: str
    name: str
    oid: int
    partitioned: bool
    unlogged: bool
    """Or it has a partition that is, or that is a foreign table."""
    columns: tuple[ColumnInfo, ...]
    key: tuple[str, ...]
    """The columns of the primary key, in its order."""
    replica_identity: str
    """d default (the key), i an index, f full rows, n nothing; of partitions, the poorest."""
    identity: tuple[str, ...]
    """The columns by which updates and deletes name a row in the stream; empty: by none."""
    rows: int
    """The planner's estimate; -1: never analysed."""
    bytes: int
    selectable: bool
    """Whether we may read all of it."""
    storage: str = ""
    """Its file, another one when all rows were written anew; of a partitioned table, those of its
    partitions, as `oid/xid:file`, with a space between: the transactions that have attached it."""
    altered: str = ""
    """A hash of the transactions that have last altered its columns, or those of its partitions. A
    rewriting that changes values is another one; a truncate, or VACUUM FULL, is not."""
    partitions: str = ""
    """The transactions that have last altered each of its partitions, as `oid:xid`, with a space
    between; empty if it is not partitioned. Rows change nothing of it."""
    labels: tuple[tuple[int, str], ...] = ()
    """Those of the enums of its columns, by their oid: a label can be renamed, silently."""
    deferrable: bool = False
    """Its key: until a transaction ends, several rows may have the same."""

    @property
    def streamed(self) -> list[ColumnInfo]:
        """The columns that the stream has."""
        return [column for column in self.columns if not column.generated]


def emptied(storage: str) -> str:
    """The storage of a table without its files: they are new, and the stream does not say which."""
    return re.sub(r"(^|:)\d+(?= |$)", "~", storage)


def lsn_number(text: str) -> int:
    """Read a position: `16/B374D848`."""
    high, low = text.split("/")
    return int(high, 16) << 32 | int(low, 16)


def lsn_text(number: int) -> str:
    """Write a position as PostgreSQL does."""
    return f"{number >> 32:X}/{number & 0xFFFFFFFF:X}"


def quoted(name: TableName) -> str:
    """Write a table's name as it stands in a statement."""
    return ".".join(map(identifier, name))


def identifier(name: str) -> str:
    """Write a name as it stands in a statement: always quoted, as it may be a keyword."""
    return '"' + name.replace('"', '""') + '"'


def identity(connection: Connection) -> Identity:
    """Say which server and database this connection leads to."""
    row = _one(
        connection,
        """
        select system_identifier::text as system_id,
          case when pg_is_in_recovery() then (select timeline_id from pg_control_checkpoint())
            else ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int
          end as timeline,
          datname as database, d.oid::bigint as database_oid,
          current_setting('server_version_num')::int as version
        from pg_control_system(), pg_database d where datname = current_database()
        """,
    )
    return Identity(*row)


def replicates(connection: Connection) -> tuple[str, str]:
    """Our role, and the statement that lets it replicate; empty if it may."""
    query = """
        select rolname, rolreplication or rolsuper or exists (
          select from pg_roles g where g.rolname = 'rds_replication'
            and pg_has_role(r.oid, g.oid, 'usage')),
          to_regrole('rds_replication') is not null as rds
        from pg_roles r where rolname = current_user
        """
    name, able, rds = _one(connection, query)
    role = identifier(name)
    way = f"GRANT rds_replication TO {role}" if rds else f"ALTER ROLE {role} REPLICATION"
    return name, "" if able else way


def lsn(connection: Connection) -> int:
    """The position up to which the server has written its WAL."""
    row = _one(
        connection,
        """
        select case when pg_is_in_recovery() then pg_last_wal_replay_lsn()
          else pg_current_wal_lsn() end::text
        """,
    )
    return lsn_number(row[0])


def heartbeat(connection: Connection) -> None:
    """Make the stream move on, on a quiet database too."""
    connection.execute("SELECT pg_logical_emit_message(false, 'headrace', '')")


def slot(connection: Connection, name: str) -> SlotState | None:
    """Describe a slot of the server, whatever its database; None if there is none.

    Taken as JSON, because versions differ in which columns there are.
    """
    query = """
        select to_jsonb(s) || jsonb_build_object('decoded', coalesce(total_txns, 0))
        from pg_replication_slots s left join pg_stat_replication_slots t using (slot_name)
        where slot_name = %s
        """
    row = connection.execute(query, [name]).fetchone()
    if row is None:
        return None
    found: Mapping[str, Any] = row[0]
    reason = found.get("invalidation_reason")
    if reason is None and (found["wal_status"] == "lost" or found.get("conflicting")):
        reason = "wal_removed" if found["wal_status"] == "lost" else "conflict"
    return SlotState(
        name=found["slot_name"],
        plugin=found["plugin"],
        database=found["database"],
        active=found["active"],
        active_pid=found["active_pid"],
        confirmed_flush=_position(found["confirmed_flush_lsn"]),
        restart=_position(found["restart_lsn"]),
        wal_status=found["wal_status"],
        invalidation_reason=reason,
        two_phase=found.get("two_phase", False),
        failover=found.get("failover", False),
        decoded=found["decoded"],
    )


def slots_of(connection: Connection, publication: str) -> list[str]:
    """The slots of this database that captures with this publication have made."""
    query = """
        select slot_name from pg_replication_slots
        where database = current_database() and slot_name ~ ('^' || %s || '_[0-9a-f]{8}$')
        order by 1
        """
    return [row[0] for row in connection.execute(query, [publication]).fetchall()]


def publication(connection: Connection, name: str) -> Publication | None:
    """Describe a publication of this database; None if there is none."""
    query = """
        select oid::bigint, pubowner::regrole::text as owner, puballtables, pubviaroot,
          pubinsert, pubupdate, pubdelete, pubtruncate
        from pg_publication where pubname = %s
        """
    found = _rows(connection, query, [name])
    if not found:
        return None
    # Not by the view pg_publication_tables, which waits for tables that somebody has locked.
    query = """
        select nspname, relname, c.oid::bigint, coalesce(
          (select r.oid::bigint from pg_publication_rel r
            where r.prpubid = p.oid and r.prrelid = c.oid),
        """
    if connection.info.server_version >= 150000:
        query += """
          (select s.oid::bigint from pg_publication_namespace s
            where s.pnpubid = p.oid and s.pnnspid = c.relnamespace),
        """
    query += """
          case when puballtables then p.oid::bigint end) as member
        from pg_publication p, pg_class c join pg_namespace n on n.oid = c.relnamespace
        where pubname = %s and (relkind = 'r' or relkind = 'p' and pubviaroot)
          and not (relispartition and pubviaroot)
          and relpersistence = 'p' and nspname !~ '^pg_' and nspname <> 'information_schema'
        """
    rows = _rows(connection, query, [name])
    members = {(row.nspname, row.relname): row.member for row in rows if row.member is not None}
    query = """
        select nspname, relname,
          coalesce(to_jsonb(r) ->> 'prqual', to_jsonb(r) ->> 'prattrs') is not null as filtered
        from pg_publication p join pg_publication_rel r on r.prpubid = p.oid
        join pg_class c on c.oid = r.prrelid join pg_namespace n on n.oid = c.relnamespace
        where pubname = %s
        """
    named = _rows(connection, query, [name])
    one = found[0]
    return Publication(
        name=name,
        oid=one.oid,
        owner=one.owner,
        tables=frozenset(members),
        members=members,
        oids={(row.nspname, row.relname): row.oid for row in rows},
        all_tables=one.puballtables,
        via_root=one.pubviaroot,
        insert=one.pubinsert,
        update=one.pubupdate,
        delete=one.pubdelete,
        truncate=one.pubtruncate,
        filtered=frozenset((row.nspname, row.relname) for row in named if row.filtered),
    )


def is_named(connection: Connection, publication: str, oid: int) -> bool:
    """Whether a table has an entry of its own: else the server lets it be unlogged for a while."""
    query = """
        select from pg_publication p join pg_publication_rel on prpubid = p.oid
        where pubname = %s and prrelid = %s
        """
    return connection.execute(query, [publication, oid]).rowcount > 0


def note(connection: Connection, publication: str) -> Note | None:
    """Read the note; None if there is none, or a comment that is not ours."""
    query = """
        select obj_description(oid, 'pg_publication') from pg_publication where pubname = %s
        """
    row = connection.execute(query, [publication]).fetchone()
    return _read_note(row[0] if row else None)


def write_note(connection: Connection, publication: str, note: Note) -> bool:
    """Leave the note; False where we may not, or where a comment stands that is not ours.

    To be called only when the log has on disk what the note says.
    """
    query = """
        select obj_description(oid, 'pg_publication'), pg_has_role(pubowner, 'usage')
        from pg_publication where pubname = %s
        """
    row = connection.execute(query, [publication]).fetchone()
    if row is None or not row[1] or (row[0] and _read_note(row[0]) is None):
        return False
    text = f"headrace log={note.log} starts={note.starts} confirmed={lsn_text(note.confirmed)}"
    comment = sql.SQL("comment on publication {} is {}").format(sql.Identifier(publication), text)
    try:
        with connection.transaction():
            connection.execute("set local lock_timeout = '1s'")
            connection.execute(comment)
    except psycopg.errors.LockNotAvailable:  # somebody alters the publication
        return False
    return True


def _read_note(text: str | None) -> Note | None:
    pattern = r"headrace log=(\S+) starts=(\d+) confirmed=([0-9A-F]+/[0-9A-F]+)"
    match = re.fullmatch(pattern, text or "")
    return Note(match[1], int(match[2]), lsn_number(match[3])) if match else None


def chosen(table: TableName, patterns: Iterable[str]) -> bool:
    """Whether patterns choose a table: one without `!` fits, and none with `!`."""
    patterns = list(patterns)
    wanted = any(fits(table, one) for one in patterns if not one.startswith("!"))
    return wanted and not any(fits(table, one[1:]) for one in patterns if one.startswith("!"))


def fits(table: TableName, pattern: str) -> bool:
    """Whether a pattern such as `shop.order*` fits; without a point it is of schema `public`.

    Of several points any may be the one between: schemas and tables may have some in their names.
    Only `*` and `?` are special, not the brackets of `fnmatch`: a table may be named `prices[old]`.
    """
    pattern = pattern.replace("[", "[[]")
    words = (pattern if "." in pattern else f"public.{pattern}").split(".")
    return any(
        fnmatchcase(table[0], ".".join(words[:at])) and fnmatchcase(table[1], ".".join(words[at:]))
        for at in range(1, len(words))
    )


def table(connection: Connection, name: TableName) -> TableInfo | None:
    """Describe one table; None if it is not there. At one moment: it may go meanwhile."""
    with connection.transaction():
        connection.execute("set transaction isolation level repeatable read")
        return next(iter(_described(connection, lambda row: (row.schema, row.name) == name)), None)


def tables(
    connection: Connection, patterns: Sequence[str], known: Mapping[int, PgType] | None = None
) -> list[TableInfo]:
    """Describe the tables that the patterns choose, in the order of their names.

    A partitioned table is one table; its partitions are not listed. `known` are the types, if they
    were read before.
    """
    return _described(connection, lambda row: chosen((row.schema, row.name), patterns), known)


def _described(
    connection: Connection, which: Callable[[Any], bool], known: Mapping[int, PgType] | None = None
) -> list[TableInfo]:
    found = [row for row in _rows(connection, _TABLES) if which(row)]
    if not found:
        return []
    columns: dict[int, list[ColumnInfo]] = {row.oid: [] for row in found}
    rows = _rows(connection, _COLUMNS, [list(columns)])
    if known is None or any(row.type not in known for row in rows):
        known = types(connection)
    for row in rows:
        column = ColumnInfo(
            name=row.name,
            number=row.number,
            type=known[row.type],
            modifier=row.modifier,
            not_null=row.not_null,
            has_default=row.has_default,
            missing=row.missing,
            generated=row.generated,
        )
        columns[row.table].append(column)
    version = connection.info.server_version
    tables = [_table(row, tuple(columns[row.oid]), version) for row in found]
    enums = {one.oid: [*_enums(one)] for one in tables}
    if not any(enums.values()):
        return tables
    query = (
        "select enumtypid::bigint, oid::bigint, enumlabel from pg_enum where enumtypid = any(%s)"
    )
    rows = _rows(connection, query, [[oid for of_table in enums.values() for oid in of_table]])
    return [
        replace(
            one, labels=tuple(sorted((o, label) for t, o, label in rows if t in enums[one.oid]))
        )
        for one in tables
    ]


def _enums(table: TableInfo) -> Iterator[int]:
    """The enums that its columns are made of."""
    for column in table.columns:
        kind: PgType | None = column.type
        while kind is not None and kind.kind != "e":
            kind = kind.base or kind.element or kind.range_of
        if kind is not None:
            yield kind.oid


def _table(row: Any, columns: tuple[ColumnInfo, ...], version: int) -> TableInfo:
    streamed = {column.number: column.name for column in columns if not column.generated}
    key, index = (
        tuple(streamed[number] for number in numbers) if streamed.keys() >= set(numbers) else ()
        for numbers in (row.key, row.index)
    )
    everything = tuple(streamed.values())
    if not takes_full(columns, version):
        everything = ()
    return TableInfo(
        schema=row.schema,
        name=row.name,
        oid=row.oid,
        partitioned=row.partitioned,
        unlogged=row.unlogged,
        columns=columns,
        key=key,
        replica_identity=row.replica_identity,
        identity={"d": key if row.immediate else (), "i": index, "f": everything, "n": ()}[
            row.replica_identity
        ],
        rows=int(row.rows),
        bytes=int(row.bytes),
        storage=row.storage or "",
        altered=row.altered or "",
        partitions=row.partitions or "",
        selectable=row.selectable,
        deferrable=not row.immediate,
    )


def takes_full(columns: Sequence[ColumnInfo], version: int) -> bool:
    """Whether a published table may have REPLICA IDENTITY FULL: else its updates are refused."""
    return version < 180000 or all(column.generated != "s" for column in columns)


def have_rows(connection: Connection, oids: Sequence[int]) -> bool:
    """Whether one of these tables has had a row; so it is taken to be if somebody has locked it."""
    query = "select coalesce(max(pg_relation_size(one)), 0) > 0 from unnest(%s::oid[]) one"
    try:
        with connection.transaction():
            connection.execute("set local lock_timeout = 100")
            row = connection.execute(query, [list(oids)]).fetchone()
    except psycopg.errors.LockNotAvailable:
        return True
    return bool(row and row[0])


def types(connection: Connection) -> dict[int, PgType]:
    """All types of the database by their oid."""
    query = """
        select oid::bigint, typname, typtype::text as kind, typdelim::text as delimiter,
          case when typoutput = 'array_out'::regproc then typelem::bigint else 0
          end as element,
          typbasetype::bigint as base, typtypmod as base_modifier, rngsubtype::bigint as range_of
        from pg_type t left join pg_range on t.oid in (rngtypid, rngmultitypid)
        """
    rows = {row.oid: row for row in _rows(connection, query)}
    made: dict[int, PgType] = {}

    def make(oid: int) -> PgType:
        if oid not in made:
            row = rows[oid]
            made[oid] = PgType(
                oid=oid,
                name=row.typname,
                kind=row.kind,
                element=make(row.element) if row.element else None,
                base=make(row.base) if row.base else None,
                base_modifier=row.base_modifier,
                range_of=make(row.range_of) if row.range_of else None,
                delimiter=row.delimiter,
            )
        return made[oid]

    return {oid: make(oid) for oid in rows}


# Nothing here waits for a table that somebody has locked, as pg_table_size, pg_partition_tree and
# pg_get_expr would: the capture asks while it streams.
# What an index has behind INCLUDE (from indnkeyatts on) is no part of the key.
# The poorest identity of the leaves: what a partition logs is its own, whatever the root says; one
# that logs other columns than those by which the stream calls the root's rows has none.
_TABLES = """
with recursive tree(root, oid, attached, partitioned) as (
  select oid, oid, '', relkind = 'p' from pg_class
  where relkind in ('r', 'p') and not relispartition
  union all select root, inhrelid, attached || '/' || i.xmin, true
  from tree join pg_inherits i on inhparent = tree.oid where partitioned
), leaves as (
  select root, coalesce(sum(nullif(l.reltuples, -1)), -1) as rows,
    coalesce(sum(current_setting('block_size')::bigint * (l.relpages + coalesce(
      (select t.relpages from pg_class t where t.oid = l.reltoastrelid), 0))), 0) as bytes,
    coalesce(bool_or(l.relpersistence <> 'p' or l.relkind = 'f'), false) as unlogged,
    min(case when c.relkind = 'p' and l.relreplident = 'i' and (
        select array_agg(attname order by attname) from pg_index join pg_attribute
          on attrelid = indrelid and attnum = any((indkey::int2[])[:indnkeyatts - 1])
        where indrelid = l.oid and indisreplident
      ) is distinct from (
        select array_agg(attname order by attname) from pg_index join pg_attribute
          on attrelid = indrelid and attnum = any((indkey::int2[])[:indnkeyatts - 1])
        where indrelid = c.oid
          and case c.relreplident when 'i' then indisreplident else indisprimary end
      ) then 1 else position(l.relreplident::text in 'ndif') end) as poorest,
    coalesce(string_agg(l.oid || attached || ':' || l.relfilenode, ' ' order by l.oid), ' ')
      as files,
    md5(string_agg((select string_agg(attnum || ' ' || a.xmin, ',' order by attnum)
      from pg_attribute a where attrelid = l.oid and attnum > 0 and not attisdropped), ' '
      order by l.oid)) as altered,
    string_agg(l.oid || ':' || l.xmin, ' ' order by l.oid) as partitions
  from tree join pg_class c on c.oid = root
  left join pg_class l on l.oid = tree.oid and l.relkind in ('r', 'f')
  group by root
)
select n.nspname as schema, c.relname as name, c.oid::bigint, c.relkind = 'p' as partitioned,
  leaves.rows, leaves.bytes, leaves.unlogged,
  case when leaves.poorest < 4 then substr('ndif', leaves.poorest, 1)
    else c.relreplident::text end as replica_identity,
  coalesce((select (i.indkey::int2[])[:i.indnkeyatts - 1] from pg_index i
    where i.indrelid = c.oid and i.indisprimary), '{}') as key,
  not exists (select 1 from pg_index i where i.indrelid = c.oid and i.indisprimary
    and not i.indimmediate) as immediate,
  case when c.relkind = 'r' then c.relfilenode::text else leaves.files end as storage,
  leaves.altered, case when c.relkind = 'p' then leaves.partitions end as partitions,
  coalesce((select (i.indkey::int2[])[:i.indnkeyatts - 1] from pg_index i
    where i.indrelid = c.oid and i.indisreplident), '{}') as index,
  has_table_privilege(c.oid, 'select') as selectable
from pg_class c join pg_namespace n on n.oid = c.relnamespace join leaves on root = c.oid
where c.relpersistence <> 't' and n.nspname !~ '^pg_' and n.nspname <> 'information_schema'
order by 1, 2
"""

_COLUMNS = """
select a.attrelid::bigint as table, a.attname as name, a.attnum as number,
  a.atttypid::bigint as type, a.atttypmod as modifier, a.attnotnull as not_null,
  a.attgenerated = '' and d.adbin is not null as has_default,
  case when a.atthasmissing then (a.attmissingval::text::text[])[1] end as missing,
  a.attgenerated::text as generated
from pg_attribute a left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
where a.attrelid = any(%s) and a.attnum > 0 and not a.attisdropped
order by a.attrelid, a.attnum
"""


def _one(connection: Connection, query: str) -> Any:
    return _rows(connection, query)[0]


def _rows(connection: Connection, query: str, values: Sequence[object] = ()) -> list[Any]:
    with connection.cursor(row_factory=namedtuple_row) as cursor:
        return cursor.execute(query, values or None).fetchall()


def _position(text: str | None) -> int | None:
    return None if text is None else lsn_number(text)
