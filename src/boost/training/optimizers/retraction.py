"""LORO's exact step on one linear W = B A: the best matrix of the same rank near W - eta times a tangent direction.

With M = B [d_out, r] and N = A^T [d_in, r], W = M N^T. The directions dM, dN are projected on the tangent space of the
matrices of rank r at W, the step is taken there, and the result is cut back to rank r by an SVD of 2r x 2r numbers
(Mo et al., ICLR 2025, and its published code). Rows of M and N may lie on any ranks: all that depends on more than
one row are six r x r Grams, and what they decide are four r x r matrices to multiply the rows with.

U = M R_M^-1 and V = N R_N^-1 are the orthonormal bases. Everything here is fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor

# A column that the ones before it determine up to this share of its length counts as theirs: fp64 Grams see no further.
DEPENDENT = 1e-7


class SingularGramError(ArithmeticError):
    """The columns of one factor are linearly dependent, so its pair has lost rank; the message is `A` or `B`."""


def grams(m_or: Tensor, n_ir: Tensor, dm_or: Tensor, dn_ir: Tensor) -> Tensor:
    """This rank's contributions to the Grams, [6, r, r], from its rows of M, N [., r] and of their directions."""
    return torch.stack(
        [
            m_or.t() @ m_or,
            n_ir.t() @ n_ir,
            dn_ir.t() @ n_ir,
            m_or.t() @ dm_or,
            dm_or.t() @ dm_or,
            dn_ir.t() @ dn_ir,
        ]
    )


def coefficients(summed: Tensor, eta: float) -> Tensor:
    """From the summed Grams [6, r, r] to X_M, Y_M, X_N, Y_N [4, r, r]: the step is M X_M + dM Y_M and N X_N + dN Y_N.

    The result is balanced: the Grams of both new factors are the singular values of their product.

    Raises:
        SingularGramError: a factor has lost rank.
    """
    gram_m, gram_n, dn_n, m_dm, dm_dm, dn_dn = summed
    r_m, r_n = _cholesky(gram_m, "B"), _cholesky(gram_n, "A")
    # The direction G of W, seen through its marginals: Z_M = dM R_N^-1 = G V and Z_N = dN R_M^-1 = G^T U.
    inside = _left(r_m, _right(dn_n, r_n))  # Z_N^T V = U^T G V, from dN's side
    inside_m = _left(r_m, _right(m_dm, r_n))  # U^T Z_M
    # What of Z_N lies outside V, and of Z_M outside U, as orthonormal bases times k1 and k2.
    k1, k1_inverse = _root(_left(r_m, _right(dn_dn, r_m)), inside @ inside.t())
    k2, k2_inverse = _root(_left(r_n, _right(dm_dm, r_n)), inside_m.t() @ inside_m)
    step = torch.cat(
        [
            torch.cat([r_m @ r_n.t() - eta * inside, -eta * k1.t()], dim=1),
            torch.cat([-eta * k2, torch.zeros_like(k2)], dim=1),
        ]
    )
    left, values, right = torch.linalg.svd(step)
    rank = len(gram_m)
    scale = values[:rank].sqrt()
    top_m, bottom_m = (left[:, :rank] * scale).split(rank)
    top_n, bottom_n = (right.t()[:, :rank] * scale).split(rank)
    outside_m, outside_n = k2_inverse @ bottom_m, k1_inverse @ bottom_n
    return torch.stack(
        [
            _solve(r_m, top_m - inside_m @ outside_m),
            _solve(r_n, outside_m),
            _solve(r_n, top_n - inside.t() @ outside_n),
            _solve(r_m, outside_n),
        ]
    )


def _cholesky(gram: Tensor, factor: str) -> Tensor:
    """Upper R with R^T R = gram, from the QR decomposition of what has this Gram."""
    root, failed = torch.linalg.cholesky_ex(gram, upper=True)
    if failed or not bool((root.diagonal() > DEPENDENT * gram.diagonal().sqrt()).all()):
        raise SingularGramError(factor)
    return root


def _right(a: Tensor, r: Tensor) -> Tensor:
    """a R^-1."""
    return torch.linalg.solve_triangular(r, a, upper=True, left=False)


def _left(r: Tensor, a: Tensor) -> Tensor:
    """R^-T a."""
    return torch.linalg.solve_triangular(r.t(), a, upper=False)


def _solve(r: Tensor, a: Tensor) -> Tensor:
    """R^-1 a."""
    return torch.linalg.solve_triangular(r, a, upper=True)


def _root(whole: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """K with K^T K = whole - inside, a Gram, and K's inverse where K is not zero.

    Directions shorter than the rounding of the difference are left out.
    """
    difference = whole - inside
    values, vectors = torch.linalg.eigh((difference + difference.t()) / 2)
    noise = len(whole) * torch.finfo(whole.dtype).eps * whole.diagonal().sum()
    kept = values > noise
    roots = torch.where(kept, values, 0).sqrt()
    inverses = torch.where(kept, 1 / roots, 0)
    return roots[:, None] * vectors.t(), vectors * inverses
