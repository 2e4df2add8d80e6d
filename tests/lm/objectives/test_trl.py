"""Ten steps of each objective of preferences, compared with TRL's trainers on the same batches."""

import random
from dataclasses import fields
from typing import Any, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import megatrain_jax as mt
from megatrain_jax import models, objectives
from megatrain_jax._src.lm.cli.finetune_settings import OBJECTIVE_KINDS, FinetuneSettings
from megatrain_jax._src.lm.objectives.example_losses import DpoLoss

needs = 'compared with TRL: pip install -e ".[torch]"'
datasets, torch, transformers, trl = (
    pytest.importorskip(name, reason=needs) for name in ("datasets", "torch", "transformers", "trl")
)

from chats import tokenizer  # noqa: E402
from families import make_torch, save  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
WORDS = "red green blue one two three cat dog house tree".split()
PAIRS = 4
OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": PAIRS,
    "num_train_epochs": 1,
    "learning_rate": 1e-3,
    "adam_epsilon": 1e-3,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "report_to": [],
    "save_strategy": "no",
    "logging_steps": 1,
}


def texts(seed: int) -> Any:
    """A function that draws texts of uneven lengths."""
    rng = random.Random(seed)
    return lambda least, most: " ".join(rng.choices(WORDS, k=rng.randint(least, most)))


def pairs_of_texts(count: int) -> list[dict[str, str]]:
    draw = texts(0)
    return [
        {"prompt": draw(1, 5) + " ", "chosen": draw(2, 9), "rejected": draw(2, 9)}
        for _ in range(count)
    ]


def theirs(kind: Any, config: Any, tmp_path: Any, rows: list[Any], model: Any, *before: Any) -> Any:
    """A trainer of TRL after its training, with its batches and losses as `seen`, `losses`."""

    class Noting(kind):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            copied = {k: v.numpy() for k, v in inputs.items() if hasattr(v, "numpy")}
            self.seen.append(copied)
            self.losses.append(loss.item())
            return loss

    splits = tokenizer()
    splits.pad_token = splits.pad_token or splits.eos_token
    noting = Noting(
        model,
        *before,
        args=config(output_dir=str(tmp_path / "theirs"), **OPTIONS),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=splits,
    )
    noting.seen, noting.losses = [], []
    noting.train()
    return noting


def sides_of(batch: dict[str, np.ndarray]) -> tuple[Any, ...]:
    """The conversations of a batch of TRL, with masks of their answers: first and second ones."""
    if "completion_mask" in batch:
        tokens, there, mask = (
            np.split(batch[name], 2) for name in ("input_ids", "attention_mask", "completion_mask")
        )
        return tuple(zip(tokens, there, mask, strict=True))
    return tuple(
        (
            batch[f"{side}_input_ids"],
            batch[f"{side}_attention_mask"],
            batch[f"{side}_labels"] != -100,
        )
        for side in ("chosen", "rejected")
    )


def packed(sides: tuple[Any, ...], length: int) -> dict[str, np.ndarray]:
    """A batch whose rows have one conversation of each side, as `megatrain_jax.data` packs them."""
    rows = len(sides[0][0])
    whole = {
        name: np.zeros((rows, length), np.int32)
        for name in ("tokens", "labels", "segments", "positions", "mask")
    }
    for row in range(rows):
        start = 0
        for number, (tokens, there, mask) in enumerate(sides, 1):
            size = int(there[row].sum())
            here = slice(start, start + size)
            whole["tokens"][row, here] = tokens[row, :size]
            whole["labels"][row, start : start + size - 1] = tokens[row, 1:size]
            whole["mask"][row, start : start + size - 1] = mask[row, 1:size]
            whole["segments"][row, here] = number
            whole["positions"][row, here] = np.arange(size)
            start += size
    segments, mask = whole["segments"], whole["mask"].astype(bool)
    chosen = segments % 2 == 1
    follows = segments[:, 1:] == segments[:, :-1]
    sums = {
        "learned": mask.sum(),
        "pairs": rows,
        "chosen_learned": (mask & chosen).sum(),
        "chosen_tokens": (follows & chosen[:, 1:]).sum(),
    }
    counts = {f"{k}_per_row": np.full(rows, v / rows, np.float32) for k, v in sums.items()}
    return whole | counts | {"mask": mask, "pairs": np.ones((rows, 1), bool)}


def all_packed(seen: list[Any], sides: Any = sides_of) -> list[dict[str, np.ndarray]]:
    split = [sides(batch) for batch in seen]
    length = max(sum(there.shape[1] for _, there, _ in one) for one in split)
    return [packed(one, length) for one in split]


def initial_answers(pretrained: models.Pretrained) -> Any:
    """A function from a batch to its answers' log-probabilities before training."""
    graph, initial = nnx.split(pretrained.model())
    nnx.replace_by_pure_dict(initial, jax.tree.map(jnp.asarray, pretrained.params))
    compute = jax.jit(
        lambda batch: objectives.answer_log_probabilities(nnx.merge(graph, initial), batch)
    )
    return lambda batch: np.asarray(compute(batch))


def check_equal(result: mt.FitResult, trainer: Any, model: Any) -> None:
    """Losses of all steps and the parameters after them are TRL's."""
    curve = [record["loss"] for record in result.history]
    assert len(curve) == 10 and np.ptp(trainer.losses) > 0.01
    np.testing.assert_allclose(curve, trainer.losses, rtol=1e-5)
    trained = dict(model.named_parameters())
    for path, array in nnx.to_flat_state(nnx.state(result.trainer.model, nnx.Param)):
        name = ".".join(map(str, path))
        expected = trained[name if name in trained else f"model.{name}"].detach().numpy()
        np.testing.assert_allclose(array[...], expected, atol=2e-6 + 2e-6 * abs(expected).max())


def check_metrics(result: mt.FitResult, trainer: Any, names: Any) -> None:
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    for name in names:
        found = [record[name] for record in result.history]
        expected = [entry[name] for entry in logged]
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5, err_msg=name)


def ours(pretrained: models.Pretrained, loss: Any, batches: list[Any]) -> mt.FitResult:
    return mt.fit(
        pretrained.model,
        loss,
        batches,
        optax.adamw(1e-3, eps=1e-3, weight_decay=0.0),
        params=pretrained.params,
        precision=mt.Precision(compute=jnp.float32),
        progress=False,
    )


REWARDS = [f"rewards/{name}" for name in ("chosen", "rejected", "accuracies", "margins")]
PAIRED = {
    "dpo": lambda: (trl.DPOTrainer, trl.DPOConfig),
    "ipo": lambda: (
        trl.DPOTrainer,
        lambda **given: trl.DPOConfig(loss_type="ipo", **given),
    ),
    "simpo": lambda: (
        pytest.importorskip("trl.experimental.cpo").CPOTrainer,
        lambda **given: trl.experimental.cpo.CPOConfig(loss_type="simpo", **given),
    ),
    "orpo": lambda: (
        pytest.importorskip("trl.experimental.orpo").ORPOTrainer,
        pytest.importorskip("trl.experimental.orpo").ORPOConfig,
    ),
}


@pytest.mark.by_default("ipo", "simpo", "orpo")
@pytest.mark.parametrize("name", PAIRED)
def test_pairs_are_learned_as_trl_learns_them(name: str, tmp_path: Any):
    kind, config = PAIRED[name]()
    has_reference = kind is trl.DPOTrainer
    model, *before = (make_torch("llama", vocab_size=400) for _ in range(1 + has_reference))
    pretrained = models.load_pretrained(save(model, tmp_path / "model"))
    trainer = theirs(kind, config, tmp_path, pairs_of_texts(40), model, *before)
    batches = all_packed(trainer.seen)
    if has_reference:
        reference = initial_answers(pretrained)
        batches = [batch | {"reference": reference(batch)} for batch in batches]
    stored = {"reference": "stored"} if has_reference else {}
    # The defaults of options are TRL's.
    result = ours(pretrained, getattr(objectives, name)(**stored), batches)
    check_equal(result, trainer, model)
    check_metrics(result, trainer, REWARDS)


def test_further_losses_of_pairs_are_those_of_trl(tmp_path: Any):
    kinds, smoothing = get_args(DpoLoss), {"robust": 0.2}
    assert kinds == get_args(get_type_hints(FinetuneSettings)["loss_type"])
    weights = [0.01 if kind == "sppo_hard" else 1.0 for kind in kinds]  # it is far larger
    model, before = (make_torch("llama", vocab_size=400) for _ in range(2))
    with torch.no_grad():  # or all rewards would begin with 0
        for parameter in before.parameters():
            parameter.mul_(1.05)
    pretrained = models.load_pretrained(save(model, tmp_path / "model"))
    reference = initial_answers(models.load_pretrained(save(before, tmp_path / "before")))

    def config(**given: Any) -> Any:
        own = {"loss_type": list(kinds), "loss_weights": weights, "label_smoothing": 0.2}
        return trl.DPOConfig(**own, **given)

    def loss(model: Any, batch: Any) -> Any:
        found: Any = 0.0
        for kind, weight in zip(kinds, weights, strict=True):
            options: Any = {"loss_type": kind, "label_smoothing": smoothing.get(kind, 0.0)}
            value, metrics = objectives.dpo(**options, reference="stored")(model, batch)
            found += weight * value
        return found, metrics

    trainer = theirs(trl.DPOTrainer, config, tmp_path, pairs_of_texts(40), model, before)
    batches = [batch | {"reference": reference(batch)} for batch in all_packed(trainer.seen)]
    check_equal(ours(pretrained, loss, batches), trainer, model)


def test_dropout_is_off_where_trl_switches_it_off():
    configs: dict[str, Any] = {
        "dpo": trl.DPOConfig,
        "ipo": trl.DPOConfig,
        "kto": trl.KTOConfig,
        "reward": trl.RewardConfig,
        "simpo": pytest.importorskip("trl.experimental.cpo").CPOConfig,
        "orpo": pytest.importorskip("trl.experimental.orpo").ORPOConfig,
        "sft": trl.SFTConfig,
        "distill": pytest.importorskip(
            "trl.experimental.server_distillation"
        ).ServerDistillationConfig,
    }
    for name, kind in OBJECTIVE_KINDS.items():
        defaults = {field.name: field.default for field in fields(configs[name])}
        assert kind.has_dropout == (not defaults.get("disable_dropout", False)), name
    # `models.train_grpo` trains with a model's own dropout.
    assert not trl.GRPOConfig.disable_dropout


def labelled_texts(count: int) -> list[dict[str, Any]]:
    draw, rng = texts(1), random.Random(2)
    return [
        {"prompt": draw(1, 5) + " ", "completion": draw(2, 9), "label": rng.random() < 0.6}
        for _ in range(count)
    ]


def labelled_sides(batch: dict[str, np.ndarray]) -> tuple[Any, ...]:
    names = ("input_ids", "attention_mask", "completion_mask")
    return tuple(tuple(batch[f"{kind}{name}"] for name in names) for kind in ("", "KL_"))


def test_labelled_answers_are_learned_as_trl_learns_them(tmp_path: Any):
    model, before = (make_torch("llama", vocab_size=400) for _ in range(2))
    with torch.no_grad():  # or the baseline would be 0, and could be left out
        for parameter in before.parameters():
            parameter.mul_(1.05)
    pretrained = models.load_pretrained(save(model, tmp_path / "model"))
    earlier = models.load_pretrained(save(before, tmp_path / "before"))

    def config(**given: Any) -> Any:
        return trl.KTOConfig(undesirable_weight=1.2, **given)

    trainer = theirs(trl.KTOTrainer, config, tmp_path, labelled_texts(40), model, before)
    reference = initial_answers(earlier)
    batches = []
    for batch, seen in zip(all_packed(trainer.seen, labelled_sides), trainer.seen, strict=True):
        good = seen["label"][:, None]
        counts = np.full(PAIRS, good.mean(), np.float32)
        batches.append(batch | {"desirable": good, "desirable_per_row": counts})
        batches[-1]["reference"] = reference(batch)
    loss = objectives.kto(undesirable_weight=1.2, reference="stored")
    result = ours(pretrained, loss, batches)
    assert max(record["kl"] for record in result.history) > 0.1
    check_equal(result, trainer, model)
    check_metrics(result, trainer, ["kl"])


def scored_sides(batch: dict[str, np.ndarray]) -> tuple[Any, ...]:
    tokens, there = (np.split(batch[name], 2) for name in ("input_ids", "attention_mask"))
    return tuple(zip(tokens, there, there, strict=True))


@pytest.mark.parametrize("has_margins", [True, False])
def test_reward_models_learn_as_trl_lets_them_and_are_exported(has_margins: bool, tmp_path: Any):
    base = make_torch("llama", vocab_size=400, num_labels=1, pad_token_id=0)
    torch.manual_seed(1)
    model = transformers.LlamaForSequenceClassification(base.config)
    pretrained = models.load_pretrained(save(model, tmp_path / "model"))
    assert pretrained.config.scores and "score" in pretrained.params
    rows = [row | {"chosen": row["prompt"] + row["chosen"]} for row in pairs_of_texts(40)]
    rows = [row | {"rejected": row["prompt"] + row["rejected"]} for row in rows]
    rng = np.random.default_rng(0)
    kept = ["chosen", "rejected"] + ["margin"] * has_margins
    rows = [{k: (row | {"margin": rng.random()})[k] for k in kept} for row in rows]
    coefficient = 0.01 if has_margins else None

    def config(**given: Any) -> Any:
        return trl.RewardConfig(center_rewards_coefficient=coefficient, **given)

    trainer = theirs(trl.RewardTrainer, config, tmp_path, rows, model)
    batches = all_packed(trainer.seen, scored_sides)
    for batch, seen in zip(batches, trainer.seen, strict=True):
        batch["margins"] = seen.get("margin", np.zeros(PAIRS, np.float32))[:, None]
    loss = objectives.reward(center_rewards_coefficient=coefficient)
    result = ours(models.reward_model(pretrained), loss, batches)
    check_equal(result, trainer, model)
    check_metrics(result, trainer, ["accuracy", "margin", "mean_reward"])
    models.save_pretrained(result.trainer, tmp_path / "ours")
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours")
    last = {k: torch.tensor(v) for k, v in trainer.seen[-1].items() if k != "margin"}
    own = models.conversation_scores(result.trainer.model, batches[-1], segments=2)
    with torch.no_grad():
        found = loaded.eval()(**last).logits[:, 0]
        # One by one and without padding, too.
        alone = [
            loaded(ids[there.bool()][None]).logits[0, 0]
            for ids, there in zip(last["input_ids"], last["attention_mask"], strict=True)
        ]
    np.testing.assert_allclose(own.T.reshape(-1), found, rtol=2e-6, atol=5e-6)
    np.testing.assert_allclose(torch.stack(alone), found, rtol=2e-6, atol=5e-6)
    again = models.load_pretrained(tmp_path / "ours")
    np.testing.assert_array_equal(
        again.params["score"]["weight"], result.trainer.model.score.weight
    )
