"""A program on a TPU v5e that is not there: `compile` gives its cycles, bytes and units
by the compiler's own output; `launches` and `vmem` say what the traced program does
before the compiler is asked.
"""

from gdn2_kernels.v5e.compile import CompileError, Unavailable, compile
from gdn2_kernels.v5e.launches import launches, tiled_bytes, vmem
from gdn2_kernels.v5e.report import Report
from gdn2_kernels.v5e.tables import Comparison, compare

__all__ = [
    "Comparison",
    "CompileError",
    "Report",
    "Unavailable",
    "compare",
    "compile",
    "launches",
    "tiled_bytes",
    "vmem",
]
