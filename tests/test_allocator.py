"""Which allocator of device memory the import chooses."""

import os

import pytest

from megatrain_jax.memory import allocator


@pytest.mark.parametrize("plugin", ["jax_cuda12_plugin", "jax_cuda13_plugin", None])
@pytest.mark.parametrize("chosen", [None, "default"])
def test_cudas_pool_allocates_unless_something_else_was_chosen(plugin, chosen, monkeypatch):
    monkeypatch.setattr(allocator, "find_spec", lambda name: name == plugin or None)
    monkeypatch.setenv(allocator.VARIABLE, chosen or "")  # put back afterwards, whatever it was
    if chosen is None:
        monkeypatch.delenv(allocator.VARIABLE)
    allocator.choose()
    assert os.environ.get(allocator.VARIABLE) == (chosen or (plugin and "cuda_async"))
