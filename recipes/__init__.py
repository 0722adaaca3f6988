"""Recipes: functions that return a configured training run, one file per family. `registry` lists them.

Importing this package imports nothing heavy; a recipe file imports nemo-run and the training function.
"""
