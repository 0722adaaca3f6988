"""T5 and CLIP, compared with transformers and diffusers on the same weights; settings of several encoders."""

from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline
from transformers import AutoTokenizer, CLIPTextModel

from dit.encoders.text import TextEncoder, TextEncoders
from dit.encoders.text_config import TextEncoderConfig, check_text_encoder
from dit.errors import ConfigError
from dit.pipeline_folder import with_folders_of
from tests.support.encoders import CLIP_TOKENS, save_clip, save_language_model, save_t5

TEXTS = ["a red circle left of a blue square", "", "a circle", "a red circle", "blue"]
LONG = "a red circle left of a blue square of a red square"
ROUNDING = {"rtol": 1e-4, "atol": 1e-5}  # fp32: another batch size sums in another order


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A pipeline's folder with tokenizers next to the models, and models that contain tokenizers."""
    root = tmp_path_factory.mktemp("encoders")
    save_clip(root / "text_encoder", root / "tokenizer")
    save_t5(root / "text_encoder_2", root / "tokenizer_2")
    save_t5(root / "t5")
    save_clip(root / "projected", projected=True)
    save_language_model("qwen3", root / "qwen3")
    return root


def same(found, expected) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, **ROUNDING)


def test_clip_gives_the_tokens_of_stable_diffusion(folder):
    """Each text has its tokens up to the end token; with `padded`, all tokens."""
    pipeline = StableDiffusionPipeline(
        vae=None,
        text_encoder=CLIPTextModel.from_pretrained(folder / "text_encoder").eval(),
        tokenizer=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        unet=None,
        scheduler=None,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    with torch.no_grad():
        padded, empty = pipeline.encode_prompt([*TEXTS, LONG], "cpu", 1, True)
    line = str(folder / "text_encoder")
    same(TextEncoders(f"{line}:padded").encode([*TEXTS, LONG])["text"], padded)
    made = TextEncoders(line).encode([*TEXTS, LONG])["text"]
    lengths = [len(rows) for rows in made]
    assert lengths[1] == 2  # the empty text: start and end
    assert lengths[-1] == max(lengths) == CLIP_TOKENS  # truncated, with its end token
    same(made, [rows[:length] for rows, length in zip(padded, lengths)])
    same(made[1:2], empty[:1, :2])


@pytest.mark.parametrize("padding", ["padded", "padded_once"])
def test_an_empty_text_without_tokens_has_padding_like_other_texts(folder, padding):
    """The tokenizer of Qwen3 adds neither start nor end token."""
    encoder = TextEncoder(TextEncoderConfig.parse(f"{folder}/qwen3:max_tokens=8:{padding}"))
    texts = ["", "a cat", "a"]
    together = encoder.encode(texts)["text"]
    for text, ids, rows in zip(texts, encoder.tokenize(texts), together, strict=True):
        assert rows.isfinite().all()
        assert len(rows) == encoder.rows(ids) == (8 if padding == "padded" else len(ids) + 1)
        same(encoder.encode([text])["text"], [rows])


@pytest.mark.parametrize("name", ["t5", "text_encoder", "identity"])
def test_an_embedding_does_not_depend_on_the_other_texts(folder, name):
    line = name if name == "identity" else f"{folder}/{name}"
    encoders = TextEncoders(line if name != "text_encoder" else f"text+pooled={line}")
    together = encoders.encode([*TEXTS, *TEXTS[::-1]])
    for i, text in enumerate(TEXTS):
        alone = encoders.encode([text])
        for entry, rows in together.items():
            same([rows[i], rows[-1 - i]], [alone[entry][0]] * 2)


def test_the_identity_is_the_bytes_of_a_text():
    (rows,) = TextEncoders("identity").encode(["hé"])["text"]
    assert rows.shape == (4, 257)
    assert rows.argmax(1).tolist() == [*"hé".encode(), 256]
    assert rows.sum() == 4


def test_a_tokenizer_without_a_chat_template_is_refused(folder):
    with pytest.raises(ConfigError, match=r"text encoder '.*/t5': .*chat.template"):
        TextEncoders(f"{folder}/t5:prompt=chat").encode(["a"])


def test_a_line_is_parsed_as_written(tmp_path, monkeypatch):
    for text in (
        "a/b",
        "text_2+pooled=a/b/c:layer=penultimate:max_tokens=7:padded",
        "a/b:prompt=wan:layer=-3+0:appended",
        "a/b:max_tokens=24:zero_padded",
    ):
        assert str(TextEncoderConfig.parse(text)) == text
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert TextEncoderConfig.parse("pooled=mine").recorded() == TextEncoderConfig.parse(f"pooled={tmp_path}/mine")
    assert str(TextEncoderConfig.parse("all-minilm-l6-v2").recorded()) == "all-minilm-l6-v2"


@pytest.mark.parametrize("line", ["mine", "text=mine:padded", "text_2+pooled=mine"])
def test_a_folder_may_have_an_equals_sign_in_its_path(tmp_path, monkeypatch, line):
    """The record of a data set has the absolute path, which commands read."""
    (tmp_path / "date=1" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "date=1")
    recorded = TextEncoderConfig.parse(line).recorded()
    assert recorded.name == f"{tmp_path}/date=1/mine"
    assert TextEncoderConfig.parse(str(recorded)) == recorded
    assert TextEncoderConfig.parse(with_folders_of(str(recorded), line)) == recorded


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("t5", "unknown; use one of all-minilm"),
        ("{0}/nothing", "text encoder .* cannot be loaded|unknown"),
        ("label={0}/t5", "entries are text, text_2, pooled"),
        ("text+text={0}/t5", "write NAME"),
        ("{0}/t5,{0}/text_encoder", "make text twice; name other entries"),
        ("pooled={0}/t5", "makes no pooled vector"),
        ("{0}/t5:layer=2", "has no layer=2; use layers from -2 to 1"),
        ("identity:layer=penultimate", "has no layer=penultimate; leave it out"),
        ("identity:padded", "has no padding"),
        ("identity:zero_padded", "has no padding; leave out :zero_padded"),
        ("{0}/t5:padded:zero_padded", "has :padded and :zero_padded; choose one"),
        ("{0}/t5:layer=first", "is not an option"),
        ("{0}/t5:prompt=flux", "is not an option; use .* prompt= plain, lower_case, wan"),
        ("{0}/t5:max_tokens=0", "is not an option"),
        ("{0}/text_encoder:max_tokens=21", "reads 20 tokens, not max_tokens=21"),
        ("{0}/t5:half", "is not an option"),
        ("{0}/t5:padded:joined", "no text before the joined encoder"),
        ("pooled={0}/text_encoder,text+pooled={0}/projected:padded:joined", "have no text before the joined encoder"),
        ("{0}/text_encoder,{0}/projected:padded:joined", "needs texts of one length"),
        ("{0}/t5:padded,{0}/projected:padded:joined", "needs texts of one length"),
    ],
)
def test_an_invalid_line_is_refused_with_the_cure(folder, line, fault):
    with pytest.raises(ConfigError, match=fault):
        check_text_encoder(line.format(folder))


def test_another_kind_of_network_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match=r"is a gpt2; supported kinds are .*t5"):
        check_text_encoder(str(tmp_path))
