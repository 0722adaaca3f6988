"""What every rank of a test world needs, imported once, before ranks are forked; nothing here starts a thread."""

import warnings

warnings.simplefilter("ignore")

import energon_data.mock  # noqa: E402, F401
from dit.training import pretrain  # noqa: E402, F401
from tests.parallel import context_worker, expert_tasks, fsdp_worker, pipeline_cases, worker  # noqa: E402, F401
