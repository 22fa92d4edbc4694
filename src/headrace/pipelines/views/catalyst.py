"""The bridge to Catalyst: classes by name, sequences, types. All of py4j is here and in `evaluate`.

A call over py4j costs 0.3 ms, a dotted path more (each step asks the JVM what it is), and turning
a Scala sequence into a Java list 20 ms; hence the caches, and the indexed access in `items`. Plans
and expressions stay in the JVM; what Python must know of them (attributes, ids, types) it asks for
once. The internal interface used is small and old: ``children``, ``withNewChildren``,
``makeCopy``, ``toJSON``, ``containsPattern``, the names of rules and the constructors of `Alias`,
`Project`, `Filter`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.errors import NotKept

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXPRESSIONS = "org.apache.spark.sql.catalyst.expressions."
PLANS = "org.apache.spark.sql.catalyst.plans.logical."
Java = Any
"""An object in the JVM."""


@dataclass(frozen=True)
class Attribute:
    """A column of a plan: its id is unique in the JVM, its type Spark's, as JSON."""

    java: Java
    id: int
    name: str
    type: str


class Catalyst:
    """What Python needs of one session's JVM."""

    def __init__(self, session: SparkSession) -> None:
        self.session = session
        self.jvm: Any = session._jvm
        self._classes: dict[str, Any] = {}
        self._objects: dict[str, Java] = {}
        self._types: dict[str, pa.DataType] = {}

    def java_class(self, name: str) -> Any:
        """Give a class by its full name, to construct from or to call statics of."""
        if name not in self._classes:
            found: Any = self.jvm
            for part in name.split("."):
                found = getattr(found, part)
            self._classes[name] = found
        return self._classes[name]

    def expression(self, name: str) -> Any:
        """Give a class of expressions."""
        return self.java_class(EXPRESSIONS + name)

    def plan(self, name: str) -> Any:
        """Give a class of logical plans."""
        return self.java_class(PLANS + name)

    def plan_class(self, name: str) -> Java:
        """A kind of logical plan, for ``isInstance``."""
        return self.java_class("java.lang.Class").forName(PLANS + name)

    def scala_object(self, name: str) -> Java:
        """Give a Scala object: a rule, a companion."""
        if name not in self._objects:
            found = self.java_class("java.lang.Class").forName(name + "$")
            self._objects[name] = found.getField("MODULE$").get(None)
        return self._objects[name]

    def compiled(self, name: str, text: str) -> Java:
        """Give an object of a class in Java, by the compiler that Spark has for generated code."""
        if name not in self._objects:
            compiler = self.java_class("org.codehaus.janino.SimpleCompiler")()
            compiler.setParentClassLoader(self.jvm.Thread.currentThread().getContextClassLoader())
            compiler.cook(text)
            found = compiler.getClassLoader().loadClass(name)
            self._objects[name] = found.getDeclaredConstructor(None).newInstance(None)
        return self._objects[name]

    def java_list(self, values: list[Java]) -> Java:
        """Make a Java list."""
        made = self.java_class("java.util.ArrayList")()
        for value in values:
            made.add(value)
        return made

    def seq(self, values: list[Java]) -> Java:
        """Make a Scala sequence."""
        return self.jvm.PythonUtils.toSeq(self.java_list(values))

    def array(self, values: list[Any]) -> Java:
        """Make a Java array of objects."""
        gateway: Any = self.session.sparkContext._gateway
        made = gateway.new_array(self.jvm.Object, len(values))
        for index, value in enumerate(values):
            made[index] = value
        return made

    @cached_property
    def none(self) -> Java:
        """Scala's None."""
        return self.scala_object("scala.None")

    @cached_property
    def nil(self) -> Java:
        """The empty sequence."""
        return self.seq([])

    def pattern(self, name: str) -> Java:
        """Give a tree pattern, by which Catalyst finds expressions without a walk."""
        key = f"pattern {name}"
        if key not in self._objects:
            patterns = self.scala_object("org.apache.spark.sql.catalyst.trees.TreePattern")
            self._objects[key] = getattr(patterns, name)()
        return self._objects[key]

    def attribute(self, java: Java) -> Attribute:
        """Describe an attribute."""
        return Attribute(java, java.exprId().id(), java.name(), java.dataType().json())

    def attributes(self, seq: Java) -> tuple[Attribute, ...]:
        """Describe a sequence of attributes."""
        return tuple(map(self.attribute, items(seq)))

    def alias(self, expression: Java, name: str, expr_id: Java | None = None) -> Java:
        """Name an expression, under a new id or a given one."""
        ids = self.scala_object(EXPRESSIONS + "NamedExpression")
        fresh = ids.newExprId() if expr_id is None else expr_id
        return self.expression("Alias")(expression, name, fresh, self.nil, self.none, self.nil)

    def new_attribute(self, name: str, datatype: Java) -> Attribute:
        """Make an attribute of a new id, nullable."""
        ids = self.scala_object(EXPRESSIONS + "NamedExpression")
        empty = self.scala_object("org.apache.spark.sql.types.Metadata").empty()
        return self.attribute(
            self.expression("AttributeReference")(
                name, datatype, True, empty, ids.newExprId(), self.nil
            )
        )

    def null(self, datatype: Java) -> Java:
        """Make the null of a type."""
        return self.expression("Literal").create(None, datatype)

    def datatype(self, type_json: str) -> Java:
        """Read a type back from its JSON."""
        return self.java_class("org.apache.spark.sql.types.DataType").fromJson(type_json)

    def struct(self, attributes: tuple[Attribute, ...]) -> Java:
        """Make the schema of these columns, c0, c1, ..., nullable through and through."""
        fields = [
            {"name": f"c{index}", "type": json.loads(attribute.type), "nullable": True}
            | {"metadata": {}}
            for index, attribute in enumerate(attributes)
        ]
        return self.datatype(json.dumps({"type": "struct", "fields": fields})).asNullable()

    def arrow_type(self, type_json: str) -> pa.DataType:
        """Give the Arrow type of a Spark type: one for each, whatever is nullable inside."""
        if type_json not in self._types:
            from pyspark.errors import PySparkException
            from pyspark.sql.pandas.types import to_arrow_type
            from pyspark.sql.types import _parse_datatype_json_string

            if re.search(' collate (?!UTF8_BINARY")', type_json) or '"variant"' in type_json:
                raise _no_such_type(type_json, "keys are compared by their bytes")
            try:
                parsed = _parse_datatype_json_string(_nullable(type_json))
                self._types[type_json] = to_arrow_type(parsed, timezone="UTC")
            except (PySparkException, ValueError) as error:  # a map of nothing to nothing
                raise _no_such_type(
                    type_json, "Arrow, in which changes travel, has none"
                ) from error
        return self._types[type_json]

    def schema(self, attributes: tuple[Attribute, ...]) -> pa.Schema:
        """Give the Arrow schema of these columns."""
        return pa.schema(
            [pa.field(f"c{index}", self.arrow_type(a.type)) for index, a in enumerate(attributes)]
        )


def _no_such_type(type_json: str, why: str) -> NotKept:
    return NotKept(
        f"a column of the type {type_json} cannot be kept up to date",
        why=why,
        fix="cast it to another type, or say refresh='full' if it is not part of the result",
    )


def _nullable(type_json: str) -> str:
    """Make everything nullable inside a type."""

    def visit(value: Any) -> Any:
        if isinstance(value, dict):
            flags = ("nullable", "containsNull", "valueContainsNull")
            return {key: True if key in flags else visit(inner) for key, inner in value.items()}
        return [visit(inner) for inner in value] if isinstance(value, list) else value

    return json.dumps(visit(json.loads(type_json)))


def items(seq: Java) -> list[Java]:
    """Give the elements of a Scala sequence."""
    return [seq.apply(index) for index in range(seq.size())]


def kind_of(java: Java) -> str:
    """Give the simple name of an object's class."""
    name: str = java.getClass().getSimpleName()
    return name


def with_field(node: Java, old: Java, new: Java, bridge: Catalyst) -> Java:
    """Copy a tree node with one of its constructor's arguments replaced, however many it has."""
    fields, replaced = [], 0
    for index in range(node.productArity()):
        element = node.productElement(index)
        same = hasattr(element, "_target_id") and element.equals(old)
        replaced += same
        fields.append(new if same else element)
    assert replaced == 1, f"{kind_of(node)} has no such field"
    return node.makeCopy(bridge.array(fields))
