"""The order of an epoch: arithmetic only, without I/O.

The modules, in the order in which a sample passes through them::

    plan       the sample at each position of an epoch
    schedule   the order of an epoch -> the blocks that each batch needs
    ranks      the rank of this process, and the number of ranks

The order, as a specification
-----------------------------

Which sample is at which position depends only on the shards' numbers of samples, ``block_samples``, the seed, the epoch
and the number of lanes. A loader in another language that follows these rules gets the same order. All numbers are
exact.

1. **Hash.** ``mix64(x)``, modulo 2^64: add 0x9e3779b97f4a7c15, then ``x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9``,
   ``x = (x ^ x >> 27) * 0x94d049bb133111eb``, ``x ^ x >> 31``. ``derive(a, b, ...)`` begins with
   ``h = 0x243f6a8885a308d3`` and for each part makes ``h = mix64(h ^ mix64(part mod 2^64))``.
2. **Permutation** of ``n`` numbers with a key. Let ``bits`` be the number of bits of ``n - 1``, rounded up to an even
   number, at least 2. Split a number into halves ``left, right`` of ``bits / 2`` bits. Four times, for r = 1 to 4,
   set ``left, right = right, left ^ (mix64(right ^ mix64(key ^ r)) mod 2^(bits / 2))``. Join the halves. While the
   result is not below ``n``, repeat all of these steps with the result.
3. **Line.** Shards without samples have no block. Blocks are numbered from 0 across the whole dataset. Block ``b`` of
   ``n`` MUST be at place ``permutation(b)`` with the key ``derive(seed, epoch, 1)``. The blocks in the order of their
   places, end to end, are the line of all ``N`` samples.
4. **Lanes.** A lane is one of the interleaved sequences of an epoch. The line MUST be cut, in order, into ``lanes``
   pieces; lane ``l`` has ``(N - l + lanes - 1) div lanes`` samples.
5. **Windows.** A window is a run of samples of a lane that are mixed together. Its length ``w`` is ``N / n``, rounded
   up. In lane ``l``, window 0 is the first ``derive(seed, epoch, 3, l) mod w`` samples, possibly none, and windows 1,
   2, ... are ``w`` samples each, the last possibly fewer. The samples of window ``j`` MUST be put in ascending order of
   ``derive(seed, epoch, 2, l, j, i)``, where ``i`` counts from 0 in the window; ties are ordered by ``i``.
6. **Position** ``p`` of the epoch is the sample that is then at offset ``p div lanes`` of lane ``p mod lanes``.
7. **Ranks.** A global batch is the next ``batch_size * world_size`` positions. If ``world_size`` divides ``lanes``,
   rank ``r`` MUST get those with ``p mod lanes mod world_size = r``. Otherwise the ``m`` positions are sorted by lane
   and then by offset, and rank ``r`` gets those from ``m * r div world_size`` to ``m * (r + 1) div world_size``. Each
   rank has its positions in ascending order. If fewer samples than ranks would remain after a batch, they belong to
   that batch, unless incomplete batches are dropped.

Test vectors, as JSON::

    {
      "mix64 of 0, 1, 2^64-1": ["0xe220a8397b1dcdaf", "0x910a2dec89025cc1", "0xe4d971771b652c20"],
      "derive() (0) (1,0) (0,1)":
        ["0x243f6a8885a308d3", "0x33c05415474018a", "0x6054f9f9f563782d", "0x7f5d5af5e47e1ca2"],
      "permutation of 10, key derive(1,2)": [2, 4, 5, 6, 8, 0, 7, 9, 3, 1],
      "plan [5,4] block 2 seed 0 epoch 0 lanes 2": [2, 6, 3, 5, 7, 0, 4, 1, 8],
      "plan [9,0,3,12] block 4 seed 7 epoch 3 lanes 3":
        [20, 1, 18, 21, 3, 17, 5, 2, 13, 23, 0, 12, 22, 9, 19, 4, 16, 14, 6, 11, 8, 7, 10, 15]
    }
"""
