"""The seconds of a step's computations, as schedules count them."""

import dataclasses

import pytest

import megatrain_jax as mt
from megatrain_jax._src.schedule.tasks import build_task_lists
from megatrain_jax._src.spec.costs import find_costs
from megatrain_jax._src.state.cards import H100
from optimizers import OPTIMIZERS
from runs import make_spec
from zoo import CASES


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_sums_of_gradients_are_read_and_written_by_each_microbatch(microbatches):
    spec = make_spec(CASES["equinox"], OPTIMIZERS["adam"], microbatches=microbatches)
    step, sizes = spec.first, spec.first.workload.sizes
    slow, fast = (
        find_costs(
            step.stages,
            sizes,
            [0] * len(sizes),
            step.collectives,
            microbatches,
            1,
            dataclasses.replace(H100, memory_bytes_per_s=rate),
        )
        for rate in (1.0, 1e30)
    )
    summed = sum(slow.backward) - sum(fast.backward)
    # With the padding behind each leaf.
    num_elements = sum(layout.master.size for layout in spec.layouts)
    assert summed == pytest.approx(0 if microbatches == 1 else 2 * microbatches * 4 * num_elements)


@pytest.mark.parametrize("waves", [1, 2, 4])
def test_sums_in_bfloat16_are_widened_and_rounded_once_per_wave(waves):
    def computing(sums: str) -> float:
        spec = make_spec(
            CASES["equinox"],
            OPTIMIZERS["adam"],
            microbatches=4,
            waves=waves,
            precision=mt.Precision(compute="float32", sums=sums),
            hardware=dataclasses.replace(H100, memory_bytes_per_s=1.0, flops_per_s=1e30),
        )
        return build_task_lists(spec.first.workload).computing

    spec = make_spec(CASES["equinox"], OPTIMIZERS["adam"], microbatches=4)
    num_elements = sum(layout.master.size for layout in spec.layouts)
    # An update reads a gradient of half the bytes.
    expected = (12 * waves - 2) * num_elements
    assert computing("bfloat16") - computing("float32") == pytest.approx(expected)
