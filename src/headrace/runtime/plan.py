"""What running a project would do: to its views, and to the targets that follow them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from headrace import errors
from headrace.pipelines.files import load_pipeline
from headrace.pipelines.views.plan import Plan, planned
from headrace.runtime.project import FollowerOf, Project

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog


@dataclass(frozen=True)
class KeptStep:
    """What happens to what one follower keeps."""

    name: str
    action: str
    """"goes on", "is loaded", "is loaded anew" or "ends"."""
    why: str


@dataclass
class FilePlan:
    """What happens to one pipeline file."""

    file: str
    plan: Plan | None = None
    kept: list[KeptStep] = field(default_factory=list)
    error: errors.HeadraceError | None = None

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        found: dict[str, Any] = {"file": self.file, "followers": [asdict(one) for one in self.kept]}
        if self.plan is not None:
            found |= self.plan.to_json()
        return found | ({"error": self.error.to_json()} if self.error else {})


def project_plan(project: Project, log: EmbeddedLog) -> list[FilePlan]:
    """Read all files, and compare them with what the last run left; nothing is changed."""
    before = project.followers()
    found: list[FilePlan] = []
    now: dict[str, FollowerOf] = {}
    for file in project.pipelines:
        one = FilePlan(str(file.relative_to(project.folder)))
        found.append(one)
        try:
            pipeline = load_pipeline(str(file))
            specs = {kept.follower: FollowerOf.of(kept) for kept in pipeline.kept.values()}
            now |= specs
            if pipeline.views:
                one.plan = planned(pipeline, log)
            rebuilt = (
                [s.name for s in one.plan.views if s.action == "is rebuilt"] if one.plan else []
            )
            one.kept = [kept_step(spec, before.get(name), rebuilt) for name, spec in specs.items()]
        except errors.HeadraceError as error:
            one.error = error
    if found and not any(one.error for one in found):
        gone = [name for name in before if name not in now]
        found[-1].kept += [
            KeptStep(name, "ends", "not in the files; its target stays as it is") for name in gone
        ]
    return found


def kept_step(now: FollowerOf, before: FollowerOf | None, rebuilt: list[str]) -> KeptStep:
    """What a follower does about a change of the file."""
    if before is None:
        return KeptStep(now.name, "is loaded", "new: all rows are copied, then it is shown")
    if before.target != now.target:
        return KeptStep(now.name, "is loaded", "its target is another; the old one stays as it is")
    if before.topics != now.topics:
        tables = sorted({*before.topics.items()} ^ {*now.topics.items()})
        names = ", ".join(dict.fromkeys(table for table, _ in tables))
        return KeptStep(now.name, "is loaded anew", f"other tables are kept: {names}")
    mine = [name for name in rebuilt if f"{now.pipeline}.{name}" in now.views]
    if mine:
        why = f"{', '.join(mine)} stays as it is until it is rebuilt; then what differs is applied"
        return KeptStep(now.name, "goes on", why)
    return KeptStep(now.name, "goes on", "unchanged")
