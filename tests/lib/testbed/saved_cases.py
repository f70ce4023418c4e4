"""Runs that are saved once and loaded by many tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from testbed.launcher import RankFailure, RankLauncher
from testbed.rank import RankContext
from testbed.values import Case, Saved


@dataclass(frozen=True, slots=True)
class SavedCases:
    """Saves each case when it is first asked for."""

    launcher: RankLauncher
    directory: Path
    reports: dict[Case, list[Saved] | RankFailure]

    def find(self, case: Case) -> tuple[Path, list[Saved]]:
        """Return where a case is saved, and what each rank reported.

        Raises:
            RankFailure: The save failed; every test that needs it fails with the same reason.
        """
        root = self.directory / str(case)
        if case not in self.reports:
            root.mkdir()
            self.reports[case] = self._save(case, root)
        report = self.reports[case]
        if isinstance(report, RankFailure):
            raise report
        return root, report

    def _save(self, case: Case, root: Path) -> list[Saved] | RankFailure:
        try:
            return self.launcher.run(save_case, case, root, ranks=case.mesh.ranks)
        except RankFailure as failure:
            return failure


def save_case(context: RankContext, case: Case, root: Path) -> Saved:
    """Train and save a case; runs in a rank."""
    from testbed.checkpoints import save_formats  # noqa: PLC0415  the launching process must not import torch

    return save_formats(context, case, root)
