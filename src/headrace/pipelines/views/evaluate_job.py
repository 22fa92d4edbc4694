"""Templates as Spark jobs: for what has no compiled form, such as Python functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from headrace.pipelines.views.algebra import WEIGHT
from headrace.pipelines.views.catalyst import Attribute, Catalyst, Java, items
from headrace.pipelines.views.evaluate_plan import (
    Expanded,
    Filtered,
    Leaf,
    Operator,
    Plan,
    Projected,
    United,
)
from headrace.pipelines.views.evaluate_rows import Converter, shaped, whole

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Job:
    """The plan over the given rows, run by Spark as a query: one job."""

    def __init__(
        self,
        bridge: Catalyst,
        converter: Converter,
        plan: Plan,
        leaves: tuple[tuple[Attribute, ...], ...],
        *,
        rider: bool,
    ) -> None:
        self._bridge, self._converter, self._plan = bridge, converter, plan
        long_type = bridge.datatype('"long"')
        self._riders = [bridge.new_attribute("_w", long_type) for _ in leaves] if rider else []
        self._sources = [
            (*leaf, self._riders[index]) if rider else leaf for index, leaf in enumerate(leaves)
        ]
        self._structs = [bridge.struct(source) for source in self._sources]
        schema = bridge.schema(plan.output)
        self._schema = schema.append(WEIGHT) if rider else schema

    def __call__(self, batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        """Evaluate the plan on these rows, one batch for each leaf."""
        given = zip(batches, self._structs, strict=True)
        frame = self.frame([self._converter.relation(batch, struct) for batch, struct in given])
        return shaped(whole(frame.toArrow()), self._schema)

    def frame(self, plans: Sequence[Java]) -> DataFrame:
        """Give the plan over these plans, one for each leaf, as a frame."""
        from pyspark.sql import DataFrame

        bridge = self._bridge
        relations = []
        for relation, source in zip(plans, self._sources, strict=True):
            bound = [
                bridge.alias(column, attribute.name, attribute.java.exprId())
                for column, attribute in zip(items(relation.output()), source, strict=True)
            ]
            relations.append(bridge.plan("Project")(bridge.seq(bound), relation))
        java, _ = self._build(self._plan, relations)
        datasets = bridge.java_class("org.apache.spark.sql.classic.Dataset")
        made = datasets.ofRows(bridge.session._jsparkSession, java)
        return DataFrame(made, bridge.session).toDF(*self._schema.names)

    def _build(self, plan: Plan, relations: Sequence[Java]) -> tuple[Java, list[Java]]:
        """Give the Catalyst plan, and its rider as a list of one attribute or none."""
        bridge = self._bridge
        if isinstance(plan, Leaf):
            riders = [self._riders[plan.index].java] if self._riders else []
            return relations[plan.index], riders
        if isinstance(plan, United):
            built = [self._build(part, relations) for part in plan.parts]
            return bridge.plan("Union")(
                bridge.seq([java for java, _ in built]), False, False
            ), built[0][1]
        below, rider = self._build(plan.below, relations)
        if isinstance(plan, Projected):
            columns = bridge.seq([*plan.expressions, *rider])
            return bridge.plan("Project")(columns, below), rider
        if isinstance(plan, Filtered):
            return bridge.plan("Filter")(plan.condition, below), rider
        if isinstance(plan, Expanded):
            lists = [bridge.seq([*projection, *rider]) for projection in plan.projections]
            output = bridge.seq([*(a.java for a in plan.output), *rider])
            return bridge.plan("Expand")(bridge.seq(lists), output, below), rider
        made = plan.java.withNewChildren(bridge.seq([below]))
        if isinstance(plan, Operator):
            return made, rider
        columns = [*(a.java for a in plan.output), *rider]
        return bridge.plan("Project")(bridge.seq(columns), made), rider
