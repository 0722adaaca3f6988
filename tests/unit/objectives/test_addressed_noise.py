"""Laws of addressed noise: the generator is Philox, and a draw depends only on its address."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dit.layout import SequenceLayout
from dit.objectives.addressed_noise import AddressedNoise
from dit.philox import _rounds, philox
from tests.support.calls import CallCounter

IDS = torch.tensor([3, 2**62 + 5, 41], dtype=torch.int64)
DRAWS = torch.tensor([9, 2**40, 9], dtype=torch.int64)


def words(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    tensors = tuple(torch.tensor([c], dtype=torch.int64) for c in counter)
    return [int(w) for w in philox(tensors, key)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_published_known_answers(counter, key, expected):
    """Three vectors that Salmon et al. publish for philox4x32-10."""
    assert words(counter, key) == expected


class _Products(TorchDispatchMode):
    """Records the largest product of integers, computed without a limit."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mul.Tensor:
            factors, number = args
            self.largest = max(self.largest, *(abs(value * int(number)) for value in factors.flatten().tolist()))
        return func(*args, **(kwargs or {}))


def test_no_product_overflows():
    """The result of an overflow is undefined in compiled code, which would then draw other numbers."""
    counter = tuple(torch.full((64,), 2**32 - 1) - torch.arange(64) for _ in range(4))
    with _Products() as seen:
        _rounds(counter, (2**32 - 1, 2**32 - 1))
    assert 2**61 < seen.largest < 2**63


@pytest.mark.parametrize("keys", ["numbers", "one for each row"])
def test_words_of_numpy_equal_those_of_torch(keys):
    """Also for more counters than fit one block, and for a view with repeated rows; counters are not changed."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = 7, 3001
    counter = (
        torch.randint(2**32, (rows, columns), generator=generator),
        torch.randint(2**32, (rows, 1), generator=generator).expand(rows, columns),
        torch.full((rows, columns), 2**32 - 1),
        torch.randint(2**32, (columns, rows), generator=generator).T,
    )
    given = [c.clone() for c in counter]
    key = (2**32 - 1, 5)
    if keys != "numbers":
        key = tuple(torch.randint(2**32, (rows, 1), generator=generator) for _ in range(2))
    with CallCounter() as counted:
        found = philox(counter, key)
    assert all(torch.equal(x, y) for x, y in zip(found, _rounds(counter, key), strict=True))
    assert all(torch.equal(x, y) for x, y in zip(counter, given, strict=True))
    assert counted.calls < 20


@pytest.mark.parametrize("draws", [None, DRAWS])
def test_local_tokens_get_the_noise_of_the_global_pack(draws):
    """Selecting rows and drawing noise commute, for any order of rows and for a selection of a selection."""
    layout = SequenceLayout.from_lengths([5, 3, 4], multiple_of=4, total_tokens=20)
    full = AddressedNoise(1, 7, IDS, layout, draws).normal_TC("eps", 6)
    rows = torch.tensor([17, 0, 9, 8, 3, 12])
    part = layout.select(rows)
    assert torch.equal(AddressedNoise(1, 7, IDS, part, draws).normal_TC("eps", 6), full[rows])
    again = torch.tensor([4, 1])
    assert torch.equal(AddressedNoise(1, 7, IDS, part.select(again), draws).normal_TC("eps", 6), full[rows[again]])


def test_each_sample_has_the_noise_of_its_seed():
    """All 64 bits of a seed count."""
    layout = SequenceLayout.from_lengths([5, 3, 4], multiple_of=4)
    seeds = [3, 2**40 + 3, 2**62 + 1]
    mixed = AddressedNoise(torch.tensor(seeds), 7, IDS, layout)
    for i, seed in enumerate(seeds):
        own = AddressedNoise(seed, 7, IDS, layout)
        tokens = slice(layout.starts[i], layout.starts[i] + layout.lengths[i])
        assert torch.equal(mixed.normal_TC("eps", 5)[tokens], own.normal_TC("eps", 5)[tokens])
        assert torch.equal(mixed.level_S()[i], own.level_S()[i])
    assert len(set(AddressedNoise(torch.tensor(seeds), 7, IDS[:1].repeat(3), layout).level_S().tolist())) == 3


@pytest.mark.parametrize("draws", [None, DRAWS])
def test_a_sample_gets_the_same_noise_in_every_pack(draws):
    """Neighbours, order and padding do not matter."""
    one = SequenceLayout.from_lengths([4])
    many = SequenceLayout.from_lengths([5, 4, 3], multiple_of=8)
    order = torch.tensor([0, 2, 1])
    alone = AddressedNoise(1, 7, IDS[2:], one, None if draws is None else draws[2:])
    packed = AddressedNoise(1, 7, IDS[order], many, None if draws is None else draws[order])
    start = many.starts[1]
    assert torch.equal(packed.normal_TC("eps", 5)[start : start + 4], alone.normal_TC("eps", 5))
    for draw in (lambda n: n.level_S(), lambda n: n.uniform_S("dropout")):
        assert torch.equal(draw(packed)[1:2], draw(alone))


def test_every_part_of_the_address_matters():
    """Another seed, step, purpose, sample or draw gives independent noise: correlation 0 within its standard error."""
    layout = SequenceLayout.from_lengths([4096, 4096])
    ids = torch.tensor([11, 12], dtype=torch.int64)
    base = AddressedNoise(1, 7, ids, layout).normal_TC("eps", 4)
    others = {
        "seed": AddressedNoise(2, 7, ids, layout).normal_TC("eps", 4),
        "high seed bits": AddressedNoise(1 + 2**32, 7, ids, layout).normal_TC("eps", 4),
        "step": AddressedNoise(1, 8, ids, layout).normal_TC("eps", 4),
        "purpose": AddressedNoise(1, 7, ids, layout).normal_TC("noise", 4),
        "low id bits": AddressedNoise(1, 7, ids + 2, layout).normal_TC("eps", 4),
        "high id bits": AddressedNoise(1, 7, ids + 2**40, layout).normal_TC("eps", 4),
        "draw": AddressedNoise(1, 7, ids, layout, torch.tensor([1, 1])).normal_TC("eps", 4),
        "high draw bits": AddressedNoise(1, 7, ids, layout, torch.tensor([2**40, 2**40])).normal_TC("eps", 4),
        "neighbour sample": base.roll(4096, 0),
        "neighbour channel": base.roll(1, 1),
        "neighbour token": base.roll(1, 0),
    }
    standard_error = base.numel() ** -0.5
    for name, other in others.items():
        assert abs((base * other).mean().item()) < 4 * standard_error, name


def test_step_numbers_on_device_and_host_give_equal_noise():
    """Changing the tensor, which a CUDA graph reads, changes the next draw."""
    layout, step = SequenceLayout.from_lengths([4, 4, 4]), torch.tensor(0)
    on_device = AddressedNoise(1, step, IDS, layout)
    for number in (7, 2**31):
        step.fill_(number)
        on_host = AddressedNoise(1, number, IDS, layout)
        for draw in (AddressedNoise.level_S, lambda noise: noise.normal_TC("eps", 4), lambda noise: noise.step_1):
            assert torch.equal(draw(on_device), draw(on_host))


def test_draw_0_equals_a_draw_without_a_number():
    """Samples without a draw number (held-out and generated samples) have the noise of draw 0."""
    layout = SequenceLayout.from_lengths([4, 4, 4])
    first = AddressedNoise(1, 7, IDS, layout, torch.zeros(3, dtype=torch.int64))
    assert torch.equal(first.normal_TC("eps", 4), AddressedNoise(1, 7, IDS, layout).normal_TC("eps", 4))


def test_normal_noise_has_the_moments_of_a_standard_normal():
    """Mean 0, variance 1, skewness 0, kurtosis 3, each within four standard errors."""
    n = 1 << 17
    x = AddressedNoise(5, 0, IDS[:1], SequenceLayout.from_lengths([n // 4])).normal_TC("eps", 4).double()
    for power, expected, variance in ((1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)):
        assert (x**power).mean().item() == pytest.approx(expected, abs=4 * math.sqrt(variance / n))


def test_channels_are_independent():
    """They are not only uncorrelated: for independent normals x and y, x**2 - 1 and y**2 - 1 are uncorrelated, too."""
    n = 1 << 15
    x_TC = AddressedNoise(5, 0, IDS[:1], SequenceLayout.from_lengths([n])).normal_TC("eps", 8).double()
    for centred_TC, variance in ((x_TC, 1.0), (x_TC**2 - 1, 2.0)):
        covariance = (centred_TC.T @ centred_TC / n).tril(-1)
        assert covariance.abs().max() < 5 * variance / math.sqrt(n)


def test_noise_of_leading_channels_does_not_depend_on_the_number_of_channels():
    """Noise is drawn in blocks of 4 channels and cut to the requested number."""
    layout = SequenceLayout.from_lengths([3])
    noise = AddressedNoise(1, 0, IDS[:1], layout)
    for channels in (1, 3, 4, 5, 16):
        assert noise.normal_TC("eps", channels).shape == (3, channels)
    assert torch.equal(noise.normal_TC("eps", 3), noise.normal_TC("eps", 4)[:, :3])


def test_level_quantiles_are_uniform_over_samples_steps_and_draws():
    """Over each of them, the Kolmogorov-Smirnov distance to the uniform law is below its 0.1 % point."""
    n = 4096
    layout = SequenceLayout.from_lengths([1] * n)
    over_samples = AddressedNoise(1, 0, torch.arange(n), layout).level_S()
    one = SequenceLayout.from_lengths([1])
    over_steps = torch.cat([AddressedNoise(1, step, IDS[:1], one).level_S() for step in range(512)])
    same = torch.full((n,), int(IDS[1]))
    over_draws = AddressedNoise(1, 0, same, layout, torch.arange(n)).level_S()
    for u in (over_samples, over_steps, over_draws):
        assert u.min() > 0
        assert u.max() < 1
        ranks = (torch.arange(len(u)) + 0.5) / len(u)
        assert (u.sort().values - ranks).abs().max().item() < 1.95 / math.sqrt(len(u))
