"""Backbones: one folder each, one line here each."""

BACKBONES = {
    "dit": "dit.models.dit.config:DiTConfig",
}
