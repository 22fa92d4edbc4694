"""Bugs of the short cut in C, on purpose: see `seeded`.

Each is `shortcut.c` with a text that occurs exactly once replaced by another one, compiled, and
used instead of the right one for as long as it is on. There are none where the short cut or a
compiler is missing.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from headrace.log.embedded import shortcut
from headrace.testing.seeded import Bug, Patch, instead

SOURCE = Path(shortcut.__file__).with_suffix(".c")
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def why_not() -> str:
    """Why there can be no other short cut here; empty: there can."""
    if shortcut.compiled() is None:
        return "the short cut is not compiled"
    return "" if COMPILER and SOURCE.exists() else "no C compiler, or no source"


def in_c(name: str, old: str, new: str, *where: str) -> Bug:
    """The short cut with another text in its source; `where`: as in `hunt`, without `_in_c`."""

    def patches() -> list[Patch]:
        left_out = shortcut.compiled
        return [instead(shortcut, "compiled", lambda: left_out() and _compiled_with(old, new))]

    words = [place.partition(" ") for place in where]
    return Bug(f"in C: {name}", patches, tuple(f"{w}_in_c{space}{how}" for w, space, how in words))


@functools.cache
def _compiled_with(old: str, new: str) -> Any:
    source = SOURCE.read_text(encoding="utf-8")
    if source.count(old) != 1:
        raise AssertionError(f"{SOURCE.name} has {source.count(old)} times: {old}")
    with tempfile.TemporaryDirectory(prefix="headrace-mutant-") as folder:
        mutant, made = f"{folder}/mutant.c", f"{folder}/_shortcut.so"
        Path(mutant).write_text(source.replace(old, new), encoding="utf-8")
        flags = ["-std=c11", "-O1", "-shared", "-fPIC", "-I", sysconfig.get_path("include")]
        subprocess.run([str(COMPILER), *flags, mutant, "-o", made], check=True)
        spec = importlib.util.spec_from_file_location("_shortcut", made)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


_SYNCS = "    *error = sync_file(s, &fit->file);\n"
_WRITES = "    entry->error = write_all(s, &fit->file, entry->iov, count, offset);\n"
_EARLY = """    Tail early = tail;
    early.end = end, early.position = header.position, early.checksum = checksum;
    publish(s, &early);
"""
SHORTCUT_BUGS: list[Bug] = [] if why_not() else [
    in_c("acknowledged without a sync", _SYNCS, "    *error = 0;\n", "plain"),
    in_c(
        "the synced end moves before the sync", _SYNCS,
        f"    store(s, SYNCED, tail.end);\n{_SYNCS}", "chased shown", "two_processes shown",
    ),
    in_c(
        "what came during a sync is taken for synced", "    store(s, SYNCED, tail.end);\n",
        "    store(s, SYNCED, tail_of(s).end);\n", "two_processes shown",
    ),
    in_c(
        "a failed sync is tried again", "    if (*error) {\n        store",
        "    if (*error && sync_file(s, &fit->file)) {\n        store", "sync_fails",
    ),
    in_c(
        "a poisoned log takes entries", "load(s, POISONED) || load(s, DAMAGED) || tail", "tail",
        "sync_fails",
    ),
    in_c(
        "half an entry stays where the disk is full",
        "    if (entry->error) {", "    if (entry->error = 0) {", "disk_full",
    ),
    in_c("published before it is written", _WRITES, _EARLY + _WRITES, "two_processes_killed"),
    in_c(
        "an entry says of itself that it is synced",
        ".synced = load(s, SYNCED),", ".synced = end,", "plain",
    ),
    in_c(
        "the append lock is not taken", "!try_lock(s, lock)",
        "holder == SYNC_HOLDER && !try_lock(s, lock)", "two_processes uncut",
    ),
    in_c("the chain is not moved on", "    tail.checksum = checksum;\n", "", "plain"),
    in_c("offsets are not moved", "    advance(s, fit, entry);\n", "", "plain"),
    in_c("counters are not moved", "    move_counters(s, fit, entry);\n", "", "plain"),
    in_c("conditions are not looked at", "|| decide(s, fit, entry)", "", "plain"),
    in_c(
        "what is written is taken for synced", "found->visible = limit > cursor;",
        "found->visible = true; limit = end;", "chased shown", "two_processes shown",
    ),
    in_c(
        "nobody waits for the sync of what was read early",
        "if (load(s, SYNCED) >= end) {", "if (true) {", "two_processes shown",
    ),
]  # fmt: skip
"""Those that need a crash, or others beside it, to show; `tests/log/test_shortcut.py` has more."""
