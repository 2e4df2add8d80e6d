"""Runs in lm-evaluation-harness, compared with its own model of Transformers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import megatrain_jax as mt
from megatrain_jax import models
from megatrain_jax._src.lm.models import harness
from megatrain_jax._src.lm.models.harness import Harness
from messages import refuses

CONFIG = models.DecoderConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope=models.Rope(dim=8, base=100.0),
    init_std=0.4,
)


def trainer_of(model: Any, params: Any = None) -> mt.Trainer:
    batch = {name: np.ones((2, 16), np.int32) for name in ("tokens", "labels")}
    options: Any = {"params": params, "trainable": "^norm/", "progress": False}
    options |= {"precision": mt.Precision(compute=jnp.float32)}
    return mt.Trainer(model, models.next_token_loss, optax.sgd(0.0), batch, **options)


def test_continuations_are_scored_as_by_whole_forwards(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(harness, "_POSITIONS", 7)
    model, rng = models.Decoder(CONFIG, rngs=nnx.Rngs(3)), np.random.default_rng(0)
    run = Harness(trainer_of(model), None, batch_size=3, max_length=16)
    sizes = np.array([(5, 4), (5, 4), (1, 1), (2, 15), (14, 3), (40, 1), (1, 16), (1, 12)])
    each = [rng.integers(1, 40, sum(pair)) for pair in sizes]
    forward = jax.jit(lambda tokens: model(tokens))

    def logits_of() -> np.ndarray:
        """Of the last tokens but one of each text; those behind don't change what is before."""
        rows = [np.pad(text[-17:-1], (0, 16 - len(text[-17:-1]))) for text in each]
        return np.asarray(forward(jnp.asarray(rows)))

    for place in range(5, 9):  # as the model itself goes on
        each[0][place] = logits_of()[0, place - 1].argmax()
    each[1][:8] = each[0][:8]  # all but the last one
    requests = [
        (None, text[:size].tolist(), text[size:].tolist())
        for text, (size, _) in zip(each, sizes, strict=True)
    ]
    found = run._loglikelihood_tokens(requests)
    assert [greedy for _, greedy in found] == [True] + [False] * 7
    for text, (_, size), logits, (log, _) in zip(each, sizes, logits_of(), found, strict=True):
        last = len(text[-17:-1])
        logs = np.asarray(jax.nn.log_softmax(logits))[np.arange(last - size, last), text[-size:]]
        np.testing.assert_allclose(log, logs.sum(), rtol=1e-5)
    assert run._loglikelihood_tokens([]) == []
    with refuses(ValueError, "`max_length`", 16, 17):
        run._loglikelihood_tokens([(None, [1], [1] * 17)])


def test_results_are_those_of_the_harness_s_own_model(tmp_path):
    needs = "compared with lm-evaluation-harness: pip install lm_eval"
    instance = pytest.importorskip("lm_eval.api.instance", reason=needs).Instance
    model_of = pytest.importorskip("lm_eval.models.huggingface", reason=needs).HFLM
    import torch

    from chats import tokenizer
    from families import make_torch, save

    words = tokenizer()
    words.pad_token = words.pad_token or words.eos_token
    model = make_torch("llama", vocab_size=400)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    pretrained = models.load_pretrained(save(model, tmp_path / "model"))
    trainer = trainer_of(pretrained.model, pretrained.params)
    ours = models.lm_eval_model(trainer, words, batch_size=4, max_length=32)
    theirs = model_of(model, tokenizer=words, batch_size=2, max_length=32, device="cpu")

    def asked(kind: str, *each: Any) -> list[Any]:
        return [
            instance(request_type=kind, doc={}, arguments=args, idx=i)
            for i, args in enumerate(each)
        ]

    long = " ".join(["red green blue one two three"] * 9)
    pairs = asked(
        "loglikelihood",
        ("red green", " blue"),
        ("blue ", "green red"),
        ("", "one two"),
        (long, " cat dog house"),
        ("one", " two three cat dog"),
    )
    for one, other in zip(ours.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True):
        np.testing.assert_allclose(one[0], other[0], atol=1e-4)
        assert one[1] == other[1]
    texts = asked("loglikelihood_rolling", ("red green",), (long,), ("one",))
    np.testing.assert_allclose(
        ours.loglikelihood_rolling(texts), theirs.loglikelihood_rolling(texts), atol=1e-4
    )
    (free,) = ours.generate_until(asked("generate_until", ("red", {"max_gen_toks": 12})))
    stop = free[len(free) // 2 :][:3]
    prompts = asked(
        "generate_until",
        ("red", {"until": [stop], "max_gen_toks": 12}),
        ("one two", {"until": "\n\n", "max_gen_toks": 9, "do_sample": False}),
        (long, {"max_gen_toks": 12, "repetition_penalty": 1.5}),
        ("cat dog", {"until": [stop], "max_gen_toks": 12}),
    )
    written = ours.generate_until(prompts)
    assert written == theirs.generate_until(prompts)
    assert free.startswith(written[0]) and free != written[0]
    with refuses(ValueError, "num_beams"):
        ours.generate_until(asked("generate_until", ("red", {"num_beams": 2})))
