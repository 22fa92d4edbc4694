"""Programs that come from the operating system, not from PyPI: which, what for, how to get them.

The one place that installs any: only as root, only with apt-get, and never a reason to fail. What
is missing is said, with what cannot be tested without it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    """A program of the system that some tests need."""

    name: str
    package: str
    purpose: str
    install: bool = True
    """False: only said. A package that starts a server is for people to install."""
    instead: tuple[str, ...] = ()
    """Others that do as well."""

    def found(self) -> str | None:
        """Where it is, or one that does as well."""
        return next(filter(None, map(shutil.which, (self.name, *self.instead))), None)


CHROMIUM = Program(
    "chromium-headless-shell",
    "chromium-headless-shell",
    "test of the page in a real browser",
    instead=("chromium", "chromium-browser", "google-chrome"),
)
PROGRAMS = (
    Program("strace", "strace", "faults injected into system calls (EIO, ENOSPC)"),
    Program("faketime", "faketime", "processes whose clocks jump (`./run faults chaos`)"),
    CHROMIUM,
    Program("pg_createcluster", "postgresql", "captures of Debian's PostgreSQL", install=False),
)


def provide() -> list[str]:
    """Install what is missing where that is possible; say what could not be had, a line each."""
    absent = [program for program in PROGRAMS if not program.found()]
    packages = [program.package for program in absent if program.install]
    if packages and os.geteuid() == 0 and shutil.which("apt-get"):
        print(f"installing {', '.join(packages)} with apt-get", file=sys.stderr, flush=True)
        if _apt("update"):
            for package in packages:  # one that this system does not have must not stop the others
                _apt("install", "-y", "--no-install-recommends", package)
    return [
        f"{program.name} not found: no {program.purpose}; "
        f"install it with: apt-get install {program.package}"
        for program in PROGRAMS
        if not program.found()
    ]


def _apt(*arguments: str) -> bool:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "-qq", *arguments]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=180, check=False
        )
    except subprocess.TimeoutExpired:
        print("  apt-get gave no answer in 3 minutes", file=sys.stderr)
        return False
    if done.returncode != 0:
        print(f"  {' '.join(command)}: {done.stderr.strip()[-300:]}", file=sys.stderr)
    return done.returncode == 0


if __name__ == "__main__":
    for line in provide():
        print(line, file=sys.stderr)
