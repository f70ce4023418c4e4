"""`python -m ckpt_verify` is the `ckpt-verify` command."""

from __future__ import annotations

import sys

from ckpt_verify.cli import main

sys.exit(main())
