"""Tests of Triton kernels in Triton's interpreter, which is on for a whole process or not at all."""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]  # tests/unit/kernels/test_fused.py runs them in a process of their own
