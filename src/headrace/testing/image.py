"""A small disk in a file: a loop-mounted ext4 image, where root allows it.

Its copy is what a disk would hold had the power failed at that instant, and it can be filled.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path


def run(*command: str) -> None:
    """Run a program of the system; what it wrote to stderr is in the error."""
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def mounted(image: Path, point: Path) -> Iterator[Path]:
    """Mount an image for a while; nothing in it may be open when that ends."""
    point.mkdir(exist_ok=True)
    run("mount", "-o", "loop", str(image), str(point))
    try:
        yield point
    finally:
        gc.collect()
        run("umount", str(point))


@contextlib.contextmanager
def in_memory(point: Path, megabytes: int) -> Iterator[Path]:
    """A disk in memory for a while: it can be filled, and a sync of it costs nothing."""
    point.mkdir(exist_ok=True)
    run("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "chaos", str(point))
    try:
        yield point
    finally:
        gc.collect()
        run("umount", str(point))


def make_image(path: Path, megabytes: int = 64) -> Path:
    """Make an empty file system in a file."""
    with path.open("wb") as file:
        file.truncate(megabytes << 20)
    run(_mkfs() or "mkfs.ext4", "-q", "-F", str(path))
    return path


def _mkfs() -> str | None:
    return shutil.which("mkfs.ext4", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


@functools.cache
def why_not() -> str:
    """Why images cannot be mounted here; empty if they can."""
    if os.geteuid() != 0:
        return "mounting an image needs root"
    if _mkfs() is None:
        return "mkfs.ext4 is not installed"
    with tempfile.TemporaryDirectory() as folder:
        try:
            with mounted(make_image(Path(folder, "disk.img")), Path(folder, "disk")):
                return ""
        except subprocess.CalledProcessError as error:
            return f"loop-mounted images do not work here: {error.stderr}"
