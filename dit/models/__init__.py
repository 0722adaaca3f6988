"""Backbones: one folder each, one line here each."""

BACKBONES = {
    "dit": "dit.models.dit.config:DiTConfig",
    "dit_cross": "dit.models.dit_cross.config:DiTCrossConfig",
    "flux": "dit.models.flux.config:FluxConfig",
    "moviegen": "dit.models.moviegen.config:MovieGenConfig",
    "stdit": "dit.models.stdit.config:STDiTConfig",
    "wan": "dit.models.wan.config:WanConfig",
}
