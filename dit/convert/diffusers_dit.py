"""Convert diffusers' `DiTTransformer2DModel` to and from our DiT.

Every block has time and label embedders; they must be equal to be imported. The sinusoid of the time reaches 1 / 10000
one frequency earlier: our `time_frequency_shift=1`. The paper's code has 0, so weights trained with 0 get slightly
different time features in diffusers. `norm_eps` applies only to the norm before the MLP; we have one epsilon, 1e-6, as
in the paper's code. Times are steps 0 to 999, so `time_scale` must be 1000.

Source: diffusers 0.38, `models/transformers/dit_transformer_2d.py`, names and settings.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dit.convert.diffusers_format import DiffusersFormat, LatentSize, TrainedModel, patches, square_side
from dit.convert.original_dit import check_class_dit, position_table, published_sampling, trained_objective
from dit.convert.rules import Copies, Form
from dit.errors import ConfigError
from dit.models.dit.config import DiTConfig

PIPELINE_CLASSES = 1000
"""`DiTPipeline` uses this index for "no class", independent of the network."""


class DiffusersDiT(DiffusersFormat[DiTConfig]):
    """`DiTTransformer2DModel`; the published DiT-XL/2 folders have its old name."""

    class_name = "DiTTransformer2DModel"
    aliases = ("Transformer2DModel",)
    config_class = DiTConfig
    other = ("dropout", "norm_num_groups", "upcast_attention", "norm_eps")
    same: Mapping[str, str] = {"patch_spatial": "patch_size", "num_classes": "num_embeds_ada_norm"}
    names: Mapping[str, str] = {
        "embed": "pos_embed.proj",
        "conditioner.time.linear_(1|2)": "transformer_blocks.#.norm1.emb.timestep_embedder.linear_(1|2)",
        "conditioner.label": "transformer_blocks.#.norm1.emb.class_embedder.embedding_table",
        "layers.#.attention.linear_qkv": "transformer_blocks.#.attn1.to_(q|k|v)",
        "layers.#.attention.linear_proj": "transformer_blocks.#.attn1.to_out.0",
        "layers.#.mlp.linear_fc(1|2)": "transformer_blocks.#.ff.net.(0.proj|2)",
        "layers.#.modulation.linear": "transformer_blocks.#.norm1.linear",
        "head.(modulation|linear)": "proj_out_(1|2)",
    }
    free = ("routing", "time_frequency_shift")

    def trained(self, model: DiTConfig, published: Mapping[str, Any]) -> TrainedModel:
        notes = []
        if published["norm_eps"] != model.layernorm_epsilon:
            notes.append(
                f"norm_eps={published['norm_eps']:g} applies only to the norm before the MLP; ours has "
                f"{model.layernorm_epsilon:g} everywhere, as the paper's code"
            )
        size = (1, published["sample_size"], published["sample_size"])
        return TrainedModel(model, trained_objective(model), size, published_sampling(model), notes=notes)

    def read_sizes(self, published: Mapping[str, Any]) -> dict[str, Any]:
        return super().read_sizes(published) | {"time_frequency_shift": 1}

    def write_sizes(self, model: DiTConfig, latent_size: LatentSize) -> dict[str, Any]:
        check_class_dit(model, self.class_name)
        return super().write_sizes(model, latent_size) | {"norm_eps": model.layernorm_epsilon}

    def notes(self, model: DiTConfig, latent_size: LatentSize) -> list[str]:
        _, notes = square_side(self.class_name, latent_size, model.patch_spatial)
        if model.time_frequency_shift != 1:
            notes.append(
                "the model was trained with time_frequency_shift=0, diffusers computes the time's sinusoid with 1 "
                "(frequencies 10000 ** -(i / 127) instead of 10000 ** -(i / 128)), so its outputs differ slightly; "
                "train with model.time_frequency_shift=1 for equal outputs"
            )
        return notes

    def for_pipeline(self, trained: TrainedModel, weights: dict[str, Tensor]) -> tuple[TrainedModel, dict[str, Tensor]]:
        """Move the vector of "no class" to the index that `DiTPipeline` uses, after zeros for unused classes."""
        assert isinstance(trained.model, DiTConfig)
        classes, name = trained.model.num_classes, "conditioner.label.weight"
        if classes is None or classes > PIPELINE_CLASSES:
            raise ConfigError(f"--format pipeline: DiTPipeline has at most {PIPELINE_CLASSES} classes, not {classes}")
        unused = weights[name].new_zeros(PIPELINE_CLASSES - classes, weights[name].shape[1])
        table = torch.cat([weights[name][:classes], unused, weights[name][classes:]])
        names = trained.class_names or [str(i) for i in range(classes)]
        model = replace(trained.model, num_classes=PIPELINE_CLASSES)
        return replace(trained, model=model, class_names=names), {**weights, name: table}

    def forms(self, model: DiTConfig) -> Mapping[str, Form]:
        return {
            **super().forms(model),
            "embed.weight": patches("d c ph pw -> d (ph pw c)", model),
            "conditioner.(time.linear_1|time.linear_2|label)": Copies(model.num_layers),
        }

    def tables(self, model: DiTConfig, latent_size: LatentSize) -> Mapping[str, Tensor]:
        side, _ = square_side(self.class_name, latent_size, model.patch_spatial)
        return {"pos_embed.pos_embed": position_table(model.hidden_size, side // model.patch_spatial)}
