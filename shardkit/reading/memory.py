"""Memory that is used again as soon as nobody refers to it any more.

The system clears new memory page by page when it is first touched, which takes longer than reading a file into it.
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
_KEPT_BYTES = 32_000_000  # glibc takes notice of up to 32 MiB
_FRACTION = 4  # buffers are larger than what is asked for by a sixteenth at most (2 ** -4)


class Buffers:
    """Arrays of bytes, whose memory is used again when neither they nor any view of them exist. Threads may share it.

    Views are whatever keeps an array alive: slices, memoryviews, tensors made of it. So there is no moment at which a
    result stops being valid.

    Args:
        kept_bytes: How much memory is kept for later, beside what is in use, at most.

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
        # Memory is given back wherever its last user lets go of it, perhaps by the thread that holds the lock. So that
        # happens without it, in steps that are atomic.
        self._users: dict[int, weakref.ref[npt.NDArray[np.uint8]]] = {}

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return an array of so many bytes, whose content is arbitrary."""
        capacity = _capacity(nbytes)
        with self._lock:
            free = self._free[capacity]
            try:
                memory = free.pop()
            except IndexError:
                memory = self._allocate(capacity)
                self._drop_surplus()
        # NumPy makes a view refer to this array, and not to what it is a view of, because that is no array.
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
    """Let the C library keep the memory of values that are freed, for the next ones.

    glibc gives it back to the system with every value of more than some 100 KB, and has it cleared when it is needed
    again, until a program has freed something larger for once: from then on it keeps up to twice as much as that was.
    """
    bytearray(_KEPT_BYTES)


class SharedMemory(mmap.mmap):
    """Memory that another process can map, once it is sent the file descriptor. It has no name and leaves no trace.

    It counts as this process's memory; it is not limited by the size of /dev/shm.

    Attributes:
        number: Another one for each that this process makes; 0 if another process has made it.
        descriptor: The file descriptor, which is closed with the memory.
    """

    number: int
    descriptor: int

    def __new__(cls, descriptor: int, nbytes: int, number: int) -> Self:
        """Map what a descriptor stands for."""
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
    """Return uint8, (nbytes,), that nobody uses: from the buffers, or, where there is a GPU, pinned memory of torch's.

    torch uses that again, too, but not before copies to the GPU have ended.
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
    """Return the size of the buffer that is taken for a request.

    Example:
        >>> _capacity(1000), _capacity(1_000_001), _capacity(0)
        (1024, 1048576, 1)
    """
    step = max(1, 1 << max(0, (nbytes - 1).bit_length()) >> _FRACTION)
    return max(1, -(-nbytes // step) * step)
