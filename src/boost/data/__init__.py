"""From text to training sequences: `prepare` writes a dataset, `dataset` opens it, `sampler` cuts sequences out of it.

Nothing here imports torch: sequences are numpy arrays, and their order is a pure function of seed and index.
"""
