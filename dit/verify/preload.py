"""Imports of a rank, made once before ranks are forked. Users cannot act on the warnings of libraries here."""

import warnings
from importlib import import_module

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import_module("dit.verify.trial")
