"""Every kernel test: uninitialised memory holds NaN, and the number of threads is put back; the forms of operators.

With TRITON_INTERPRET=1 all tests here are of the Triton form, on a CPU.
"""

from types import SimpleNamespace

import pytest
import torch

from megatron_rlzero.kernels import backend, compiler


@pytest.fixture(scope="session", autouse=True)
def patched_once():
    """The interpreter replaces the language's functions at every call within a kernel; once a launch is enough."""
    if not backend.INTERPRETED:
        yield
        return
    from triton import language
    from triton.runtime import interpreter

    patch, scopes = interpreter._patch_lang, {}

    def patch_once(function):
        seen = frozenset(
            id(value) for value in function.__globals__.values() if value is language or value is language.core
        )
        outermost = not scopes
        if not any(seen <= key for key in scopes):
            scopes[seen] = patch(function)
        return SimpleNamespace(restore=restore) if outermost else None

    def restore():
        for scope in reversed(scopes.values()):
            scope.restore()
        scopes.clear()

    interpreter._patch_lang = patch_once
    yield
    interpreter._patch_lang = patch


def pytest_collection_modifyitems(items):
    if backend.INTERPRETED:
        for item in items:
            if item.get_closest_marker("cpu"):
                item.add_marker(pytest.mark.skip(reason="of CPUs"))


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    if backend.INTERPRETED:
        monkeypatch.setattr(backend, "_chosen", "triton")
    threads = torch.get_num_threads()
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)  # empty() and its kin are then filled with NaN
    assert torch.empty(1000).isnan().all()
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.fixture(params=["triton"] if backend.INTERPRETED else backend.BACKENDS)
def form(request, monkeypatch):
    """native | torch, or else triton: the form of this test's operators."""
    if request.param == "native" and not compiler.usable():
        pytest.skip("no compiler, or no AVX2")
    monkeypatch.setattr(backend, "_chosen", request.param)
    return request.param
