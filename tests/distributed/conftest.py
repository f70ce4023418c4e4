from __future__ import annotations

import pytest
from testbed.launcher import RankLauncher


@pytest.fixture(scope="session")
def launcher() -> RankLauncher:
    """Gloo ranks on request, forked from a server that starts once for the session."""
    launcher = RankLauncher()
    launcher.ensure_server()
    return launcher
