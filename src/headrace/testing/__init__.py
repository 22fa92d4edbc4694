"""The shipped test kit: `history` and `same` for pipelines, conformance suites, oracles, faults.

after = hr.testing.history([{"orders": [{"id": 1, "amount": 5}]}]).rows(shop, "revenue")
hr.testing.same(after[-1], [{"revenue": 5}])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.testing.kit import History, history, same

__all__ = ["History", "history", "same"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'headrace.testing' has no attribute '{name}'")
    return getattr(importlib.import_module("headrace.testing.kit"), name)
