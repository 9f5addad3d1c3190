"""Gated DeltaNet-2 on TPU v5e in JAX, built stage by stage. See `gdn2`."""

from gdn2_kernels.environment import __version__, banner, check_jax, on_tpu, show

check_jax()

from gdn2_kernels.api import STAGES, gdn2  # noqa: E402  (the check must speak before anything can fail to import)

__all__ = ["STAGES", "__version__", "banner", "gdn2", "on_tpu", "show"]
