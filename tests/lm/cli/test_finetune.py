"""Fine-tuning as a user does it has the loss curve of Transformers."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import megatrain_jax as mt
from megatrain_jax import models

torch = pytest.importorskip("torch", reason='compared with PyTorch: pip install -e ".[torch]"')

from families import make_torch, random_tokens, save  # noqa: E402

STEPS = 20


def batches():
    for seed in range(STEPS):
        tokens = random_tokens(4, 17, seed)
        mask = np.random.default_rng(seed).random((4, 16)) < 0.7
        yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "mask": mask}


def curve_of_torch(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    curve = []
    for batch in batches():
        logits = model(torch.tensor(batch["tokens"]).long()).logits
        labels = torch.tensor(np.where(batch["mask"], batch["labels"], -100)).long()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        curve.append(loss.item())
    return curve


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen2", marks=pytest.mark.long), "gemma2"])
def test_the_loss_curve_is_that_of_transformers(name, tmp_path):
    model = make_torch(name)
    pretrained = models.load_pretrained(save(model, tmp_path / "model"))
    expected = curve_of_torch(model)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, weight_decay=0.01))
    result = mt.fit(
        pretrained.model,
        models.next_token_loss,
        batches(),
        optimizer,
        params=pretrained.params,
        precision=mt.Precision(compute=jnp.float32),
        progress=False,
    )
    curve = [record["loss"] for record in result.history]
    assert abs(expected[-1] - expected[0]) > 0.05
    np.testing.assert_allclose(curve, expected, atol=1e-4)
