"""Stage 4: the chunked form as the Triton kernels have it, one Pallas launch per step,
everything between two steps through HBM.

    forward     A  scores         Aqk, Akk           vector unit
                B  inverse        X                  matrix unit, latency
                C  prepare        W, U, kg, qg       matrix unit
                D  scan           vn, o, S           matrix unit, chunks in order
    backward    B2 own_outputs    dAqk, dvn
                B1 scan_back      dvn, dS            chunks in order, last one first
                B3 prepare_back   dv, dw, dAkk, dq, dk, dbk through the state
                B4 scores_back    dq, dk, db         vector unit
                B5 log_decay_back dg

Each launch has a twin of the same name in `twins`, plain JAX on the same arrays.

Source of the steps and their letters: flash-linear-attention's GDN-2 kernels, ported to
Pallas by the package atomic-ops; two things differ. Exponents of pairs are sums of g
over the pair's own span, not differences of a running sum; and dg counts what straddles
a token. Both are why any g <= 0 is served to float32 accuracy.
"""

from gdn2_kernels.stages.atomic_ops.stage import (
    CHUNK_SIZE,
    Residuals,
    atomic_ops,
    residual_bytes,
)

__all__ = ["CHUNK_SIZE", "Residuals", "atomic_ops", "residual_bytes"]
