"""Objectives: one file each, one line here each."""

OBJECTIVES = {
    "ddpm": "dit.objectives.ddpm:DDPM",
    "edm": "dit.objectives.edm:EDM",
    "flow_matching": "dit.objectives.flow_matching:FlowMatching",
}
"""By the names that recipes give them."""
