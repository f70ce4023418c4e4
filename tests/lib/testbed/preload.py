"""Imports that every rank needs, done once in the fork server and shared with the ranks by copy on write.

Importing torch, transformers and nemo_automodel takes 10 to 15 seconds; forking a process that
has them takes a few hundredths of a second. No thread may be started here, and no process group: neither
survives a fork.
"""

from __future__ import annotations

import gc
import os

os.environ.update(
    {
        # The ranks share few cores, and a thread pool would not survive the fork.
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Tests are the same on a machine with accelerators or a network.
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        # Compiling the experts' activations takes longer than all the rest, and a compiler.
        "TORCHDYNAMO_DISABLE": "1",
    }
)

import nemo_automodel.components.checkpoint.checkpointing  # noqa: F401  imported to be there
import torch
import torch.distributed.checkpoint.hf_storage
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

import testbed.training  # noqa: F401  brings the models' modules

torch.set_num_threads(1)
gc.collect()
# Without this the collector would touch, and so copy, every page that the ranks share.
gc.freeze()
