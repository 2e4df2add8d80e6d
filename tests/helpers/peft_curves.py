"""Adapters trained here and by PEFT, on the same batches."""

import itertools

import jax.numpy as jnp
import optax
import pytest

import megatrain_jax as mt
from megatrain_jax import models

torch = pytest.importorskip("torch", reason='compared with PyTorch: pip install -e ".[torch]"')
peft = pytest.importorskip("peft", reason='compared with PEFT: pip install -e ".[torch]"')
from families import random_tokens  # noqa: E402

STEPS = 20

# PEFT calls what Transformers gives another name, and looks for the patterns of its own experts,
# which are parameters, among modules.
PEFT_WARNINGS = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern:RuntimeWarning"),
]


def batches():
    for seed in range(STEPS):
        tokens = random_tokens(2, 13, seed)
        yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def make_trainer(folder, targets, run=None, **options):
    pretrained = models.load_pretrained(folder)
    adapted = models.lora(pretrained.model, targets=targets, params=pretrained.params, **options)
    return trainer_of(adapted, **(run or {}))


def trainer_of(adapted, **run):
    settings = {"trainable": adapted.trainable, "precision": mt.Precision(compute=jnp.float32)}
    return mt.Trainer(
        adapted.model,
        models.next_token_loss,
        optax.adamw(1e-2, eps=1e-3, weight_decay=0.01),
        next(batches()),
        params=adapted.params,
        **(settings | run),
    )


def curves(trainer, theirs, steps):
    """The losses of steps of our trainer, and of a model of PEFT."""
    trained = [p for p in theirs.parameters() if p.requires_grad]
    # Divided by less, rounding alone would decide where gradients are small.
    optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-3, weight_decay=0.01)
    ours, expected = [], []
    for batch in itertools.islice(batches(), steps):
        logits = theirs(torch.tensor(batch["tokens"]).long()).logits
        labels = torch.tensor(batch["labels"]).long()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
        ours.append(trainer.read(trainer.step(batch))["loss"])
    return ours, expected
