"""Objectives: one file each, one line here each."""

OBJECTIVES = {
    "autoencoding": "dit.objectives.autoencoding:Autoencoding",
    "contrastive_flow_matching": "dit.objectives.contrastive:ContrastiveFlowMatching",
    "ddpm": "dit.objectives.ddpm:DDPM",
    "edm": "dit.objectives.edm:EDM",
    "flow_matching": "dit.objectives.flow_matching:FlowMatching",
    "mean_flow": "dit.objectives.mean_flow:MeanFlow",
    "vq_autoencoding": "dit.objectives.vq_autoencoding:VQAutoencoding",
}
"""By the names that recipes give them."""
