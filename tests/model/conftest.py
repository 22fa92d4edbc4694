"""Settings of hypothesis for the tests of the model."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("model", deadline=None)  # machines are noisy
settings.load_profile("model")
