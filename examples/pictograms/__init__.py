"""Colour pictograms of Unicode characters, by name."""
