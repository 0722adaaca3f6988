"""Write a FLUX.2 klein pipeline of diffusers with small random networks: `python -m examples.flux2.tiny --out DIR`.

It has every part of the published pipeline in its class: a Qwen3 of 28 layers with a tokenizer of bytes, an
autoencoder that compresses 8 x 8 pixels, and a transformer of 308,352 parameters.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

import torch
from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
from diffusers.pipelines.flux2.pipeline_flux2_klein import Flux2KleinPipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dit.errors import ConfigError, one_line_errors
from dit.terminal import echo

MARKS = ("<pad>", "<eos>", "<|im_start|>", "<|im_end|>")
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)
WIDTH, LAYERS_READ = 16, 3


def tokenizer() -> Any:
    """Return a tokenizer of bytes with Qwen3's form of a chat."""
    vocabulary = {piece: i for i, piece in enumerate([*MARKS, *sorted(ByteLevel.alphabet())])}
    network = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    network.pre_tokenizer = ByteLevel(add_prefix_space=False)
    settings = {"pad_token": "<pad>", "eos_token": "<eos>", "additional_special_tokens": list(MARKS[2:])}
    return PreTrainedTokenizerFast(tokenizer_object=network, chat_template=CHAT, **settings)


def pipeline() -> Any:
    """Return the pipeline."""
    torch.manual_seed(0)
    tokens = tokenizer()
    text = Qwen3Config(
        vocab_size=len(tokens),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=28,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        initializer_range=0.3,
    )
    down, up = ("DownEncoderBlock2D",) * 4, ("UpDecoderBlock2D",) * 4
    vae = AutoencoderKLFlux2(
        down_block_types=down, up_block_types=up, block_out_channels=(8,) * 4, norm_num_groups=4, latent_channels=4
    )
    transformer = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=LAYERS_READ * WIDTH,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    return Flux2KleinPipeline(
        FlowMatchEulerDiscreteScheduler(shift=3.0), vae, Qwen3ForCausalLM(text), tokens, transformer
    )


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="examples.flux2.tiny", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder")
    out = parser.parse_args(argv).out
    if out.exists():
        raise ConfigError(f"--out {out} already exists and is not changed; choose another or remove it")
    pipeline().save_pretrained(out)
    echo(str(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
