"""A plan without state, over leaves: what a template evaluates, still as Catalyst's expressions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.pipelines.views.catalyst import Attribute, Java


@dataclass(frozen=True)
class Leaf:
    """The rows of an input of the template."""

    index: int
    output: tuple[Attribute, ...]


@dataclass(frozen=True)
class Projected:
    """One expression (an attribute or an alias) for each column."""

    below: Plan
    expressions: tuple[Java, ...]
    output: tuple[Attribute, ...]


@dataclass(frozen=True)
class Filtered:
    """The rows for which a condition is true."""

    below: Plan
    condition: Java

    @property
    def output(self) -> tuple[Attribute, ...]:
        """The columns of the rows that are filtered."""
        return self.below.output


@dataclass(frozen=True)
class Expanded:
    """Each row once for each list of expressions."""

    below: Plan
    projections: tuple[tuple[Java, ...], ...]
    output: tuple[Attribute, ...]


@dataclass(frozen=True)
class Generated:
    """Each row once for each row that a generator makes of it."""

    below: Plan
    java: Java
    required: tuple[int, ...]
    """Positions of the columns below that go on, before those of the generator."""
    output: tuple[Attribute, ...]


@dataclass(frozen=True)
class United:
    """The rows of all of these."""

    parts: tuple[Plan, ...]
    output: tuple[Attribute, ...]


@dataclass(frozen=True)
class Operator:
    """Any other operator, evaluated by Spark as it is: the groups of a Regroup."""

    below: Plan
    java: Java
    output: tuple[Attribute, ...]


Plan = Leaf | Projected | Filtered | Expanded | Generated | United | Operator


def moved(plan: Plan, by: int) -> Plan:
    """Give a plan whose leaves are counted from another number on."""
    if isinstance(plan, Leaf):
        return replace(plan, index=plan.index + by)
    if isinstance(plan, United):
        return replace(plan, parts=tuple(moved(part, by) for part in plan.parts))
    return replace(plan, below=moved(plan.below, by))


def walk(plan: Plan) -> list[Plan]:
    """Give all parts of a plan, the lowest first."""
    below: Sequence[Any] = ()
    if isinstance(plan, United):
        below = plan.parts
    elif not isinstance(plan, Leaf):
        below = (plan.below,)
    return [*(part for inner in below for part in walk(inner)), plan]
