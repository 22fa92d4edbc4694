"""Seeded bugs: production code is patched on purpose, for as long as a `with` block lasts.

Production code has no switches for them. They show that a hunter would notice if something were
wrong: `headrace.testing.hunt` has the ways to look for one.

A bug is a few patches. Mostly it is a `mutant`: a function is made again from its source, in which
a text that must occur exactly once is another one; so a bug whose place was rewritten says so
instead of being silently gone.
"""

from __future__ import annotations
import __future__

import contextlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

Patch = contextlib.AbstractContextManager[Any]
Change = tuple[Any, str, str, str]
"""Module or class, function, a text in it, and what to put there."""


@dataclass(frozen=True, slots=True)
class Bug:
    """A bug that can be switched on."""

    name: str
    """What is wrong, in a few words."""
    patches: Callable[[], list[Patch]]
    where: tuple[str, ...]
    """The hunters that should find it, the likeliest first."""

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Have it for a while."""
        with contextlib.ExitStack() as stack:
            for patch in self.patches():
                stack.enter_context(patch)
            yield


Patches = Callable[[], list[Patch]]


def seeding(bugs: list[Bug]) -> Callable[..., Callable[[Patches], None]]:
    """A decorator for functions that give the patches of a bug: `@bug(name, *where)`."""

    def bug(name: str, *where: str) -> Callable[[Patches], None]:
        return lambda patches: bugs.append(Bug(name, patches, where))

    return bug


def instead(owner: Any, name: str, new: Any) -> Patch:
    """Another attribute for a while."""
    return mock.patch.object(owner, name, new)


def nothing(*_: Any) -> None:
    """Do nothing."""


def mutant(
    name: str,
    where: str,
    changes: tuple[Change, ...],
    beside: Callable[[Any, Any], list[Patch]] = lambda _original, _made: [],
) -> Bug:
    """A bug in lines of functions; `beside` patches whatever else refers to such a function."""
    functions = list(dict.fromkeys((owner, function) for owner, function, _, _ in changes))
    for function in functions:
        _source(*function)  # as it is now, whoever edits the file meanwhile

    def patches() -> list[Patch]:
        found: list[Patch] = []
        for owner, function in functions:
            texts = [change[2:] for change in changes if change[:2] == (owner, function)]
            original = inspect.unwrap(getattr(owner, function))
            made = _mutated(owner, function, texts)
            found += [instead(owner, function, made), *beside(original, made)]
        return found

    return Bug(name, patches, (where,))


def _mutated(owner: Any, function: str, texts: list[tuple[str, str]]) -> Any:
    source = _source(owner, function)
    for old, new in texts:
        if source.count(old) != 1:
            raise AssertionError(f"{function} has {source.count(old)} times: {old}")
        source = source.replace(old, new)
    source = source.replace("super()", f"super({getattr(owner, '__name__', '')}, self)")
    module = sys.modules[inspect.unwrap(getattr(owner, function)).__module__]
    code = compile(source, "<bug>", "exec", flags=__future__.annotations.compiler_flag)
    made: dict[str, Any] = {}
    exec(code, module.__dict__, made)  # our own source, changed on purpose
    return made[function]


@cache
def _source(owner: Any, function: str) -> str:
    return textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(owner, function))))
