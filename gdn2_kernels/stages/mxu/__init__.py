"""Stage 6: pairwise decay as matrix products, exact for every gate."""

from gdn2_kernels.stages.mxu.stage import mxu, serves

__all__ = ["mxu", "serves"]
