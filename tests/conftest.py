"""Set before JAX is imported: a CPU, eight simulated devices, and no search for a TPU that is not there."""

import gc
import os
import pathlib
import sys

import jax
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import gdn2_kernels as gk
from gdn2_kernels.tile import PRECISIONS
from gdn2_kernels.v5e.compile import ENVIRONMENT  # imports jax, which reads these only when first used

os.environ.update(ENVIRONMENT)
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

# Every compiled program keeps some sixty memory mappings. Linux allows a process 65530 of them, and XLA crashes on the
# next one. The count starts at a few hundred and one test adds a thousand at most.
MAPPINGS = pathlib.Path("/proc/self/maps")
MANY_MAPPINGS, TOO_MANY_MAPPINGS = 10_000, 40_000


def mappings() -> int:
    with MAPPINGS.open("rb") as lines:
        return sum(1 for _ in lines)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Let go of all compiled programs before there are too many: between two groups, which share none, if possible."""
    if nextitem is None or not MAPPINGS.exists():
        return
    same_group = group(item.nodeid) == group(nextitem.nodeid)
    if mappings() > (TOO_MANY_MAPPINGS if same_group else MANY_MAPPINGS):
        jax.clear_caches()
        gc.collect()


def group(nodeid: str) -> str:
    """Tests of one file, stage and precision share compiled programs."""
    path, _, test = nodeid.partition("::")
    words = test.partition("[")[2].rstrip("]").split("-")
    stages = [word for word in words if word in gk.STAGES]
    # Where nothing is said the helpers take "highest".
    return "-".join([path, *stages, *([word for word in words if word in PRECISIONS] or ["highest"] if stages else [])])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A group of tests stays in one process. Not by the mark xdist_group: pytest 9.2 ignores it without a word."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return group(nodeid)

    return ByGroup(config, log)
