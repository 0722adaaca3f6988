"""Recipes: functions that return a configured training run, one file per family. `registry` lists them.

Numbers of GPUs follow from the layout and from the memory that `--dryrun` estimates; more GPUs raise the data-parallel
size. None of the published and larger models has been trained here at full size.

Importing this package imports nothing heavy; a recipe file imports nemo-run and the training function.
"""
