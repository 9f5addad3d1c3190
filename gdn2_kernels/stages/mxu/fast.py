from gdn2_kernels.stages.mxu.forward import forward_kernel, forward_scratch
from gdn2_kernels.stages.mxu.backward import backward_kernel, backward_scratch
