"""What the v5e compiler says about a program, on a machine without a TPU: see `compile`.
And what the traced program says before it is asked: `launches`, `vmem`.
"""

from gdn2_kernels.v5e.compile import CompileError, Report, Unavailable, compile
from gdn2_kernels.v5e.launches import launches, tiled_bytes, vmem

__all__ = ["CompileError", "Report", "Unavailable", "compile", "launches", "tiled_bytes", "vmem"]
