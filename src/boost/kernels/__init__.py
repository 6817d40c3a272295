"""Fused operations on one rank's tensors. None of them communicates."""
