"""Demos: letters and pictograms that two CPU cores learn in minutes, with their data, recipes and metrics.

They depend on the product and are registered as entry points in pyproject.toml, like a user's own package.
"""
