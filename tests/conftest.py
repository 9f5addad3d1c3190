"""Set before JAX is imported: a CPU, eight simulated devices, and no search for a TPU that is not there."""

import os
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
sys.path.insert(0, str(pathlib.Path(__file__).parent))

from gdn2_kernels.v5e.compile import ENVIRONMENT  # noqa: E402  (imports jax, which reads these only when first used)

os.environ.update(ENVIRONMENT)
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Tests of one file and stage share compiled programs: they stay in one process."""
    for item in items:
        stage = getattr(item, "callspec", None) and item.callspec.params.get("stage")
        item.add_marker(pytest.mark.xdist_group(f"{item.path.name}-{stage}"))
