"""Spark DDL to Arrow types and back, without Spark.

``"user bigint not null, url string, tags array<string>"`` is how a schema is written by hand and
how types are kept in control records. The grammar is Spark's own for a schema::

    schema   = column {"," column}  |  "struct" "<" column {"," column} ">"
    column   = name [":"] type ["not" "null"] ["comment" text]
    type     = simple | "decimal" ["(" p ["," s] ")"] | "interval day to second"
             | "array" "<" type ">" | "map" "<" type "," type ">" | "struct" "<" column ... ">"

Names are case-sensitive, and may be anything between backquotes (a backquote is written twice);
keywords are not case-sensitive. Each type has exactly one Arrow type, and each such Arrow type
exactly one canonical spelling, so ``parse_type(ddl_type(t)) == t``. Comments are kept for columns;
inside a struct they are read and not kept. The elements of an array and the values of a map may
always be null, as in every DDL.

What Spark has and a log cannot keep (``variant``, collations, ``default`` clauses, ...) is refused
by its name, with the column and the character where it stands (counted from 1).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from headrace.errors import BadSchema, nearest

DEPTH_MAX = 32
"""How deep types may be nested; Arrow's own readers give up at 64."""
DECIMAL_DIGITS_MAX = 38

TIMESTAMP = pa.timestamp("us", tz="UTC")
TIMESTAMP_NTZ = pa.timestamp("us")
TIME = pa.time64("us")
DURATION = pa.duration("us")


@dataclass(frozen=True, slots=True)
class Field:
    """One column as written in DDL."""

    name: str
    type: pa.DataType
    nullable: bool = True
    comment: str | None = None


_SIMPLE: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": TIMESTAMP,
    "timestamp_ntz": TIMESTAMP_NTZ,
    "time": TIME,
    "interval day to second": DURATION,
}
_CANONICAL: dict[pa.DataType, str] = {arrow: name for name, arrow in _SIMPLE.items()}
_SYNONYMS = {
    "byte": "tinyint",
    "short": "smallint",
    "integer": "int",
    "long": "bigint",
    "real": "float",
    "timestamp_ltz": "timestamp",
}
_DECIMALS = ("decimal", "dec", "numeric")
_REFUSED: dict[str, tuple[str, str]] = {
    "varchar": ("a log does not cut or pad text", "use string"),
    "char": ("a log does not cut or pad text", "use string"),
    "character": ("a log does not cut or pad text", "use string"),
    "variant": ("Arrow has no such type", "use string for JSON text, or a struct"),
    "void": ("a column of nothing holds nothing", "name the type that will come, or leave it out"),
    "null": ("a column of nothing holds nothing", "name the type that will come, or leave it out"),
    "geometry": ("Arrow has no such type", "use binary (WKB)"),
    "geography": ("Arrow has no such type", "use binary (WKB)"),
    "text": ("it is not a type of Spark", "use string"),
    "json": ("it is not a type of Spark", "use string for JSON text, or a struct"),
    "jsonb": ("it is not a type of Spark", "use string for JSON text, or a struct"),
    "uuid": ("it is not a type of Spark", "use string"),
    "blob": ("it is not a type of Spark", "use binary"),
    "bytes": ("it is not a type of Spark", "use binary"),
    "bytea": ("it is not a type of Spark", "use binary"),
    "bool": ("it is not a type of Spark", "use boolean"),
    "int64": ("it is not a type of Spark", "use bigint"),
    "int32": ("it is not a type of Spark", "use int"),
    "timestamptz": ("it is not a type of Spark", "use timestamp"),
    "datetime": ("it is not a type of Spark", "use timestamp, or timestamp_ntz for local time"),
}
_CLAUSES: dict[str, tuple[str, str]] = {
    "default": ("readers would not agree on it", "fill the value in when appending"),
    "generated": (
        "a log keeps what it is given",
        "compute the value before appending, or in a view",
    ),
    "collate": ("the order of strings here is that of their bytes", "use string without collation"),
    "primary": ("keys are not part of the schema", "give key=... to create_topic()"),
    "key": ("keys are not part of the schema", "give key=... to create_topic()"),
    "unique": ("keys are not part of the schema", "give key=... to create_topic()"),
    "null": ("a column is nullable unless it says 'not null'", "leave it out"),
}
_TYPE_WORDS = (*_SIMPLE, *_SYNONYMS, *_DECIMALS, "array", "map", "struct", "interval")

_TOKEN = re.compile(
    r"""\s*(?: (?P<quoted>`(?:[^`]|``)*`)
             | (?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
             | (?P<word>\w+)
             | (?P<sign>[<>(),:])
             | (?P<end>\Z) )""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0"}
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    at: int

    @property
    def shown(self) -> str:
        return repr(self.text) if self.text else "the end"


class _Parser:
    """Recursive descent over the tokens of one text; `column` says where we are, for errors."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.column = ""
        self.depth = 0
        self.tokens: list[_Token] = []
        self.index = 0
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise self.error(
                "half a surrogate is not text", error.start, fix="leave it out"
            ) from None
        at = 0
        while True:
            match = _TOKEN.match(text, at)
            if match is None:
                at += len(text[at:]) - len(text[at:].lstrip())
                char = text[at]
                fix = "put an unusual name between backquotes"
                if char in "`'\"":
                    fix = f"close the {char}"
                raise self.error(f"{char!r} does not belong here", at, fix=fix)
            kind = match.lastgroup or ""
            token = _Token(kind, match.group(kind), match.start(kind))
            self.tokens.append(token)
            if kind == "end":
                break
            at = match.end()

    def error(self, fact: str, at: int, *, why: str = "", fix: str = "") -> BadSchema:
        """Make the error for this character of the text."""
        where = f"character {at + 1}"
        place = f"column '{self.column}', {where}" if self.column else where
        return BadSchema(
            fact,
            place=place,
            why=why,
            fix=fix,
            column=self.column,
            character=at + 1,
            text=self.text,
        )

    @property
    def next(self) -> _Token:
        return self.tokens[self.index]

    def take(self) -> _Token:
        token = self.tokens[self.index]
        if token.kind != "end":
            self.index += 1
        return token

    def sees(self, *words: str) -> bool:
        """Say whether the next tokens are these words or signs."""
        ahead = self.tokens[self.index : self.index + len(words)]
        return len(ahead) == len(words) and all(
            token.kind in ("word", "sign") and token.text.lower() == word
            for token, word in zip(ahead, words, strict=True)
        )

    def accept(self, *words: str) -> bool:
        if not self.sees(*words):
            return False
        self.index += len(words)
        return True

    def expect(self, sign: str, after: str) -> None:
        if not self.accept(sign):
            fact = f"expected '{sign}' after {after}, found {self.next.shown}"
            raise self.error(fact, self.next.at, fix=f"add '{sign}'")

    def schema(self) -> list[Field]:
        whole = self.sees("struct", "<")
        if whole:
            self.index += 2
        if self.next.kind == "end":
            raise self.error("the schema has no columns", 0, fix="name at least one column")
        fields = self.columns()
        if whole:
            self.expect(">", "the last column")
        self.done()
        return fields

    def done(self) -> None:
        if self.next.kind != "end":
            token = self.next
            if token.kind == "word" and token.text.lower() in _CLAUSES:
                raise self.clause_error(token)
            raise self.error(
                f"expected ',' or the end, found {token.text!r}",
                token.at,
                fix="separate columns by ',', and put a name with spaces between backquotes",
            )

    def clause_error(self, token: _Token) -> BadSchema:
        why, fix = _CLAUSES[token.text.lower()]
        return self.error(f"'{token.text}' is not supported", token.at, why=why, fix=fix)

    def columns(self) -> list[Field]:
        outer = self.column
        fields = []
        while True:
            fields.append(self.one_column(outer))
            if not self.accept(","):
                self.column = outer
                return fields

    def one_column(self, outer: str) -> Field:
        token = self.take()
        if token.kind not in ("word", "quoted"):
            raise self.error(
                f"expected a column name, found {token.shown}", token.at, fix="name a column here"
            )
        name = token.text[1:-1].replace("``", "`") if token.kind == "quoted" else token.text
        if not name:
            raise self.error("a column name is empty", token.at, fix="name the column")
        self.column = f"{outer}.{name}" if outer else name
        colon = self.accept(":")
        if self.next.kind != "word":
            why = ""
            if not colon and name.lower() in _TYPE_WORDS:
                why = "a schema names its columns: name first, then type"
            raise self.error(
                f"column '{name}' has no type, found {self.next.shown}",
                self.next.at,
                why=why,
                fix=f"write a type after the name, e.g. '{name} string'",
            )
        arrow = self.type()
        nullable = not self.accept("not", "null")
        comment = self.comment()
        if nullable and comment is not None:  # Spark takes both orders
            nullable = not self.accept("not", "null")
        if self.next.kind == "word" and self.next.text.lower() in _CLAUSES:
            raise self.clause_error(self.next)
        return Field(name, arrow, nullable, comment)

    def comment(self) -> str | None:
        if not self.accept("comment"):
            return None
        token = self.take()
        if token.kind != "text":
            raise self.error("'comment' needs a text in quotes", token.at, fix="comment 'text'")
        return _ESCAPE.sub(lambda m: _ESCAPES.get(m[1], m[1]), token.text[1:-1])

    def type(self) -> pa.DataType:
        token = self.take()
        if token.kind != "word":
            raise self.error(f"expected a type, found {token.shown}", token.at, fix="name a type")
        word = token.text.lower()
        word = _SYNONYMS.get(word, word)
        if word in _SIMPLE:
            arrow = _SIMPLE[word]
            if word == "time":
                self.time_precision()
            if self.sees("(") or self.sees("<"):
                raise self.error(
                    f"'{token.text}' takes no parameters", self.next.at, fix=f"use {word} alone"
                )
            if self.sees("collate"):
                raise self.clause_error(self.next)
            return arrow
        if word in _DECIMALS:
            return self.decimal()
        if word == "interval":
            return self.interval(token)
        if word in ("array", "map", "struct"):
            return self.nested(word, token)
        raise self.unknown_type(token)

    def unknown_type(self, token: _Token) -> BadSchema:
        word = token.text.lower()
        if word in _REFUSED:
            why, fix = _REFUSED[word]
            return self.error(f"type '{token.text}' is not supported", token.at, why=why, fix=fix)
        fix = nearest(word, _TYPE_WORDS) or "use a type of Spark, e.g. bigint, string, timestamp"
        return self.error(f"unknown type '{token.text}'", token.at, fix=fix)

    def time_precision(self) -> None:
        """Read the precision of ``time(6)``: the only one, as values are kept in microseconds."""
        if self.accept("("):
            at = self.next.at
            if self.number("the precision of time") != 6:
                raise self.error("only time(6) is supported", at, fix="use time")
            self.expect(")", "the precision")

    def number(self, what: str) -> int:
        token = self.take()
        if token.kind != "word" or not token.text.isascii() or not token.text.isdigit():
            fact = f"{what} must be a number, found {token.shown}"
            raise self.error(fact, token.at, fix="write it as digits")
        return int(token.text[:9])

    def decimal(self) -> pa.DataType:
        precision, scale = 10, 0
        if self.accept("("):
            at = self.next.at
            precision = self.number("the precision of a decimal")
            if self.accept(","):
                scale = self.number("the scale of a decimal")
            self.expect(")", "the digits of a decimal")
            if not 1 <= precision <= DECIMAL_DIGITS_MAX or scale > precision:
                raise self.error(
                    f"decimal({precision},{scale}) is out of range",
                    at,
                    why=f"precision is 1 to {DECIMAL_DIGITS_MAX}, scale at most the precision",
                    fix="use decimal(38,s), or string for longer numbers",
                )
        return pa.decimal128(precision, scale)

    def interval(self, token: _Token) -> pa.DataType:
        if self.accept("day", "to", "second"):
            return DURATION
        spelled = ["interval"]
        while self.next.kind == "word" and self.next.text.lower() in _INTERVAL_WORDS:
            spelled.append(self.take().text)
        raise self.error(
            f"type '{' '.join(spelled)}' is not supported",
            token.at,
            why="a month has no fixed length, and other intervals are the same in other units",
            fix="use 'interval day to second', or int for a number of months",
        )

    def nested(self, word: str, token: _Token) -> pa.DataType:
        self.depth += 1
        if self.depth > DEPTH_MAX:
            fact = f"types are nested deeper than {DEPTH_MAX}"
            raise self.error(fact, token.at, fix="use string for JSON text")
        self.expect("<", f"'{word}'")
        if word == "array":
            arrow = pa.list_(self.type())
        elif word == "map":
            at = self.next.at
            key = self.type()
            if has_map(key):
                raise self.error("a map cannot be a map's key", at, fix="use string as key")
            self.expect(",", "the key's type")
            arrow = pa.map_(key, self.type())
        else:
            arrow = self.struct(token)
        self.refuse_element_clause(word)
        self.expect(">", f"the types of '{word}'")
        self.depth -= 1
        return arrow

    def refuse_element_clause(self, word: str) -> None:
        if self.sees("not", "null"):
            raise self.error(
                f"'not null' cannot be said inside {word}<>",
                self.next.at,
                why="elements and values may always be null",
                fix="leave it out",
            )

    def struct(self, token: _Token) -> pa.DataType:
        if self.sees(">"):
            raise self.error("a struct needs a field", token.at, fix="name at least one field")
        fields = self.columns()
        twice = duplicate(field.name for field in fields)
        if twice:
            raise self.error(f"field '{twice}' is named twice", token.at, fix="rename one of them")
        return pa.struct([pa.field(f.name, f.type, nullable=f.nullable) for f in fields])


_INTERVAL_WORDS = {"year", "month", "day", "hour", "minute", "second", "to"}


def duplicate(names: Iterable[str]) -> str:
    """Give the first name that was there before, ignoring case as Spark does; "" if none is."""
    seen: set[str] = set()
    for name in names:
        folded = name.casefold()
        if folded in seen:
            return name
        seen.add(folded)
    return ""


def parse_ddl(text: str) -> list[Field]:
    """Read a schema, in the order of its columns; names are not yet checked for duplicates.

    Raises `BadSchema` naming the column, the character and what to write instead.
    """
    return _Parser(text).schema()


def parse_type(text: str) -> pa.DataType:
    """Read a single type, e.g. ``array<int>``; raises `BadSchema`."""
    parser = _Parser(text)
    arrow = parser.type()
    parser.done()
    return arrow


def quoted(name: str) -> str:
    """Spell a column's name, between backquotes if it needs them."""
    return name if _PLAIN_NAME.match(name) else f"`{name.replace('`', '``')}`"


def ddl_type(arrow: pa.DataType) -> str:
    """Spell a type canonically; it must be one that `parse_type` or `normal_type` gives."""
    known = _CANONICAL.get(arrow)
    if known is not None:
        return known
    types = pa.types
    if types.is_decimal128(arrow):
        return f"decimal({arrow.precision},{arrow.scale})"
    if types.is_list(arrow):
        return f"array<{ddl_type(arrow.value_type)}>"
    if types.is_map(arrow):
        return f"map<{ddl_type(arrow.key_type)},{ddl_type(arrow.item_type)}>"
    if types.is_struct(arrow):
        fields = (
            f"{quoted(f.name)}:{ddl_type(f.type)}{'' if f.nullable else ' not null'}" for f in arrow
        )
        return f"struct<{','.join(fields)}>"
    raise BadSchema(f"Arrow type {arrow} has no spelling in DDL", fix="use normal_type() first")


def format_ddl(fields: Iterable[Field]) -> str:
    """Spell a whole schema canonically: what `parse_ddl` reads back to the same fields."""
    return ", ".join(_format_field(field) for field in fields)


def _format_field(field: Field) -> str:
    text = f"{quoted(field.name)} {ddl_type(field.type)}"
    if not field.nullable:
        text += " not null"
    if field.comment is not None:
        escaped = field.comment.replace("\\", "\\\\").replace("'", "\\'")
        text += f" comment '{escaped}'"
    return text


def has_map(arrow: pa.DataType) -> bool:
    """Say whether a map is somewhere in this type."""
    if pa.types.is_map(arrow):
        return True
    if pa.types.is_nested(arrow):
        return any(has_map(arrow.field(i).type) for i in range(arrow.num_fields))
    return False


_UNSIGNED: dict[pa.DataType, str] = {
    pa.uint8(): "smallint (int16)",
    pa.uint16(): "int (int32)",
    pa.uint32(): "bigint (int64)",
    pa.uint64(): "decimal(20,0), or bigint (int64) if the values fit",
}


def normal_type(arrow: pa.DataType, column: str, depth: int = 0) -> pa.DataType:
    """Give the type a column gets when a user's pyarrow schema says ``arrow``.

    Encodings and widths of offsets fall away (``large_string``, ``string_view``, dictionaries,
    ``large_list``, fixed sizes), times are in microseconds, instants in UTC, dates in days,
    decimals of 128 bits; elements of lists and values of maps may be null. What Spark does not
    have is refused with `BadSchema`. Values that do not fit the new unit are found when rows are
    appended.
    """
    types = pa.types
    if depth > DEPTH_MAX:
        raise _bad_type(arrow, column, f"types are nested deeper than {DEPTH_MAX}", "flatten them")
    if isinstance(arrow, pa.BaseExtensionType):
        fix = f"use its storage type {arrow.storage_type}"
        raise _bad_type(arrow, column, "extension types mean nothing to other readers", fix)
    if arrow in _CANONICAL:
        return arrow
    if types.is_dictionary(arrow) or types.is_run_end_encoded(arrow):
        return normal_type(arrow.value_type, column, depth + 1)
    if types.is_large_string(arrow) or types.is_string_view(arrow):
        return pa.string()
    if types.is_large_binary(arrow) or types.is_binary_view(arrow):
        return pa.binary()
    if types.is_fixed_size_binary(arrow):
        return pa.binary()
    if types.is_timestamp(arrow):
        return TIMESTAMP_NTZ if arrow.tz is None else TIMESTAMP
    if types.is_date(arrow):
        return pa.date32()
    if types.is_time(arrow):
        return TIME
    if types.is_duration(arrow):
        return DURATION
    if types.is_decimal(arrow):
        return _normal_decimal(arrow, column)
    if types.is_nested(arrow) and not types.is_union(arrow):
        return _normal_nested(arrow, column, depth)
    raise _bad_type(arrow, column, *_reason(arrow))


def _reason(arrow: pa.DataType) -> tuple[str, str]:
    """Say why a type is not supported, and what to use instead."""
    types = pa.types
    if arrow in _UNSIGNED:
        return "Spark has no unsigned integers", f"use {_UNSIGNED[arrow]}"
    if types.is_float16(arrow):
        return "Spark has no half floats", "use float (float32)"
    if types.is_union(arrow):
        return "Spark has no unions", "use a struct with one field a case"
    if types.is_null(arrow):
        return "a column of nothing holds nothing", "name the type to come"
    if types.is_interval(arrow):
        return "a month has no fixed length", "use duration('us'), or int for a number of months"
    return "Spark has no such type", "use a type that Spark has"


def _bad_type(arrow: pa.DataType, column: str, why: str, fix: str) -> BadSchema:
    fact = f"type {arrow} is not supported"
    return BadSchema(fact, place=f"column '{column}'", why=why, fix=fix, column=column)


def _normal_decimal(arrow: pa.DataType, column: str) -> pa.DataType:
    precision, scale = arrow.precision, arrow.scale
    if precision > DECIMAL_DIGITS_MAX or not 0 <= scale <= precision:
        why = f"precision is 1 to {DECIMAL_DIGITS_MAX}, scale is 0 to the precision"
        raise _bad_type(arrow, column, why, "use decimal128(38, s), or string for longer numbers")
    return pa.decimal128(precision, scale)


def _normal_nested(arrow: pa.DataType, column: str, depth: int) -> pa.DataType:
    if pa.types.is_map(arrow):
        key = normal_type(arrow.key_type, f"{column}.key", depth + 1)
        if has_map(key):
            raise _bad_type(arrow, column, "a map cannot be a map's key", "use string as key")
        return pa.map_(key, normal_type(arrow.item_type, f"{column}.value", depth + 1))
    if not pa.types.is_struct(arrow):  # all kinds of lists
        return pa.list_(normal_type(arrow.value_type, f"{column}.element", depth + 1))
    fields = [
        pa.field(f.name, normal_type(f.type, f"{column}.{f.name}", depth + 1), nullable=f.nullable)
        for f in arrow
    ]
    if not fields:
        raise _bad_type(arrow, column, "a struct needs a field", "name at least one field")
    twice = duplicate(f.name for f in fields)
    if twice:
        raise _bad_type(arrow, column, f"field '{twice}' is named twice", "rename one of them")
    if any(not f.name for f in fields):
        raise _bad_type(arrow, column, "a field has no name", "name all fields")
    return pa.struct(fields)
