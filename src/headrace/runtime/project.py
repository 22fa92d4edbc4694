"""A project: a folder with `headrace.toml`, which names what shall run. Standard library only.

    log = "data"                                  # the folder of the log
    pipelines = ["pipeline.py"]                   # one pipeline each

    [capture.shop]
    dsn = "postgresql://reader@localhost/shop"    # the password: PGPASSWORD or ~/.pgpass
    tables = ["public.*", "!public.tmp_*"]

    [page]
    port = 8321                                   # 0: a free one; false: no page

    [spark]
    memory = "2g"

Paths are relative to the file. The environment goes before it: `HEADRACE_LOG`, `HEADRACE_PORT`,
`HEADRACE_CAPTURE_SHOP_DSN`. What is not known is refused, with the nearest name.

**Followers** are not named here: a pipeline file says what is kept (`keep`), and reading it needs
Spark. So whoever has read the files notes the followers in `run/followers.json`, where others find
them without Spark; the supervisor starts those of the last time at once, and corrects itself when
the files have been read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import BadPipeline, BadProject, NoProject, nearest

if TYPE_CHECKING:
    from headrace.interfaces import Kept

FILE = "headrace.toml"
PORT = 8321
CAPTURE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,39}")


@dataclass(frozen=True)
class CaptureOf:
    """A database to take the changes of."""

    name: str
    dsn: str
    tables: tuple[str, ...]
    numeric_as_text: bool = False


@dataclass(frozen=True)
class FollowerOf:
    """What a pipeline keeps in one target."""

    name: str
    """`PIPELINE/KEPT`."""
    pipeline: str
    kept: str
    topics: dict[str, str]
    """Table of the target -> topic of the log."""
    views: tuple[str, ...]
    """Those of the topics that are views of the pipeline."""
    target: dict[str, Any]
    """The descriptor: `{"type": "module:Class", "fields": {...}}`."""

    @classmethod
    def of(cls, kept: Kept) -> FollowerOf:
        """From what a pipeline file says; the descriptor is a dataclass of plain values."""
        target: Any = kept.target
        kind = type(target)
        here = kind.__module__.startswith("headrace_pipeline_") or "<locals>" in kind.__qualname__
        try:
            fields = {one.name: getattr(target, one.name) for one in dataclasses.fields(target)}
            json.dumps(fields)
        except TypeError:
            here = True
        if here:
            raise BadPipeline(
                f"the target of '{kept.name}' cannot be made again in another process",
                place=f"pipeline '{kept.pipeline}'",
                why="a follower runs in a process of its own, which does not read pipeline files",
                fix=f"make {kind.__name__} a dataclass of plain values, in a module of its own",
            )
        described = {"type": f"{kind.__module__}:{kind.__qualname__}", "fields": fields}
        views = tuple(sorted(kept.views))
        return cls(kept.follower, kept.pipeline, kept.name, dict(kept.topics), views, described)

    def to_kept(self) -> Kept:
        """The inverse."""
        from headrace.interfaces import Kept

        module, _, name = self.target["type"].partition(":")
        descriptor = getattr(importlib.import_module(module), name)(**self.target["fields"])
        return Kept(self.pipeline, self.kept, self.topics, frozenset(self.views), descriptor)


@dataclass(frozen=True)
class Project:
    """What `headrace.toml` says."""

    folder: Path
    name: str
    log: Path
    captures: tuple[CaptureOf, ...]
    pipelines: tuple[Path, ...]
    port: int | None
    """None: no page; 0: a free one."""
    spark_memory: str = "2g"
    spark_quick: bool = False
    """Starts with half the work, and is slower later: for tests and small projects."""

    @property
    def run_folder(self) -> Path:
        """What belongs to the running project, and to nobody else."""
        return self.folder / "run"

    @property
    def parts_file(self) -> Path:
        """How the parts are, written by the supervisor."""
        return self.run_folder / "parts.json"

    @property
    def socket(self) -> Path:
        """Where the supervisor listens."""
        return self.run_folder / "control.sock"

    @property
    def logs(self) -> Path:
        """What the parts say."""
        return self.run_folder / "logs"

    def followers(self) -> dict[str, FollowerOf]:
        """The followers that the pipeline files asked for when they were read last."""
        try:
            data = json.loads((self.run_folder / "followers.json").read_text())
        except (FileNotFoundError, ValueError):
            return {}
        made = [FollowerOf(**one | {"views": tuple(one["views"])}) for one in data]
        return {one.name: one for one in made}

    def note_followers(self, followers: Iterable[FollowerOf]) -> None:
        """Let others know the followers."""
        text = json.dumps([dataclasses.asdict(one) for one in followers], indent=1)
        write_whole(self.run_folder / "followers.json", text)


def digest(path: Path) -> str:
    """What a file says, in a few letters; nothing if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def write_whole(path: Path, text: str) -> None:
    """Replace a file: a reader sees the old one or the new one. Only its owner reads it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    os.replace(beside, path)


# --- reading the file -----------------------------------------------------------------------------


def find_project(folder: str | os.PathLike[str] = ".") -> Project:
    """Read the project of a folder."""
    root = Path(folder).absolute()
    file = root / FILE
    try:
        data = tomllib.loads(file.read_text("utf-8-sig"))
    except (FileNotFoundError, NotADirectoryError):
        raise NoProject(f"there is no {FILE} in {folder}", place=str(root)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadProject(f"{FILE} cannot be read: {error}", place=str(file)) from None
    return _checked(root, data, os.environ)


def _checked(root: Path, data: Mapping[str, Any], environment: Mapping[str, str]) -> Project:
    place = str(root / FILE)
    known: dict[str, type] = {"name": str, "log": str, "pipelines": list}
    known |= {"capture": dict, "page": dict, "spark": dict}
    _known(data, known, place)
    page = data.get("page", {})
    _known(page, {"port": int}, f"{place} [page]")
    spark = data.get("spark", {})
    _known(spark, {"memory": str, "quick": bool}, f"{place} [spark]")
    memory = spark.get("memory", "2g")
    if not re.fullmatch(r"[1-9]\d*[kmgKMG]", memory):
        raise BadProject(f"{memory!r} cannot be a size of memory", place=place, fix='e.g. "2g"')
    captures = tuple(
        _capture(name, of, f"{place} [capture.{name}]", environment)
        for name, of in data.get("capture", {}).items()
    )
    pipelines = data.get("pipelines", [])
    if not all(isinstance(one, str) for one in pipelines):
        raise BadProject("pipelines is not a list of file names", place=place)
    missing = [one for one in pipelines if not (root / one).is_file()]
    if missing:
        raise BadProject(f"there is no file {missing[0]}", place=place, fix="correct pipelines")
    return Project(
        root,
        data.get("name", root.name),
        root / (environment.get("HEADRACE_LOG") or data.get("log", "data")),
        captures,
        tuple(root / one for one in pipelines),
        _port(page.get("port", PORT), environment.get("HEADRACE_PORT"), place),
        memory,
        spark.get("quick", False),
    )


def _capture(name: str, of: Any, place: str, environment: Mapping[str, str]) -> CaptureOf:
    if not CAPTURE_NAME.fullmatch(name) or not isinstance(of, dict):
        raise BadProject(f"'{name}' cannot be a capture", place=place, fix="e.g. [capture.shop]")
    _known(of, {"dsn": str, "tables": list, "numeric_as_text": bool}, place)
    variable = f"HEADRACE_CAPTURE_{name.upper().replace('-', '_')}_DSN"
    dsn = environment.get(variable, of.get("dsn"))
    if not dsn:
        fix = f"dsn = 'postgresql://user@host/database', or the variable {variable}"
        raise BadProject(f"capture '{name}' has no address", place=place, fix=fix)
    tables = of.get("tables", ["public.*"])
    if not tables or not all(isinstance(one, str) for one in tables):
        raise BadProject("tables is not a list of patterns", place=place, fix='tables = ["a.*"]')
    return CaptureOf(name, dsn, tuple(tables), of.get("numeric_as_text", False))


def _port(said: Any, variable: str | None, place: str) -> int | None:
    if variable is not None:
        said = int(variable) if variable.isdigit() else variable
    if said is False:
        return None
    if isinstance(said, bool) or not isinstance(said, int) or not 0 <= said < 1 << 16:
        fix = "a number below 65536, or false for no page"
        raise BadProject(f"{said!r} cannot be a port", place=place, fix=fix)
    return said


def _known(data: Mapping[str, Any], known: Mapping[str, type], place: str) -> None:
    for name, value in data.items():
        if name not in known:
            fix = nearest(name, known) or f"it may say {', '.join(known)}"
            raise BadProject(f"'{name}' is not known", place=place, fix=fix)
        if not isinstance(value, known[name]):
            kinds = {str: "text", list: "a list", dict: "a table", int: "a number"}
            what = kinds.get(known[name], "true or false")
            raise BadProject(f"{name} is not {what}", place=place)
