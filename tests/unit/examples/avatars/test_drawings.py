"""Avatars: their attributes change pixels, their captions name them, and training never sees some combinations."""

from itertools import product

import numpy as np
import pytest
import torch

from dit.batch import pixel_values
from dit.errors import ConfigError
from energon_data.folder import check_folder
from examples.avatars import design
from examples.avatars.drawings import ATTRIBUTES, caption, choose, draw, kind_of, prepare_avatars
from examples.avatars.judge import read
from tests.unit.energon_data.preparations import samples

KINDS = ("trained", "new combination", "new pair")
NUMBER_OF = {name: number for number, name in enumerate(ATTRIBUTES)}
PAIRS = (("hair", "hair colour"), ("clothing", "clothing colour"))


def pairs(avatars, names):
    return {tuple(avatar[NUMBER_OF[name]] for name in names) for avatar in avatars}


def test_shapes_fill_the_pixels_inside_a_path():
    """A ring of 3 x 3 with a hole, by either fill rule; a second square moves relative to the first."""
    ring = "M1 1h3v3H1V1ZM2 2v1h1V2H2Z"
    around = {(y, x) for y, x in product(range(1, 4), repeat=2)} - {(2, 2)}
    for even_odd in (False, True):
        assert {divmod(int(i), design.SIZE) for i in design._pixels(ring, even_odd)} == around
    same_way = "M1 1h3v3H1V1ZM2 2h1v1H2V2Z"
    assert len(design._pixels(same_way, False)) == 9
    assert len(design._pixels(same_way, True)) == 8
    assert [divmod(int(i), design.SIZE) for i in design._pixels("M4 2h1v1H4ZM6 5m1 1h1v1h-1z", False)] == [
        (2, 4),
        (6, 7),
    ]


def test_the_design_has_its_parts():
    counts = {kind: len(named) for kind, named in design.parts().items() if named}
    assert counts == {
        "head": 1, "accessories": 4, "beard": 8, "clothing": 23, "eyes": 12, "glasses": 14, "hair": 45, "hat": 10,
        "mouth": 23,
    }  # fmt: skip
    assert all(len(shape.pixels) for named in design.parts().values() for shapes in named.values() for shape in shapes)


def test_each_value_of_each_attribute_changes_pixels():
    avatars = np.array(choose("trained", 40))
    assert [len(values) for values in ATTRIBUTES.values()] == [4, 10, 6, 4, 6, 3, 4, 7, 5]
    for number, values in enumerate(ATTRIBUTES.values()):
        drawings = []
        for value in range(len(values)):
            avatars[:, number] = value
            drawings.append(draw(avatars))
        for one, other in product(range(len(values)), repeat=2):
            changed = (drawings[one] != drawings[other]).any((1, 2, 3))
            assert changed.all() if one != other else not changed.any()


def test_captions_name_every_attribute_in_any_order():
    avatar = (2, 5, 3, 0, 1, 2, 3, 1, 4)
    words = ["brown skin", "long red hair", "eyes ahead", "a frown", "a goatee", "sunglasses", "a purple striped shirt"]
    assert caption(avatar) == ", ".join(words)
    wordings = {caption(avatar, str(i)) for i in range(50)}
    assert len(wordings) > 40
    assert all(all(phrase in text for phrase in words) for text in wordings)
    assert caption((0,) * 9) == "pale skin, short blond hair, eyes ahead, a smile, a blue shirt"


def test_training_never_sees_the_held_out_combinations_and_pairs():
    chosen = {kind: choose(kind, 1000) for kind in KINDS}
    assert all(kind_of(avatar) == kind for kind, avatars in chosen.items() for avatar in avatars)
    assert sum(len(set(avatars)) for avatars in chosen.values()) == len(set().union(*chosen.values())) == 3000
    for names in PAIRS:
        styles, colours = (len(ATTRIBUTES[name]) for name in names)
        seen = pairs(chosen["trained"], names)
        assert len(seen) == styles * (colours - 1)
        assert len(pairs(chosen["new pair"], names) - seen) == styles
        assert pairs(chosen["new combination"], names) <= seen
        assert {style for style, _ in seen} == set(range(styles))
        assert {colour for _, colour in seen} == set(range(colours))
    assert all(any(pairs([a], names) - pairs(chosen["trained"], names) for names in PAIRS) for a in chosen["new pair"])
    assert chosen["trained"][:10] == choose("trained", 10)


@pytest.mark.parametrize(("noise", "share"), [(0, 1.0), (40, 0.98)])
def test_the_judge_reads_drawings(noise, share):
    avatars = [avatar for kind in KINDS for avatar in choose(kind, 50)]
    noisy = draw(avatars) + np.random.default_rng(0).normal(0, noise, (len(avatars), design.SIZE, design.SIZE, 3))
    assert (read(noisy.clip(0, 255).round()) == np.array(avatars)).mean() >= share


def test_samples_are_drawings_with_captions(tmp_path):
    prepare_avatars(tmp_path / "data", count=7, samples_per_shard=4).run(processes=1, force=False)
    avatars = choose("trained", 7)
    for avatar, (split, metadata, clip, _) in zip(avatars, samples(tmp_path / "data"), strict=True):
        assert split == "train"
        assert metadata["caption"] == caption(avatar, "-".join(map(str, avatar)))
        assert torch.equal(clip.latent[:, 0], pixel_values(torch.from_numpy(draw([avatar])[0]).movedim(-1, 0)))
    description = check_folder(tmp_path / "data", "train").description
    assert (description["name"], description["prepared"]["count"]) == ("avatars", 7)
    assert "CC0" in description["attribution"]
    with pytest.raises(ConfigError, match="--count 0 must be 1 to 1,000,000"):
        prepare_avatars(tmp_path / "none", count=0)
    with pytest.raises(ConfigError, match="--size 24 must be a multiple of 16 from 16 to 1024 pixels"):
        prepare_avatars(tmp_path / "none", count=1, size=24)


def test_larger_pictures_repeat_each_pixel(tmp_path):
    prepare_avatars(tmp_path / "data", count=1, size=48).run(processes=1, force=False)
    ((_, _, clip, _),) = samples(tmp_path / "data")
    assert clip.latent.shape == (3, 1, 48, 48)
    pixels = pixel_values(torch.from_numpy(draw(choose("trained", 1))[0]).movedim(-1, 0))
    assert torch.equal(clip.latent[:, 0], pixels.repeat_interleave(3, 1).repeat_interleave(3, 2))


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A folder in the place of the npm registry, and an empty cache."""
    folder = tmp_path / "registry" / "@dicebear/pixel-art" / "-"
    folder.mkdir(parents=True)
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", (tmp_path / "registry").as_uri() + "/")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def test_the_archive_is_downloaded_once_and_checked(registry, tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    archive = design._archive()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=r"cannot be downloaded .*; connect to the network, set NPM_CONFIG_REGISTRY"):
        design._archive()
    source, cached = registry / design.ARCHIVE, tmp_path / "cache" / "megatron-dit" / design.ARCHIVE
    source.write_bytes(archive[:-1] + b"x")
    with pytest.raises(
        ConfigError, match=r"10,534 bytes with another SHA-512 than @dicebear/pixel-art 9\.4\.3; set NPM"
    ):
        design._archive()
    assert not cached.exists()
    source.write_bytes(archive)
    assert design._archive() == cached.read_bytes() == archive
    source.unlink()
    assert design._archive() == archive
    cached.write_bytes(b"damaged")
    source.write_bytes(archive)
    assert design._archive() == cached.read_bytes() == archive
