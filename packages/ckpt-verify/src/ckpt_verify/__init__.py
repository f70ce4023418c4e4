"""Prove that checkpoints of any layout hold the same tensors, bit for bit.

`compare_checkpoints` compares two of them and returns a `Comparison`.
"""

from importlib.metadata import version

from ckpt_verify.compare import compare_checkpoints
from ckpt_verify.comparison import ComparedSide, Comparison, TiedPair, ValueProblem

__all__ = ["ComparedSide", "Comparison", "TiedPair", "ValueProblem", "compare_checkpoints"]

__version__ = version("ckpt-verify")
