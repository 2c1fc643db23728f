"""Every kernel test: uninitialised memory holds NaN, and the number of threads is put back."""

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned():
    threads = torch.get_num_threads()
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)  # empty() and its kin are then filled with NaN
    assert torch.empty(1000).isnan().all()
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
