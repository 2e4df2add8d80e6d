"""Blocks cut into parts where one as a whole doesn't fit: by need only, and as exact as ever."""

import numpy as np
import pytest

from inside import spec_of
from optimizers import OPTIMIZERS
from oracle import train_plain
from runs import check_close, make_spec, make_trainer, train
from zoo import CASES


def least_of(spec):
    return spec.first.schedule.smallest_bytes


@pytest.mark.parametrize(
    ("name", "optimizer", "options"),
    [
        ("nnx_tied", "clip_adamw", {}),
        ("moe", "adamw_schedule", {"microbatches": 2}),
        ("linen_scan_remat", "adafactor", {}),
        pytest.param("unet", "adamw_schedule", {}, marks=pytest.mark.long),
        pytest.param("shared_block", "lion", {}, marks=pytest.mark.long),
        pytest.param("batchnorm_nnx", "muon", {}, marks=pytest.mark.long),
    ],
)
def test_training_in_parts_agrees_with_plain_jax(name, optimizer, options):
    case, make = CASES[name], OPTIMIZERS[optimizer]
    whole = make_spec(case, make, **options)
    trainer = make_trainer(case, make, budget=least_of(whole) - 1, **options)
    spec = spec_of(trainer)
    assert spec.num_parts > 1 and len(spec.first.stages) > len(whole.first.stages)
    batches = [case.batch(seed) for seed in range(3)]
    run, plain = train(trainer, batches, gradients=False), train_plain(case, make, batches)
    check_close(run.params, plain.params, 2e-5, "parameter")
    np.testing.assert_allclose(run.losses, plain.losses, rtol=2e-6)
