"""Shards as memory: maps that are read-only, so that they are no process's own memory and the system drops their pages when it is short."""

import mmap
import os
import threading
import warnings
from pathlib import Path

import torch
from torch import Tensor

from dsv4.convert.header import StoredTensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class Mapped:
    """A folder's files, each mapped when it is first asked for; with `most`, the one longest unused is let go of beyond that many.

    Views stay valid whatever is let go of. Writing into one ends the process.
    """

    def __init__(self, folder: Path, most: int | None = None):
        self.folder, self.most = folder, most
        self._open: dict[str, _Map] = {}
        self._lock = threading.Lock()
        # torch says once that what is mapped here is not to be written to.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.frombuffer(bytes(1), dtype=torch.uint8)

    def __deepcopy__(self, memo) -> "Mapped":
        return self

    def view(self, tensor: StoredTensor) -> Tensor:
        """The stored tensor, in the file's dtype."""
        dtype = DTYPES[tensor.dtype]
        if tensor.nbytes == 0:
            return torch.empty(tensor.shape, dtype=dtype)
        pages = self._map(tensor.file).pages
        return torch.frombuffer(pages, dtype=dtype, count=tensor.nbytes // dtype.itemsize, offset=tensor.begin).view(tensor.shape)

    def ahead(self, file: str, begin: int, nbytes: int) -> None:
        """Have the system read these bytes in the background, where it can."""
        advise = getattr(os, "posix_fadvise", None)
        if advise is not None:
            advise(self._map(file).descriptor, begin, nbytes, os.POSIX_FADV_WILLNEED)

    def _map(self, file: str) -> "_Map":
        with self._lock:
            # Reinserted, so that the one longest unused is the first.
            found = self._open.pop(file, None) or _Map(self.folder / file)
            self._open[file] = found
            if self.most is not None and len(self._open) > self.most:
                del self._open[next(iter(self._open))]
            return found


class _Map:
    def __init__(self, path: Path):
        self.descriptor = os.open(path, os.O_RDONLY)
        self.pages = mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ)

    def __del__(self):
        # The pages live as long as a view of them.
        if "descriptor" in self.__dict__:
            os.close(self.descriptor)
