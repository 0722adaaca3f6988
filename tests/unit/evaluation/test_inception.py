"""Inception's features with random weights, compared with an explicit forward pass of the published network."""

import math
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from dit.errors import ConfigError
from dit.evaluation.features import load_features
from dit.evaluation.inception import InceptionV3, resize

CPU = torch.device("cpu")
TRUNK = 27_161_264 - (2_048 * 1_000 + 1_000) - (768 * 128 + 256 + 128 * 768 * 25 + 2 * 768 + 768 * 1_000 + 1_000)
"""Number of parameters that torchvision documents for `inception_v3`, without its head and its auxiliary head."""
RTOL = 1e-4  # fp32, another order of sums over 94 convolutions


@cache
def state() -> dict[str, Tensor]:
    """Random weights that keep the size of activations, in the published names."""
    torch.manual_seed(0)
    found = {}
    for name, x in InceptionV3().state_dict().items():
        if name.endswith("conv.weight"):
            found[name] = torch.randn(x.shape) * math.sqrt(2 / x[0].numel())
        elif name.endswith("num_batches_tracked"):
            found[name] = torch.tensor(7)
        elif name.endswith(("bn.weight", "running_var")):
            found[name] = torch.rand(x.shape) + 0.5
        else:
            found[name] = torch.randn(x.shape) * 0.2
    return found | {"fc.weight": torch.randn(1008, 2048), "fc.bias": torch.randn(1008)}


class Plain:
    """The published network, step by step."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights

    def conv(self, x: Tensor, name: str, stride: int = 1, padding: int | tuple[int, int] = 0) -> Tensor:
        w = {part: self.weights[f"{name}.{part}"] for part in ("conv.weight", "bn.weight", "bn.bias")}
        mean, variance = (self.weights[f"{name}.bn.running_{part}"] for part in ("mean", "var"))
        x = F.conv2d(x, w["conv.weight"], None, stride, padding)
        x = (x - mean[:, None, None]) / (variance[:, None, None] + 0.001).sqrt()
        return F.relu(x * w["bn.weight"][:, None, None] + w["bn.bias"][:, None, None])

    def chain(self, x: Tensor, block: str, *steps: tuple) -> Tensor:
        for name, *given in steps:
            x = self.conv(x, f"{block}.{name}", *given)
        return x

    def average(self, x: Tensor) -> Tensor:
        """Mean of the 3 x 3 neighbours inside the picture."""
        padded = F.pad(x, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1).sum((-1, -2))
        ones = F.pad(torch.ones_like(x[:1, :1]), (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1).sum((-1, -2))
        return padded / ones

    def a(self, x: Tensor, b: str) -> Tensor:
        return torch.cat(
            [
                self.chain(x, b, ("branch1x1",)),
                self.chain(x, b, ("branch5x5_1",), ("branch5x5_2", 1, 2)),
                self.chain(x, b, ("branch3x3dbl_1",), ("branch3x3dbl_2", 1, 1), ("branch3x3dbl_3", 1, 1)),
                self.chain(self.average(x), b, ("branch_pool",)),
            ],
            1,
        )

    def b(self, x: Tensor, b: str) -> Tensor:
        double = self.chain(x, b, ("branch3x3dbl_1",), ("branch3x3dbl_2", 1, 1), ("branch3x3dbl_3", 2))
        return torch.cat([self.chain(x, b, ("branch3x3", 2)), double, F.max_pool2d(x, 3, 2)], 1)

    def c(self, x: Tensor, b: str) -> Tensor:
        row, column = (1, (0, 3)), (1, (3, 0))
        single = (("branch7x7_1",), ("branch7x7_2", *row), ("branch7x7_3", *column))
        double = (("1",), ("2", *column), ("3", *row), ("4", *column), ("5", *row))
        return torch.cat(
            [
                self.chain(x, b, ("branch1x1",)),
                self.chain(x, b, *single),
                self.chain(x, b, *((f"branch7x7dbl_{name}", *given) for name, *given in double)),
                self.chain(self.average(x), b, ("branch_pool",)),
            ],
            1,
        )

    def d(self, x: Tensor, b: str) -> Tensor:
        long = (("1",), ("2", 1, (0, 3)), ("3", 1, (3, 0)), ("4", 2))
        return torch.cat(
            [
                self.chain(x, b, ("branch3x3_1",), ("branch3x3_2", 2)),
                self.chain(x, b, *((f"branch7x7x3_{name}", *given) for name, *given in long)),
                F.max_pool2d(x, 3, 2),
            ],
            1,
        )

    def e(self, x: Tensor, b: str, *, last: bool) -> Tensor:
        one = self.chain(x, b, ("branch3x3_1",))
        two = self.chain(x, b, ("branch3x3dbl_1",), ("branch3x3dbl_2", 1, 1))
        pooled = F.max_pool2d(x, 3, 1, 1) if last else self.average(x)
        return torch.cat(
            [
                self.chain(x, b, ("branch1x1",)),
                self.chain(one, b, ("branch3x3_2a", 1, (0, 1))),
                self.chain(one, b, ("branch3x3_2b", 1, (1, 0))),
                self.chain(two, b, ("branch3x3dbl_3a", 1, (0, 1))),
                self.chain(two, b, ("branch3x3dbl_3b", 1, (1, 0))),
                self.chain(pooled, b, ("branch_pool",)),
            ],
            1,
        )

    @torch.no_grad()
    def features(self, pictures: Tensor) -> Tensor:
        """Return the features of bytes `[N, 3, 299, 299]`."""
        x = (pictures.float() - 128) / 128
        x = self.conv(self.conv(x, "Conv2d_1a_3x3", 2), "Conv2d_2a_3x3")
        x = F.max_pool2d(self.conv(x, "Conv2d_2b_3x3", 1, 1), 3, 2)
        x = F.max_pool2d(self.conv(self.conv(x, "Conv2d_3b_1x1"), "Conv2d_4a_3x3"), 3, 2)
        for block in ("5b", "5c", "5d"):
            x = self.a(x, f"Mixed_{block}")
        x = self.b(x, "Mixed_6a")
        for block in ("6b", "6c", "6d", "6e"):
            x = self.c(x, f"Mixed_{block}")
        x = self.e(self.d(x, "Mixed_7a"), "Mixed_7b", last=False)
        return self.e(x, "Mixed_7c", last=True).mean((2, 3))


@pytest.fixture(scope="module")
def pictures() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (2, 3, 299, 299), generator=generator, dtype=torch.uint8)


@pytest.fixture(scope="module")
def expected(pictures: Tensor) -> Tensor:
    return Plain(state()).features(pictures)


@pytest.mark.parametrize(("file", "has_counters"), [("weights.pth", True), ("weights.safetensors", False)])
def test_features_equal_those_of_the_published_network(
    file: str, has_counters: bool, tmp_path: Path, pictures: Tensor, expected: Tensor
) -> None:
    """Batch counters, which old files do not have, do not matter."""
    kept = {name: x for name, x in state().items() if has_counters or not name.endswith("num_batches_tracked")}
    save = torch.save if file.endswith("pth") else save_file
    save(kept, tmp_path / file)
    scale = float(expected.abs().max())
    network = load_features(tmp_path / file, CPU)
    found = network(pictures.float() / 127.5 - 1)
    assert found.shape == (2, 2048)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=RTOL, atol=RTOL * scale)
    assert network.network == "Inception of FID"


def test_the_trunk_has_as_many_parameters_as_published() -> None:
    assert sum(x.numel() for x in InceptionV3().parameters()) == TRUNK


@pytest.mark.parametrize(("height", "width"), [(32, 64), (299, 299), (512, 400)])
def test_pictures_are_resized_by_the_rule_of_tensorflow_1(height: int, width: int) -> None:
    """Pixel (i, j) is read at (i H / 299, j W / 299), between four neighbours."""
    image = torch.rand(1, 1, height, width, generator=torch.Generator().manual_seed(0)) * 255
    found = resize(image, 299)
    for i, j in [(0, 0), (1, 2), (150, 149), (298, 298), (297, 5)]:
        y, x = i * height / 299, j * width / 299
        top, left = int(y), int(x)
        bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
        dy, dx = y - top, x - left
        above = image[0, 0, top, left] * (1 - dx) + image[0, 0, top, right] * dx
        below = image[0, 0, bottom, left] * (1 - dx) + image[0, 0, bottom, right] * dx
        assert float(found[0, 0, i, j]) == pytest.approx(float(above * (1 - dy) + below * dy), rel=1e-5)


def test_other_tensors_are_named(tmp_path: Path) -> None:
    path, weights = tmp_path / "x.pth", state()

    def refusal(changed: dict[str, Tensor]) -> str:
        torch.save(changed, path)
        with pytest.raises(ConfigError) as caught:
            load_features(path, CPU)
        return str(caught.value)

    trunk = {name: x for name, x in weights.items() if not name.startswith("fc.")}
    assert "with no head; FID's network has 1,008 classes" in refusal(trunk)
    assert "a head of 10 classes" in refusal(trunk | {"fc.weight": torch.zeros(10, 2048)})
    name = "Mixed_6b.branch7x7_2.conv.weight"
    assert f'Missing key(s) in state_dict: "{name}"' in refusal({k: x for k, x in weights.items() if k != name})
    turned = weights | {name: weights[name].transpose(2, 3).contiguous()}
    assert f"size mismatch for {name}: copying a param with shape torch.Size([128, 128, 7, 1])" in refusal(turned)
    assert 'Unexpected key(s) in state_dict: "AuxLogits2.x"' in refusal(weights | {"AuxLogits2.x": torch.zeros(1)})
    assert "has tensors such as a, which are not those of Inception v3" in refusal({"a": torch.zeros(1)})
