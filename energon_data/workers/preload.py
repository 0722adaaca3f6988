"""Imports of a data worker, made once in the fork server before workers are forked from it; starts no thread."""

import gc
from importlib import import_module

from dit.terminal import quiet_libraries

quiet_libraries()
import_module("energon_data.energon_source")
import_module("energon_data.workers.worker")
gc.freeze()  # otherwise garbage collection in each worker would copy these pages
