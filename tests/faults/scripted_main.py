"""The program of main.py, over the scripted engine.

    python -m tests.faults.scripted_main SCRIPT ARGUMENTS...

SCRIPT is that of `tests.scripted_worker`, the rest is for main.py.
"""

from __future__ import annotations

import sys
from functools import partial

import main
from backends.manager import ModelManager

if __name__ == "__main__":
    script, *arguments = sys.argv[1:]
    worker = (sys.executable, "-m", "tests.scripted_worker", script)
    vars(main)["ModelManager"] = partial(ModelManager, worker_command=worker)
    sys.exit(main.main(arguments))
