"""Measures of generated pictures against real ones, and against their texts."""
