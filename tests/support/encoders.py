"""Small encoders with random weights, saved in the real formats, with tokenizers for a few words."""

from pathlib import Path
from string import ascii_lowercase
from typing import Any, Optional

import numpy as np
import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, StableDiffusionXLPipeline, UNet2DConditionModel
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoTokenizer,
    BatchFeature,
    ByT5Tokenizer,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PixtralVisionConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5EncoderModel,
    T5GemmaConfig,
    T5Tokenizer,
)
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

from energon_data.prepare.__main__ import main as prepare

T5_WIDTH, CLIP_WIDTH, PROJECTION = 16, 12, 10
CLIP_TOKENS = 20
WORDS = ("a", "red", "blue", "circle", "square", "left", "of")


def save_t5(folder: Path, tokenizer: Optional[Path] = None, *, width: int = T5_WIDTH, layers: int = 2) -> Path:
    """Save a small T5 with its tokenizer, in one folder or two."""
    torch.manual_seed(1)
    sizes = {"d_model": width, "d_kv": 4, "d_ff": 24, "num_layers": layers, "num_heads": 4, "vocab_size": 128}
    T5EncoderModel(T5Config(feed_forward_proj="gated-gelu", **sizes)).eval().save_pretrained(folder)
    marks = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces = [(f"▁{word}", -1.0) for word in WORDS] + [(letter, -5.0) for letter in ascii_lowercase]
    T5Tokenizer(vocab=marks + pieces, extra_ids=0).save_pretrained(tokenizer or folder)
    return folder


def save_clip(folder: Path, tokenizer: Optional[Path] = None, *, projected: bool = False) -> Path:
    """Save a CLIP text model of three layers with its tokenizer; with `projected`, like SDXL's second encoder."""
    torch.manual_seed(4 if projected else 2)
    sizes = {"hidden_size": CLIP_WIDTH, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3}
    marks = {"vocab_size": 80, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = CLIPTextConfig(max_position_embeddings=CLIP_TOKENS, projection_dim=PROJECTION, **sizes, **marks)
    kind = CLIPTextModelWithProjection if projected else CLIPTextModel
    kind(config).eval().save_pretrained(folder)
    merges = [("r", "e"), ("re", "d</w>"), ("o", "f</w>")]
    pieces = ["<|startoftext|>", "<|endoftext|>"]
    pieces += [letter + end for letter in ascii_lowercase for end in ("", "</w>")] + ["".join(pair) for pair in merges]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=CLIP_TOKENS).save_pretrained(tokenizer or folder)
    return folder


BYTES = sorted(ByteLevel.alphabet())
PICTURE_MARK = "<|image_pad|>"
MARKS = ("<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", PICTURE_MARK)
QWEN_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)
PIXTRAL_CHAT = "<bos>{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"


def byte_tokenizer(chat: Optional[str] = None, *, side: str = "right", adds_start: bool = False) -> Any:
    """Return a tokenizer of bytes and special tokens.

    Args:
        chat: chat template.
        side: side of the padding.
        adds_start: add a start token to every text by default.
    """
    tokenizer = Tokenizer(BPE(vocab={piece: i for i, piece in enumerate([*MARKS, *BYTES])}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    if adds_start:
        tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    marks = {"pad_token": "<pad>", "bos_token": "<bos>" if adds_start else None, "eos_token": "<eos>"}
    others = [mark for mark in MARKS if mark not in marks.values()]
    settings = {**marks, "additional_special_tokens": others, "padding_side": side, "chat_template": chat}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)


def save_byt5(folder: Path) -> Path:
    """Save a T5 with one token per byte."""
    torch.manual_seed(8)
    sizes = {"d_model": T5_WIDTH, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": 384}
    T5EncoderModel(T5Config(**sizes)).eval().save_pretrained(folder)
    ByT5Tokenizer().save_pretrained(folder)
    return folder


LANGUAGE_WIDTH = 8
LANGUAGE_MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "mistral3": (31, {"chat": PIXTRAL_CHAT, "side": "left", "adds_start": True}),
    "qwen3": (28, {"chat": QWEN_CHAT}),
    "qwen2_5_vl": (3, {"chat": QWEN_CHAT}),
    "gemma2": (3, {"side": "left", "adds_start": True}),
    "t5gemma": (3, {"side": "left", "adds_start": True}),
}
"""Number of layers and tokenizer settings of each language model, as the pipelines require them."""


def save_language_model(kind: str, folder: Path) -> Path:
    """Save a language model with its tokenizer."""
    layers, settings = LANGUAGE_MODELS[kind]
    language_model(kind, layers).save_pretrained(folder)
    byte_tokenizer(**settings).save_pretrained(folder)
    return folder


def language_model(kind: str, layers: int) -> Any:
    """Return a random language model with layers that change their input clearly."""
    torch.manual_seed(5)
    sizes = {"hidden_size": LANGUAGE_WIDTH, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"head_dim": 4, "num_hidden_layers": layers, "vocab_size": len(MARKS) + len(BYTES), "pad_token_id": 0}
    sizes |= {"initializer_range": 0.4, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**sizes)).eval()
    if kind == "t5gemma":
        return T5GemmaEncoder(T5GemmaConfig(encoder=sizes, decoder=sizes).encoder).eval()
    if kind == "gemma2":
        return Gemma2Model(Gemma2Config(**sizes)).eval()
    vision = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_hidden_layers": 1}
    if kind == "mistral3":
        config = Mistral3Config(text_config=MistralConfig(**sizes), vision_config=PixtralVisionConfig(**vision))
        return Mistral3ForConditionalGeneration(config).eval()
    del sizes["head_dim"]
    rope = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4}
    own = {"depth": 1, "hidden_size": 8, "num_heads": 2, "out_hidden_size": 8, "intermediate_size": 12}
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={**sizes, "rope_parameters": rope},
            vision_config=own,
            image_token_id=MARKS.index(PICTURE_MARK),
        )
    ).eval()


class Processor:
    """`Qwen2VLProcessor` for one text with pictures; its part for videos needs torchvision."""

    def __init__(self, tokenizer: Any, pictures: Any = None) -> None:
        self.tokenizer = tokenizer
        # At most 12 tokens for a picture of any size.
        sizes = {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}
        self.pictures = pictures or Qwen2VLImageProcessorPil(size=sizes)

    @classmethod
    def from_pretrained(cls, folder: str, **options: Any) -> "Processor":
        return cls(AutoTokenizer.from_pretrained(folder), Qwen2VLImageProcessorPil.from_pretrained(folder))

    def __call__(self, text: list[str], images: Any, padding: bool, return_tensors: str) -> BatchFeature:
        pixels = self.pictures(images=images, return_tensors=return_tensors)
        first, *parts = text[0].split(PICTURE_MARK)
        counts = (pixels["image_grid_thw"].prod(1) // 4).tolist()
        words = first + "".join(PICTURE_MARK * n + part for n, part in zip(counts, parts, strict=True))
        return BatchFeature({**self.tokenizer([words], padding=padding, return_tensors=return_tensors), **pixels})


def with_types(module: Any, words: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Mark the picture's tokens, as transformers 4 did for the pipelines; in version 5 the caller does."""
    return words, {**named, "mm_token_type_ids": (named["input_ids"] == MARKS.index(PICTURE_MARK)).int()}


def prepare_twice(root: Path) -> Path:
    """Save `vae`, `t5` and `clip`; prepare twelve captioned pictures of two sizes as `pixels` and `latents`."""
    save_vae(root / "vae"), save_t5(root / "t5"), save_clip(root / "clip")
    (root / "in").mkdir()
    rng = np.random.default_rng(1)
    for i in range(12):
        Image.fromarray(rng.integers(0, 256, (16, 16 + 16 * (i % 2), 3), np.uint8)).save(root / f"in/{i}.png")
        (root / f"in/{i}.txt").write_text(" ".join(WORDS[: 1 + i // 2]))  # two pictures share each caption
    common = ["images", "--in", str(root / "in"), "--multiple-of", "8", "--validation", "0", "--processes", "1"]
    texts = ["--text-encoder", f"text={root}/t5", "--text-encoder", f"pooled={root}/clip"]
    assert prepare([*common, "--out", str(root / "pixels")]) == 0
    assert prepare([*common, "--out", str(root / "latents"), "--vae", str(root / "vae"), *texts]) == 0
    return root


SDXL_PICTURES = {
    "wide": ((64, 32), 1, [32, 64, 0, 8, 16, 16]),
    "turned": ((64, 32), 6, [64, 32, 8, 0, 16, 16]),
    "square": ((48, 48), 1, [48, 48, 0, 0, 16, 16]),
    "odd": ((17, 16), 1, [16, 17, 0, 0, 16, 16]),
}
"""By name: stored width and height, EXIF orientation, and the six size conditions for `--size 16 --aspect square`."""
SDXL_OPTIONS = "layer=penultimate:padded"


def prepare_sdxl(root: Path) -> Path:
    """Save encoders like those of Stable Diffusion XL; prepare `SDXL_PICTURES` as `joined`, `first` and `pixels`."""
    save_vae(root / "vae"), save_clip(root / "clip"), save_clip(root / "projected", projected=True)
    (root / "in").mkdir()
    rng = np.random.default_rng(1)
    for i, (name, ((width, height), orientation, _)) in enumerate(SDXL_PICTURES.items()):
        exif = Image.Exif()
        exif[0x0112] = orientation
        Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(root / f"in/{name}.png", exif=exif)
        (root / f"in/{name}.txt").write_text(" ".join(WORDS[: 1 + i]))
    common = ["images", "--in", str(root / "in"), "--size", "16", "--aspect", "square", "--multiple-of", "8"]
    common += ["--validation", "0", "--processes", "1"]
    first = ["--text-encoder", f"text={root}/clip:{SDXL_OPTIONS}"]
    second = ["--text-encoder", f"text+pooled={root}/projected:{SDXL_OPTIONS}:joined"]
    latents = ["--vae", str(root / "vae")]
    assert prepare([*common, "--out", str(root / "pixels")]) == 0
    assert prepare([*common, "--out", str(root / "first"), *latents, *first]) == 0
    assert prepare([*common, "--out", str(root / "joined"), *latents, *first, *second]) == 0
    return root


DC_AUTOENCODER = {
    **{f"{part}_block_out_channels": (8, 8, 8) for part in ("encoder", "decoder")},
    **{f"{part}_layers_per_block": (1, 1, 1) for part in ("encoder", "decoder")},
    **{f"{part}_qkv_multiscales": ((), (), ()) for part in ("encoder", "decoder")},
    **{"latent_channels": 4, "attention_head_dim": 4, "scaling_factor": 0.41407},
}
"""Settings of a small `AutoencoderDC`."""


def autoencoder_blocks(*channels: int) -> dict[str, tuple[Any, ...]]:
    """Return the settings of diffusers' image autoencoders for blocks of these channels."""
    down, up = ("DownEncoderBlock2D",) * len(channels), ("UpDecoderBlock2D",) * len(channels)
    return {"block_out_channels": channels, "down_block_types": down, "up_block_types": up}


def save_vae(folder: Path, blocks: int = 3) -> Path:
    """Save an image autoencoder of 4 channels that halves the sides between blocks; three compress 4 x 4 pixels."""
    torch.manual_seed(3)
    sizes = {**autoencoder_blocks(*(8,) * blocks), "norm_num_groups": 4, "latent_channels": 4}
    AutoencoderKL(**sizes, scaling_factor=0.3611).eval().save_pretrained(folder)
    return folder


def save_stable_diffusion(
    root: Path, scheduler: Any, *, xl: bool = False, latent_side: int = 8, **settings: Any
) -> Path:
    """Save a pipeline of Stable Diffusion v1 or XL for pictures with eight times the side of the latents.

    Args:
        scheduler: scheduler of the pipeline.
        settings: further arguments of the pipeline.
    """
    parts: dict[str, Any] = {"vae": AutoencoderKL.from_pretrained(save_vae(root / "vae", blocks=4))}
    for name, projected in {"text_encoder": False, **({"text_encoder_2": True} if xl else {})}.items():
        tokenizer = name.replace("text_encoder", "tokenizer")
        save_clip(root / name, root / tokenizer, projected=projected)
        kind = CLIPTextModelWithProjection if projected else CLIPTextModel
        parts |= {name: kind.from_pretrained(root / name), tokenizer: CLIPTokenizer.from_pretrained(root / tokenizer)}
    sizes: dict[str, Any] = {"sample_size": latent_side, "block_out_channels": (8, 16), "layers_per_block": 1}
    plain, crossed = ("DownBlock2D", "UpBlock2D"), ("CrossAttnDownBlock2D", "CrossAttnUpBlock2D")
    if xl:
        sizes |= {"attention_head_dim": (2, 4), "transformer_layers_per_block": (1, 2), "use_linear_projection": True}
        sizes |= {"addition_embed_type": "text_time", "addition_time_embed_dim": 256}
        sizes |= {"projection_class_embeddings_input_dim": PROJECTION + 6 * 256, "cross_attention_dim": 2 * CLIP_WIDTH}
    else:
        sizes |= {"attention_head_dim": 2, "cross_attention_dim": CLIP_WIDTH}
    (down, up), (deep_down, deep_up) = (plain, crossed) if xl else (crossed, plain)
    blocks = {"down_block_types": (down, deep_down), "up_block_types": (deep_up, up)}
    unet = UNet2DConditionModel(**sizes, **blocks, norm_num_groups=4)
    generator = torch.Generator().manual_seed(0)
    unet.load_state_dict({n: 0.2 * torch.randn(x.shape, generator=generator) for n, x in unet.state_dict().items()})
    if xl:
        settings |= {"add_watermarker": False}
    else:
        settings |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    kind = StableDiffusionXLPipeline if xl else StableDiffusionPipeline
    kind(**parts, unet=unet, scheduler=scheduler, **settings).save_pretrained(root)
    return root
