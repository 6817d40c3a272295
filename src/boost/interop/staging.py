"""A new directory that appears complete or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from boost.checkpoint.shards import sync_directory
from boost.errors import EnvironmentFailure, UserError

_USERS_FAULT = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EROFS)


@contextmanager
def staged(out: Path, name: str) -> Iterator[Path]:
    """Gives a hidden folder beside `out`; on success the directory `name` made in it becomes `out`.

    Raises:
        UserError: `out` exists, or cannot be made.
        EnvironmentFailure: no space, or the disk fails.
    """
    if os.path.lexists(out):
        raise UserError(str(out), "exists already", hint="choose a new directory")
    out = Path(os.path.abspath(out))
    partial = out.parent / f".{out.name}.partial"
    try:
        if partial.is_dir() and not partial.is_symlink():
            shutil.rmtree(partial)  # of a run that was killed
        partial.mkdir()
        try:
            yield partial
            for path in (partial / name).iterdir():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            sync_directory(partial / name)
            os.rename(partial / name, out)
            sync_directory(out.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        failure = UserError if error.errno in _USERS_FAULT else EnvironmentFailure
        raise failure(str(out), f"cannot be written: {error.strerror or error}") from error
    except SafetensorError as error:  # the library reports a full disk as its own error
        raise EnvironmentFailure(str(out), f"cannot be written: {error}") from error
