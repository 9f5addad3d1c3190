"""Stage 5: the nine launches fused into two, the state in VMEM."""

from gdn2_kernels.stages.atomic_gdn2.stage import atomic_gdn2

__all__ = ["atomic_gdn2"]
