"""Recognise, read, save and load distributed PyTorch checkpoints."""

from importlib.metadata import version

__version__ = version("ckpt-core")
