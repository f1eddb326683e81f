"""One thread a test: tensors here are small, and tests run beside each other."""

import os

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def cubins(request, tmp_path):
    """The folder in which Triton keeps what it compiles: pytest's cache, anew in CI.

    Its key is the kernel's source, its configuration and Triton's own version.
    """
    cache = None if os.environ.get("CI") else getattr(request.config, "cache", None)
    return cache.mkdir("cubins") if cache else tmp_path
