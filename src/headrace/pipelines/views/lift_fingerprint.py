"""Fingerprints: equal in every process for equal computations, and different for different ones.

An expression is taken as Catalyst's JSON. Out of it go what differs from run to run or does not
change a value: ids (numbered anew, in order of appearance, columns of the input first), names of
columns and lambda variables, qualifiers, metadata, nullability. In goes what JSON does not say:
the code of the user's Python functions (a pickle is not canonical, so the function is unpickled
and its code, constants, defaults and captured values are read), the session's time zone, ANSI mode
and case rule, the version of Spark, since another one may write other JSON, and each field that has
no form in JSON (null stands there): ``x / y`` and ``try_divide(x, y)`` are told apart by nothing
else, and so are the options of ``from_json``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import pickle
import types
from typing import Any

from headrace.pipelines.views.catalyst import Catalyst, Java, items, kind_of

DROPPED = {"metadata", "explicitMetadata", "nonInheritableMetadataKeys", "qualifier", "nullable"}
NAMELESS = {"AttributeReference", "Alias", "NamedLambdaVariable"}
PYTHON = {"PythonUDF", "PythonUDAF", "PythonUDTF"}
DATA = {"decimal", "datetime", "fractions", "uuid", "numpy", "pandas", "pyarrow"}
"""Modules whose objects are nothing but their value."""
SETTINGS = ("spark.sql.session.timeZone", "spark.sql.ansi.enabled", "spark.sql.caseSensitive")


def digest(*parts: Any) -> str:
    """Hash anything that JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def salt(bridge: Catalyst) -> list[str]:
    """Give what every computation of a session depends on."""
    settings = [str(bridge.session.conf.get(name)).lower() for name in SETTINGS]
    return [bridge.session.version, *settings]


class Numbering:
    """Numbers ids by their first appearance, over several expressions."""

    def __init__(self, known: dict[int, int | str]) -> None:
        self._numbers = dict(known)
        self.classes: set[str] = set()
        """Simple names of all classes of expressions seen."""

    def canonical(self, expression: Java) -> Any:
        """Give an expression as plain data."""
        said = json.loads(expression.toJSON())
        unsaid = _unsaid(expression, [*said])
        return [self._plain(said), *unsaid, *self._functions(expression)]

    def number(self, key: int) -> int | str:
        """Give the number of an id."""
        return self._numbers.setdefault(key, len(self._numbers))

    def _plain(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._plain(inner) for inner in value]
        if not isinstance(value, dict):
            return value
        if str(value.get("product-class", "")).endswith(".ExprId"):
            return self.number(value["id"])
        simple = str(value.get("class", "")).rpartition(".")[2]
        self.classes.add(simple)
        left_out = DROPPED | {"name"} if simple in NAMELESS else DROPPED
        return {key: self._plain(inner) for key, inner in value.items() if key not in left_out}

    def _functions(self, expression: Java) -> list[Any]:
        """Give the code of the Python functions in an expression, in order."""
        if not self.classes & PYTHON:
            return []
        found = []
        if kind_of(expression) in PYTHON:
            found.append(code_of_command(expression))
        for child in items(expression.children()):
            found += self._functions(child)
        return found


def exactly(expression: Java) -> str:
    """Give a text that only equal expressions of one plan have in common, ids and all."""
    said = json.loads(expression.toJSON())
    unsaid = _unsaid(expression, [*said])
    return json.dumps([said, unsaid])


def _unsaid(expression: Java, nodes: list[dict[str, Any]]) -> list[str]:
    """Give what Catalyst's JSON has as null and is not: a mode (TRY, ANSI), options, a character.

    The JSON has nodes in the order of the tree, and of each its fields in that of the constructor.
    Of bytes in a literal it has the address, which is taken out of the nodes. A Python function is
    a pickle, another one when Python has the bytecode of the file: `_functions` reads it instead.
    """
    node = nodes.pop(0)
    found = []
    if _has_address(node):
        node["value"] = "bytes"
        found.append(str(expression.sql()))
    python = node["class"].rpartition(".")[2] in PYTHON
    fields = [key for key in node if key not in {"class", "num-children"}]
    for place, key in enumerate(fields[: expression.productArity()]):
        said = node[key] is not None or (python and key == "func")
        if not said and (held := expression.productElement(place)) is not None:
            found.append(str(held))
    below, open_ = 0, node["num-children"]
    while open_:
        open_ += nodes[below]["num-children"] - 1
        below += 1
    if any(None in one.values() or _has_address(one) for one in nodes[:below]):
        for child in items(expression.children()):
            found += _unsaid(child, nodes)
    else:
        del nodes[:below]
    return found


def _has_address(node: dict[str, Any]) -> bool:
    return node["class"].endswith(".Literal") and "[B@" in str(node.get("value"))


def code_of_command(udf: Java) -> Any:
    """Read the code of a Python function out of a Catalyst expression."""
    from pyspark.serializers import CloudPickleSerializer

    serializer: Any = CloudPickleSerializer  # without types
    function = serializer().loads(udf.func().command().unsafeArray())
    return code_of(function[0] if isinstance(function, tuple) else function)


def code_of(value: Any, seen: frozenset[int] = frozenset()) -> Any:
    """Give what a function computes, or a captured value is, as plain data."""
    from pyspark.cloudpickle import cloudpickle

    own: Any = cloudpickle.list_registry_pickle_by_value  # without types
    if id(value) in seen:
        return "again"
    seen |= {id(value)}
    if isinstance(value, types.CodeType):
        constants = [code_of(constant, seen) for constant in value.co_consts]
        names = [list(value.co_names), list(value.co_varnames), list(value.co_freevars)]
        return ["code", value.co_code.hex(), constants, *names, value.co_flags]
    if isinstance(value, types.FunctionType):
        cells = [code_of(cell.cell_contents, seen) for cell in value.__closure__ or ()]
        used = {
            name: code_of(value.__globals__[name], seen)
            for name in _names(value.__code__)
            if name in value.__globals__
        }
        defaults = code_of([value.__defaults__, value.__kwdefaults__], seen)
        return ["function", code_of(value.__code__, seen), cells, used, defaults]
    if isinstance(value, staticmethod | classmethod):
        return code_of(value.__func__, seen)
    if isinstance(value, types.MethodType):
        return code_of([value.__func__, value.__self__], seen)
    if isinstance(value, property):
        return code_of(value.fget, seen)
    if isinstance(value, functools.partial):
        return code_of([value.func, value.args, value.keywords], seen)
    if isinstance(value, types.ModuleType):
        return ["module", value.__name__]
    if isinstance(value, dict):
        pairs = [[code_of(key, seen), code_of(inner, seen)] for key, inner in value.items()]
        return ["dict", sorted(pairs, key=json.dumps)]
    if isinstance(value, set | frozenset):
        return ["set", sorted((code_of(inner, seen) for inner in value), key=json.dumps)]
    if isinstance(value, list | tuple):
        return ["list", [code_of(inner, seen) for inner in value]]
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return [type(value).__name__, repr(value)]
    of = value if isinstance(value, type) else type(value)
    found: list[Any] = [of.__module__, getattr(value, "__qualname__", of.__qualname__)]
    if of is not value and of.__module__.partition(".")[0] in DATA:
        return [*found, hashlib.sha256(pickle.dumps(value, 4)).hexdigest()]
    if of.__module__ not in {"__main__", *own()}:
        return found  # of a library: its name says what it is
    held = {**vars(of), **(vars(value) if of is not value and hasattr(value, "__dict__") else {})}
    plain = [name for name in held if not name.startswith("__") or callable(held[name])]
    return [*found, code_of([{name: held[name] for name in plain}, of.__bases__], seen)]


def _names(code: types.CodeType) -> list[str]:
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return sorted({*code.co_names, *(name for part in inner for name in _names(part))})
