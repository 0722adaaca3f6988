"""Preparation of data sets. Run `python -m energon_data.prepare --help`."""
