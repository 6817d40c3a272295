"""What a run reports: metrics.jsonl, TensorBoard scalars, and pictures of the curves at the end."""

from __future__ import annotations

import json
import logging
import resource
import sys
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger("boost")

# Dense bf16 FLOP/s without sparsity, from the vendors' data sheets. An unknown device has no MFU, never a guess.
PEAK_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "L40S": 362e12,
}


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The device's peak in bf16, or None where it or the precision is not in the table."""
    if device.type != "cuda" or precision != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process has held: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class MetricsWriter:
    """Appends one JSON object per step, and mirrors the numbers to TensorBoard where asked.

    A backend that fails is reported once and dropped; it never stops the training. Scalars from `first_step` on that
    an interrupted run left are dropped, because those steps are taken again.
    """

    def __init__(self, path: Path, tensorboard_dir: Path | None, first_step: int = 1) -> None:
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
        self._tensorboard: Any = None
        if tensorboard_dir is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter

                self._tensorboard = SummaryWriter(str(tensorboard_dir), purge_step=first_step)
            except Exception as error:
                logger.warning("no TensorBoard scalars: %s", error)

    def write(self, record: dict[str, Any]) -> None:
        """Writes one step's record and makes it visible to readers."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._tensorboard is None:
            return
        try:
            for name, value in record.items():
                if isinstance(value, int | float) and name != "step":
                    self._tensorboard.add_scalar(name, value, record["step"])
        except Exception as error:
            logger.warning("TensorBoard scalars stop here: %s", error)
            self._tensorboard = None

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def write_plots(records: list[dict[str, Any]], directory: Path) -> list[Path]:
    """Loss and throughput as PNG files; none, with a line in the log, where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        logger.info("no plots: matplotlib is not installed (pip install 'boost-llm[report]')")
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    directory.mkdir(exist_ok=True)
    steps = [record["step"] for record in records]
    validated = [record for record in records if "val_loss" in record]
    written = []
    for name, label in (("loss", "loss (nats per token)"), ("tokens_per_second", "tokens per second")):
        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        axes.plot(steps, [record[name] for record in records], linewidth=1, label="training")
        if name == "loss" and validated:
            where = [record.get("val_step", record["step"]) for record in validated]
            axes.plot(where, [record["val_loss"] for record in validated], "o", label="validation")
            axes.legend()
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        written.append(directory / f"{name}.png")
        figure.savefig(written[-1], dpi=120)
        pyplot.close(figure)
    return written
