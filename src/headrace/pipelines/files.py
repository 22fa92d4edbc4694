"""A pipeline file: plain Python that defines one pipeline."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any

from headrace import errors
from headrace.pipelines.pipeline import Pipeline


def load_pipeline(file: str) -> Pipeline:
    """Import a file and give the pipeline it defines.

    Spark is started first: functions of the user with a type as text need a session when defined.
    What the file has, and the modules beside it that it imports, go to Python workers by value:
    these do not look where it lies.
    """
    from pyspark.cloudpickle import cloudpickle

    from headrace.pipelines.spark import session

    register: Any = cloudpickle.register_pickle_by_value  # without types

    path = Path(file)
    if not path.is_file():
        raise errors.BadPipeline(f"there is no file {file}", place=file, fix="name a Python file")
    try:  # before Spark is started, which takes seconds
        compile(path.read_bytes(), str(path), "exec")
    except (SyntaxError, ValueError) as error:
        raise _raised(error, path.parent) from error
    session()
    name = f"headrace_pipeline_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise errors.BadPipeline(f"{file} is not a Python file", place=file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = path.parent.resolve()
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
    except errors.HeadraceError as error:
        line = _line(error, folder)
        if line.rpartition(":")[0] not in error.place:
            error.place = f"{error.place}, {line}" if error.place else line
        raise
    except (Exception, SystemExit) as error:
        raise _raised(error, folder) from error
    finally:
        sys.path.pop(0)
    for known, one in [*sys.modules.items()]:
        lies = folder.joinpath(*known.split("."))
        at = getattr(one, "__file__", None)
        if one is module or at in (f"{lies}.py", str(lies / "__init__.py")):
            register(one)
    found = {id(one): one for one in vars(module).values() if isinstance(one, Pipeline)}
    if len(found) != 1:
        raise errors.BadPipeline(
            f"{file} defines {len(found)} pipelines",
            place=file,
            why="a file defines one pipeline, at its top level",
            fix="shop = hr.Pipeline('shop')",
        )
    return next(iter(found.values()))


def _raised(error: BaseException, folder: Path) -> errors.BadPipeline:
    """What a file raised, and where in the files of its folder."""
    return errors.BadPipeline(
        f"{type(error).__name__}: {error}",
        place=_line(error, folder),
        why="the file raised it while it was read",
        fix="correct the file",
    )


def _line(error: BaseException, folder: Path) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if Path(one.filename).is_relative_to(folder)] or frames
    return f"{own[-1].filename}:{own[-1].lineno}"
