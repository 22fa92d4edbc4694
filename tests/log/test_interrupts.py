"""^C in the midst of a call: the exception comes, and nobody else is kept from appending.

Caught: a lock that a living process keeps because an interrupt came between taking it and the place
where it is given back. Not caught: an interrupt in the midst of giving it back, a few instructions.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import headrace as hr
from headrace.log.embedded.log import EmbeddedLog
from headrace.log.embedded.system import OsSystem
from tests.log.kit import checked, values

GIVING_BACK = ("release", "signal", "forewarn")
FILES = ("journal.py", "locks.py", "log.py")
CALLS: dict[str, Callable[[EmbeddedLog], object]] = {
    "append": lambda log: log.append("t", [{"a": 1}], expect={"c": 1}),
    "mark": lambda log: log.tick(),
    "counter": lambda log: log.counter("c"),
}


def interrupted(call: Callable[[], object], at: int) -> bool:
    """Make the call, with an interrupt at its `at`-th line of the log's code; False if it ended."""
    left = at

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(FILES):
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and "release" not in line and frame.f_code.co_name not in GIVING_BACK:
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_anywhere_keeps_nobody_from_appending(tmp_path: Path, name: str) -> None:
    appended = 0
    for at in range(1, 1000):
        folder = tmp_path / str(at)
        settings: dict[str, Any] = {"lock_timeout_seconds": 0.5, "background": False}
        with hr.connect(folder, **settings) as log, hr.connect(folder, **settings) as other:
            log.create_topic("t", "a bigint")
            log.append("t", [{"a": 0}], expect={"c": 0})
            came = interrupted(lambda log=log: CALLS[name](log), at)  # type: ignore[misc]
            other.append("t", [{"a": 2}])
            log.append("t", [{"a": 3}])
            found = values(other.read("t"))
            assert found in ([0, 2, 3], [0, 1, 2, 3])
            assert other.counter("c") == (2 if 1 in found else 1)
        appended += 1 in found
        if not came:
            break
    assert not came
    assert at > 20
    assert appended > 0 or name != "append"
    checked(str(folder))


def test_a_file_whose_closing_was_interrupted_is_not_closed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number may be another file's by then."""
    file, close = OsSystem().create(str(tmp_path / "file"), 0), os.close

    def interrupted_close(fd: int) -> None:
        close(fd)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", interrupted_close)
        with pytest.raises(KeyboardInterrupt):
            file.close()
    with open(tmp_path / "other", "wb") as other:  # gets the number
        file.close()
        other.write(b"x")
