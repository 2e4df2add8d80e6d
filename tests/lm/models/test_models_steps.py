"""Five steps of AdamW in every family, beside Transformers and PyTorch."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import megatrain_jax as mt
from megatrain_jax._src.lm.models.pretrained import leaves, parameter_tensors
from megatrain_jax.models import load_pretrained, next_token_loss

torch = pytest.importorskip("torch", reason='compared with PyTorch: pip install -e ".[torch]"')

from families import FAMILIES, make_torch, named, random_tokens, save  # noqa: E402

STEPS, RATE, EPS = 5, 1e-3, 1e-4
# Families whose layers are classes of their own, one of each kind; the others are `long`.
SAMPLE = ("olmo2", "qwen3-next", "phi")


def batches() -> list[dict[str, np.ndarray]]:
    tokens = [random_tokens(2, 13, seed) for seed in range(STEPS)]
    return [{"tokens": t[:, :-1], "labels": t[:, 1:]} for t in tokens]


def steps_of_torch(model: Any) -> tuple[list[float], dict[str, np.ndarray]]:
    trained = [p for name, p in model.named_parameters() if ".vis" not in name]
    optimizer = torch.optim.AdamW(trained, lr=RATE, eps=EPS, weight_decay=0.01)
    losses = []
    for batch in batches():
        out = model(torch.tensor(batch["tokens"]).long())
        labels = torch.tensor(batch["labels"]).long().flatten()
        loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), labels)
        if getattr(out, "aux_loss", None) is not None:
            loss = loss + model.config.get_text_config().router_aux_loss_coef * out.aux_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, named({n: p.detach().numpy() for n, p in model.named_parameters()}, model)


@pytest.mark.parametrize(
    "name",
    [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.long) for n in FAMILIES],
)
def test_five_steps_are_those_of_transformers(name, tmp_path):
    reference = make_torch(name)
    pretrained = load_pretrained(save(reference, tmp_path / "m"))
    trainer = mt.Trainer(
        pretrained.model,
        next_token_loss,
        optax.adamw(RATE, eps=EPS, weight_decay=0.01),
        batches()[0],
        params=pretrained.params,
        precision=mt.Precision(compute=jnp.float32),
    )
    losses = [trainer.read(trainer.step(batch))["loss"] for batch in batches()]
    expected, parameters = steps_of_torch(reference)
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    found = dict(leaves(trainer.model))
    parameters |= named({name: b.numpy() for name, b in reference.named_buffers()}, reference)
    for entry in parameter_tensors(pretrained.config):
        want = np.stack([parameters[n] for n in entry.names])
        got = np.asarray(found[entry.path]).reshape(want.shape)
        assert np.linalg.norm(got - want) <= 2e-6 * np.linalg.norm(want), entry.names[0]
