"""The stages, one module each, in the order of the story. Internal contract:

    stage(q, k, v, g, b, w, scale, initial_state, *, precision, chunk_size, interpret)
    -> (o, final_state)

on checked arguments: `scale` a scalar array, `initial_state` an array, `chunk_size` and
  `interpret` possibly None.
"""

from gdn2_kernels.stages import (
    associative_scan,
    atomic_gdn2,
    atomic_ops,
    mxu,
    recurrence,
    wy,
)  # fmt: skip

STAGES = {
    "recurrence": recurrence.recurrence,
    "associative_scan": associative_scan.associative_scan,
    "wy": wy.wy,
    "atomic_ops": atomic_ops.atomic_ops,
    "atomic_gdn2": atomic_gdn2.atomic_gdn2,
    "mxu": mxu.mxu,
}
