"""Which allocator of device memory the import chooses, and how much it may take."""

import os

import pytest

from megatrain_jax._src.startup import allocator

SET = allocator.VARIABLE, allocator.FRACTION, allocator.OLD_FRACTION
CHOSEN = {allocator.VARIABLE: "cuda_async", allocator.FRACTION: "0.85"}


def chosen(given, plugin, monkeypatch):
    for name in (*SET, allocator.PREALLOCATE):
        monkeypatch.setenv(name, "")  # put back afterwards, whatever it was
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(allocator, "find_spec", lambda name: name == plugin or None)
    allocator.choose()
    return {name: os.environ[name] for name in SET if name in os.environ}


@pytest.mark.parametrize("plugin", ["jax_cuda12_plugin", "jax_cuda13_plugin"])
def test_cudas_pool_allocates_most_of_a_gpu(plugin, monkeypatch):
    assert chosen({}, plugin, monkeypatch) == CHOSEN


def test_nothing_is_chosen_without_a_plugin(monkeypatch):
    assert chosen({}, None, monkeypatch) == {}


@pytest.mark.parametrize(
    "given",
    [
        {allocator.VARIABLE: "default"},
        {allocator.FRACTION: "0.5"},
        {allocator.VARIABLE: "bfc", allocator.FRACTION: "0.5"},
    ],
)
def test_what_a_user_chose_stays(given, monkeypatch):
    assert chosen(given, "jax_cuda12_plugin", monkeypatch) == CHOSEN | given


def test_a_fraction_under_its_old_name_stays_alone(monkeypatch):
    given = {allocator.OLD_FRACTION: "0.5"}
    found = chosen(given, "jax_cuda12_plugin", monkeypatch)
    assert found == {allocator.VARIABLE: "cuda_async"} | given


@pytest.mark.parametrize(
    ("variable", "preallocate", "lists"),
    [
        (None, None, False),
        ("DEFAULT", None, True),
        ("bfc", "true", True),
        ("bfc", "false", False),
        ("platform", None, False),
    ],
)
def test_jaxs_own_allocator_keeps_lists_where_it_takes_a_gpu_at_once(
    variable, preallocate, lists, monkeypatch
):
    for name, value in ((allocator.VARIABLE, variable), (allocator.PREALLOCATE, preallocate)):
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    assert allocator.keeps_lists() is lists


@pytest.mark.parametrize(("preallocate", "allocates"), [("true", True), ("0", False)])
def test_cudas_pool_has_to_preallocate_to_tell_its_limit(preallocate, allocates, monkeypatch):
    given = {allocator.PREALLOCATE: preallocate}
    found = chosen(given, "jax_cuda12_plugin", monkeypatch)
    assert (allocator.VARIABLE in found) == allocates and found[allocator.FRACTION] == "0.85"
