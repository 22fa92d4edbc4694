"""What running a pipeline file would do, before it does it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from headrace.pipelines.views.define import define_views
from headrace.pipelines.views.engine import Engine
from headrace.pipelines.views.reading import status_of, topic_of
from headrace.tables.packs import Packs, Ref

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.log.embedded.log import EmbeddedLog
    from headrace.pipelines.pipeline import Pipeline


@dataclass(frozen=True)
class Step:
    """What happens to one view."""

    name: str
    action: str
    """"goes on", "is built", "is rebuilt" or "ends"."""
    why: str


@dataclass(frozen=True)
class Plan:
    """What happens to all of them."""

    pipeline: str
    views: tuple[Step, ...]
    rows: int
    """Rows of the inputs that a build reads."""
    seconds: float
    """How long that should take, by the rate of the last build; 0 if there was none."""
    kept: int
    """Operators below what is built whose state is used as it is."""

    def to_json(self) -> dict[str, Any]:
        """As it is."""
        return asdict(self)


def planned(pipeline: Pipeline, log: EmbeddedLog, spark: SparkSession | None = None) -> Plan:
    """Compare a pipeline with what its last commit says."""
    status = status_of(log, pipeline.name)
    defined = define_views(pipeline, log, spark, topics=False)
    packs = Packs(f"{log.path}/pipelines/{pipeline.name}")
    engine = Engine(defined.nodes, defined.input_identities, packs, 0)
    steps = []
    ids = {topic.name: topic.id for topic in log.topics()}
    published = {
        name: engine.published(node, ids.get(topic_of(pipeline.name, name), 0))
        for name, node in defined.nodes.items()
    }
    unchanged = defined.unchanged(published, status.views)
    for name in defined.nodes:
        if name in unchanged:
            steps.append(Step(name, "goes on", f"unchanged, through {status.through}"))
        elif status.views.get(name) is None:
            steps.append(Step(name, "is built", "new"))
        else:
            steps.append(Step(name, "is rebuilt", "its definition, or what it reads, changed"))
    steps += [
        Step(name, "ends", "not in the file; its topic stays as it is")
        for name, before in status.views.items()
        if name not in defined.nodes and before
    ]
    rows = kept = 0
    built = [step.name for step in steps if step.action.startswith("is")]
    if built:
        views = {name: defined.nodes[name] for name in defined.needed(built)}
        build = Engine(views, defined.input_identities, packs, 0)
        if status.manifest:
            engine.load(packs.json(Ref(*status.manifest)))
        reused = build.take_over(engine)
        kept = len(build.kept)
        if not reused or build.reads_inputs(reused):
            rows = sum(sum(log.ends(one.topic)) for one in pipeline.inputs.values())
    seconds = rows / status.rate if status.rate else 0.0
    return Plan(pipeline.name, tuple(steps), rows, seconds, kept)
