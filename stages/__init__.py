"""The stages of the pipeline; `python -m stages.<name>` runs one.

Importing torch and transformers makes objects by the million that live to the end. Looking for
garbage among them meanwhile is a sixth of a stage's start, so that it waits until the command runs
(base/command.py). Where the package is only imported nothing is switched off.

PARENT is noted before those seconds too: a DVC killed meanwhile is missed when they are over.
"""

import gc
import os
import sys

PARENT = os.getppid()

if sys.argv[:1] == ["-m"]:
    gc.disable()
