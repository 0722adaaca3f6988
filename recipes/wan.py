"""Wan-shaped video transformers: flow matching on synthetic clips.

The forms at full size measure systems and live in benchmarks/model_recipes.py.
"""

from typing import Any

import nemo_run as run

from dit.models.wan.config import WanConfig
from recipes.base import variant
from recipes.dit import as_tiny, flow_conditional

FLOW: dict[str, Any] = {"guidance_scale": 5.0, "time_shift": 3.0}
"""Settings of `flow_conditional`. Times are moved towards noise, because the sequences are long. One text in ten is
dropped, this project's choice."""

tiny_wan = variant(
    "tiny_wan", lambda: as_tiny(flow_conditional(run.Config(WanConfig), **FLOW)), model={"ffn_hidden_size": 128}
)
"""2-layer Wan of width 64, images and clips with texts: any machine.

Packs of 128 tokens, 20 steps; the loss falls by a tenth or more.
"""


tiny_wan_image_to_video = variant("tiny_wan_image_to_video", tiny_wan, data={"clean_first_frame": 0.5})
"""tiny_wan, in which half of the clips have a clean first frame: any machine.

Packs of 128 tokens, 20 steps; clean tokens do not count in the loss, which falls by a tenth or more.
"""
