"""PEFT adapters: what `adapter_config.json` says, and reading `adapter_model.safetensors`.

Source: peft/config.py and peft/utils/save_and_load.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt_core.checkpoint_files import read_whole
from ckpt_core.errors import CheckpointNotFoundError, CorruptCheckpointError, Problem
from ckpt_core.layout import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CheckpointLayout
from ckpt_core.safetensors_reader import SafetensorsReader
from ckpt_core.strict_json import parse_strict_json


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The part of an adapter's configuration that says what it is."""

    peft_type: str
    """Such as `LORA`."""
    r: int | None
    """Rank; None for types that have none."""
    lora_alpha: float | None
    target_modules: tuple[str, ...] | str | None
    """Names, or one regular expression (or `all-linear`); None if chosen by architecture."""
    base_model_name_or_path: str | None


def read_adapter_config(directory: Path) -> AdapterConfig:
    """Read the `adapter_config.json` in `directory`.

    Raises:
        CheckpointNotFoundError: There is none.
        CorruptCheckpointError: It is no JSON object, or a field has the wrong type.
    """
    path = directory / ADAPTER_CONFIG
    return _ConfigParser(path, _load_config(path)).parse()


class AdapterReader(SafetensorsReader):
    """A `CheckpointReader` for an adapter directory."""

    layout = CheckpointLayout.ADAPTER

    def check(self) -> list[Problem]:
        """Check the weights and the configuration beside them."""
        problems = super().check()
        try:
            read_adapter_config(self.path)
        except CheckpointNotFoundError:
            problems.append(Problem("missing_file", ADAPTER_CONFIG, "no loader can use the adapter without it"))
        except CorruptCheckpointError as err:
            problems.append(Problem("bad_header", ADAPTER_CONFIG, str(err)))
        return problems

    def _read_weight_map(self) -> None:
        return None

    def _list_files(self) -> list[str]:
        return [ADAPTER_WEIGHTS]


def _load_config(path: Path) -> Mapping[str, object]:
    try:
        content = parse_strict_json(read_whole(path).decode())
    except ValueError as err:
        raise CorruptCheckpointError(f"{path}: expected JSON, found: {err}") from err
    if not isinstance(content, dict):
        raise CorruptCheckpointError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


class _ConfigParser:
    def __init__(self, path: Path, content: Mapping[str, object]) -> None:
        self.path = path
        self.content = content

    def parse(self) -> AdapterConfig:
        peft_type = self._text("peft_type")
        if peft_type is None:
            raise self._fault("peft_type", "a name such as LORA")
        return AdapterConfig(
            peft_type, self._rank(), self._alpha(), self._targets(), self._text("base_model_name_or_path")
        )

    def _fault(self, field: str, expected: str) -> CorruptCheckpointError:
        found = type(self.content.get(field)).__name__
        return CorruptCheckpointError(f"{self.path}: expected {field} to be {expected}, found {found}")

    def _text(self, field: str) -> str | None:
        value = self.content.get(field)
        if value is None or isinstance(value, str):
            return value
        raise self._fault(field, "text")

    def _rank(self) -> int | None:
        value = self.content.get("r")
        if value is None or (type(value) is int and value > 0):
            return value
        raise self._fault("r", "a positive number")

    def _alpha(self) -> float | None:
        value = self.content.get("lora_alpha")
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            return value
        raise self._fault("lora_alpha", "a number")

    def _targets(self) -> tuple[str, ...] | str | None:
        value = self.content.get("target_modules")
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            return tuple(value)
        raise self._fault("target_modules", "a list of names or a pattern")
