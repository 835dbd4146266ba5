"""What the server that ranks are forked from imports, once.

It is used to the end, so no search for garbage shall look at it: not while it is imported, and not in the ranks, whose
memory would no longer be shared.
"""

import gc
from importlib import import_module

gc.disable()
for module in ("pytest", "tests.support.jobs.checkpoint", "tests.support.scripts.faults"):
    import_module(module)
gc.collect()
gc.freeze()
gc.enable()
