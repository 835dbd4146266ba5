"""Steps that `torch.cuda.graph` captures.

Note: captured steps
    What is captured runs later, without Python, again and again. So the plan is that of the moment, nothing is read
    back, and no event is recorded that the host asks for: there would be no host to act on it.
"""

from __future__ import annotations

import torch


def is_being_captured(device: torch.device) -> bool:
    """Whether what is given to `device` now is captured instead of run (Note: captured steps)."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
