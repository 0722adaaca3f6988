"""Pixel-art avatars by text: combinations of attributes that training never saw."""
