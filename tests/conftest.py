from __future__ import annotations

import signal

from hypothesis import settings

# A deadline per example measures how busy the machine is.
settings.register_profile("default", deadline=None)
settings.load_profile("default")

# A shell that starts the tests in the background has them, and all that they start, ignore an interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
