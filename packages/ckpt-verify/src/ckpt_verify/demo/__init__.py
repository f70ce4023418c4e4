"""The main job, start to end, on a model that takes seconds: `python -m ckpt_verify.demo [DIRECTORY]`.

A tiny Llama trains two steps on a 2x2 mesh of real processes (FSDP2 over `dp`, tensor
parallel over `tp`) and is saved in both formats that nemo_automodel knows (`training`). Each
save is then inspected, converted, compared with the result, and opened with transformers
(`main_job`). The logits of what was opened have to equal those of the trained model,
gathered in memory: no checkpoint takes part in what is expected.

Everything is made here (`base_model`); nothing is downloaded. With DIRECTORY the files are
kept there.
"""

import logging

# Libraries hint at optional parts while they are imported; that is no part of the story.
logging.disable(logging.WARNING)
