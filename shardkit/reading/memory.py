"""Memory that is reused as soon as nothing refers to it.

The system clears new memory page by page on first use, which takes longer than reading a file into it.
"""

import itertools
import mmap
import os
import threading
import weakref
from collections import defaultdict, deque
from functools import cache
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

_NUMBERS = itertools.count(1)
_KEPT_BYTES = 32_000_000  # glibc adapts its threshold to freed values of up to 32 MiB
_FRACTION = 4  # buffers are at most a sixteenth (2 ** -4) larger than asked for


class Buffers:
    """Arrays of bytes whose memory is reused when neither they nor any view of them exist. Threads may share it.

    A view is anything that keeps an array alive: a slice, a memoryview, a tensor made from it. So arrays and views stay
    valid as long as they exist.

    Args:
        kept_bytes: The most memory that is kept for later, in addition to the memory in use.

    Example:
        >>> buffers = Buffers(1_000_000)
        >>> first = buffers.take(1000)
        >>> first[:] = 7
        >>> view = memoryview(first)[10:20]
        >>> del first
        >>> other = buffers.take(1000)
        >>> other[:] = 8
        >>> view.tolist() == 10 * [7]
        True
    """

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._free: defaultdict[int, deque[bytearray | SharedMemory]] = defaultdict(deque)
        self._lock = threading.Lock()
        # Memory is returned wherever its last view is deleted, perhaps in the thread that holds the lock. So it is
        # returned without the lock, in atomic steps.
        self._users: dict[int, weakref.ref[npt.NDArray[np.uint8]]] = {}

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return an array of ``nbytes`` bytes. Its content is arbitrary."""
        capacity = _capacity(nbytes)
        with self._lock:
            free = self._free[capacity]
            try:
                memory = free.pop()
            except IndexError:
                memory = self._allocate(capacity)
                self._drop_surplus()
        # Views of this array refer to it and not to the underlying memory: NumPy only skips bases that are arrays.
        array = np.frombuffer(memory, dtype=np.uint8, count=nbytes)
        users, number = self._users, id(memory)

        def take_back(_: object) -> None:
            del users[number]
            free.append(memory)

        users[number] = weakref.ref(array, take_back)
        return array

    @staticmethod
    def _allocate(capacity: int) -> "bytearray | SharedMemory":
        return bytearray(capacity)

    def _drop_surplus(self) -> None:
        surplus = sum(capacity * len(free) for capacity, free in self._free.items()) - self._kept_bytes
        for capacity, free in self._free.items():
            while surplus > 0 and free:
                free.pop()
                surplus -= capacity


@cache
def keep_freed_memory() -> None:
    """Make the C library keep the memory of freed values for later ones.

    At first, glibc returns the memory of every freed value of more than about 100 KB to the system, which clears it
    when it is needed again. Once a program has freed a larger value, glibc keeps up to twice the size of that.
    """
    bytearray(_KEPT_BYTES)


class SharedMemory(mmap.mmap):
    """Memory that another process can map when it is sent the file descriptor. It has no name and leaves no file.

    It counts as this process's memory, and is not limited by the size of /dev/shm.

    Attributes:
        number: Its number among all that this process has made; 0 if another process has made it.
        descriptor: The file descriptor, which is closed with the memory.
    """

    number: int
    descriptor: int

    def __new__(cls, descriptor: int, nbytes: int, number: int) -> Self:
        """Map the file of a descriptor."""
        memory = super().__new__(cls, descriptor, nbytes)
        memory.number = number
        memory.descriptor = descriptor
        weakref.finalize(memory, os.close, descriptor)
        return memory


class SharedBuffers(Buffers):
    """Buffers whose memory other processes can map."""

    @staticmethod
    def _allocate(capacity: int) -> SharedMemory:
        descriptor = os.memfd_create("shardkit")
        try:
            os.ftruncate(descriptor, capacity)
            return SharedMemory(descriptor, capacity, next(_NUMBERS))
        except BaseException:
            os.close(descriptor)
            raise


def take_tensor(buffers: Buffers, nbytes: int) -> "torch.Tensor":
    """Return unused memory: uint8, (nbytes,). It is from the buffers or, if there is a GPU, torch's pinned memory.

    torch reuses pinned memory, too, but only when copies to the GPU have ended.
    """
    import torch

    if torch.cuda.is_available():
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return torch.from_numpy(buffers.take(nbytes))


def shared_memory(array: npt.NDArray[np.uint8]) -> SharedMemory | None:
    """Return the memory that an array was taken from, if it is shared."""
    base = array.base
    found = base.obj if isinstance(base, memoryview) else None
    return found if isinstance(found, SharedMemory) else None


def _capacity(nbytes: int) -> int:
    """Return the size of the buffer for a request of ``nbytes``.

    Example:
        >>> _capacity(1000), _capacity(1_000_001), _capacity(0)
        (1024, 1048576, 1)
    """
    step = max(1, 1 << max(0, (nbytes - 1).bit_length()) >> _FRACTION)
    return max(1, -(-nbytes // step) * step)
