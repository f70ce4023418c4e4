"""`python -m ckpt_convert` is `ckpt-convert`."""

import sys

from ckpt_convert.cli import main

sys.exit(main())
