"""Weights of integers packed in words, against the formats' definitions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from megatrain_jax._src.lm.models import packed_integers
from megatrain_jax._src.lm.models.quantised import check_quantisation, open_weights
from messages import refuses

NAME = "model.layers.0.mlp.up_proj"
# The column of each four bits of a word of AWQ, from the lowest on.
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """The words of each row's codes, which follow one another from the lowest bit on."""
    rows = [sum(int(code) << bits * i for i, code in enumerate(row)) for row in codes]
    count = -(-codes.shape[1] * bits // 32)
    found = [[row >> 32 * i & 2**32 - 1 for i in range(count)] for row in rows]
    return np.array(found, np.uint32).view(np.int32)


def stored(kind: str, bits: int, size: int, outputs: int, inputs: int, **options: Any) -> Any:
    """The tensors of a weight, what the configuration says, and the weight itself."""
    rng = np.random.default_rng([bits, size % 100, outputs, inputs])
    groups = 1 if size < 0 else -(-inputs // size)
    codes = rng.integers(0, 2**bits, (outputs, inputs))
    zeros = rng.integers(1, 2**bits, (outputs, groups))
    scales = rng.uniform(0.1, 1, (outputs, groups)).astype(np.float16)
    index = np.arange(inputs) // (size if size > 0 else inputs)
    if options.get("shuffled"):
        index = rng.permutation(index)
    about: dict[str, Any] = {"quant_method": kind, "bits": bits, "group_size": size}
    if kind == "compressed-tensors":
        if symmetric := options.get("symmetric", False):
            zeros = np.full_like(zeros, 2 ** (bits - 1))
        tensors = {
            "weight_packed": words(codes, bits),
            "weight_scale": scales,
            "weight_shape": np.array([outputs, inputs]),
            "weight_zero_point": words(zeros.T, bits).T,
            "weight_g_idx": index if options.get("shuffled") else np.full(inputs, -1),
        }
        if symmetric:
            del tensors["weight_zero_point"]
        weights = {"num_bits": bits, "group_size": size, "symmetric": symmetric}
        about |= {"format": "pack-quantized", "config_groups": {"group_0": {"weights": weights}}}
    elif kind == "gptq":
        version = options.get("version", "gptq")
        less = int(version == "gptq")
        tensors = {
            "qweight": words(codes, bits).T,
            "qzeros": words(zeros.T - less, bits),
            "scales": scales.T,
            "g_idx": index.astype(np.int32),
        }
        about |= {"checkpoint_format": version} if version != "gptq" else {}
    else:
        exchanged = np.arange(outputs).reshape(-1, 8)[:, AWQ].ravel()
        tensors = {
            "qweight": words(codes.T[:, exchanged], bits),
            "qzeros": words(zeros.T[:, exchanged], bits),
            "scales": scales.T,
        }
    weight = (codes - zeros[:, index]).astype(np.float32) * scales[:, index].astype(np.float32)
    return {f"{NAME}.{k}": np.ascontiguousarray(x) for k, x in tensors.items()}, about, weight


def opened(folder: Path, tensors: dict[str, np.ndarray], about: Any) -> dict[str, Any]:
    save_file(tensors, folder / "model.safetensors")
    config = {"dtype": "float32", "quantization_config": about}
    check_quantisation(config)
    return open_weights(folder, json.dumps(config))


@pytest.mark.parametrize(
    ("kind", "bits", "size", "outputs", "inputs", "options"),
    [
        ("gptq", 4, 16, 72, 64, {}),
        ("gptq", 4, 16, 40, 64, {"shuffled": True}),
        ("gptq", 8, -1, 40, 32, {"version": "gptq_v2"}),
        ("gptq", 3, 32, 32, 96, {}),
        ("gptq", 2, 16, 48, 32, {"version": "gptq_v2"}),
        ("awq", 4, 16, 72, 48, {}),
        ("awq", 4, -1, 40, 10, {}),
        ("compressed-tensors", 4, 16, 70, 64, {}),
        ("compressed-tensors", 4, 16, 70, 60, {"symmetric": True}),
        ("compressed-tensors", 8, -1, 35, 20, {"symmetric": True}),
        ("compressed-tensors", 5, 8, 33, 36, {}),
        ("compressed-tensors", 4, 16, 70, 64, {"shuffled": True}),
    ],
)
def test_packed_weights_are_what_their_format_says(
    kind, bits, size, outputs, inputs, options, tmp_path, monkeypatch
):
    monkeypatch.setattr(packed_integers, "CHUNK", 32)  # several parts of outputs
    tensors, about, weight = stored(kind, bits, size, outputs, inputs, **options)
    tensors["model.norm.weight"] = np.ones(4, np.float32)
    found = opened(tmp_path, tensors, about)
    assert found.keys() == {f"{NAME}.weight", "model.norm.weight"}
    read = found[f"{NAME}.weight"]
    assert (read.shape, read.dtype) == (weight.shape, "F32")
    np.testing.assert_array_equal(read.read(), weight)
    np.testing.assert_array_equal(read.slice(slice(3, 9)), weight[3:9])


def test_one_scale_of_a_packed_weight_is_that_of_all_numbers(tmp_path):
    tensors, about, _ = stored("compressed-tensors", 4, -1, 16, 8, symmetric=True)
    codes = np.arange(128).reshape(16, 8) % 16
    tensors |= {
        f"{NAME}.weight_packed": words(codes, 4),
        f"{NAME}.weight_scale": np.full(1, 0.5, np.float32),
    }
    found = opened(tmp_path, tensors, about)[f"{NAME}.weight"].read()
    np.testing.assert_array_equal(found, (codes - 8) * 0.5)


@pytest.mark.parametrize(
    ("kind", "changed", "named"),
    [
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format"),
        ("gptq", {"bits": 5}, "bits"),
        ("gptq", {"bits": True}, "bits"),
        ("gptq", {"bits": 4.0}, "bits"),
        ("gptq", {"group_size": 0}, "group_size"),
        ("gptq", {"group_size": 8}, NAME),
        ("awq", {"version": "gemv"}, "version"),
        ("awq", {"backend": "llm-awq"}, "backend"),
        ("awq", {"bits": 8}, "bits"),
        ("awq", {"group_size": 24}, NAME),
    ],
)
def test_what_a_configuration_says_of_packed_weights_is_checked(kind, changed, named, tmp_path):
    tensors, about, _ = stored(kind, 4, 16, 32, 64)
    with refuses(ValueError, named):
        opened(tmp_path, tensors, about | changed)


@pytest.mark.parametrize("part", ["qweight", "scales", "qzeros"])
@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_tensors_of_a_packed_weight_have_to_fit(kind, part, tmp_path):
    tensors, about, _ = stored(kind, 4, 16, 32, 64)
    key = f"{NAME}.{part}"
    for wrong in (tensors[key][: len(tensors[key]) // 2], tensors[key].astype(np.int64), None):
        rest = {name: x for name, x in tensors.items() if name != key}
        found = rest if wrong is None else rest | {key: np.ascontiguousarray(wrong)}
        if wrong is None and part == "qweight":  # nothing says that it is a weight
            assert opened(tmp_path, found, about).keys() == found.keys()
            continue
        with refuses(ValueError, NAME):
            opened(tmp_path, found, about)


def test_packed_weights_without_shape_zeros_or_known_bits_are_refused(tmp_path):
    tensors, about, _ = stored("compressed-tensors", 4, 8, 16, 8)

    def without(part: str) -> dict[str, np.ndarray]:
        return {name: x for name, x in tensors.items() if not name.endswith(part)}

    with refuses(ValueError, f"{NAME}.weight_shape"):
        opened(tmp_path, without("_shape"), about)
    with refuses(ValueError, f"{NAME}.weight", "zero points"):
        opened(tmp_path, without("_zero_point"), about)
    groups = about["config_groups"]
    symmetric = {"weights": groups["group_0"]["weights"] | {"symmetric": True}}
    for several in ({"a": groups["group_0"], "b": symmetric}, {"a": symmetric}):
        opened(tmp_path, without("_zero_point"), about | {"config_groups": several})
    # One word holds eight codes of either 3 or 4 bits.
    several = {
        "a": groups["group_0"],
        "b": {"weights": groups["group_0"]["weights"] | {"num_bits": 3}},
    }
    with refuses(ValueError, f"{NAME}.weight", "3 or 4"):
        opened(tmp_path, tensors, about | {"config_groups": several})


@pytest.mark.parametrize(("part", "wrong"), [("scales", np.inf), ("g_idx", 4), ("g_idx", -1)])
def test_damaged_numbers_of_packed_weights_are_told_when_they_are_read(part, wrong, tmp_path):
    tensors, about, _ = stored("gptq", 4, 16, 32, 64)
    tensors[f"{NAME}.{part}"].flat[-1] = wrong
    found = opened(tmp_path, tensors, about)
    with refuses(ValueError, f"{NAME}.weight"):
        found[f"{NAME}.weight"].read()
