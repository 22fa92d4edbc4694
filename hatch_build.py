"""Compiles the short cut of an append, `shortcut.c`, beside its source, where that can be done.

Hatchling does it for wheels and editable installs; by hand: `./run python hatch_build.py`. Without
it the package is pure Python, and slower, and nothing else (decision 0023): so nothing in here may
make an installation fail, and what is in the way is said in one line.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

FOLDER = Path("src", "headrace", "log", "embedded")
MADE = "_shortcut.abi3.so"
FLAGS = ["-std=c11", "-O2", "-g0", "-Wall", "-Wextra", "-shared", "-fPIC", "-fvisibility=hidden"]
LOAD = "import sys; sys.path.insert(0, sys.argv[1]); import _shortcut"


class ShortCutHook(BuildHookInterface[BuilderConfig]):
    """What hatchling calls before it makes a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and make it a wheel of this platform for every Python from 3.11 on."""
        reason = compiled(Path(self.root))
        if reason:
            self.app.display_warning(f"headrace without its short cut in C: {reason}")
            return
        # Not manylinux: what was made here needs the C library of this machine.
        platform = next(tag for tag in platform_tags() if tag.startswith("linux"))
        build_data.update(pure_python=False, tag=f"cp311-abi3-{platform}")
        build_data["artifacts"].append(f"{FOLDER}/{MADE}")  # though git ignores it


def compiled(root: Path) -> str | None:
    """Compile; give why that could not be. Then no older file stays: it may not fit the rest."""
    folder = root / FOLDER
    try:
        # Beside its place, and renamed: processes that have mapped the old file keep it.
        with tempfile.TemporaryDirectory(prefix="_shortcut.", dir=folder) as beside:
            reason = obstacle() or _compile(folder, Path(beside))
            if reason is None:
                Path(beside, MADE).replace(folder / MADE)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    if reason:
        with contextlib.suppress(OSError):
            (folder / MADE).unlink(missing_ok=True)
    return reason


def obstacle() -> str | None:
    """Why it cannot be compiled here, in the order of what could be helped least."""
    if sys.platform != "linux":
        return "it is for Linux only"
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "it is for CPython with its global lock only"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "this Python came without Python.h (Debian, Ubuntu: apt-get install python3-dev)"
    if not compiler():
        return "no C compiler (Debian, Ubuntu: apt-get install gcc libc6-dev)"
    return None


def compiler() -> list[str]:
    """`$CC`, else the system's, else the one that can be had as a wheel, if it is installed."""
    named = shlex.split(os.environ.get("CC", ""))
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    zig = [sys.executable, "-m", "ziglang", "cc"] if importlib.util.find_spec("ziglang") else []
    return named or ([found] if found else zig)


def _compile(folder: Path, beside: Path) -> str | None:
    made = beside / MADE
    environment = os.environ | {"LC_ALL": "C"}
    environment |= {f"ZIG_{which}_CACHE_DIR": str(beside) for which in ("LOCAL", "GLOBAL")}
    command = [*compiler(), *FLAGS, "-I", sysconfig.get_path("include"), "shortcut.c"]
    command += ["-o", str(made)]
    loads = [sys.executable, "-I", "-c", LOAD, str(beside)]  # $CC may compile for another machine
    for step in (command, loads):
        done = subprocess.run(
            step, cwd=folder, env=environment,
            capture_output=True, text=True, errors="replace", timeout=300, check=False,
        )  # fmt: skip
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if "rror" in line]
            return (said or [f"{step[0]} failed with {done.returncode}"])[0]
    return None


if __name__ == "__main__":
    sys.exit(compiled(Path(__file__).resolve().parent))
