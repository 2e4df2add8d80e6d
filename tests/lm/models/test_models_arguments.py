"""Misuses of the public functions of `models` and `data`: refused under the argument's name."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from chats import conversations, openai, tokenizer, write
from megatrain_jax import data
from megatrain_jax.models import (
    Decoder,
    DecoderConfig,
    Experts,
    Rope,
    attention,
    load_pretrained,
    next_token_loss,
    save_pretrained,
)
from tiny_sizes import tiny_decoder

NAN, INF = float("nan"), float("inf")
SMALL = tiny_decoder()
EXPERTS: dict[str, Any] = {
    "num": 4,
    "per_token": 2,
    "intermediate_size": 8,
    "normalize": True,
    "layers": (0,),
}
HF = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
}

# What no argument of a kind may be.
INTEGER: list[Any] = ["5", "", 1.5, 2.0, True, NAN, INF, -1, [3], {}, object(), b"5", 1j]
NUMBER: list[Any] = ["1.0", "", True, NAN, INF, [1.0], {}, object(), 1j, 10**400]
BOOLEAN: list[Any] = ["yes", 1, 0.0, [True], {}, object()]
NAME: list[Any] = ["nothing", "", 5, 1.5, True, ["error"], {}, object()]
PATH: list[Any] = [5, 1.5, True, "", b"folder", "a\0b", object(), ["folder"]]
ARRAY: list[Any] = [5, "x", [[1, 2]], None, np.zeros(3), np.zeros((2, 3, 4)), {}]
SHAPES = np.zeros((1, 4), np.int32)


def nested(depth: int = 10_000) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def of_config(**changes: Any) -> Any:
    return dataclasses.replace(SMALL, **changes)


def of_experts(**changes: Any) -> Any:
    return Experts(**EXPERTS | changes)


def of_rope(**changes: Any) -> Any:
    given: dict[str, Any] = {"dim": 8}
    return Rope(**given | changes)


def of_from_hf(**changes: Any) -> Any:
    given: dict[str, Any] = {"config": HF}
    return DecoderConfig.from_hf(**given | changes)


def of_hf(**changes: Any) -> Any:
    return DecoderConfig.from_hf(HF | changes)


def of_attention(**changes: Any) -> Any:
    x = jnp.zeros((1, 4, 2, 8))
    given: dict[str, Any] = {"q": x, "k": x, "v": x}
    return attention(**given | changes)


def of_decoder(**changes: Any) -> Any:
    given = {"config": SMALL, "rngs": nnx.Rngs(0)} | changes
    return Decoder(given.pop("config"), **given)


def of_call(**changes: Any) -> Any:
    model = nnx.eval_shape(lambda: Decoder(SMALL, rngs=nnx.Rngs(0)))
    return model(**{"tokens": SHAPES} | changes)


def of_loss(**changes: Any) -> Any:
    model = nnx.eval_shape(lambda: Decoder(SMALL, rngs=nnx.Rngs(0)))
    given: dict[str, Any] = {"model": model, "batch": {"tokens": SHAPES, "labels": SHAPES}}
    return next_token_loss(**given | changes)


def of_load(**changes: Any) -> Any:
    given: dict[str, Any] = {"folder": "nothing"}
    return load_pretrained(**given | changes)


def of_save(**changes: Any) -> Any:
    return save_pretrained(**{"trainer": object(), "folder": "nothing"} | changes)


OPTIONAL_INTEGER = [value for value in INTEGER if value != ""]
# Function, and for each argument what it may not be.
MISUSES: list[tuple[Callable[..., Any], dict[str, list[Any]]]] = [
    (
        of_config,
        {name: [*INTEGER, 0, None] for name in ("vocab_size", "hidden_size", "intermediate_size")}
        | {name: [*INTEGER, 0, None] for name in ("num_layers", "num_heads", "num_kv_heads")}
        | {"head_dim": [*INTEGER, 0, None], "norm_eps": [*NUMBER, -1.0, None]}
        | {"init_std": [*NUMBER, -1.0], "norm_offset": [*NUMBER, None]}
        | {"attention_scale": [*NUMBER, 0.0], "final_softcap": [*NUMBER, 0.0, -1.0]}
        | {"attention_softcap": [*NUMBER, 0, -1], "activation": [*NAME, None]}
        | {"rope": [None, 5, "default", {}, [8]], "local_rope": [5, "default", {}]}
        | {"windows": [5, [None], "x", (0,), (-1,), ("5",), (1.5,), (True,), (1, 2)]}
        | {"experts": [5, "x", {}, EXPERTS]}
        | {name: [*BOOLEAN, None] for name in ("fused", "qkv_bias", "tie_embeddings", "qk_norm")},
    ),
    (
        of_experts,
        {name: [*INTEGER, 0, None] for name in ("num", "per_token", "intermediate_size")}
        | {"normalize": [*BOOLEAN, None], "balance_weight": [*NUMBER, -1, None]}
        | {"layers": [5, [0], "x", (-1,), ("0",), (1.5,), (1, 0), (0, 0), None]},
    ),
    (
        of_rope,
        {"dim": [*INTEGER, 0, 3, None], "base": [*NUMBER, 0, -1, None], "kind": [*NAME, None]}
        | {"factor": [*NUMBER, 0, -1, None], "attention_factor": [*NUMBER, 0, -1, None]}
        | {"max_length": INTEGER, "original_length": INTEGER, "truncate": [*BOOLEAN, None]}
        | {"short_factors": [5, "x", [1.0], (0,), ("1",), (NAN,)]},
    ),
    (
        of_hf,
        {name: [*INTEGER, 0, 10**9, 10**400] for name in HF if name != "model_type"}
        | {"rms_norm_eps": [*NUMBER, None], "rope_theta": [*NUMBER, 0], "model_type": [*NAME, None]}
        | {"tie_word_embeddings": [*BOOLEAN, None], "hidden_act": [*NAME, None]}
        | {"head_dim": [*INTEGER, 0, 3, 10**9], "rope_scaling": [5, "x", [1], True]}
        | {"architectures": [5, "x", [5], ["x"], nested(10)]},
    ),
    (
        of_from_hf,
        {"config": [[], 5, "x", None, [HF], HF | {"x": nested()}, HF | {"_x": {1, 2}}]}
        | {"ignore": ["comment", 5, None, [5], [["x"]], True]},
    ),
    (
        of_attention,
        {"q": ARRAY, "k": [*ARRAY, jnp.zeros((1, 4, 3, 8))], "v": [*ARRAY, jnp.zeros((1, 4, 1, 8))]}
        | {"segments": [v for v in ARRAY if v is not None] + [np.zeros((1, 4)), SHAPES[:, 1:]]}
        | {"window": [*OPTIONAL_INTEGER, 0], "piece": [*OPTIONAL_INTEGER, 0]}
        | {"softcap": [*NUMBER, 0, -1], "scale": [*NUMBER, 0, -1]},
    ),
    (
        of_decoder,
        {"config": [5, None, {}, HF, "x"], "rngs": [0, None, "x", np.random.default_rng(0)]}
        | {"param_dtype": ["x", 5, jnp.int32, "int8", object(), bool]},
    ),
    (
        of_call,
        {"tokens": [*ARRAY, np.zeros((1, 4)), np.zeros((1, 4), bool)]}
        | {"positions": [5, "x", [[1]], np.zeros((1, 4)), SHAPES[:, 1:], SHAPES[0]]}
        | {"segments": [5, "x", [[1]], np.zeros((1, 4)), SHAPES[:, 1:], SHAPES[0]]},
    ),
    (
        of_loss,
        {
            "model": [None, 5, SMALL, HF],
            "batch": [5, None, SHAPES, [SHAPES], {}, {"tokens": SHAPES}],
        }
        | {"z_loss": [*NUMBER, -1, None], "chunk": [*INTEGER, 0, None]},
    ),
    (of_load, {"folder": [*PATH, None, "nothing"], "ignore": ["comment", 5, None, [5]]}),
    (
        of_save,
        {
            "trainer": [None, 5, HF, SMALL, "x"],
            "folder": [*PATH, None],
            "dtype": [*NAME, np.float32],
        }
        | {"max_shard_bytes": [*INTEGER, 0, None], "source": [v for v in PATH if v != ""]},
    ),
]
FLAT = [(f, name, value) for f, names in MISUSES for name, many in names.items() for value in many]


def check_refused(function: Callable[..., Any], name: str, value: Any) -> None:
    try:
        function(**{name: value})
    except (TypeError, ValueError, FileNotFoundError) as error:
        named = f"`{name}`", f"`{name}["  # or one of its elements
        assert any(text in str(error) for text in named), (name, type(value), str(error))
        assert len(str(error)) < 2000
    else:
        raise AssertionError(f"{name} was taken: {type(value)}")


@pytest.mark.exhaustive
def test_models_refuse_what_no_argument_may_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(FLAT) > 400
    for function, name, value in FLAT:
        check_refused(function, name, value)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def chats_file(tmp_path_factory):
    rows = [openai(messages) for messages in conversations(6)]
    return write(tmp_path_factory.mktemp("data") / "chats.jsonl", rows)


DATA: dict[str, list[Any]] = {
    "source": [5, None, True, [], [5], [None], "", {}, "nothing.jsonl", b"x.jsonl", [b"x"]],
    "tokenizer": [5, None, True, "", "nothing", "org/name", b"x", {}, object()],
    "length": [*INTEGER, 0, 1, 10**12, None],
    "batch_size": [*INTEGER, 0, 10**12, None],
    "seed": [*INTEGER, None],
    "epochs": [*OPTIONAL_INTEGER, 0, 10**30],
    "workers": [*INTEGER, 10**9, None],
    "shuffle": [*BOOLEAN, None],
    "progress": [*BOOLEAN, None],
    "too_long": [*NAME, None],
    "invalid": [*NAME, None],
    "train_on": [*NAME, None],
    "chat_template": [5, 1.5, True, ["x"], {}, b"x", object()],
    "template_variables": [5, "x", [1], True, {1: 2}, object()],
    "columns": [5, "x", [1], True, {1: 2}, {"prompt": 3}, {"x": "y"}, object()],
}


@pytest.mark.parametrize("call", ["chat", "text"])
def test_data_refuses_what_no_argument_may_be(call, chats_file):
    def of_data(**changes: Any) -> Any:
        given = {"source": chats_file, "tokenizer": tokenizer(), "length": 512, "batch_size": 2}
        return getattr(data, call)(**given | {"progress": False} | changes)

    only_chat = {"train_on", "chat_template", "template_variables"}
    cases = [
        (n, v) for n, many in DATA.items() if call == "chat" or n not in only_chat for v in many
    ]
    assert len(cases) > 100
    for name, value in cases:
        check_refused(of_data, name, value)


def test_a_split_refuses_what_no_argument_may_be(chats_file):
    made = data.chat(chats_file, tokenizer(), length=512, batch_size=2, progress=False)

    def of_split(**changes: Any) -> Any:
        given: dict[str, Any] = {"fraction": 0.5}
        return made.split(**given | changes)

    for name, many in {"fraction": [*NUMBER, 0, 1, -0.1], "seed": [*INTEGER, None]}.items():
        for value in many:
            check_refused(of_split, name, value)


def test_two_wrong_arguments_name_one_of_them():
    rng = random.Random(0)
    for _ in range(200):
        function, names = rng.choice(MISUSES)
        chosen = rng.sample(sorted(names), min(2, len(names)))
        given = {name: rng.choice(names[name]) for name in chosen}
        with pytest.raises((TypeError, ValueError, FileNotFoundError)) as error:
            function(**given)
        assert any(f"`{name}`" in str(error.value) for name in given), given
