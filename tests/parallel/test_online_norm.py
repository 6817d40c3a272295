"""Online RMSNorm in bf16: what its statistic and its output lose, against float64 and against a separate norm.

Ranks are simulated in one process: each packs its statistic, and the all-reduce is a sum of bf16 tensors, rounded
after every addition, in several orders. Last, real gloo ranks run the block's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from boost.config import ParallelSection
from boost.kernels.norm import divide_by_rms
from boost.kernels.projections import norm_down
from boost.model.blocks.bottleneck import BottleneckBlock
from boost.model.context import Context
from boost.parallel.collectives import pack_statistic, unpack_statistic
from boost.parallel.mesh import Group, Mesh
from boost.parallel.sharding import described
from tests.distributed.harness import run_ranks
from tests.models import model_section

TOKENS, HIDDEN, RANK, EPS = 128, 256, 32, 1e-6
STATISTIC_BOUND = 2.0**-15
ROUNDED = torch.bfloat16


def gaussian(noise: Tensor, tp: int) -> Tensor:
    return noise


def lognormal_rows(noise: Tensor, tp: int) -> Tensor:
    return noise * (2 * noise[:, :1]).exp()


def outlier_channel(noise: Tensor, tp: int) -> Tensor:
    x = noise.clone()
    x[:, 3] *= 1e4
    return x


def zero_shard(noise: Tensor, tp: int) -> Tensor:
    x = noise.clone()
    x[:, HIDDEN // tp : 2 * HIDDEN // tp] = 0
    return x


def tiny(noise: Tensor, tp: int) -> Tensor:
    return noise * 1e-6


def huge(noise: Tensor, tp: int) -> Tensor:
    return noise * 1e4


def zero_token(noise: Tensor, tp: int) -> Tensor:
    x = noise.clone()
    x[::7] = 0
    return x


INPUTS = [gaussian, lognormal_rows, outlier_channel, zero_shard, tiny, huge, zero_token]


def residual(make: Callable[[Tensor, int], Tensor], tp: int, seed: int = 0) -> Tensor:
    """Residual stream [TOKENS, HIDDEN] in bf16."""
    generator = torch.Generator().manual_seed(seed)
    return make(torch.randn(TOKENS, HIDDEN, generator=generator), tp).to(ROUNDED)


def orders(terms: list[Tensor]) -> Iterator[Tensor]:
    """Their bf16 sums, rounded after each addition: in rank order, reversed, shuffled, as a ring's, and pairwise."""
    generator = torch.Generator().manual_seed(0)
    size = len(terms)
    sequences = [list(range(size)), list(reversed(range(size)))]
    sequences += [torch.randperm(size, generator=generator).tolist() for _ in range(3)]
    sequences += [[(start + i) % size for i in range(size)] for start in (1, size // 2)]
    for sequence in sequences:
        total = terms[sequence[0]].clone()
        for i in sequence[1:]:
            total += terms[i]
        yield total
    level = terms
    while len(level) > 1:
        level = [level[i] + level[i + 1] for i in range(0, len(level), 2)]
    yield level[0]


def norms(x: Tensor, tp: int) -> list[Tensor]:
    """|x_i| of each rank's shard in fp32, as the block computes it."""
    return [torch.linalg.vector_norm(shard, dim=-1, dtype=torch.float32) for shard in x.chunk(tp, dim=-1)]


def inverse_rms(squares: Tensor) -> Tensor:
    return torch.rsqrt(squares / HIDDEN + EPS)


def statistic_error(squares: Tensor, x: Tensor) -> float:
    """Largest relative error of 1/rms over the tokens, against float64 on the same bf16 input."""
    exact = inverse_rms(x.double().square().sum(-1))
    return float((inverse_rms(squares).double() / exact - 1).abs().max())


def bridge_squares(x: Tensor, tp: int) -> Iterator[Tensor]:
    """The sum of squares as the bridge delivers it, for every order of the all-reduce."""
    slots = [pack_statistic(norm, Group(rank, tp), ROUNDED) for rank, norm in enumerate(norms(x, tp))]
    assert all(s.dtype == ROUNDED for s in slots)
    assert all(s.shape == (TOKENS, 2 * tp) for s in slots)
    for total in orders(slots):
        yield unpack_statistic(total, torch.float32)


def column_squares(x: Tensor, tp: int) -> Iterator[Tensor]:
    """What one bf16 column of squares would deliver."""
    for total in orders([norm.square().to(ROUNDED) for norm in norms(x, tp)]):
        yield total.float()


def split_column_squares(x: Tensor, tp: int) -> Iterator[Tensor]:
    """What two summed bf16 columns, the high and the low parts of the squares, would deliver."""
    high = [norm.square().to(ROUNDED) for norm in norms(x, tp)]
    low = [(norm.square() - part.float()).to(ROUNDED) for norm, part in zip(norms(x, tp), high, strict=True)]
    for highs, lows in zip(orders(high), orders(low), strict=True):
        yield highs.float() + lows.float()


def parameters() -> tuple[Tensor, Tensor]:
    """Gain [HIDDEN] and A [HIDDEN, RANK], masters in fp32."""
    generator = torch.Generator().manual_seed(9)
    gain = 1 + 0.3 * torch.randn(HIDDEN, generator=generator)
    return gain, torch.randn(HIDDEN, RANK, generator=generator) / HIDDEN**0.5


def exact_latent(x: Tensor, gain: Tensor, a: Tensor) -> Tensor:
    """z in float64 from the bf16 input and the fp32 masters."""
    x = x.double()
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return (x * inverse * gain.double()) @ a.double()


def latent_error(z: Tensor, exact: Tensor) -> float:
    """Relative error in norm, the mean over the tokens that are not zero, so that no token hides another."""
    scale = exact.norm(dim=-1)
    real = scale > 0
    assert bool((z[~real] == 0).all())
    return float(((z.double() - exact).norm(dim=-1)[real] / scale[real]).mean())


def online(x: Tensor, tp: int, gain: Tensor, a: Tensor) -> list[Tensor]:
    """z from raw products and the statistic in one bf16 all-reduce, for every order."""
    shards = zip(x.chunk(tp, dim=-1), gain.chunk(tp), a.chunk(tp), strict=True)
    products = [norm_down(*shard)[0] for shard in shards]
    return [
        divide_by_rms(total, squares, HIDDEN, EPS)
        for total, squares in zip(orders(products), bridge_squares(x, tp), strict=True)
    ]


def synchronous(x: Tensor, tp: int, gain: Tensor, a: Tensor) -> list[Tensor]:
    """z from a norm with an fp32 all-reduce of its own, then products summed in bf16, for every order."""
    squares = x.float().square().sum(-1)
    normalised = (x.float() * inverse_rms(squares).unsqueeze(-1)).to(ROUNDED) * gain.to(ROUNDED)
    shards = zip(normalised.chunk(tp, dim=-1), a.to(ROUNDED).chunk(tp), strict=True)
    return list(orders([shard @ rows for shard, rows in shards]))


@pytest.mark.parametrize("make", INPUTS)
@pytest.mark.parametrize("tp", [2, 4, 8, 16])
def test_statistic_keeps_15_bits(tp: int, make: Callable[[Tensor, int], Tensor]) -> None:
    """1/rms within 2^-15 of float64 for every token, and equal to the last bit whatever the order of the sum."""
    x = residual(make, tp)
    found = list(bridge_squares(x, tp))
    assert max(statistic_error(squares, x) for squares in found) <= STATISTIC_BOUND
    for squares in found:
        assert torch.equal(squares, found[0])


@pytest.mark.parametrize("tp", [2, 4, 8, 16])
def test_summed_columns_would_not_keep_them(tp: int) -> None:
    """One bf16 column of squares breaks the bound, and so do summed high and low columns: the bound can fail."""
    x = residual(gaussian, tp)
    assert min(statistic_error(squares, x) for squares in column_squares(x, tp)) > 8 * STATISTIC_BOUND
    assert min(statistic_error(squares, x) for squares in split_column_squares(x, tp)) > 8 * STATISTIC_BOUND


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_dtypes_carry_the_square_in_one_column(dtype: torch.dtype) -> None:
    """fp32 and fp64 need no parts."""
    norm = torch.tensor([0.0, 1e-6, 3.0, 1e4], dtype=dtype)
    packed = pack_statistic(norm, Group(1, 4), dtype)
    assert packed.shape == (4, 1)
    assert torch.equal(unpack_statistic(packed, dtype), norm.square())


@pytest.mark.parametrize("make", INPUTS)
@pytest.mark.parametrize("tp", [2, 4, 8, 16])
def test_online_norm_is_as_exact_as_a_separate_one(tp: int, make: Callable[[Tensor, int], Tensor]) -> None:
    """z's error against float64 is at most 1.5 times the separate norm's, with the same roundings in the sum."""
    x, (gain, a) = residual(make, tp), parameters()
    exact = exact_latent(x, gain, a)
    for one, other in zip(online(x, tp, gain, a), synchronous(x, tp, gain, a), strict=True):
        assert latent_error(one, exact) <= 1.5 * latent_error(other, exact)


def run_block(mesh: Mesh) -> dict[str, dict[str, float]]:
    """Errors of the latents before attention of a real bf16 block, per input and norm mode."""
    tp = mesh.tp
    model = model_section(hidden_size=HIDDEN, rank=RANK, heads=4, head_size=4, ffn_size=64, norm_eps=EPS)
    gain, a = parameters()
    found: dict[str, dict[str, float]] = {}
    for make in INPUTS:
        x = residual(make, tp.size)
        exact = exact_latent(x, gain, a)
        found[make.__name__] = {}
        for mode in ("online", "sync"):
            block = BottleneckBlock(model, ParallelSection(tp=tp.size, norm=mode), 0, tp, torch.float32)  # type: ignore[arg-type]
            with torch.no_grad():
                for parameter, parts in described(block):
                    for part in parts:
                        share, whole = part.view(parameter, tp), gain if "norm" in part.name else a.t()
                        if part.name.endswith((".q.down.weight", ".k.down.weight", ".v.down.weight", "norm.weight")):
                            start = part.offsets(parameter, tp)[-1]
                            share.copy_(whole.narrow(-1, start, share.shape[-1]))
                shard = x.chunk(tp.size, dim=-1)[tp.rank]
                context = Context(1, len(shard), torch.empty(0), torch.empty(0))
                _, (partial,), _ = block.chunk_qkv(shard, (), context)
                z = block.bridge(partial)
            assert z.dtype == ROUNDED
            # q, k, v have the same A here, but gloo may sum different parts of a payload in different orders.
            found[make.__name__][mode] = latent_error(z, exact.repeat(1, 3))
    return found


@pytest.mark.parametrize("tp", [2, 4])
def test_the_block_itself_is_as_exact_as_with_a_separate_norm(tp: int) -> None:
    """The same bound on gloo ranks, through the block's chunk and bridge; and both modes are really bf16-close."""
    first, *others = run_ranks(tp, run_block)
    assert all(other == first for other in others)
    assert len(first) == len(INPUTS)
    for name, error in first.items():
        assert error["online"] <= 1.5 * error["sync"], (name, error)
        assert 0 < error["sync"] < 0.02, (name, error)
