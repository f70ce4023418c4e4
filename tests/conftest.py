from __future__ import annotations

from hypothesis import settings

# A deadline per example measures how busy the machine is.
settings.register_profile("default", deadline=None)
settings.load_profile("default")
