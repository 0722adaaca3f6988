"""What ranks need, imported once before they are forked; the user can do nothing about what libraries say meanwhile."""

import warnings
from importlib import import_module

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import_module("dit.verify.trial")
