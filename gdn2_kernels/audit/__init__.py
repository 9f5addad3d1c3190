"""The numerical audit: what a stage computes, against gates that can fail."""

from gdn2_kernels.audit.cases import FULL, REDUCED
from gdn2_kernels.audit.report import audit, failures, summary
from gdn2_kernels.audit.subject import Subject

__all__ = ["FULL", "REDUCED", "Subject", "audit", "failures", "summary"]
