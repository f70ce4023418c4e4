"""Prove that checkpoints of any layout hold the same tensors, bit for bit."""

from importlib.metadata import version

__version__ = version("ckpt-verify")
