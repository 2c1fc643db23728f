"""Output files: any order of writes, by any threads, on any file system, leaves the same bytes."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest

from megatron_rlzero.resharding import output_files
from megatron_rlzero.resharding.output_files import ALIGNED, OutputFile, allocate

PAGES = 40


@pytest.fixture(params=["direct", "cache only"])
def opened(request, tmp_path, monkeypatch):
    """Opens a file, and counts how often for direct writes."""
    real, direct = os.open, []

    def opening(path, flags, *mode):
        if flags & os.O_DIRECT:
            direct.append(path)
            if request.param == "cache only":
                raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", opening)
    yield lambda size: OutputFile(allocate(tmp_path / "file", size))
    assert direct


def cuts(random, size):
    """Neighbouring parts, some smaller than a page, some that begin or end with one, in random order."""
    inside = {*random.integers(1, size, 30), ALIGNED, 5 * ALIGNED, 5 * ALIGNED + 1, 9 * ALIGNED, 9 * ALIGNED - 1}
    bounds = sorted({0, size, *map(int, inside)})
    return random.permutation(list(pairwise(bounds))).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_parts_in_any_order_from_any_thread(opened, tmp_path, monkeypatch, seed):
    monkeypatch.setattr(output_files, "BUFFER", 3 * ALIGNED)
    random = np.random.default_rng(seed)
    data = random.bytes(PAGES * ALIGNED + 123)
    file = opened(len(data))
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda part: file.write(data[slice(*part)], part[0]), cuts(random, len(data))))
    file.close()
    assert (tmp_path / "file").read_bytes() == data


def test_whole_pages_pass_the_cache(tmp_path, monkeypatch):
    """Every byte is written once: whole pages in aligned memory to the direct descriptor, the ends to the other."""
    file, real, writes = OutputFile(allocate(tmp_path / "file", 4 * ALIGNED)), os.pwrite, []

    def pwrite(descriptor, data, offset):
        address = np.frombuffer(data, np.uint8).ctypes.data
        writes.append((descriptor == file._direct, address % ALIGNED == 0, offset, len(data)))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    file.write(memoryview(bytes(3 * ALIGNED)), 10)
    direct = [w for w in writes if w[0]]
    assert direct == [(True, True, ALIGNED, 2 * ALIGNED)]
    assert [w[2:] for w in writes if not w[0]] == [(10, ALIGNED - 10), (3 * ALIGNED, 10)]
    file.close()
