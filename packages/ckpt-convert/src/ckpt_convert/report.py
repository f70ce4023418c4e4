"""What a conversion did, for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt_core.terminal import format_bytes, join_lines

from ckpt_convert.plan import ConversionPlan


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """The result of a plan that was carried out and published."""

    plan: ConversionPlan
    files: Mapping[str, int]
    """Size in bytes of every file at the target."""
    digests: Mapping[str, str] = field(repr=False)
    """Digest of each tensor by its name in the output; empty if nothing was verified."""
    verified: bool
    """Whether every tensor was read back and compared with the source."""

    def __str__(self) -> str:
        proof = "every tensor read back and equal to the source" if self.verified else "not verified"
        return join_lines(
            [
                f"{self.plan.target}: {self.plan.tensor_count:,} tensors, {format_bytes(self.plan.nbytes)}, {proof}",
                *self.plan.describe_findings(),
            ]
        )

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON values: the plan's, sizes in bytes, digests by FQN."""
        return {
            **self.plan.to_json(),
            "files": dict(self.files),
            "verified": self.verified,
            "digests": dict(self.digests),
        }
