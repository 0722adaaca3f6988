"""Conversion of the models with `block=sandwich`, common to their diffusers classes.

Differences of diffusers' models, besides those of q, k and v in `dit.convert.diffusers_streams`:

* refiners of the image and of the text are two lists of blocks, ours are one list of layers with both;
* a SwiGLU has one matrix for gates and one for values; ours alternate in one matrix;
* the network predicts x0 - noise, the negated velocity, so the weights of the head have the opposite sign;
* files have patches with channels fastest, as ours, and the head has a scale only.
"""

from collections.abc import Mapping
from typing import TypeVar

from dit.convert.diffusers_streams import SELF_ATTENTION, DiffusersStreams, StreamNames, attention_rules
from dit.convert.rules import ByHead, Form, Negated, Rule, Same, with_bias
from dit.models.streams.config import StreamsConfig

Model = TypeVar("Model", bound=StreamsConfig)


class DiffusersSandwich(DiffusersStreams[Model]):
    """A diffusers class for a family with `block=sandwich`.

    Attributes:
        attention: name of the attention of a block.
        parts: names of its other layers by ours.
        mlp: names of gates, values and output of its MLP.
    """

    streams: Mapping[str, StreamNames] = {}
    blocks = ("refiner", "layers")
    attention: str
    parts: Mapping[str, str]
    mlp: tuple[str, str, str]

    def joint(self, model: Model, layer: str, block: str) -> list[Rule]:
        image = self.single(model, f"{layer}.image", f"noise_{block}")
        return [*image, *self.single(model, f"{layer}.text", f"context_{block}")]

    def single(self, model: Model, layer: str, block: str) -> list[Rule]:
        gates, values, out = (f"{block}.feed_forward.{name}" for name in self.mlp)
        names = (f"{block}.{self.attention}.{name}" for name in SELF_ATTENTION)
        return [
            *(
                rule
                for ours, theirs in self.parts.items()
                for rule in with_bias(f"{layer}.{ours}", f"{block}.{theirs}")
            ),
            *attention_rules(model, f"{layer}.attention", *names),
            *with_bias(f"{layer}.mlp.linear_fc1", gates, values, form=ByHead(1, (model.ffn_size,) * 2, alternate=True)),
            *with_bias(f"{layer}.mlp.linear_fc2", out),
        ]

    def forms(self, model: Model) -> Mapping[str, Form]:
        return {"head.modulation": Same(), "head.linear": Negated()}
