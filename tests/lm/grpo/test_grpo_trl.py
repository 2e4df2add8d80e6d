"""The loss and the advantages of GRPO, compared with TRL's own trainer on its own completions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from megatrain_jax import losses, models
from megatrain_jax._src.lm.grpo.policy_batch import (
    GrpoOptions,
    grpo_loss,
    packed_rows,
    policy_batch,
)
from megatrain_jax._src.lm.models.decoder import WithReference
from megatrain_jax._src.lm.models.generation.generate import Completion

needs = 'compared with TRL: pip install -e ".[torch]"'
datasets, torch, transformers, trl = (
    pytest.importorskip(name, reason=needs) for name in ("datasets", "torch", "transformers", "trl")
)

from chats import tokenizer  # noqa: E402
from families import make_torch, save  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
GROUP, LENGTH = 4, 12
PROMPTS = ["the cat sat", "rain fell on a mat, while"]
LOSSES = [
    {"loss_type": "dapo", "epsilon_high": 0.28},
    {"loss_type": "grpo", "beta": 0.04},
    {"loss_type": "dr_grpo", "epsilon": 0.1},
    {"loss_type": "bnpo", "beta": 0.1, "epsilon": 0.05, "use_bias_correction_kl": False},
]


def reward(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text) + 0.1 * text.count("a")) for text in completions]


def their_trainer(model: Any, folder: Any) -> Any:
    splits = tokenizer()
    splits.pad_token = splits.eos_token
    options = {
        "output_dir": str(folder),
        "per_device_train_batch_size": GROUP * len(PROMPTS),
        "num_generations": GROUP,
        "max_completion_length": LENGTH,
        "temperature": 0.7,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
    }
    trainer = trl.GRPOTrainer(
        model,
        reward_funcs=[reward],
        args=trl.GRPOConfig(**options),
        train_dataset=datasets.Dataset.from_list([{"prompt": text} for text in PROMPTS]),
        processing_class=splits,
    )
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def completions_of(theirs: dict[str, Any], old_logs: np.ndarray) -> list[Completion]:
    found = []
    for row in range(len(theirs["prompt_ids"])):
        there, written = (theirs[f"{name}_mask"][row].bool() for name in ("prompt", "completion"))
        logs = old_logs[row][written.numpy()]
        found.append(
            Completion(
                prompt=row // GROUP,
                sample=row % GROUP,
                text="",
                prompt_ids=theirs["prompt_ids"][row][there].numpy(),
                ids=theirs["completion_ids"][row][written].numpy(),
                log_probs=logs,
                tempered_log_probs=logs,
                drawn_log_probs=logs,
                finish="stop",
            )
        )
    return found


def with_reference(pretrained: models.Pretrained, before: models.Pretrained) -> Any:
    """Builds both decoders, with the parameters of two checkpoints."""

    def filled(one: models.Pretrained) -> models.Decoder:
        graph, state = nnx.split(one.model())
        nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, one.params))
        return nnx.merge(graph, state)

    return WithReference(filled(pretrained), filled(before))


def their_batch(trainer: Any, model: Any, before: Any) -> dict[str, Any]:
    """TRL's completions of uneven lengths, as after an update: their old log-probabilities differ.

    Args:
        trainer: TRL's trainer of the model.
        model: The model.
        before: The reference.
    """
    inputs = [{"prompt": text} for text in PROMPTS for _ in range(GROUP)]
    model.train()
    theirs = trainer._generate_and_score_completions(inputs)
    # So rows have different numbers of completions.
    for row, mask in enumerate(theirs["completion_mask"]):
        mask[LENGTH - row :] = 0
    theirs["num_items_in_batch"] = theirs["completion_mask"].sum()
    both = [
        torch.cat([theirs[f"{name}_{kind}"] for name in ("prompt", "completion")], 1)
        for kind in ("ids", "mask")
    ]
    size = theirs["completion_ids"].shape[1]
    trl.trainer.utils.add_fused_lm_head(before, temperature=0.7)
    with torch.no_grad():
        logs, _, _ = trainer._get_per_token_logps_and_entropies(model, *both, size)
        theirs["ref_per_token_logps"], _, _ = trainer._get_per_token_logps_and_entropies(
            before, *both, size
        )
    # Some ratios are clipped, on both sides.
    theirs["old_per_token_logps"] = logs + 0.3 * torch.randn_like(logs)
    return theirs


def their_loss(trainer: Any, model: Any, theirs: Any, given: dict[str, Any]) -> float:
    """TRL's loss with some options; its gradients are left in the model."""
    trainer.args.use_bias_correction_kl = given.get("use_bias_correction_kl", True)
    trainer.loss_type, trainer.beta = given["loss_type"], given["beta"]
    trainer.epsilon_low = given["epsilon"]
    trainer.epsilon_high = given["epsilon_high"] or given["epsilon"]
    model.zero_grad()
    loss = trainer._compute_loss(model, theirs)
    loss.backward()
    return loss.item()


def our_loss(ours: Any, chosen: GrpoOptions, batch: Any) -> tuple[Any, Any, Any]:
    """The loss of our policy and reference, its metrics, and gradients by name."""
    function = grpo_loss(chosen)
    graph, params, rest = nnx.split(ours, nnx.Param, ...)

    def of_params(params: Any) -> Any:
        return function(nnx.merge(graph, params, rest), batch)

    (found, metrics), gradients = jax.jit(jax.value_and_grad(of_params, has_aux=True))(params)
    return found, metrics, nnx.to_pure_dict(gradients)


def check_gradients(mine: Any, model: Any) -> None:
    """Compares gradients of our policy with those that TRL's loss has left in its model."""
    wanted = {name: p.grad.numpy() for name, p in model.named_parameters()}
    for path in ("layers.0.self_attn.q_proj", "layers.1.mlp.down_proj", "norm", "embed_tokens"):
        there: Any = mine
        for key in path.split("."):
            there = there[int(key) if key.isdigit() else key]
        (array,) = there.values()
        other = wanted[f"model.{path}.weight"]
        array = np.asarray(array)
        array = array if array.shape == other.shape else array.T
        np.testing.assert_allclose(array, other, atol=1e-5 * np.abs(other).max(), err_msg=path)


def test_loss_and_gradients_are_those_of_trl(tmp_path: Any):
    model = make_torch("llama", vocab_size=400)
    before = make_torch("llama", vocab_size=400)
    with torch.no_grad():
        for parameter in before.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    ours = with_reference(
        *(models.load_pretrained(save(m, tmp_path / n)) for n, m in (("a", model), ("b", before)))
    )
    trainer = their_trainer(model, tmp_path / "theirs")
    theirs = their_batch(trainer, model, before)
    rewards = list(trainer._logs["rewards"]["reward"])
    advantages = losses.group_advantages(rewards, GROUP)
    np.testing.assert_allclose(advantages, theirs["advantages"], rtol=1e-5, atol=1e-6)

    completions = completions_of(theirs, theirs["old_per_token_logps"].numpy())
    rows = packed_rows(completions, length=40, unit=1, most=8)
    assert len({len(row) for row in rows}) > 1 and len(rows) < len(completions)
    for options in LOSSES:
        given = {"beta": 0.0, "epsilon": 0.2, "epsilon_high": None} | options
        loss = their_loss(trainer, model, theirs, given)
        chosen = GrpoOptions(max_completion_length=LENGTH, temperature=0.7, **given)
        batch = policy_batch(rows, completions, advantages, length=40, options=chosen)
        found, metrics, gradients = our_loss(ours, chosen, batch)
        np.testing.assert_allclose(found, loss, rtol=1e-5, atol=1e-6)
        check_gradients(gradients["policy"], model)
        logged = trainer._metrics["train"]
        clipped = logged["clip_ratio/region_mean"][-1]
        assert 0.02 < clipped < 0.98
        np.testing.assert_allclose(metrics["clip_ratio/region_mean"], clipped, rtol=1e-5)
        if given["beta"]:
            np.testing.assert_allclose(metrics["kl"], logged["kl"][-1], rtol=1e-4)
        others = jax.tree.leaves(gradients["reference"])
        assert not any(np.abs(x).any() for x in others)
