"""Let a failure of what one rank writes alone reach the ranks that wait for it.

nemo_automodel writes adapters, metadata and scripts on rank 0 and then meets the other ranks
in a barrier. If that write fails, rank 0 never comes, and the others wait until the group's
timeout. The names that are wrapped here are private, and each is looked up before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from ckpt_core.collective import Step, agree

T = TypeVar("T")
_SCRIPT = "_maybe_write_offline_consolidation_script"


@contextmanager
def guard_single_writes(checkpointer: Any, step: Step) -> Iterator[None]:  # noqa: ANN401
    """Guard the writes of one save.

    Args:
        checkpointer: nemo_automodel's.
        step: Names the save in the error that every rank raises.
    """
    guarded = {
        "_addons": [_GuardedAddon(addon, step) for addon in checkpointer._addons],  # noqa: SLF001  no public name
        "_do_save": _guard_adapter_save(checkpointer, step),
    }
    script = getattr(checkpointer, _SCRIPT, None)
    if script is not None:
        guarded[_SCRIPT] = lambda directory: agree(step, lambda: script(directory))
    held = {name: vars(checkpointer)[name] for name in guarded if name in vars(checkpointer)}
    vars(checkpointer).update(guarded)
    try:
        yield
    finally:
        for name in guarded:
            del vars(checkpointer)[name]
        vars(checkpointer).update(held)


@dataclass(frozen=True, slots=True)
class _GuardedAddon:
    addon: Any
    step: Step

    def pre_save(self, **options: object) -> None:
        self._run(self.addon.pre_save, options)

    def post_save(self, **options: object) -> None:
        self._run(self.addon.post_save, options)

    def _run(self, hook: Callable[..., None], options: dict[str, object]) -> None:
        group = options.get("process_group")
        agree(self.step, lambda: _meet_in_barrier(lambda: hook(**options), group))


def _guard_adapter_save(checkpointer: Any, step: Step) -> Callable[..., Any]:  # noqa: ANN401
    save = checkpointer._do_save  # noqa: SLF001  no public name

    def guarded(state_dict: Any, path: str, storage_writer: Any = None) -> Any:  # noqa: ANN401
        if not (checkpointer.config.is_peft and Path(path).name == "model"):
            return save(state_dict, path, storage_writer)
        group = getattr(checkpointer, "process_group", None)
        return agree(step, lambda: _meet_in_barrier(lambda: save(state_dict, path, storage_writer), group))

    return guarded


def _meet_in_barrier(work: Callable[[], T], group: Any) -> T:  # noqa: ANN401
    """Do work that ends in a barrier of `group`; enter it on a failure as well, since the others do."""
    try:
        return work()
    except BaseException:
        if dist.is_initialized():
            dist.barrier(group=group)
        raise
