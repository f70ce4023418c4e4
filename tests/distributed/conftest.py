from __future__ import annotations

import pytest
from testbed.launcher import RankLauncher
from testbed.saved_cases import SavedCases


@pytest.fixture(scope="session")
def launcher() -> RankLauncher:
    """Gloo ranks on request, forked from a server that starts once for the session."""
    launcher = RankLauncher()
    launcher.ensure_server()
    return launcher


@pytest.fixture(scope="session")
def saved_cases(launcher: RankLauncher, tmp_path_factory: pytest.TempPathFactory) -> SavedCases:
    """Runs that are saved once for all tests that load them."""
    return SavedCases(launcher, tmp_path_factory.mktemp("saved"), {})
