"""Metrics of generated pictures, compared with real pictures and with their texts."""
