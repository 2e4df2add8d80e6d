"""Token ids with a teacher's top-k log-probabilities, packed, and learned by a small decoder."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import megatrain_jax as mt
from chats import tokenizer, write
from megatrain_jax import data, models, objectives
from small_decoders import SMALL
from small_logits import full

K = 3


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of uneven lengths; some positions have fewer entries, in any order."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        size = int(rng.integers(2, 12))
        ids, logs = [], []
        for _ in range(size):
            k = int(rng.integers(1, K + 2))
            probabilities = np.sort(rng.dirichlet(np.ones(40)))[::-1][:k].astype(np.float32)
            order = rng.permutation(k)
            ids.append(rng.permutation(40)[:k][order].tolist())
            logs.append(np.log(probabilities)[order].tolist())
        row = {"topk_token_ids": ids, "topk_logprobs": logs}
        row["input_ids"] = rng.integers(0, 40, size).tolist()
        if rng.random() < 0.5:
            row["completion_mask"] = [0] + rng.integers(0, 2, size - 2).tolist() + [1]
        found.append(row)
    return found


def load(source: Any, **options: Any) -> data.Dataset:
    options = {"length": 16, "batch_size": 4, "topk": K, "progress": False, **options}
    return data.distillation(source, tokenizer(), **options)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_entries_are_beside_their_tokens(tmp_path: Path, suffix: str):
    given = rows(20)
    wanted = {}
    for row in given:
        best = [np.argsort(-np.float32(logs), kind="stable")[:K] for logs in row["topk_logprobs"]]
        learned = row.get("completion_mask", [1] * len(row["input_ids"]))
        wanted[tuple(row["input_ids"])] = (
            learned[1:] + [0],
            *(
                [np.array(one, kind)[at].tolist() for one, at in zip(row[name], best, strict=True)]
                for name, kind in (("topk_token_ids", np.int32), ("topk_logprobs", np.float32))
            ),
        )
    found = 0
    for batch in load(write(tmp_path / f"a.{suffix}", given), epochs=2):
        for r, segments in enumerate(batch["segments"]):
            for number in range(1, segments.max() + 1):
                here = segments == number
                learned, ids, logs = wanted[tuple(batch["tokens"][r][here].tolist())]
                assert batch["mask"][r][here].tolist() == [bool(one) for one in learned]
                for i, place in enumerate(np.flatnonzero(here)):
                    entries = batch["topk_logprobs"][r, place]
                    assert entries[np.isfinite(entries)].tolist() == logs[i]
                    kept = batch["topk_token_ids"][r, place][np.isfinite(entries)]
                    assert kept.tolist() == ids[i]
                found += 1
    assert found == 40


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "a column": ({"topk_logprobs": None}, "no `topk_logprobs`"),
    "a length": ({"topk_token_ids": [[1]]}, "`topk_token_ids` .*lists.*long"),
    "entries": ({"topk_logprobs": [[0.0], [0.0, 0.0]]}, "`topk_logprobs` .*num"),
    "ids": ({"topk_token_ids": [[1], [0.5]]}, "`topk_token_ids` .*token ids"),
    "alike": (
        {"topk_token_ids": [[1], [3, 3]], "topk_logprobs": [[-1.0], [-1.0, -2.0]]},
        "`topk_token_ids` .*twice",
    ),
    "logits": (
        {"topk_logprobs": [[-1.0], [0.5]]},
        "log-probabilities.*`tail=True`.*position 2.* 0.5 ",
    ),
    "a little above": (
        {"topk_logprobs": [[-1.0], [0.015]]},
        "position 2.* 0.015 ",
    ),
    "a sum": (
        {"topk_token_ids": [[1, 2], [2]], "topk_logprobs": [[-0.5, -0.6], [-1.0]]},
        "position 1.* 1.155",
    ),
    "nothing": ({"topk_logprobs": [[-1.0], [float("nan")]]}, "`topk_logprobs` .*numbers"),
    "tokens": ({"input_ids": [1, -1]}, "`input_ids` .*token ids"),
    "a mask": ({"completion_mask": [1]}, "`completion_mask` .*numbers"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_row_is_named(fault: str):
    change, message = FAULTS[fault]
    good = {"input_ids": [1, 2], "topk_token_ids": [[1], [2]], "topk_logprobs": [[-1], [-1.0]]}
    with pytest.raises(data.DataError, match=f"`source`, row 2: .*{message}"):
        load([good, good | change, good])
    left = load([good, good | change, good], invalid="drop")
    assert left.num_documents == 2


def test_logits_and_rounded_log_probabilities_are_accepted_where_they_do():
    logits = {"input_ids": [1, 2], "topk_token_ids": [[1], [2]], "topk_logprobs": [[3.5], [-1.0]]}
    assert load([logits], tail=False, batch_size=1).num_documents == 1
    with pytest.raises(data.DataError, match="`topk_logprobs` that are no numbers"):
        load([logits | {"topk_logprobs": [[float("inf")], [-1.0]]}], tail=False)
    with pytest.raises(ValueError, match="`datasets`"):
        data.mix([load([logits], tail=False, topk=k) for k in (1, 2)])
    logs = np.log(np.random.default_rng(0).dirichlet(np.ones(40), 9)).astype(jnp.bfloat16)
    rounded = {"input_ids": [1] * 9, "topk_token_ids": [list(range(40))] * 9}
    rounded["topk_logprobs"] = logs.astype(np.float32).tolist()
    assert load([rounded], topk=40, batch_size=1).num_documents == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("microbatches", [1, 2])
def test_ten_steps_are_those_of_plain_jax(microbatches: int):
    batches = [batch for _, batch in zip(range(10), load(rows(99)), strict=False)]
    assert len(batches) == 10
    optimizer = optax.adamw(1e-2, eps=1e-3)

    def build() -> models.Decoder:
        return models.Decoder(SMALL, rngs=nnx.Rngs(0))

    result = mt.fit(
        build,
        objectives.distill(alpha=0.4),
        batches,
        optimizer,
        microbatches=microbatches,
        precision=mt.Precision(compute=jnp.float32),
        progress=False,
    )
    graph, params = nnx.split(build())

    def plain(params: Any, batch: Any) -> jax.Array:
        model = nnx.merge(graph, params)
        hidden, _ = model.hidden(batch["tokens"], batch["positions"], batch["segments"])
        return full(
            hidden,
            model.head_weight(),
            batch["labels"],
            batch["topk_token_ids"],
            jnp.where(batch["segments"][..., None] > 0, batch["topk_logprobs"], -9.0),
            0.4,
            1.0,
            True,
            batch["mask"],
            None,
        )

    state = optimizer.init(params)
    for batch, record in zip(batches, result.history, strict=True):
        value, gradients = jax.jit(jax.value_and_grad(plain))(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        assert record["loss"] == pytest.approx(float(value), rel=2e-6)
    trained = nnx.state(result.trainer.model, nnx.Param)
    for ours, wanted in zip(jax.tree.leaves(trained), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(ours, wanted, atol=2e-6 * (1 + np.abs(wanted).max()))
