"""What a model costs: parameters and FLOPs, one formula per term. Training metrics and planning both read these.

A multiply-add counts as two FLOPs. These are the FLOPs that this model executes: rank-r products, not those of the
dense model it stands for. Backward is twice forward, but for frozen weights; recomputation is never counted.
"""

from __future__ import annotations

from boost.config import ModelSection
from boost.model.blocks.shapes import attention_linears, mlp_linears
from boost.model.crossing import balanced
from boost.model.sparse import blocks_of, entries


def block_linear_parameters(model: ModelSection) -> int:
    """Weights in the seven linears of one block, without biases."""
    total = block_frozen_parameters(model)
    for linear in (*attention_linears(model, 0), *mlp_linears(model, 0)):
        pair = model.rank is not None
        total += (linear.d_in + linear.d_out) * (model.rank or 0) if pair else linear.d_in * linear.d_out
        total += entries(model, linear) if model.linear == "sltrain" else 0
    return total


def block_frozen_parameters(model: ModelSection) -> int:
    """Of them, the weights that have no gradient: the matrices beside ReLoRA's pairs."""
    if model.linear != "relora":
        return 0
    return sum(linear.d_in * linear.d_out for linear in (*attention_linears(model, 0), *mlp_linears(model, 0)))


def block_linear_flops_per_token(model: ModelSection) -> float:
    """Forward FLOPs per token of the seven linears of one block. Sparse matrices count as the dense GEMMs they run in,
    of G blocks where the support is block-diagonal."""
    flops = 2.0 * block_linear_parameters(model)
    if model.linear == "sltrain":
        for linear in (*attention_linears(model, 0), *mlp_linears(model, 0)):
            flops += 2 * (linear.d_in * linear.d_out / blocks_of(model) - entries(model, linear))
    return flops


def gate_parameters(model: ModelSection) -> int:
    """Weights of the crossing gate of one linear, with its bias."""
    r, (a, b) = model.rank or 0, balanced(model.rank or 1)
    return {"none": 0, "identity": 0, "diagonal": r, "dense": r * r + r, "tensor": a * a + b * b}[model.crossing]


def gates_flops_per_token(model: ModelSection) -> float:
    """Forward FLOPs per token of the matrix products in the gates of one block."""
    r, (a, b) = model.rank or 0, balanced(model.rank or 1)
    return 7 * 2 * {"dense": r * r, "tensor": r * (a + b)}.get(model.crossing, 0)


def parameters(model: ModelSection) -> int:
    """All parameters, tied tables counted once, padding not counted."""
    biases = sum(linear.d_out for linear in (*attention_linears(model, 0), *mlp_linears(model, 0)) if linear.bias)
    tables = model.vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    block = block_linear_parameters(model) + biases + 2 * model.hidden_size
    # A gate and a LayerNorm at each of the seven linears, but for the first block.
    crossing = 0 if model.crossing == "none" else 7 * (gate_parameters(model) + 2 * (model.rank or 0))
    return model.layers * block + (model.layers - 1) * crossing + tables + model.hidden_size


def block_flops_per_token(model: ModelSection, sequence_length: int) -> float:
    """Forward FLOPs per token of one block: its GEMMs, and causal attention (half of the full square)."""
    attention = 2 * 2 * (sequence_length + 1) / 2 * model.heads * model.head_size
    return block_linear_flops_per_token(model) + attention


def head_flops_per_token(model: ModelSection) -> float:
    """Forward FLOPs per token of the head. The embedding, a lookup, has none."""
    return 2 * model.vocab_size * model.hidden_size


def forward_flops_per_token(model: ModelSection, sequence_length: int) -> float:
    """Forward FLOPs per token of the whole model."""
    blocks = model.layers * block_flops_per_token(model, sequence_length)
    return blocks + (model.layers - 1) * gates_flops_per_token(model) + head_flops_per_token(model)


def training_flops_per_token(model: ModelSection, sequence_length: int) -> float:
    """Forward and backward, which for frozen weights has no weight gradient."""
    unneeded = 2 * model.layers * block_frozen_parameters(model)
    return 3 * forward_flops_per_token(model, sequence_length) - unneeded
