"""Every kernel test: uninitialised memory holds NaN, and the number of threads is put back; the forms of operators."""

import pytest
import torch

from megatron_rlzero.kernels import backend, compiler


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


@pytest.fixture(params=backend.BACKENDS)
def form(request, monkeypatch):
    """native | torch, the backend of this test."""
    if request.param == "native" and not compiler.usable():
        pytest.skip("no compiler, or no AVX-512")
    monkeypatch.setattr(backend, "_chosen", request.param)
    return request.param
