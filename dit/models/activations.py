"""What autograd keeps of a layer for its backward pass, on CUDA: numbers per row, counted by sub-layer.

A number is as wide as the run's activations. What a row keeps once for all layers (embedding, text, rotations) and what
a sample keeps (modulations) is not counted, nor are the few numbers per head and row of softmax and norms.
"""

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class BatchForm:
    """What of a run decides which numbers are kept.

    Attributes:
        half: activations are bf16; a float32 copy counts as two numbers.
        several: a micro-batch holds several samples.
        ragged: they do not lie as one dense batch (a pack, or rows spread over ranks), so that each row gets its own
            copy of its sample's scale and gate.
    """

    half: bool = True
    several: bool = False
    ragged: bool = False


@dataclass(frozen=True)
class Kept:
    """Numbers that a layer keeps of one row.

    Attributes:
        whole: spread over tensor-parallel ranks by sequence parallelism only.
        split: spread over tensor-parallel ranks by their features.
        cheap_whole, cheap_split: of these, what selective recompute makes again.
        input: of `whole`, the layer's input, which is all that full recompute keeps.
    """

    whole: float = 0.0
    split: float = 0.0
    cheap_whole: float = 0.0
    cheap_split: float = 0.0
    input: float = 0.0

    def __add__(self, other: "Kept") -> "Kept":
        return Kept(*(a + b for a, b in zip(astuple(self), astuple(other))))


@dataclass(frozen=True)
class SavedActivations:
    """What one layer keeps of each token, and of each token of its text."""

    token: Kept
    text: Kept = Kept()


def gated_sublayer(hidden_size: int, form: BatchForm) -> Kept:
    """Count a norm with its modulation and a gated residual around a sub-layer: input, norm, modulated norm, output."""
    h = hidden_size
    return Kept(whole=(4 + 2 * form.ragged) * h, cheap_whole=(2 + form.ragged) * h)


def plain_norm(hidden_size: int) -> Kept:
    """Count a norm with weights and no modulation: its input and its output."""
    return Kept(whole=2 * hidden_size)


def self_attention(
    hidden_size: int,
    kv_size: int,
    form: BatchForm,
    *,
    norm: bool,
    rotary: bool,
    full_width: bool = False,
    reordered: bool = False,
) -> Kept:
    """Count the projection to queries, keys and values, what norm and rotation make of it, and the output.

    The projection stays whole as long as its values are kept, for they are a view of it.

    Args:
        kv_size: width of all keys.
        norm: QK-layernorm.
        full_width: that norm goes over all heads together.
        reordered: attention gets its rows in another order (temporal attention), so copies of all of them.
    """
    h, kv = hidden_size, kv_size
    projection, turned = h + 2 * kv, h + kv
    # Grouped queries do not lie side by side in the projection.
    apart = h * (kv < h and norm and not (full_width and form.half))
    if reordered:
        return Kept(split=projection * (1 + norm) + apart + 2 * h)
    if not norm and not rotary:
        return Kept(split=projection + h * (kv < h) + h)
    return Kept(split=projection + apart + turned * (1 + _full_width_copies(form) * (norm and full_width)) + h)


def cross_attention(hidden_size: int, form: BatchForm, *, norm: bool, full_width: bool = False) -> Kept:
    """Count queries, what their norm makes of them, and the output; the arguments are those of `self_attention`."""
    queries = 1 + norm
    if norm and full_width:
        # A float32 copy takes the place of bf16 queries, and is the queries themselves in float32.
        queries = 1 + (not form.half) + _full_width_copies(form)
    return Kept(split=(queries + 1) * hidden_size)


def text_keys(kv_size: int, form: BatchForm, *, norm: bool, full_width: bool = False) -> Kept:
    """Count keys and values of a text token and what the norm makes of its keys."""
    return Kept(split=kv_size * (2 + norm * (1 + _full_width_copies(form) * full_width)))


def _full_width_copies(form: BatchForm) -> int:
    """Count what the norm over all heads keeps besides its result: float32 input and, before the weight, output."""
    return 4 if form.half else 1


def mlp(ffn_size: int) -> Kept:
    """Count the MLP's vector before and after its activation."""
    return Kept(split=2 * ffn_size, cheap_split=ffn_size)


def swiglu(ffn_size: int) -> Kept:
    """Count gate, up, SiLU of the gate, and their product."""
    return Kept(split=4 * ffn_size, cheap_split=2 * ffn_size)


def experts(hidden_size: int, expert_size: int, met: float, form: BatchForm, *, gated: bool) -> Kept:
    """Count input, output and inside of the experts that a token meets, and the router's float32 copy of the token.

    Args:
        met: experts that a token meets on average.
        gated: experts are SwiGLU.
    """
    inside = swiglu(expert_size) if gated else mlp(expert_size)
    # In bf16 the router has an fp32 copy, which selective recompute does not drop; in fp32 it uses the norm's output.
    router = hidden_size * form.half
    return Kept(
        whole=router,
        cheap_whole=-router,
        split=met * (2 * hidden_size + inside.split),
        cheap_split=met * inside.cheap_split,
    )
