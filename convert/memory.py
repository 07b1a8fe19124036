"""Fresh memory for large tensors."""

import ctypes
import mmap

import torch
from torch import Tensor

# Smaller tensors come from memory that is reused, without new pages.
LARGE = 1 << 22


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """torch.empty on the CPU, for large tensors with huge pages if the system has them.

    Filling a tensor touches each of its pages for the first time; in pages of 4 kB that takes
    longer than the copy or the decoding itself (measured: a load of stored codes is twice as fast
    with huge pages). Only a hint: a system that has none to give ignores it.
    """
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.nbytes >= LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (tensor.data_ptr() + tensor.nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE
        )
    return tensor
