"""State in fewer bytes: held narrower than it is computed on, the same bits however it moves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import megatrain_jax as mt
from megatrain_jax._src.build.options import DeviceBudget
from optimizers import OPTIMIZERS
from oracle import open_model
from runs import check_same_bits, train
from workloads import all_resident_bytes
from zoo import CASES

SETTINGS = {
    "bf16": mt.Precision(master=jnp.bfloat16, compute=jnp.float32),
    "bf16_state": mt.Precision(master=jnp.bfloat16, state=jnp.bfloat16, compute=jnp.float32),
    "nearest": mt.Precision(
        master=jnp.bfloat16, state=jnp.bfloat16, rounding="nearest", compute=jnp.bfloat16
    ),
}
NUM_STEPS = 4


def make_trainer(case, name, setting, budget: DeviceBudget = "least", **options):
    return mt.Trainer(
        case.build(),
        case.loss_fn,
        OPTIMIZERS[name](None),
        case.batch(0),
        precision=SETTINGS[setting],
        device_budget=budget,
        progress=False,
        **options,
    )


@pytest.mark.usefixtures("started_once_in_test")
@pytest.mark.parametrize(
    ("case", "optimizer", "setting"),
    [
        ("nnx_tied", "clip_adamw", "bf16"),
        ("nnx_tied", "adamw_schedule", "bf16_state"),
        ("linen_scan_remat", "clip_adamw", "bf16_state"),
        pytest.param("nnx_tied", "adamw_schedule", "nearest", marks=pytest.mark.long),
        pytest.param("unet", "adafactor", "bf16_state", marks=pytest.mark.long),
    ],
)
def test_streamed_resident_and_resumed_are_the_same_bits(tmp_path, case, optimizer, setting):
    case = CASES[case]
    batches = [case.batch(seed) for seed in range(NUM_STEPS)]
    streamed = make_trainer(case, optimizer, setting)
    reference = train(streamed, batches, gradients=False)
    workload = streamed._spec.first.workload
    resident = make_trainer(case, optimizer, setting, 10 * all_resident_bytes(workload))
    runs = [train(resident, batches, gradients=False)]
    half = make_trainer(case, optimizer, setting)
    train(half, batches[:2], gradients=False)
    half.save(tmp_path / "half")
    resumed = make_trainer(case, optimizer, setting)
    resumed.restore(tmp_path / "half")
    runs.append(train(resumed, batches[2:], gradients=False))
    for run in runs:
        assert run.losses == reference.losses[-len(run.losses) :]
        check_same_bits(run.params, reference.params)
        check_same_bits(run.opt_state, reference.opt_state)


def test_updates_round_what_fp32_gives():
    """One step: parameters and state are neighbours in bfloat16 of what plain fp32 has."""
    case = CASES["nnx_tied"]
    exact = open_model(case, case.batch(0))
    start = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), exact.params)
    names = ("bf16_state", "nearest")
    precisions = [SETTINGS[names[0]], mt.Precision(compute=jnp.float32)]
    runs = [
        mt.Trainer(
            case.build(), case.loss_fn, OPTIMIZERS["adamw_schedule"](None), case.batch(0),
            params=start, precision=precision, progress=False,
        )
        for precision in precisions
    ]  # fmt: skip
    narrow, wide = (train(run, [case.batch(1)], gradients=False) for run in runs)
    for held, full in zip(
        jax.tree.leaves((narrow.params, narrow.opt_state)),
        jax.tree.leaves((wide.params, wide.opt_state)),
        strict=True,
    ):
        if full.dtype != jnp.float32:
            continue
        assert held.dtype == jnp.bfloat16
        down = (full.view(np.uint32) & 0xFFFF0000).view(np.float32)
        up = ((full.view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32)
        held = held.astype(np.float32)
        assert ((held == down) | (held == up)).mean() > 0.99  # fp32 itself strays a bit
    np.testing.assert_allclose(narrow.losses, wide.losses, rtol=1e-6)


def test_seeds_and_steps_draw_anew():
    case = CASES["nnx_tied"]
    runs = [
        train(make_trainer(case, "clip_adamw", "bf16", seed=seed), [case.batch(0)], gradients=False)
        for seed in (0, 0, 1)
    ]
    leaves = [jax.tree.leaves(run.params) for run in runs]
    assert all((a == b).all() for a, b in zip(*leaves[:2], strict=True))
    assert any((a != b).any() for a, b in zip(leaves[0], leaves[2], strict=True))
