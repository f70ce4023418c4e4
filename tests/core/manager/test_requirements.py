"""What the manager promises beyond the interface, numbered, on one real rank.

 1  private names of nemo_automodel are never relied on blindly
 2  arguments that a release lacks are not passed to it
 3  updates are normalized as the constructor does; unknown or impossible ones are refused
 4  no CUDA is needed; the default cache is the hub's
 5  a base model fills the model, or the load fails
 6  nothing of one save decides how the next one is written
 7  what a directory holds is told by its content, and two answers are refused
 8  a load is checked completely before a parameter changes
 9  a save leaves no stale files
10  formats can alternate in one process
11  every failure is an Exception, with its cause
12  an asynchronous save without an accelerator is refused before anything is made
13  paths of any spelling mean the same in save and load
14  the tokenizer is written once; keys are enforced
15  the supported releases are declared

Where a promise is about several ranks, its test of that name is in tests/distributed.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import pickle
import re
import shutil
from collections.abc import Callable
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_core import automodel_compat as compat
from ckpt_core.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    KeyMismatchError,
    LayoutError,
    LoadError,
    SaveError,
    TargetError,
    UnsafePickleError,
)
from ckpt_core.manager import AutomodelCheckpointManager
from ckpt_core.stored_objects import restrict_unpickling
from nemo_automodel.components._peft.lora import PeftConfig, apply_lora_to_linear_modules
from nemo_automodel.components.checkpoint.checkpointing import Checkpointer, CheckpointingConfig
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

pytestmark = pytest.mark.compat

FORMATS = ["torch_save", "safetensors"]


class Odd(nn.Module):
    """Uneven, 0-dim, integer and transient tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(7, 5)
        self.deep = nn.Linear(5, 3, bias=False)
        self.scale = nn.Parameter(torch.rand(()))
        self.register_buffer("count", torch.randint(1, 1000, ()))
        self.register_buffer("transient", torch.rand(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.deep(self.wide(x)) * self.scale
        return result


class Trained:
    """A model with an optimizer and a scheduler that have stepped."""

    def __init__(self, seed: int, build: Callable[[], nn.Module] = Odd, steps: int = 2) -> None:
        torch.manual_seed(seed)
        self.model = build()
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2)
        for _ in range(steps):
            self.step()

    def step(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.linspace(-1, 1, 14).reshape(2, 7)).square().mean()
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.detach()

    def state(self) -> dict[str, Any]:
        state = {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}
        return copy.deepcopy(state | {"sched": self.scheduler.state_dict()})


def _lora() -> nn.Module:
    model = Odd()
    apply_lora_to_linear_modules(model, PEFT)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.uniform_(parameter)
    return model


PEFT = PeftConfig(target_modules=["*wide"], dim=2, alpha=4, use_triton=False)


def _assert_same(found: object, expected: object) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.fixture
def manager(mesh: DeviceMesh) -> AutomodelCheckpointManager:
    manager = AutomodelCheckpointManager(mesh, mesh)
    manager.init_checkpointer()
    return manager


def _save(manager: AutomodelCheckpointManager, trained: Trained, root: Path, **config: object) -> None:
    manager.save_checkpoint(
        trained.model,
        str(root / "weights"),
        trained.optimizer,
        str(root / "optimizer"),
        trained.scheduler,
        checkpointing_cfg=config,
    )


def _load(manager: AutomodelCheckpointManager, trained: Trained, root: Path) -> None:
    manager.load_checkpoint(
        trained.model, str(root / "weights"), trained.optimizer, str(root / "optimizer"), trained.scheduler
    )


@pytest.mark.parametrize("is_peft", [False, True])
@pytest.mark.parametrize("save_format", FORMATS)
def test_requirement_01_addons_are_those_of_a_new_checkpointer(
    mesh: DeviceMesh, save_format: str, is_peft: bool
) -> None:
    manager = AutomodelCheckpointManager(mesh, mesh)
    manager.init_checkpointer({"model_save_format": "safetensors" if save_format == "torch_save" else "torch_save"})
    manager.update_checkpointer_config({"model_save_format": save_format, "is_peft": is_peft})
    config = CheckpointingConfig(model_save_format="safetensors", save_consolidated=False, is_peft=is_peft)
    config.model_save_format = manager.checkpointer.config.model_save_format
    fresh = Checkpointer(config, dp_rank=0, tp_rank=0, pp_rank=0)
    assert [type(a) for a in manager.checkpointer._addons] == [type(a) for a in fresh._addons]


def test_requirement_02_arguments_that_a_function_lacks_are_left_out() -> None:
    def old(a: int, b: int = 0) -> tuple[int, int]:
        return a, b

    def new(a: int, **rest: int) -> tuple[int, dict[str, int]]:
        return a, rest

    assert compat.call_supported(old, 1, b=2, c=3) == (1, 2)
    assert compat.call_supported(new, 1, b=2, c=3) == (1, {"b": 2, "c": 3})


@pytest.mark.parametrize("value", [True, "true", "every", "TRUE"])
def test_requirement_03_consolidation_is_normalized_and_happens(
    manager: AutomodelCheckpointManager, tmp_path: Path, value: object
) -> None:
    trained = Trained(1)
    _save(manager, trained, tmp_path, model_save_format="safetensors", save_consolidated=value)
    consolidated = load_file(tmp_path / "weights/model/consolidated/model-00001-of-00001.safetensors")
    _assert_same(consolidated, dict(trained.model.state_dict()))


@pytest.mark.parametrize(
    "updates",
    [
        {"no_such_option": 1},
        {"model_save_format": None},
        {"model_save_format": "FOO"},
        {"save_consolidated": "sometimes"},
        {"save_consolidated": None},
    ],
)
def test_requirement_03_impossible_updates_are_refused_and_set_nothing(
    manager: AutomodelCheckpointManager, mesh: DeviceMesh, updates: dict[str, Any]
) -> None:
    before = copy.copy(manager.checkpointer.config)
    with pytest.raises(ConfigError, match=next(iter(updates))):
        manager.update_checkpointer_config({"is_peft": True} | updates, "/elsewhere")
    assert manager.checkpointer.config == before
    with pytest.raises(ValueError, match=next(iter(updates))):
        AutomodelCheckpointManager(mesh, mesh).init_checkpointer(updates)


def _tiny_llama(*, tied: bool = False, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        architectures=["LlamaForCausalLM"],
    )
    return LlamaForCausalLM(config)


def _cache(root: Path, model: LlamaForCausalLM) -> str:
    """Lay out a hub cache that holds `model` as org/tiny."""
    snapshot = root / "models--org--tiny" / "snapshots" / "0123"
    model.save_pretrained(snapshot)
    return str(root)


@pytest.mark.parametrize("name", ["checkpoint_dir", "model_state_dict_keys"])
def test_requirement_03_every_known_field_can_be_given_to_init(mesh: DeviceMesh, name: str) -> None:
    manager = AutomodelCheckpointManager(mesh, mesh)
    manager.init_checkpointer({name: ["a"] if name == "model_state_dict_keys" else "elsewhere"})
    assert getattr(manager.checkpoint_config, name) in (["a"], "elsewhere")


def test_requirement_03_what_the_constructor_refuses_is_our_error(mesh: DeviceMesh) -> None:
    with pytest.raises(ConfigError, match="consolidation_timeout_minutes"):
        AutomodelCheckpointManager(mesh, mesh).init_checkpointer({"consolidation_timeout_minutes": 0})


def test_requirement_04_of_several_snapshots_the_current_one_is_taken(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    cache, old = _cache(tmp_path, _tiny_llama(seed=1)), tmp_path / "models--org--tiny" / "snapshots" / "9999"
    current = _tiny_llama(seed=2)
    current.save_pretrained(old)
    model = _tiny_llama(seed=3)
    with pytest.raises(LayoutError, match=r"2 snapshots.*0123.*9999"):
        manager.load_base_model(model, "org/tiny", hf_cache_dir=cache)
    (tmp_path / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "models--org--tiny" / "refs" / "main").write_text("9999")
    manager.load_base_model(model, "org/tiny", hf_cache_dir=cache)
    _assert_same(model.state_dict(), current.state_dict())


def test_requirement_04_a_base_model_is_found_in_the_hub_cache_without_cuda(
    manager: AutomodelCheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = _tiny_llama(seed=1)
    monkeypatch.setattr(compat, "HF_HUB_CACHE", _cache(tmp_path, base))
    model = _tiny_llama(seed=2)
    manager.load_base_model(model, "org/tiny")
    _assert_same(model.state_dict(), base.state_dict())
    assert next(model.parameters()).device.type == "cpu"


def test_requirement_05_a_model_on_meta_is_filled(manager: AutomodelCheckpointManager, tmp_path: Path) -> None:
    base = _tiny_llama(seed=1)
    base.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = LlamaForCausalLM(base.config)
    manager.load_base_model(model, str(tmp_path))
    _assert_same(model.state_dict(), base.state_dict())
    tokens = torch.arange(8)[None]
    _assert_same(model.eval()(tokens).logits, base.eval()(tokens).logits)


def test_requirement_05_a_base_model_is_loaded_under_an_adapter(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    base = _tiny_llama(seed=1)
    base.save_pretrained(tmp_path)
    model = _tiny_llama(seed=2)
    peft = PeftConfig(target_modules=["*q_proj"], dim=2, alpha=4, use_triton=False)
    apply_lora_to_linear_modules(model, peft)
    manager.load_base_model(model, str(tmp_path), peft_init_method="xavier")
    state = model.state_dict()
    _assert_same({name: state[name] for name in base.state_dict()}, dict(base.state_dict()))
    lora_b = [value for name, value in state.items() if "lora_B" in name]
    assert lora_b
    assert not any(value.any() for value in lora_b)


def test_requirement_05_a_base_model_that_is_not_here_is_named(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match="'org/absent'.*" + re.escape(str(tmp_path))):
        manager.load_base_model(_tiny_llama(), "org/absent", hf_cache_dir=str(tmp_path))


def test_requirement_05_a_base_model_that_lacks_parameters_is_refused(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    _tiny_llama(tied=True, seed=1).save_pretrained(tmp_path)
    model = _tiny_llama(seed=2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyMismatchError, match=r"lm_head\.weight"):
        manager.load_base_model(model, str(tmp_path))
    _assert_same(model.state_dict(), before)


def test_requirement_05_a_head_that_a_tied_model_would_lose_is_refused(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    _tiny_llama(seed=1).save_pretrained(tmp_path)
    with pytest.raises(KeyMismatchError, match=r"lm_head\.weight.*embed_tokens"):
        manager.load_base_model(_tiny_llama(tied=True, seed=2), str(tmp_path))


def test_requirement_06_an_adapter_save_does_not_leak_into_the_next(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    adapter, full = Trained(1, _lora), Trained(2)
    manager.save_checkpoint(
        adapter.model, str(tmp_path / "a"), checkpointing_cfg={}, lora_enabled=True, peft_config=PEFT
    )
    _save(manager, full, tmp_path / "b")
    manager.load_checkpoint(adapter.model, str(tmp_path / "a"))
    _save(manager, full, tmp_path / "c")
    for root in (tmp_path / "b", tmp_path / "c"):
        target = Trained(3)
        _load(manager, target, root)
        _assert_same(target.state(), full.state())


def test_requirement_06_the_format_is_that_of_init_whatever_was_saved_or_loaded_since(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    _save(manager, Trained(1), tmp_path / "a", model_save_format="torch_save")
    _load(manager, Trained(2), tmp_path / "a")
    _save(manager, Trained(1), tmp_path / "b", save_consolidated=True)
    _save(manager, Trained(1), tmp_path / "c")
    assert not list((tmp_path / "c/weights/model").glob("*.distcp"))
    assert not (tmp_path / "c/weights/model/consolidated").exists()
    manager.update_checkpointer_config({"model_save_format": "torch_save"})
    _save(manager, Trained(1), tmp_path / "d")
    assert list((tmp_path / "d/weights/model").glob("*.distcp"))


def test_requirement_06_an_adapter_needs_its_configuration_and_parameters(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="peft_config"):
        manager.save_checkpoint(Trained(1, _lora).model, str(tmp_path / "w"), checkpointing_cfg={"is_peft": True})
    with pytest.raises(ConfigError, match="LoRA parameters"):
        manager.save_checkpoint(Odd(), str(tmp_path / "w"), checkpointing_cfg={}, lora_enabled=True, peft_config=PEFT)
    assert not (tmp_path / "w").exists()


def test_an_adapter_comes_back_and_the_base_stays(manager: AutomodelCheckpointManager, tmp_path: Path) -> None:
    source, target = Trained(1, _lora), Trained(2, _lora)
    base = copy.deepcopy({n: v for n, v in target.model.state_dict().items() if "lora_" not in n})
    manager.save_checkpoint(
        source.model,
        str(tmp_path / "w"),
        source.optimizer,
        str(tmp_path / "o"),
        source.scheduler,
        checkpointing_cfg={},
        lora_enabled=True,
        peft_config=PEFT,
    )
    manager.load_checkpoint(target.model, str(tmp_path / "w"), target.optimizer, str(tmp_path / "o"), target.scheduler)
    found = target.model.state_dict()
    _assert_same({n: v for n, v in found.items() if "lora_" not in n}, base)
    expected = source.model.state_dict()
    assert sum("lora_" in n for n in expected) == 2
    _assert_same({n: v for n, v in found.items() if "lora_" in n}, {n: v for n, v in expected.items() if "lora_" in n})
    _assert_same(target.optimizer.state_dict(), source.optimizer.state_dict())


def test_requirement_07_an_adapter_and_a_full_model_in_one_place_are_refused(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    _save(manager, Trained(1), tmp_path, model_save_format="torch_save")
    target = Trained(2)
    before = target.state()
    save_file({"x": torch.ones(1)}, tmp_path / "weights/model/adapter_model.safetensors")
    with pytest.raises(LayoutError):
        _load(manager, target, tmp_path)
    (tmp_path / "weights/model/adapter_model.safetensors").unlink()
    save_file({"x": torch.ones(1)}, tmp_path / "weights/model/model.safetensors")
    with pytest.raises(LayoutError):
        _load(manager, target, tmp_path)
    _assert_same(target.state(), before)


@pytest.mark.parametrize("save_format", FORMATS)
def test_requirement_07_a_name_with_adapter_in_it_is_only_a_name(
    manager: AutomodelCheckpointManager, tmp_path: Path, save_format: str
) -> None:
    source, target, root = Trained(1), Trained(2), tmp_path / "lora-adapter"
    _save(manager, source, root, model_save_format=save_format)
    (root / "weights/model/adapter_notes.txt").write_text("of a full model")
    _load(manager, target, root)
    _assert_same(target.state(), source.state())


def _drop_file(model: Path) -> None:
    next(p for p in model.iterdir() if p.suffix in {".distcp", ".safetensors"}).unlink()


def _cut_file(model: Path) -> None:
    path = next(p for p in model.iterdir() if p.suffix in {".distcp", ".safetensors"})
    path.write_bytes(path.read_bytes()[:-9])


def _damage_header(model: Path) -> None:
    """Leave every size as it is, and make the description of one tensor unreadable."""
    path = next(p for p in model.iterdir() if p.suffix in {".distcp", ".safetensors"})
    content = bytearray(path.read_bytes())
    start = content.index(b"data.pkl") + 8 if path.suffix == ".distcp" else 8
    content[start : start + 60] = bytes(60)
    path.write_bytes(content)


def _empty_directory(model: Path) -> None:
    shutil.rmtree(model)
    model.mkdir()


@pytest.mark.parametrize("part", ["weights/model", "optimizer/optim"])
@pytest.mark.parametrize("damage", [_drop_file, _cut_file, _damage_header, _empty_directory, shutil.rmtree])
@pytest.mark.parametrize("save_format", FORMATS)
def test_requirement_08_damage_is_found_before_anything_changes(
    manager: AutomodelCheckpointManager, tmp_path: Path, save_format: str, damage: Callable[[Path], None], part: str
) -> None:
    _save(manager, Trained(1), tmp_path, model_save_format=save_format)
    damage(tmp_path / part)
    target = Trained(2)
    before = target.state()
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / part))):
        _load(manager, target, tmp_path)
    _assert_same(target.state(), before)


class _Hostile:
    """Unpickling it makes a file."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.proof,)


def _plant(directory: Path, value: object) -> str:
    """Put a pickle of `value` in the place of an object of a DCP; return its name."""
    metadata = FileSystemReader(directory).read_metadata()
    index = next(
        i for i in metadata.storage_data if isinstance(metadata.state_dict_metadata[i.fqn], BytesStorageMetadata)
    )
    place = metadata.storage_data[index]
    buffer = io.BytesIO()
    torch.save(value, buffer)
    path = directory / place.relative_path
    end = path.stat().st_size
    path.write_bytes(path.read_bytes() + buffer.getvalue())
    metadata.storage_data[index] = dataclasses.replace(place, offset=end, length=len(buffer.getvalue()))
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    (directory / "ckpt_record.json").unlink()
    return str(index.fqn)


def test_requirement_08_nothing_in_a_checkpoint_is_executed(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    _save(manager, Trained(1), tmp_path)
    name = _plant(tmp_path / "optimizer/optim", _Hostile(tmp_path / "executed"))
    target = Trained(2)
    before = target.state()
    with pytest.raises(UnsafePickleError, match=re.escape(repr(name))):
        _load(manager, target, tmp_path)
    _assert_same(target.state(), before)
    assert not (tmp_path / "executed").exists()
    _Hostile(tmp_path / "executed").__reduce__()[0](tmp_path / "executed")
    assert (tmp_path / "executed").exists()


def test_objects_are_loaded_under_restriction_even_by_the_library(tmp_path: Path) -> None:
    torch.save(_Hostile(tmp_path / "executed"), tmp_path / "hostile.pt")
    with restrict_unpickling(), pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "hostile.pt", weights_only=False)
    assert not (tmp_path / "executed").exists()


def test_requirement_08_a_model_on_meta_is_refused(manager: AutomodelCheckpointManager, tmp_path: Path) -> None:
    manager.save_checkpoint(Odd(), str(tmp_path / "w"), checkpointing_cfg={})
    with torch.device("meta"):
        model = Odd()
    with pytest.raises(ConfigError, match="meta device"):
        manager.load_checkpoint(model, str(tmp_path / "w"))
    with pytest.raises(ConfigError, match="meta device"):
        manager.save_checkpoint(model, str(tmp_path / "v"), checkpointing_cfg={})


def test_requirement_08_groups_that_one_group_cannot_hold_are_refused(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    source, target = Trained(1), Trained(2)

    def group(trained: Trained, *rates: float) -> None:
        parameters = list(trained.model.parameters())
        halves = [parameters[:2], parameters[2:]] if len(rates) > 1 else [parameters]
        trained.optimizer = torch.optim.AdamW(
            [{"params": half, "lr": rate} for half, rate in zip(halves, rates, strict=True)]
        )
        trained.scheduler = torch.optim.lr_scheduler.StepLR(trained.optimizer, step_size=2)
        trained.step()

    def load() -> None:
        manager.load_checkpoint(target.model, str(tmp_path / "w"), target.optimizer, str(tmp_path / "o"))

    group(source, 0.1, 0.2)
    manager.save_checkpoint(
        source.model, str(tmp_path / "w"), source.optimizer, str(tmp_path / "o"), checkpointing_cfg={}
    )
    group(target, 0.3)
    before = target.state()
    with pytest.raises(KeyMismatchError, match=r"\.lr: stored 0\.2, but 0\.1"):
        load()
    _assert_same(target.state(), before)
    group(target, 0.3, 0.4)
    load()
    assert [g["lr"] for g in target.optimizer.param_groups] == [0.1, 0.2]


def test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_not_taken(
    manager: AutomodelCheckpointManager, mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(manager, Trained(1), tmp_path)
    other = AutomodelCheckpointManager(mesh, mesh)
    other.init_checkpointer()
    load = manager.checkpointer.load_optimizer

    def save_and_load(**options: Any) -> None:  # noqa: ANN401
        _save(other, Trained(2), tmp_path)
        load(**options)

    monkeypatch.setattr(manager.checkpointer, "load_optimizer", save_and_load)
    with pytest.raises(LoadError, match="replaced by another save"):
        _load(manager, Trained(3), tmp_path)


class _Renamed(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.other = self.deep
        del self.deep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.other(self.wide(x)) * self.scale
        return result


class _Reshaped(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Linear(5, 4, bias=False)


class _Narrowed(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.deep.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.deep(self.wide(x).bfloat16()).float() * self.scale
        return result


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (_Renamed, ["missing tensor (1)", "other.weight", "unexpected tensor (1)", "deep.weight"]),
        (_Reshaped, ["deep.weight", "(4, 5)", "(3, 5)"]),
        (_Narrowed, ["deep.weight", "F32", "BF16"]),
        (_lora, ["missing tensor (2)", "wide.lora_A.weight"]),
    ],
)
@pytest.mark.parametrize("save_format", FORMATS)
def test_requirement_08_another_model_is_refused_before_anything_changes(
    manager: AutomodelCheckpointManager,
    tmp_path: Path,
    save_format: str,
    build: Callable[[], nn.Module],
    words: list[str],
) -> None:
    _save(manager, Trained(1), tmp_path, model_save_format=save_format)
    target = Trained(2, build)
    before = target.state()
    with pytest.raises(KeyMismatchError) as caught:
        manager.load_checkpoint(target.model, str(tmp_path / "weights"))
    assert all(word in str(caught.value) for word in words)
    _assert_same(target.state(), before)


@pytest.mark.parametrize("save_format", FORMATS)
def test_a_wider_dtype_is_filled_exactly(manager: AutomodelCheckpointManager, tmp_path: Path, save_format: str) -> None:
    source, target = Trained(1, _Narrowed), Trained(2)
    _save(manager, source, tmp_path, model_save_format=save_format)
    manager.load_checkpoint(target.model, str(tmp_path / "weights"))
    _assert_same(target.model.state_dict()["deep.weight"], source.model.state_dict()["deep.weight"].float())


def test_requirement_08_an_adapter_must_match_the_models_own(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    manager.save_checkpoint(
        Trained(1, _lora).model, str(tmp_path / "w"), checkpointing_cfg={}, lora_enabled=True, peft_config=PEFT
    )
    with pytest.raises(KeyMismatchError, match="unexpected tensor"):
        manager.load_checkpoint(Odd(), str(tmp_path / "w"))
    path = tmp_path / "w/model/adapter_model.safetensors"
    tensors = load_file(path)
    tensors["base_model.model.other.lora_A.weight"] = tensors.pop("base_model.model.wide.lora_A.weight")
    save_file(tensors, path)
    (tmp_path / "w/model/ckpt_record.json").unlink()
    with pytest.raises(KeyMismatchError, match=r"missing tensor \(1\)"):
        manager.load_checkpoint(Trained(2, _lora).model, str(tmp_path / "w"))


@pytest.mark.parametrize(
    "change",
    [
        lambda t: setattr(t, "optimizer", torch.optim.SGD(t.model.parameters(), lr=0.1, momentum=0.9)),
        lambda t: setattr(t, "scheduler", torch.optim.lr_scheduler.CosineAnnealingLR(t.optimizer, T_max=9)),
        lambda t: setattr(t, "optimizer", torch.optim.AdamW(t.model.wide.parameters())),
    ],
)
def test_requirement_08_another_optimizer_is_refused_before_the_weights_change(
    manager: AutomodelCheckpointManager, tmp_path: Path, change: Callable[[Trained], None]
) -> None:
    _save(manager, Trained(1), tmp_path)
    target = Trained(2, steps=0)
    change(target)
    before = target.state()
    with pytest.raises(KeyMismatchError, match="optimizer"):
        _load(manager, target, tmp_path)
    _assert_same(target.state(), before)


@pytest.mark.parametrize("stored_as_tensor", [True, False])
def test_requirement_08_a_tensor_is_not_loaded_for_a_number_nor_the_reverse(
    manager: AutomodelCheckpointManager, tmp_path: Path, stored_as_tensor: bool
) -> None:
    source, target = Trained(1), Trained(2)
    changed = source if stored_as_tensor else target
    for group in changed.optimizer.param_groups:
        group["lr"] = torch.tensor(0.01)
    manager.save_checkpoint(
        source.model, str(tmp_path / "weights"), source.optimizer, str(tmp_path / "optimizer"), checkpointing_cfg={}
    )
    before = target.state()
    with pytest.raises(KeyMismatchError, match=r"\.lr: expected .*stored as"):
        manager.load_checkpoint(target.model, str(tmp_path / "weights"), target.optimizer, str(tmp_path / "optimizer"))
    _assert_same(target.state(), before)


def test_requirement_08_a_refused_load_leaves_a_partly_stepped_optimizer_alone(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    _save(manager, Trained(1), tmp_path)
    target = Trained(2, _Renamed, steps=0)
    target.model.wide(torch.ones(7)).sum().backward()  # type: ignore[operator]
    target.optimizer.step()
    before = target.state()
    assert 0 < len(before["optim"]["state"]) < len(list(target.model.parameters()))
    with pytest.raises(KeyMismatchError):
        _load(manager, target, tmp_path)
    _assert_same(target.state(), before)


def test_parts_of_two_saves_are_refused(manager: AutomodelCheckpointManager, tmp_path: Path) -> None:
    first, second = Trained(1), Trained(2)
    _save(manager, first, tmp_path)
    manager.save_checkpoint(second.model, str(tmp_path / "weights"), checkpointing_cfg={})
    target = Trained(3)
    with pytest.raises(CorruptCheckpointError, match=r"weights/model.*optimizer/optim"):
        _load(manager, target, tmp_path)
    manager.load_checkpoint(target.model, str(tmp_path / "weights"))
    _assert_same(target.model.state_dict(), second.model.state_dict())


@pytest.mark.parametrize("second", FORMATS)
@pytest.mark.parametrize("first", FORMATS)
def test_requirement_09_a_save_replaces_what_was_there_and_nothing_beside_it(
    manager: AutomodelCheckpointManager, tmp_path: Path, first: str, second: str
) -> None:
    _save(manager, Trained(1), tmp_path / "twice", model_save_format=first, save_consolidated=True)
    (tmp_path / "twice/weights/notes.txt").write_text("mine")
    _save(manager, Trained(2), tmp_path / "twice", model_save_format=second)
    _save(manager, Trained(2), tmp_path / "once", model_save_format=second)
    files = {p.relative_to(tmp_path / "twice") for p in (tmp_path / "twice").rglob("*") if p.is_file()}
    fresh = {p.relative_to(tmp_path / "once") for p in (tmp_path / "once").rglob("*") if p.is_file()}
    assert files == fresh | {Path("weights/notes.txt")}


@pytest.mark.parametrize("is_link", [False, True])
def test_no_file_names_the_place_where_it_was_staged(
    manager: AutomodelCheckpointManager, tmp_path: Path, is_link: bool
) -> None:
    if is_link:
        (tmp_path / "weights").mkdir()
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "weights/model").symlink_to(tmp_path / "elsewhere")
    _save(manager, Trained(1), tmp_path)
    assert (tmp_path / "weights/model").is_symlink() is is_link
    script = (tmp_path / "weights/model/consolidate.sh").read_text()
    place = tmp_path / ("elsewhere" if is_link else "weights/model")
    assert f'"{place}"' in script
    assert f'"{place / "consolidated"}"' in script
    assert "partial" not in script
    assert (tmp_path / "weights/model/consolidate.sh").stat().st_mode & 0o100


@pytest.mark.parametrize(
    ("optimizer_path", "tokenizer_path"),
    [("a/model", None), ("a/model/inside", None), (None, "a/model"), (None, "a/model/tokenizer"), ("o", "o/optim")],
)
def test_a_part_inside_another_one_is_refused(
    manager: AutomodelCheckpointManager, tmp_path: Path, optimizer_path: str | None, tokenizer_path: str | None
) -> None:
    trained = Trained(1)
    with pytest.raises(ConfigError, match="directory of its own"):
        manager.save_checkpoint(
            trained.model,
            str(tmp_path / "a"),
            trained.optimizer,
            str(tmp_path / optimizer_path) if optimizer_path else None,
            tokenizer=_tokenizer("a") if tokenizer_path else None,
            tokenizer_path=str(tmp_path / tokenizer_path) if tokenizer_path else None,
            checkpointing_cfg={},
        )
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("save_format", FORMATS)
def test_a_stage_that_lost_a_file_is_not_published(
    manager: AutomodelCheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_format: str
) -> None:
    source, target = Trained(1), Trained(3)
    _save(manager, source, tmp_path, model_save_format=save_format)
    write = manager.checkpointer.save_model

    def write_and_lose(**options: Any) -> None:  # noqa: ANN401
        write(**options)
        _drop_file(Path(options["weights_path"]) / "model")

    monkeypatch.setattr(manager.checkpointer, "save_model", write_and_lose)
    with pytest.raises(SaveError, match="nothing was published"):
        _save(manager, Trained(2), tmp_path, model_save_format=save_format)
    _load(manager, target, tmp_path)
    _assert_same(target.state(), source.state())
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["model"]


def test_files_of_somebody_else_stay_in_a_directory_that_is_replaced(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    (tmp_path / "weights/model/src").mkdir(parents=True)
    (tmp_path / "weights/model/src/net.py").write_text("mine")
    (tmp_path / "weights/model/__7_0.distcp").write_text("stale")
    for _ in range(2):
        _save(manager, Trained(1), tmp_path)
        assert (tmp_path / "weights/model/src/net.py").read_text() == "mine"
        assert not (tmp_path / "weights/model/__7_0.distcp").exists()


def test_a_tokenizer_that_has_no_place_is_said(
    manager: AutomodelCheckpointManager, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"model_save_format": "torch_save"}
    manager.save_checkpoint(Odd(), str(tmp_path), tokenizer=_tokenizer("a"), checkpointing_cfg=config)
    assert any("pass tokenizer_path" in record.message for record in caplog.records)


def test_what_is_in_the_way_is_found_before_the_first_part_is_replaced(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    source, target = Trained(1), Trained(3)
    _save(manager, source, tmp_path)
    (tmp_path / "weights/.model.old").mkdir()
    with pytest.raises(TargetError, match=r"\.model\.old"):
        _save(manager, Trained(2), tmp_path)
    _load(manager, target, tmp_path)
    _assert_same(target.state(), source.state())


def test_requirement_10_formats_alternate_in_one_process(manager: AutomodelCheckpointManager, tmp_path: Path) -> None:
    for round_, save_format in enumerate(FORMATS * 2):
        source, target = Trained(round_), Trained(99)
        _save(manager, source, tmp_path, model_save_format=save_format)
        _load(manager, target, tmp_path)
        _assert_same(target.state(), source.state())


class _Expanded(nn.Module):
    """All elements of the parameter are one in memory, which nothing can be loaded into."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(1).expand(4))


def test_requirement_11_a_failure_inside_dcp_is_an_exception_with_its_cause(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    manager.save_checkpoint(_Expanded(), str(tmp_path / "w"), checkpointing_cfg={"model_save_format": "torch_save"})
    with pytest.raises(LoadError, match=r"rank 0: .*may be partly changed: RuntimeError") as caught:
        manager.load_checkpoint(_Expanded(), str(tmp_path / "w"))
    assert isinstance(caught.value, RuntimeError)
    assert str(tmp_path) in str(caught.value)
    assert type(caught.value.__cause__).__name__ == "CheckpointException"


def test_requirement_12_async_without_an_accelerator_is_refused_first(
    manager: AutomodelCheckpointManager, mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "has_accelerator", lambda: False)
    with pytest.raises(ValueError, match="accelerator"):
        _save(manager, Trained(1), tmp_path / "run", is_async=True)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="accelerator"):
        AutomodelCheckpointManager(mesh, mesh).init_checkpointer({"is_async": True})
    _save(manager, Trained(1), tmp_path / "run")


@pytest.mark.parametrize("save_as", ["{}", "{}/", "{}/model", "{}/model/", "{}/./"])
@pytest.mark.parametrize("load_as", ["{}", "{}/model/"])
@pytest.mark.parametrize("name", ["weights", "my_weights", "models/model-1"])
def test_requirement_13_paths_mean_the_same_in_save_and_load(
    manager: AutomodelCheckpointManager, tmp_path: Path, name: str, save_as: str, load_as: str
) -> None:
    source, target = Odd(), Odd()
    base = tmp_path / name
    manager.save_checkpoint(source, save_as.format(base), checkpointing_cfg={})
    manager.load_checkpoint(target, load_as.format(base))
    _assert_same(target.state_dict(), source.state_dict())


def test_requirement_13_path_objects_are_paths(manager: AutomodelCheckpointManager, tmp_path: Path) -> None:
    source, target = Trained(1), Trained(2)
    path: Any = tmp_path / "here"
    manager.save_checkpoint(source.model, path, source.optimizer, path, checkpointing_cfg={})
    manager.load_checkpoint(target.model, path, target.optimizer, path)
    _assert_same(target.model.state_dict(), source.model.state_dict())
    _assert_same(target.optimizer.state_dict(), source.optimizer.state_dict())


def _tokenizer(*words: str) -> PreTrainedTokenizerFast:
    model = WordLevel({"[UNK]": 0} | {word: i for i, word in enumerate(words, 1)}, unk_token="[UNK]")  # noqa: S106
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token="[UNK]")  # noqa: S106


def test_requirement_14_a_tokenizer_replaces_its_own_files_and_no_others(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    place = tmp_path / "tokenizer"

    def save(*words: str) -> None:
        manager.save_checkpoint(
            Odd(),
            str(tmp_path / "weights"),
            tokenizer=_tokenizer(*words),
            tokenizer_path=str(place),
            checkpointing_cfg={},
        )

    save("one")
    save("one", "two")
    assert AutoTokenizer.from_pretrained(place)("two")["input_ids"] == [2]
    ids = [
        json.loads((path / "ckpt_record.json").read_text())["save_id"] for path in (place, tmp_path / "weights/model")
    ]
    assert ids[0] == ids[1]
    (place / "notes.txt").write_text("mine")
    stale = place / "vocab.json"
    stale.write_text("{}")
    record = json.loads((place / "ckpt_record.json").read_text())
    record["files"]["vocab.json"] = 2
    (place / "ckpt_record.json").write_text(json.dumps(record))
    save("one", "two", "three")
    assert not stale.exists()
    assert AutoTokenizer.from_pretrained(place)("three")["input_ids"] == [3]
    assert (place / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir() if "tokenizer" in path.name) == ["tokenizer"]


def test_a_tokenizer_without_a_place_goes_beside_the_weights(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    manager.save_checkpoint(
        Odd(), str(tmp_path), tokenizer=_tokenizer("a", "b"), checkpointing_cfg={"save_consolidated": True}
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "model/consolidated")("b")["input_ids"] == [2]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_save_format": "torch_save", "save_consolidated": True}, "ckpt-convert"),
        ({"model_save_format": "safetensors", "save_consolidated": "final"}, "save_consolidated=True"),
    ],
)
def test_consolidation_that_will_not_happen_is_said(
    manager: AutomodelCheckpointManager,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    config: dict[str, object],
    words: str,
) -> None:
    _save(manager, Trained(1), tmp_path, **config)
    assert any(words in record.message for record in caplog.records if record.name == "ckpt_core.manager")


KEYS = list(Odd().state_dict())


@pytest.mark.parametrize(
    "keys", [KEYS, [f"_orig_mod.{key}" for key in KEYS], [*KEYS, "transient"], [*KEYS, "wide._extra_state"]]
)
def test_requirement_14_keys_are_enforced_by_rules(mesh: DeviceMesh, tmp_path: Path, keys: list[str]) -> None:
    manager = AutomodelCheckpointManager(mesh, mesh, keys)
    manager.init_checkpointer()
    source, target = Trained(1), Trained(2)
    _save(manager, source, tmp_path)
    _load(manager, target, tmp_path)
    _assert_same(target.state(), source.state())


def test_requirement_14_other_keys_are_refused_on_save_and_load(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    nonsense = [f"nonsense.{i}" for i in range(25)]
    manager.set_model_state_dict_keys([*KEYS[1:], *nonsense])
    with pytest.raises(KeyMismatchError) as caught:
        _save(manager, Trained(1), tmp_path / "run")
    text = str(caught.value)
    assert "missing tensor (25)" in text
    assert "and 5 more" in text
    assert f"unexpected tensor (1):\n    - {KEYS[0]}" in text
    assert not (tmp_path / "run").exists()
    manager.model_state_dict_keys = None
    _save(manager, Trained(1), tmp_path / "run")
    manager.set_model_state_dict_keys([*KEYS, "nonsense.0"])
    with pytest.raises(KeyMismatchError, match=r"nonsense\.0"):
        _load(manager, Trained(2), tmp_path / "run")


def test_keys_given_to_the_library_are_those_of_the_model(manager: AutomodelCheckpointManager, tmp_path: Path) -> None:
    _save(manager, Trained(1), tmp_path)
    mapping = json.loads((tmp_path / "weights/model/.hf_metadata/fqn_to_file_index_mapping.json").read_text())
    assert sorted(mapping) == sorted(KEYS)


@pytest.mark.parametrize("tied_keys", [True, False])
def test_a_tied_head_may_be_in_the_keys_or_not(mesh: DeviceMesh, tmp_path: Path, tied_keys: bool) -> None:
    source, target = _tiny_llama(tied=True, seed=1), _tiny_llama(tied=True, seed=2)
    keys = [key for key in source.state_dict() if tied_keys or key != "lm_head.weight"]
    manager = AutomodelCheckpointManager(mesh, mesh, keys)
    manager.init_checkpointer()
    manager.save_checkpoint(source, str(tmp_path / "w"), checkpointing_cfg={})
    manager.load_checkpoint(target, str(tmp_path / "w"))
    _assert_same(target.state_dict(), source.state_dict())


def test_a_stored_head_that_differs_is_not_lost_in_a_tied_model(
    manager: AutomodelCheckpointManager, tmp_path: Path
) -> None:
    manager.save_checkpoint(_tiny_llama(seed=1), str(tmp_path / "w"), checkpointing_cfg={})
    target = _tiny_llama(tied=True, seed=2)
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(KeyMismatchError, match=r"lm_head\.weight.*embed_tokens"):
        manager.load_checkpoint(target, str(tmp_path / "w"))
    _assert_same(target.state_dict(), before)


def test_requirement_15_the_supported_releases_are_declared() -> None:
    declared = [line.replace(" ", "") for line in requires("ckpt-core") or []]
    assert any(line.startswith("nemo-automodel>=0.5;extra==") for line in declared)
