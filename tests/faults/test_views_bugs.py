"""Every seeded bug of views is caught: the tests of views would notice.

Can catch: a hunter that has become blind or takes a crash for a catch, and a bug whose place in the
code has gone. Cannot catch: bugs of a kind that nobody has thought of. The bugs that need Spark are
in tests/pipelines.
"""

from __future__ import annotations

import pytest

from headrace.pipelines.views import engine as engines
from headrace.testing.seeded import Bug, mutant
from headrace.testing.views_bugs import BUGS, HUNTERS, catch

PLAIN = [bug for bug in BUGS if "zones" not in bug.where]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("bug", PLAIN, ids=lambda bug: bug.name.replace(" ", "_"))
def test_caught(bug: Bug) -> None:
    found = catch(bug)
    assert found.caught_by, f"{bug.name}: {found.tries} tries, and nobody noticed"


@pytest.mark.parametrize("where", ["plain", "crash", "race"])
def test_a_crash_catches_nothing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    title, _, look = HUNTERS[where]
    monkeypatch.setitem(HUNTERS, where, (title, 2, look))
    broken = (engines.Engine, "manifest", "{**self.kept, **batch.kept}", "{}['x']")
    found = catch(mutant("it does not even run", where, (broken,)))
    assert not found.caught_by
    assert found.says.startswith("crash: ")


def test_there_are_enough_of_them() -> None:
    assert len({bug.name for bug in BUGS}) >= 25
