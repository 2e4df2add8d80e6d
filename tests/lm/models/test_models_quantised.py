"""Quantised checkpoints against the libraries that write them: Transformers and bitsandbytes."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from megatrain_jax._src.lm.models.pretrained import parameter_tensors
from megatrain_jax._src.lm.models.quantised import CHUNK, open_weights, scaled
from megatrain_jax.models import DecoderConfig, load_pretrained, save_pretrained
from messages import refuses

bnb: Any = pytest.importorskip("bitsandbytes")

import safetensors.torch as safetensors_torch  # noqa: E402
from transformers import FineGrainedFP8Config  # noqa: E402
from transformers.integrations.finegrained_fp8 import (  # noqa: E402
    Fp8Dequantize,
    _dequantize_fp8_weight,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: E402

from families import make_torch, random_tokens, save  # noqa: E402
from filled_models import at, filled, tensors_of, traced_peak  # noqa: E402
from quantised_sizes import BITSANDBYTES, WIDE, torch  # noqa: E402


def rewritten(folder: Path, change: Callable[[dict[str, Any]], object], about: Any) -> Path:
    """Changes the tensors of a checkpoint and names its quantisation."""
    path = folder / "model.safetensors"
    tensors = safetensors_torch.load_file(path)
    change(tensors)
    safetensors_torch.save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": about}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def numbers(params: Any, name: str) -> np.ndarray:
    keys = name.removeprefix("model.").split(".")
    return np.asarray(at(params, tuple(int(key) if key.isdigit() else key for key in keys)))


def check_same(ours: np.ndarray, theirs: Any) -> None:
    assert str(theirs.dtype) == f"torch.{ours.dtype.name}"
    np.testing.assert_array_equal(ours.astype(np.float32), theirs.float().numpy())


def check_export(pretrained: Any, folder: Path) -> None:
    """A plain checkpoint in bfloat16, from which Transformers computes the same logits."""
    model = filled(pretrained)
    save_pretrained(model, folder)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    found = tensors_of(folder)
    assert {array.dtype.name for array in found.values()} == {"bfloat16"}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = random_tokens(1)
    with torch.no_grad():
        logits = theirs.eval()(torch.tensor(tokens).long()).logits.numpy()
    np.testing.assert_allclose(model(tokens), logits, atol=1e-4)


@pytest.mark.parametrize("kind", BITSANDBYTES)
def test_weights_of_bitsandbytes_are_the_ones_that_it_decodes(kind, tmp_path):
    source = save(make_torch("qwen3", **WIDE), tmp_path / "source", torch.bfloat16)
    settings = transformers.BitsAndBytesConfig(**BITSANDBYTES[kind])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        source, quantization_config=settings, dtype=torch.bfloat16
    )
    theirs.save_pretrained(tmp_path / "quantised")
    pretrained = load_pretrained(tmp_path / "quantised")
    count = 0
    for name, module in theirs.named_modules():
        weight: Any = getattr(module, "weight", None)
        if isinstance(module, bnb.nn.Linear4bit):
            decoded = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
        elif isinstance(module, bnb.nn.Linear8bitLt):
            decoded = bnb.functional.int8_vectorwise_dequant(weight.data, weight.SCB)
            decoded = decoded.to(torch.bfloat16)
        else:
            continue
        check_same(numbers(pretrained.params, f"{name}.weight"), decoded)
        count += 1
    assert count == 14
    check_export(pretrained, tmp_path / "saved")


def test_rows_of_broken_blocks_are_decoded_in_the_order_of_their_numbers(tmp_path):
    """Blocks of 64 go on from row to row, where bitsandbytes' kernel on some CPUs is wrong."""
    source = save(make_torch("llama", intermediate_size=80), tmp_path / "m")
    exact = safetensors_torch.load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    blocks = exact[name].reshape(-1, 64)

    def change(tensors: dict[str, Any]) -> None:
        codes, state = bnb.functional.quantize_4bit(tensors[name], quant_type="nf4")
        tensors |= {name: codes}
        tensors |= {f"{name}.{n}": x for n, x in state.as_dict(packed=True).items()}

    rewritten(source, change, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    read = torch.tensor(numbers(load_pretrained(source).params, name)).reshape(-1, 64)
    # Half of the largest gap between two levels, from -1 to -0.696.
    gap = blocks.abs().amax(dim=1, keepdim=True) * 0.1520
    assert ((read - blocks).abs() <= gap).all()


def test_experts_in_mxfp4_are_the_ones_that_transformers_decodes(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    source = save(make_torch("gpt-oss", **sizes), tmp_path / "m", torch.bfloat16)
    generator, expected = torch.Generator().manual_seed(0), {}

    def change(tensors: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
            experts, rows, columns = tensors.pop(name).shape
            shape = experts, columns, rows // 32, 16
            blocks = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
            scales = torch.randint(115, 126, shape[:3], dtype=torch.uint8, generator=generator)
            scales[0, 0], scales[0, 1] = 0, 254  # the ends of the range
            expected[name] = convert_moe_packed_tensors(blocks, scales)
            if not expected[name].isfinite().all():
                scales[0, 1] = 120
                expected[name] = convert_moe_packed_tensors(blocks, scales)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}

    about = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    rewritten(source, change, about)
    pretrained = load_pretrained(source)
    assert len(expected) == 4
    for name, decoded in expected.items():
        check_same(numbers(pretrained.params, name), decoded)
    check_export(pretrained, tmp_path / "saved")


def fp8(tensors: dict[str, Any], block: tuple[int, int] | None, **extra: Any) -> dict[str, Any]:
    """Stores the matrices of all layers in 8 bits; returns the decoded ones."""
    decoded = {}
    for name in [n for n, x in tensors.items() if ".layers." in n and x.ndim > 1]:
        if name.endswith("gate.weight"):
            continue
        weight = tensors[name].float()
        rows, columns = weight.shape[-2:]
        tall, wide = block or (rows, columns)
        grid = (*weight.shape[:-2], -(-rows // tall), -(-columns // wide))
        scales = torch.rand(grid) * 0.01 + 0.01
        whole = scales.repeat_interleave(tall, -2)[..., :rows, :]
        whole = whole.repeat_interleave(wide, -1)[..., :columns]
        codes = (weight / whole).to(torch.float8_e4m3fn)
        scales = scales if block else scales.reshape(())
        tensors |= {name: codes, f"{name}_scale_inv": scales}
        tensors |= {f"{name.removesuffix('weight')}{n}": torch.tensor(x) for n, x in extra.items()}
        decoded[name] = (codes.float() * whole).to(torch.bfloat16)
        if rows % grid[-2] == 0 and columns % grid[-1] == 0 and rows // grid[-2] == tall:
            theirs = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)
            assert torch.equal(theirs, decoded[name])
    return decoded


@pytest.mark.parametrize(
    ("name", "block", "extra"),
    [
        ("qwen3-moe", (16, 8), {}),
        ("qwen3", None, {"activation_scale": 0.5}),
        # Latents of 14 rows end within a block, as DeepSeek's own of 576 do.
        ("deepseek-v3", (16, 16), {}),
    ],
)
def test_weights_in_fp8_are_the_ones_that_transformers_decodes(name, block, extra, tmp_path):
    source = save(make_torch(name), tmp_path / "m", torch.bfloat16)
    expected = {}
    about = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic"}
    rewritten(source, lambda t: expected.update(fp8(t, block, **extra)), about)
    pretrained = load_pretrained(source)
    read = {
        tensor: array
        for entry in parameter_tensors(pretrained.config)
        if entry.trained
        for tensor, array in zip(
            entry.names,
            np.asarray(at(pretrained.params, entry.path))[slice(None) if entry.stacked else None],
            strict=True,
        )
    }
    assert expected.keys() <= read.keys()
    for tensor, decoded in expected.items():
        check_same(read[tensor], decoded)
    check_export(pretrained, tmp_path / "saved")
    if not extra:
        return
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    for tensor, decoded in theirs.state_dict().items():
        if tensor in expected:
            check_same(read[tensor], decoded)


def test_experts_of_a_layer_in_one_tensor_of_fp8(tmp_path):
    reference = make_torch("qwen3.5-moe").to(torch.bfloat16)
    source, expected = save(reference, tmp_path / "m"), {}

    def change(tensors: dict[str, Any]) -> None:
        stacked = {n: x for n, x in reference.state_dict().items() if "mlp.experts." in n}
        for name in [n for n in tensors if "mlp.experts." in n]:
            del tensors[name]
        expected.update(fp8(stacked, (16, 8)))
        tensors |= stacked

    rewritten(source, change, {"quant_method": "fp8", "weight_block_size": [16, 8]})
    experts = load_pretrained(source).params["layers"][0]["mlp"]["experts"]
    base = next(n for n in expected if n.endswith("layers.0.mlp.experts.gate_up_proj"))
    gate, up = expected[base].chunk(2, dim=1)
    check_same(np.asarray(experts["gate_proj"]["weight"]), gate)
    check_same(np.asarray(experts["up_proj"]["weight"]), up)


@pytest.mark.parametrize("scales", ["weight", "row", "group"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_weights_of_compressed_tensors(scales, dtype, tmp_path):
    source, expected = save(make_torch("llama"), tmp_path / "m", torch.bfloat16), {}

    def change(tensors: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.endswith("_proj.weight")]:
            rows, columns = tensors[name].shape
            shape = {"weight": (1,), "row": (rows, 1), "group": (rows, columns // 16)}[scales]
            scale = (torch.rand(shape) * 0.01 + 0.01).to(torch.bfloat16)
            whole = scale.repeat_interleave(16, -1) if scales == "group" else scale
            codes = (tensors[name].float() / whole.float()).to(dtype)
            tensors |= {name: codes, f"{name}_scale": scale}
            # The library multiplies in the dtype of the scales.
            expected[name] = codes.to(scale.dtype) * whole

    kind = "int-quantized" if dtype == torch.int8 else "float-quantized"
    size = 16 if scales == "group" else {"weight": None, "row": -1}[scales]
    rewritten(source, change, compressed({"group_size": size}, format=kind))
    pretrained = load_pretrained(source)
    assert len(expected) == 14
    for name, decoded in expected.items():
        check_same(numbers(pretrained.params, name), decoded)


def compressed(*weights: dict[str, Any], format: str = "naive-quantized") -> dict[str, Any]:
    """What a `config.json` says of weights in compressed-tensors."""
    groups = {f"group_{i}": {"targets": ["Linear"], "weights": w} for i, w in enumerate(weights)}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}


def whole_blocks(scales: Any, block: tuple[int, int], shape: Any) -> Any:
    """A scale for each number of a matrix, in blocks of which the last may be incomplete."""
    tall, wide = block
    return scales.repeat_interleave(tall, -2).repeat_interleave(wide, -1)[: shape[0], : shape[1]]


FP8 = {"quant_method": "fp8"}
UP, DOWN = (f"model.layers.1.mlp.{part}_proj.weight" for part in ("up", "down"))


@pytest.mark.parametrize(
    ("suffix", "about", "block"),
    [
        ("_scale_inv", FP8, FineGrainedFP8Config().weight_block_size),
        ("_scale_inv", FP8 | {"weight_block_size": [128, 128]}, (128, 128)),
        ("_scale_inv", FP8 | {"weight_block_size": [64, 160]}, (64, 160)),
        ("_scale", compressed({"group_size": 128}), (1, 128)),
        ("_scale", compressed({"group_size": -1}, {"group_size": 160}), (1, 160)),
        ("_scale", compressed({"block_structure": "128x128"}), (128, 128)),
        ("_scale", compressed({}, {"block_structure": [128, 160]}), (128, 160)),
    ],
)
def test_blocks_are_of_the_size_that_the_configuration_says(suffix, about, block, tmp_path):
    """Rows or columns of 192 end within a block, and could be divided evenly."""
    source, expected = save(make_torch("llama", **WIDE), tmp_path / "m", torch.bfloat16), {}
    shapes = {UP: (192, 64), DOWN: (64, 192)}

    def change(tensors: dict[str, Any]) -> None:
        for name, (rows, columns) in shapes.items():
            codes = tensors[name].to(torch.float8_e4m3fn)
            scales = torch.rand(-(-rows // block[0]), -(-columns // block[1])) + 0.5
            tensors |= {name: codes, f"{name}{suffix}": scales}
            whole = codes.float() * whole_blocks(scales, block, shapes[name])
            theirs = _dequantize_fp8_weight(codes, scales, list(block), torch.float32)
            assert torch.equal(whole, theirs)
            expected[name] = whole.to(torch.bfloat16)

    params = load_pretrained(rewritten(source, change, about)).params
    for name, decoded in expected.items():
        check_same(numbers(params, name), decoded)


def test_weights_are_bfloat16_where_the_configuration_names_no_dtype(tmp_path):
    source, expected = save(make_torch("llama"), tmp_path / "m", torch.bfloat16), {}
    about = FP8 | {"weight_block_size": None}
    rewritten(source, lambda tensors: expected.update(fp8(tensors, None)), about)
    config = json.loads((source / "config.json").read_text())
    del config["dtype"]
    found = open_weights(source, json.dumps(config))
    for name, decoded in expected.items():
        check_same(found[name].read(), decoded)


@pytest.mark.parametrize(
    ("suffix", "about", "scales", "told"),
    [
        ("_scale_inv", FP8, (2, 2), "128 x 128"),
        ("_scale_inv", FP8, (64, 1), "128 x 128"),
        ("_scale_inv", FP8 | {"weight_block_size": None}, (1, 2), "all x all"),
        ("_scale_inv", FP8 | {"weight_block_size": [16, 16]}, (1, 2), "16 x 16"),
        ("_scale_inv", FP8 | {"weight_block_size": [128, 96]}, (1, 1), "128 x 96"),
        *(
            ("_scale_inv", FP8 | {"weight_block_size": size}, (1, 2), "`weight_block_size`")
            for size in ([128], [0, 128], [128.0, 128], [True, 128], "128", 128, ["a", "b"], [])
        ),
        ("_scale", compressed({}), (64, 2), "1 x all .*all x all"),
        ("_scale", compressed({"group_size": 64}), (64, 2), "1 x 64"),
        # Either may be this weight's.
        ("_scale", compressed({"group_size": 96}, {"group_size": 128}), (64, 2), "1 x 96 .*1 x"),
        ("_scale", compressed({"group_size": 0}), (64, 2), "`group_size`"),
        ("_scale", compressed({"block_structure": "2x"}), (64, 2), "`block_structure`"),
        ("_scale", {"quant_method": "compressed-tensors", "format": "int-quantized"}, (64, 2), "x"),
    ],
)
def test_blocks_that_do_not_fit_the_scales_are_refused(suffix, about, scales, told, tmp_path):
    source = save(make_torch("llama", **WIDE), tmp_path / "m", torch.bfloat16)

    def change(tensors: dict[str, Any]) -> None:
        tensors[DOWN] = tensors[DOWN].to(torch.float8_e4m3fn)
        tensors[f"{DOWN}{suffix}"] = torch.ones(scales)

    with pytest.raises(ValueError, match=told):
        load_pretrained(rewritten(source, change, about))


def test_4_bit_codes_in_fp8_checkpoints_are_refused(tmp_path):
    """Transformers takes bytes there as two 4-bit floats each."""
    source = save(make_torch("llama"), tmp_path / "m", torch.bfloat16)

    def change(tensors: dict[str, Any]) -> None:
        scales = {f"{UP}_scale_inv": torch.ones(1, 1)}
        tensors |= {UP: tensors[UP].to(torch.int8)} | scales

    with refuses(ValueError, UP, "I8"):
        load_pretrained(rewritten(source, change, FP8))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_scales_of_activations_and_zeros_of_symmetric_codes_are_left_out(dtype, tmp_path):
    source = save(make_torch("qwen2"), tmp_path / "m", torch.bfloat16)

    def change(tensors: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.endswith("_proj.weight")]:
            rows, base = tensors[name].shape[0], name.removesuffix("weight")
            tensors[name] = tensors[name].mul(50).to(dtype)
            tensors[f"{name}_scale"] = torch.full((rows, 1), 0.5)
            tensors[f"{name}_zero_point"] = torch.zeros((rows, 1)).to(dtype)
            for part in ("input", "output"):
                tensors[f"{base}{part}_scale"] = torch.tensor(0.5)
                tensors[f"{base}{part}_zero_point"] = torch.tensor(3, dtype=torch.int8)
        for layer in range(2):  # of cached keys and values
            for part in ("q", "k", "v"):
                tensors[f"model.layers.{layer}.self_attn.{part}_scale"] = torch.tensor([0.5])
            tensors[f"model.layers.{layer}.self_attn.k_zero_point"] = torch.tensor([0])
        del tensors[f"{DOWN}_zero_point"]
        expected[UP] = (tensors[UP].float() * 0.5).to(torch.bfloat16)

    expected: dict[str, Any] = {}
    both = compressed({"symmetric": True}, {"symmetric": False})
    pretrained = load_pretrained(rewritten(source, change, both))
    check_same(numbers(pretrained.params, UP), expected[UP])
    saved = tensors_of(save_pretrained(filled(pretrained), tmp_path / "saved"))
    assert not [name for name in saved if name.endswith(("_scale", "_zero_point"))]


@pytest.mark.parametrize(
    ("weights", "zeros"),
    [
        ({"symmetric": True}, torch.tensor([[0], [3]], dtype=torch.int8)),
        ({"symmetric": False}, torch.tensor([[0], [-128]], dtype=torch.int8)),
        ({"symmetric": False}, None),
    ],
)
def test_asymmetric_codes_are_refused(weights, zeros, tmp_path):
    source = save(make_torch("llama"), tmp_path / "m", torch.bfloat16)

    def change(tensors: dict[str, Any]) -> None:
        tensors[UP] = tensors[UP].to(torch.int8)
        tensors[f"{UP}_scale"] = torch.ones(len(tensors[UP]), 1)
        if zeros is not None:
            tensors[f"{UP}_zero_point"] = zeros.repeat(len(tensors[UP]) // 2, 1)

    with pytest.raises(ValueError, match=f"{UP}_zero_point.*`symmetric`"):
        load_pretrained(rewritten(source, change, compressed(weights)))


def test_each_row_has_its_own_scales_beyond_the_first_rows_decoded():
    rows, columns = CHUNK // 128 + 200, 128
    rng = np.random.default_rng(0)
    codes = rng.integers(-128, 128, (2, rows, columns), dtype=np.int8)
    scales = rng.random((2, -(-rows // 100), 2), dtype=np.float32)
    whole = np.repeat(np.repeat(scales, 100, axis=1)[:, :rows], 64, axis=2)
    found = scaled(codes, scales, name="x", tiles=(100, 64), dtype=np.dtype(np.float32))
    np.testing.assert_array_equal(found, codes * whole)


def test_what_no_layer_reads_is_exported_decoded(tmp_path):
    source = save(make_torch("glm4-moe"), tmp_path / "m", torch.bfloat16)
    further, expected = {"model.layers.2.eh_proj.weight": torch.rand(32, 16)}, {}
    about = {"quant_method": "fp8", "weight_block_size": [16, 8]}
    rewritten(source, lambda t: t.update(further) or expected.update(fp8(t, (16, 8))), about)
    folder = save_pretrained(filled(load_pretrained(source), jnp.bfloat16), tmp_path / "saved")
    (name,) = further
    check_same(tensors_of(folder)[name], expected[name])


@pytest.mark.parametrize("kind", ["fp8", "nf4"])
def test_one_weight_is_decoded_at_a_time(kind, tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 6144, "num_hidden_layers": 3}
    source = save(make_torch("llama", **sizes), tmp_path / "m", torch.bfloat16)
    largest = 2 * 512 * 6144

    def change(tensors: dict[str, Any]) -> None:
        if kind == "fp8":
            fp8(tensors, (128, 128))
            return
        for name in [n for n in tensors if n.endswith("_proj.weight")]:
            codes, state = bnb.functional.quantize_4bit(
                tensors[name], quant_type="nf4", compress_statistics=True
            )
            tensors |= {name: codes}
            tensors |= {f"{name}.{n}": x for n, x in state.as_dict(packed=True).items()}

    method = {"quant_method": "fp8"} if kind == "fp8" else {"load_in_4bit": True}
    rewritten(source, change, method | {"weight_block_size": [128, 128]})
    opened = [load_pretrained(source)]
    assert traced_peak(lambda: opened.append(load_pretrained(source))) < largest

    def read() -> None:
        for entry in parameter_tensors(opened[0].config):
            np.asarray(at(opened[0].params, entry.path))

    # The weight, its codes, and a chunk in fp32 with its scales.
    assert largest <= traced_peak(read) < 1.5 * largest + 4 * 2**20


@pytest.mark.parametrize(
    ("about", "match"),
    [
        ({"quant_method": "hqq", "bits": 4}, "'hqq'.* mxfp4, fp8"),
        ({"quant_method": "quanto", "bits": 4}, "'quanto'.*Start"),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            "'nvfp4-pack-quantized' .*compressed-tensors.*float-quantized, int-quantized",
        ),
        ({"bits": 4}, "`quantization_config` .*'None'"),
        ("awq", "`quantization_config` .*object"),
    ],
)
def test_other_methods_are_refused_by_name(about, match):
    values = make_torch("llama").config.to_dict()
    with pytest.raises((TypeError, ValueError), match=match):
        DecoderConfig.from_hf(values | {"quantization_config": about})
    known = DecoderConfig.from_hf(
        values | {"quantization_config": about}, ignore=["quantization_config"]
    )
    assert known.num_layers == 2


def test_codes_and_scales_that_do_not_fit_are_named(tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    about = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    source = save(make_torch("llama"), tmp_path / "fp8", torch.bfloat16)
    rewritten(source, lambda t: fp8(t, (16, 16)), about)
    rewritten(source, lambda t: t.update({f"{name}_scale_inv": torch.ones(5, 2)}), about)
    with refuses(ValueError, name, (48, 32), "F8_E4M3", (5, 2)):
        load_pretrained(source)

    rewritten(source, lambda t: t.pop(f"{name}_scale_inv"), about)
    with pytest.raises(ValueError, match=rf"missing: {name}_scale_inv$"):
        load_pretrained(source)

    about = {"quant_method": "bitsandbytes"}
    source = save(make_torch("llama"), tmp_path / "nf4", torch.bfloat16)
    state = f"{name}.quant_state.bitsandbytes__nf4"
    right = {"blocksize": 64, "dtype": "bfloat16", "shape": [48, 32]}

    def nf4(tensors: dict[str, Any], **changed: Any) -> None:
        text = json.dumps(right | changed).encode()
        tensors[name] = torch.zeros(48 * 16, 1, dtype=torch.uint8)
        tensors[f"{name}.absmax"] = torch.ones(24)
        tensors[f"{name}.quant_map"] = torch.linspace(-1, 1, 16)
        tensors[state] = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    rewritten(source, nf4, about)
    assert (numbers(load_pretrained(source).params, name) == -1).all()
    wrong: list[dict[str, Any]] = [
        {"blocksize": 0},
        {"blocksize": 63},
        {"shape": None},
        {"shape": [48, "32"]},
        {"dtype": "int8"},
        {"nested_blocksize": 256, "nested_offset": "x"},
        {"nested_blocksize": 256, "nested_offset": 10**400},
        {"nested_offset": float("nan")},
        {"dtype": []},
        {"dtype": "\ud800"},
        {"blocksize": 10**400},
        {"other": functools.reduce(lambda value, _: [value], range(500), 0)},
    ]
    for changed in wrong:
        rewritten(source, lambda t, changed=changed: nf4(t, **changed), about)
        with refuses(ValueError, state, "damaged", source):
            load_pretrained(source)
    # Blocks may be longer than the weight: that must not take memory.
    long = {"blocksize": 2**39}
    rewritten(
        source,
        lambda t: (nf4(t, **long), t.update({f"{name}.absmax": torch.ones(1)})),
        about,
    )
    assert (numbers(load_pretrained(source).params, name) == -1).all()
    for changed in ({"shape": [48, 64]}, {"blocksize": 32}):
        rewritten(source, lambda t, changed=changed: nf4(t, **changed), about)
        with refuses(ValueError, "scales", name, "fit"):
            load_pretrained(source)
    for scale in (-1.0, float("nan"), float("inf")):
        rewritten(
            source, lambda t, scale=scale: (nf4(t), t[f"{name}.absmax"][3].fill_(scale)), about
        )
        with refuses(ValueError, f"{name}.absmax", "damaged", 1, 24):
            numbers(load_pretrained(source).params, name)
    rewritten(source, lambda t: (nf4(t), t[f"{name}.quant_map"][3].fill_(float("nan"))), about)
    with refuses(ValueError, f"{name}.quant_map", "damaged", "finite"):
        numbers(load_pretrained(source).params, name)
    rewritten(source, lambda t: (nf4(t), t.pop(state)), about)
    with pytest.raises(ValueError, match=f"missing: {state}"):
        load_pretrained(source)
