"""The seconds of a step's computations, as schedules count them."""

import dataclasses

import pytest

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
