"""Checkpoints: nothing lost, nothing copied, readable by plain Orbax."""

import pytest

from optimizers import OPTIMIZERS
from runs import check_same_bits, make_trainer
from zoo import CASES

ROUND_TRIPS = [
    ("nnx_tied", "adamw_schedule", 1),
    ("nnx_tied", "clip_adamw", 2),
    ("dropout_nnx", "clip_adamw", 1),
    ("dropout_linen", "adamw_schedule", 1),
    ("batchnorm_nnx", "adamw_schedule", 1),
    ("nnx_scan", "clip_adamw", 1),
    ("lax_scan_pytree", "adamw_schedule", 1),
    ("linen_scan_remat", "clip_adamw", 1),
    ("equinox", "adamw_schedule", 1),
    ("moe", "adafactor", 1),
    ("unused", "muon", 1),
    ("nnx_tied", "multi_steps", 1),
    ("nnx_tied", "add_noise", 1),
]


def everything(trainer):
    trainer.flush()
    engine = trainer._engine
    return [trainer.params, trainer.opt_state, engine.variables, engine.key, engine.step]


def losses(trainer, batches):
    return [trainer.read(trainer.step(batch))["loss"] for batch in batches]


@pytest.mark.parametrize(("name", "optimizer", "microbatches"), ROUND_TRIPS)
def test_resumed_training_equals_uninterrupted_training(name, optimizer, microbatches, tmp_path):
    case = CASES[name]
    batches = [case.batch(seed) for seed in range(5)]

    def make():
        return make_trainer(case, OPTIMIZERS[optimizer], microbatches=microbatches)

    whole = make()
    expected = losses(whole, batches)
    first = make()
    assert losses(first, batches[:3]) == expected[:3]
    saving = first.start_saving(tmp_path / "3")
    assert losses(first, batches[3:]) == expected[3:]  # goes on while it is written
    saving.wait()
    check_same_bits(everything(first), everything(whole))
    second = make()
    second.step(batches[4])  # other state, to be replaced
    second.restore(tmp_path / "3")
    assert second.num_steps == 3
    assert losses(second, batches[3:]) == expected[3:]
    check_same_bits(everything(second), everything(whole))
