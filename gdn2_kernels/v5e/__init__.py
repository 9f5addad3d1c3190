"""What the v5e compiler says about a program, on a machine without a TPU. See
`compile`.
"""

from gdn2_kernels.v5e.compile import CompileError, Report, Unavailable, compile

__all__ = ["CompileError", "Report", "Unavailable", "compile"]
