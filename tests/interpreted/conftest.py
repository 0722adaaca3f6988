"""Tests of Triton kernels in Triton's interpreter, which is on for a whole process or not at all."""

import os

from dit.verify.ranks import FORKS

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]  # tests/unit/kernels/test_fused.py runs them in a process of their own
else:  # ranks of these tests need neither launchers nor data
    FORKS.set_forkserver_preload(["tests.interpreted.update_worker"])
