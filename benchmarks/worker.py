"""One benchmark of one library, in this process: `python -m benchmarks.worker CASE SIDE FOLDER`, result as JSON.

The runner starts it; nothing is imported here before the case asks for it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path

from .cases import CASES

MARK = "figures: "


def main() -> None:
    name, side, folder = sys.argv[1:]
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    figures = CASES[name].measure(side, Path(folder))
    print(MARK + json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
