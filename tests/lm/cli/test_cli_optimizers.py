"""Optimizers by name on the command line: against PyTorch's and Optax's own."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax import contrib

import megatrain_jax as mt
from megatrain_jax import models
from megatrain_jax._src.lm.cli.finetune_settings import FinetuneSettings
from megatrain_jax._src.lm.cli.main import main
from megatrain_jax._src.lm.cli.recipe import (
    matrices_of_layers,
    optimizer_of,
    optimizer_of_run,
    schedule_of,
)
from messages import refuses, tells

SCHEDULE = schedule_of(0.1, 6, 0.3, "linear", 0.1)


def steps_of(optimizer, start, num=5):
    """The parameters after a few steps with gradients that depend on them."""

    @jax.jit
    def step(params, state):
        grads = jax.tree.map(lambda p: jnp.sin(3 * p) + 0.5 * p, params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = start, optimizer.init(start)
    for _ in range(num):
        params, state = step(params, state)
    return params


def test_the_default_is_adamw_with_clipping_and_without_decay():
    start = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    settings = FinetuneSettings(model="model", data="a.jsonl", out="out")
    adamw = optax.adamw(SCHEDULE, b1=0.9, b2=0.95, weight_decay=0.0)
    expected = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    found = steps_of(optimizer_of_run(settings, SCHEDULE), start)
    np.testing.assert_array_equal(found, steps_of(expected, start))


@pytest.mark.parametrize("name", ["sgd", "adafactor", "adamw"])
def test_known_optimizers_are_those_of_pytorch(name):
    torch = pytest.importorskip("torch", reason='compared with PyTorch: pip install -e ".[torch]"')
    start = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    ours: dict[str, Any] = {
        "sgd": {"options": {"momentum": 0.9}},
        "adafactor": {"options": {"min_dim_size_to_factor": 1}},
        "adamw": {"b1": 0.8, "b2": 0.9},
    }[name]
    found = steps_of(optimizer_of(name, SCHEDULE, weight_decay=0.3, clip=0.7, **ours), start)
    weight = torch.nn.Parameter(torch.tensor(start))
    if name == "adafactor":
        from transformers import Adafactor

        optimizer = Adafactor(
            [weight], lr=1.0, scale_parameter=False, relative_step=False, weight_decay=0.3
        )
    else:
        kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]
        theirs = {"sgd": {"momentum": 0.9}, "adamw": {"betas": (0.8, 0.9)}}[name]
        optimizer = kind([weight], lr=1.0, weight_decay=0.3, **theirs)
    for number in range(5):
        optimizer.param_groups[0]["lr"] = np.asarray(SCHEDULE(number)).item()
        weight.grad = (torch.sin(3 * weight) + 0.5 * weight).detach()
        torch.nn.utils.clip_grad_norm_([weight], 0.7)
        optimizer.step()
    np.testing.assert_allclose(found, weight.detach().numpy(), atol=2e-6)


def decoder():
    config = models.DecoderConfig.from_hf(
        {
            "model_type": "qwen3_moe",
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 24,
            "moe_intermediate_size": 8,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "norm_topk_prob": True,
        }
    )
    return models.Decoder(config, rngs=nnx.Rngs(0))


def test_muon_is_for_the_matrices_of_layers_alone():
    params = nnx.state(decoder(), nnx.Param)
    axes = nnx.to_flat_state(matrices_of_layers(params))
    muon = {"/".join(map(str, path)): of for path, of in axes if of.get_value()}
    layer = {name.removeprefix("layers/0/") for name in muon if name.startswith("layers/0/")}
    attention = {f"self_attn/{name}_proj/weight" for name in "qkvo"}
    experts = {f"mlp/experts/{name}_proj/weight" for name in ("gate", "up", "down")}
    assert layer == attention | experts | {"mlp/gate/weight"} and len(muon) == 2 * len(layer)
    stacked = muon["layers/1/mlp/experts/up_proj/weight"].get_value()
    assert stacked == contrib.MuonDimensionNumbers(reduction_axis=2, output_axis=1)
    # Inputs come first only in experts that aren't modules.
    bare = np.zeros((2, 4, 6))
    tree = {"layers": {"0": {"experts": {"down_proj": bare, "down_proj_bias": bare[:, 0]}}}}
    found = matrices_of_layers(tree)["layers"]["0"]["experts"]
    assert found == {"down_proj": contrib.MuonDimensionNumbers(1, 2), "down_proj_bias": None}


@pytest.mark.exhaustive
def test_muon_streams_as_it_updates_a_whole_tree():
    optimizer = optimizer_of("muon", 0.01, weight_decay=0.1, options={"eps": 1e-3})
    tokens = np.random.default_rng(0).integers(0, 32, (2, 9)).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    graph, params = nnx.split(decoder(), nnx.Param)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        def loss(params):
            return models.next_token_loss(nnx.merge(graph, params), batch)[0]

        grads = jax.grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(2):
        params, state = step(params, state)
    result = mt.fit(
        decoder,
        models.next_token_loss,
        [batch] * 2,
        optimizer,
        precision=mt.Precision(compute=jnp.float32),
        progress=False,
    )
    ours = nnx.state(result.trainer.model, nnx.Param)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), ours, params)


def test_a_function_of_ones_own_gets_the_rate_and_the_options(tmp_path, monkeypatch):
    source = "import optax\ndef mine(rate, *, factor): return optax.sgd(lambda n: factor * rate(n))"
    source += "\ndef any_options(rate, **given):\n import my_factors\n return mine(rate, **given)"
    source += "\ndef more(rate, *given): return mine(rate, factor=1)"
    (tmp_path / "my_optimizers.py").write_text(source)
    (tmp_path / "my_factors.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    start = np.ones(3, np.float32)
    half = optimizer_of("sgd", lambda step: 0.5 * SCHEDULE(step), clip=None)
    for name in ("my_optimizers:mine", "my_optimizers:any_options"):
        mine = optimizer_of(name, SCHEDULE, clip=None, options={"factor": 0.5})
        np.testing.assert_array_equal(steps_of(mine, start), steps_of(half, start))
    for name, near in (("my_optimizers:mine", ["`factor`"]), ("my_optimizers:more", [])):
        with refuses(ValueError, "'factr'", "`optimizer`", *near):
            optimizer_of(name, SCHEDULE, options={"factr": 0.5})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--optimizer", "adamW8"], "muon, adafactor, sgd module:function 'adamW8'"),
        (["--optimizer", "adamx"], "'adamx' `adamw`"),
        (["--optimizer", "absent:f"], "`optimizer`=absent:f imported"),
        (["--optimizer", "optax:absent"], "`optimizer`=optax:absent 'absent'"),
        (["--optimizer", "optax:constant_schedule"], "`optimizer`=optax:constant_schedule return"),
        (["--optimizer-options", "{epz: 1}"], "'epz' `optimizer`=adamw"),
        (["--optimizer-options", "{b1: 0.5}"], "`optimizer_options` `b1`"),
    ],
)
def test_wrong_optimizers_are_told_in_a_line(options, told, capsys):
    assert main(["plan", "smollm2-135m", "--gpu", "H100", "--tokens", "4096", *options]) == 2
    assert tells(capsys.readouterr().err.splitlines()[-1], *told.split())
