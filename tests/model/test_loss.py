"""The fused head against torch's own cross-entropy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from boost.model import loss as module
from boost.model.loss import IGNORED, chunk_tokens, head_loss
from boost.parallel.mesh import Group

TOKENS, HIDDEN, VOCABULARY = 23, 12, 37


def case(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states with an outlier, head weights, labels of which some do not count."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    h[3] *= 300
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    labels[[0, 7, 22]] = IGNORED
    return h.to(dtype), weight, labels


@pytest.mark.parametrize("chunk", [1, 7, TOKENS, 100])
def test_any_chunk_gives_the_loss_and_the_gradients(chunk: int) -> None:
    h, weight, labels = case(torch.float64)
    ours = [h.clone().requires_grad_(), weight.clone().requires_grad_()]
    theirs = [h.clone().requires_grad_(), weight.clone().requires_grad_()]
    value = head_loss(ours[0], ours[1], labels, 0, Group(), chunk)
    expected = F.cross_entropy(theirs[0] @ theirs[1].t(), labels, ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(value, expected, rtol=1e-13, atol=0)
    (value / 5).backward()
    (expected / 5).backward()
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)


def test_bf16_gradients_of_the_weight_add_up_in_fp32_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    h, weight, labels = case(torch.bfloat16)
    master = weight.float().requires_grad_()
    head_loss(h, master, labels, 0, Group(), 8).backward()
    assert master.grad is not None
    assert master.grad.dtype == torch.float32
    whole, master.grad = master.grad, None
    monkeypatch.setattr(module, "GRADIENT_ROWS", 10)
    head_loss(h, master, labels, 0, Group(), 8).backward()
    torch.testing.assert_close(master.grad, whole, rtol=1e-6, atol=0)


def test_a_second_backward_fails() -> None:
    h, weight, labels = case(torch.float64)
    value = head_loss(h.requires_grad_(), weight.requires_grad_(), labels, 0, Group(), 8)
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        value.backward()


def test_the_chunk_follows_the_vocabulary() -> None:
    assert chunk_tokens(32000) == 1048
    assert chunk_tokens(10**9) == 1
    assert chunk_tokens(0) == module.LOGITS_BYTES // 4
