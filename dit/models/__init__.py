"""Backbones: one folder each, one line here each."""

BACKBONES = {
    "dit": "dit.models.dit.config:DiTConfig",
    "dit_cross": "dit.models.dit_cross.config:DiTCrossConfig",
    "moviegen": "dit.models.moviegen.config:MovieGenConfig",
    "stdit": "dit.models.stdit.config:STDiTConfig",
}
