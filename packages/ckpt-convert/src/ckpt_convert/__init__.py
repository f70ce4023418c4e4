"""Convert distributed PyTorch checkpoints between layouts."""

from importlib.metadata import version

__version__ = version("ckpt-convert")
