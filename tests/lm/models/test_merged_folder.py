"""Adapters' folders merged into their base, against PEFT's own merging and our models' export."""

import json
import math
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from megatrain_jax import models
from messages import refuses

torch = pytest.importorskip("torch", reason='compared with PyTorch: pip install -e ".[torch]"')
peft = pytest.importorskip("peft", reason='compared with PEFT: pip install -e ".[torch]"')

from families import make_torch, save  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
ATTENTION = ["q_proj", "v_proj"]


def make_adapter(base: Any, folder: Path, **options: Any) -> Any:
    """A model of PEFT with random adapters, saved to a folder."""
    settings = {"r": 4, "lora_alpha": 6, "target_modules": ATTENTION} | options
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    # Embeddings of another size are saved as a module or not at all, instead of with a warning.
    model.save_pretrained(folder, save_embedding_layers=False)
    return model


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return {k: a for file in folder.glob("*.safetensors") for k, a in load_file(file).items()}


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"use_rslora": True}, torch.bfloat16),
        (
            {
                "target_modules": [*ATTENTION, "down_proj"],
                "rank_pattern": {"nothing|down_proj|o_proj": 2},
                "alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 32},
            },
            torch.float32,
        ),
        ({"use_dora": True, "modules_to_save": ["lm_head"]}, torch.float32),
        # Initial values that leave the base as it is.
        ({"init_lora_weights": "orthogonal", "lora_alpha": -6}, torch.float32),
        ({"init_lora_weights": "mica"}, torch.float32),
    ],
    ids=["rslora", "patterns", "dora", "orthogonal", "mica"],
)
def test_merged_folders_are_those_of_peft(options, dtype, tmp_path):
    base = save(make_torch("qwen3"), tmp_path / "base", dtype=dtype, max_shard_size="30KB")
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = make_adapter(load(base, dtype=dtype), tmp_path / "adapter", **options)
    expected = theirs.merge_and_unload().state_dict()
    merged = models.merge_adapter(
        tmp_path / "adapter", tmp_path / "merged", base=base, max_shard_bytes=40_000
    )
    assert len(list(merged.glob("*.safetensors"))) > 1
    before, found = tensors_of(base), load(merged, dtype="auto").state_dict()
    assert found.keys() == expected.keys()
    # Half a unit in the last place of bfloat16, which PEFT's product rounds in another order.
    tolerance = 1e-6 if dtype == torch.float32 else 2.0**-8
    for name, tensor in expected.items():
        assert found[name].dtype == dtype, name
        ours, theirs = found[name].float().numpy(), tensor.float().numpy()
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=1e-6, err_msg=name)
    changed = {n for n, a in before.items() if not np.array_equal(a, tensors_of(merged)[n])}
    parts = options.get("target_modules", ATTENTION) + options.get("modules_to_save", [])
    assert changed == {name for name in before if any(f"{part}." in name for part in parts)}


def test_rows_for_new_tokens_are_merged_as_by_peft(tmp_path):
    base = save(make_torch("qwen3"), tmp_path / "base")
    larger = transformers.AutoModelForCausalLM.from_pretrained(base)
    rows = larger.config.vocab_size + 2
    larger.resize_token_embeddings(rows)
    whole = ["embed_tokens", "lm_head"]
    theirs = make_adapter(larger, tmp_path / "adapter", modules_to_save=whole)
    (base / "tokenizer_config.json").write_text('{"of": "base"}')
    (base / "special_tokens_map.json").write_text('{"of": "base"}')
    (tmp_path / "adapter" / "tokenizer_config.json").write_text('{"of": "adapter"}')
    merged = models.merge_adapter(tmp_path / "adapter", tmp_path / "merged", base=base)
    assert "adapter" in (merged / "tokenizer_config.json").read_text()
    assert "base" in (merged / "special_tokens_map.json").read_text()
    found = transformers.AutoModelForCausalLM.from_pretrained(merged)
    assert found.config.vocab_size == rows
    expected = theirs.merge_and_unload().state_dict()
    for name, tensor in found.state_dict().items():
        np.testing.assert_allclose(tensor, expected[name], rtol=1e-6, atol=1e-6, err_msg=name)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({n: a for n, a in load_file(file).items() if "lm_head" not in n}, file)
    with refuses(ValueError, "embed_tokens.weight", rows):
        models.merge_adapter(tmp_path / "adapter", tmp_path / "other", base=base)


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3.5-moe"])
def test_adapters_of_experts_are_merged_as_in_an_export(name, tmp_path):
    base = save(make_torch(name), tmp_path / "base")
    pretrained = models.load_pretrained(base)
    adapted = models.lora(pretrained.model, targets="_proj", params=pretrained.params, rank=2)
    params = jax.tree.map(np.asarray, adapted.params)
    model = adapted.model()
    rng = np.random.default_rng(0)

    def fill(path: tuple[Any, ...], tree: Any) -> None:
        for key, value in tree.items():
            if isinstance(value, dict):
                fill((*path, key), value)
                continue
            at: Any = model
            for part in path:
                at = at[int(part)] if str(part).isdecimal() else getattr(at, str(part))
            random = rng.normal(size=value.shape).astype(np.float32)
            getattr(at, key).set_value(jax.numpy.asarray(random if key == "lora_B" else value))

    fill((), params)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "tokenizer.json").write_text("{}")
    adapter = models.save_lora(model, tmp_path / "adapter", source=tmp_path / "new")
    expected = tensors_of(models.save_pretrained(model, tmp_path / "exported"))
    # The adapters' own file names the base.
    found = tensors_of(models.merge_adapter(adapter, tmp_path / "merged"))
    assert found.keys() == expected.keys() == tensors_of(base).keys()
    for key, array in expected.items():
        np.testing.assert_allclose(found[key], array, rtol=1e-6, atol=1e-6, err_msg=key)
    # A tokenizer that was saved with the adapters is the merged model's.
    assert (tmp_path / "merged" / "tokenizer.json").read_text() == "{}"


def test_merging_holds_a_few_matrices_at_a_time(tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8}
    base = make_torch("llama", **sizes)
    save(base, tmp_path / "base", max_shard_size="500KB")
    make_adapter(base, tmp_path / "adapter")
    total = sum(file.stat().st_size for file in (tmp_path / "base").glob("*.safetensors"))
    options: dict[str, Any] = {"base": tmp_path / "base", "max_shard_bytes": 500_000}
    tracemalloc.start()
    try:
        models.merge_adapter(tmp_path / "adapter", tmp_path / "merged", **options)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert total > 4_000_000 and peak < total / 4


@pytest.mark.parametrize(
    ("changes", "tensors", "error"),
    [
        ({"peft_type": "LOHA"}, {}, "merged.*peft_type='LOHA'"),
        ({"bias": "all"}, {}, "merged.*bias='all'"),
        ({"base_model_name_or_path": None}, {}, "`base`"),
        ({}, {"layers.0.self_attn.q_proj.lora_B": (8, 4)}, "shapes .*layers.0.self_attn"),
        ({}, {"layers.9.self_attn.q_proj.lora_B": (8, 4)}, "no model.layers.9"),
        ({}, {"layers.0.self_attn.q_proj.lora_B.bias": (8,)}, "merged.*lora_B.bias"),
        ({}, {"embed_tokens.lora_A": (4, 8)}, "tie_word_embeddings"),
        ({}, {"norm": (3,)}, "shape .*model.norm.weight"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(changes, tensors, error, tmp_path):
    tied = {"tie_word_embeddings": True} if "embed_tokens.lora_A" in tensors else {}
    base = save(make_torch("qwen3", **tied), tmp_path / "base")
    adapter = tmp_path / "adapter"
    make_adapter(make_torch("qwen3"), adapter)
    about = json.loads((adapter / "adapter_config.json").read_text())
    about |= {"base_model_name_or_path": str(base)} | changes
    (adapter / "adapter_config.json").write_text(json.dumps(about))
    arrays = load_file(adapter / "adapter_model.safetensors")
    for name, shape in tensors.items():
        end = "" if name.endswith("bias") else ".weight"
        arrays[f"base_model.model.model.{name}{end}"] = np.zeros(shape, np.float32)
    save_file(arrays, adapter / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=error):
        models.merge_adapter(adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.fixture(scope="module")
def fitting(tmp_path_factory) -> tuple[Path, Path]:
    """A base in float16 and adapters that fit it."""
    folder = tmp_path_factory.mktemp("fitting")
    base = save(make_torch("llama"), folder / "base", dtype=torch.float16)
    make_adapter(
        transformers.AutoModelForCausalLM.from_pretrained(base),
        folder / "adapter",
        modules_to_save=["model.norm"],
    )
    return base, folder / "adapter"


def spoiled(adapter: Path, to: Path, changes: dict[str, Any], change: Any = None) -> Path:
    """A copy of adapters with other settings, or other tensors."""
    shutil.copytree(adapter, to)
    config = json.loads((to / "adapter_config.json").read_text()) | changes
    (to / "adapter_config.json").write_text(json.dumps(config))
    if change is not None:
        arrays = load_file(to / "adapter_model.safetensors")
        save_file(change(arrays), to / "adapter_model.safetensors")
    return to


def with_number(end: str, number: float) -> Any:
    def change(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        name = next(name for name in reversed(arrays) if name.endswith(end))
        arrays[name] = arrays[name].astype(np.float32)
        arrays[name].flat[-1] = number
        return arrays

    return change


def train_from(base: Path, adapter: Path) -> None:
    """Reads adapters as a run's start does, which converts them to arrays."""
    jax.tree.map(np.asarray, models.load_lora(models.load_pretrained(base), adapter).params)


@pytest.mark.parametrize("way", ["merged", "trained"])
@pytest.mark.parametrize(
    ("changes", "change", "named"),
    [
        # PEFT changes the base when it reads these.
        ({"init_lora_weights": "pissa"}, None, "init_lora_weights='pissa'"),
        ({"init_lora_weights": "olora"}, None, "init_lora_weights='olora'"),
        ({"init_lora_weights": "pissa_niter_4"}, None, "init_lora_weights='pissa_niter_4'"),
        ({"init_lora_weights": "lora_ga"}, None, "init_lora_weights='lora_ga'"),
        ({"init_lora_weights": ["loftq"]}, None, "init_lora_weights="),
        # Options of later versions of PEFT; zero may mean something.
        ({"new_option": 0}, None, "new_option=0"),
        ({"use_new": True, "further": {"a": 1}}, None, "further=.*use_new=True"),
        ({"use_bdlora": {"nblocks": 2}}, None, "use_bdlora="),
        ({"kasa_config": {}, "arrow_config": {"top_k": 3}}, None, "here: arrow_config="),
        *(
            ({"lora_alpha": alpha}, None, "`lora_alpha`")
            for alpha in (math.nan, math.inf, 1e308, 10**400, None, "16", True)
        ),
        *(({"r": r}, None, "`r`") for r in (-4, 0, 4.0, "4", True)),
        ({"r": 3}, None, r"q_proj.*\(4, 32\)"),
        ({"lora_dropout": math.nan}, None, "`lora_dropout`"),
        ({"lora_dropout": 1}, None, "`lora_dropout`"),
        ({"use_rslora": "no"}, None, "`use_rslora`"),
        ({"target_modules": "("}, None, "`target_modules`"),
        ({"target_modules": 5}, None, "`target_modules`"),
        ({"target_parameters": "q_proj.weight"}, None, "`target_parameters`"),
        ({"alpha_pattern": {"q_proj": math.nan}}, None, "alpha_pattern.*q_proj"),
        ({"alpha_pattern": {"(": 3}}, None, r"alpha_pattern.*\("),
        ({"rank_pattern": ["q_proj"]}, None, "rank_pattern"),
        ({"rank_pattern": {"q_proj": 7}}, None, r"of rank 7|q_proj.*not \(7, 32\)"),
        ({"use_dora": True}, None, "layers.1.self_attn.v_proj.lora_magnitude_vector"),
        ({}, lambda arrays: {}, "adapter_model.safetensors .*tensors"),
        ({}, with_number("lora_A.weight", math.nan), "layers.1.*lora_A.weight"),
        ({}, with_number("lora_B.weight", math.inf), "layers.1.*lora_B.weight"),
        ({}, with_number("model.norm.weight", -math.inf), "model.norm.weight"),
        (
            {},
            lambda arrays: {
                n: a for n, a in arrays.items() if "1.self_attn.q_proj.lora_B" not in n
            },
            "layers.1.self_attn.q_proj.lora_B",
        ),
        (
            {},
            lambda arrays: {n: a.astype(np.int8) for n, a in arrays.items()},
            "lora_A.weight .*I8",
        ),
        (
            {},
            lambda arrays: {
                **arrays,
                "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": np.ones(
                    32, np.float32
                ),
            },
            "q_proj.lora_magnitude_vector",
        ),
    ],
)
def test_what_is_not_known_of_adapters_is_refused(changes, change, named, way, fitting, tmp_path):
    base, adapter = fitting
    adapter = spoiled(adapter, tmp_path / "adapter", changes, change)
    with pytest.raises(ValueError, match=f"(?s){adapter}.*{named}"):
        if way == "merged":
            models.merge_adapter(adapter, tmp_path / "merged", base=base)
        else:
            train_from(base, adapter)
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("changes", "change", "name"),
    [
        ({"lora_alpha": 1e38}, None, "model.layers.0.self_attn.q_proj.weight"),
        ({}, with_number("model.norm.weight", 1e5), "model.norm.weight"),
    ],
)
def test_merged_numbers_too_large_for_the_base_are_refused(
    changes, change, name, fitting, tmp_path
):
    base, adapter = fitting
    adapter = spoiled(adapter, tmp_path / "adapter", changes, change)
    with refuses(ValueError, name, "finite", "float16"):
        models.merge_adapter(adapter, tmp_path / "merged", base=base)
    assert not (tmp_path / "merged").exists()
    train_from(base, adapter)


def test_adapters_that_only_merging_reads(fitting, tmp_path):
    base, adapter = fitting
    flagged = {"target_modules": "(?i).*(q|v)_proj"}
    train_from(base, spoiled(adapter, tmp_path / "flagged", flagged))
    for changes in ({"lora_alpha": -8}, {"init_lora_weights": "mica"}):
        (name,) = changes
        other = spoiled(adapter, tmp_path / name, changes)
        models.merge_adapter(other, tmp_path / "merged", base=base, overwrite=True)
        with pytest.raises(ValueError, match=f"adapter_config.json.*{name}"):
            train_from(base, other)


def test_a_matrix_with_adapters_and_a_whole_one_is_refused(fitting, tmp_path):
    base, adapter = fitting
    name = "model.layers.0.self_attn.q_proj.weight"
    whole = {f"base_model.model.{name}": np.ones((32, 32), np.float32)}
    other = spoiled(adapter, tmp_path / "adapter", {}, lambda arrays: arrays | whole)
    with refuses(ValueError, "both", name):
        models.merge_adapter(other, tmp_path / "merged", base=base)


def test_missing_numbers_are_those_of_peft(fitting, tmp_path):
    base, adapter = fitting
    config = json.loads((adapter / "adapter_config.json").read_text())
    del config["lora_alpha"], config["use_rslora"], config["lora_dropout"], config["alpha_pattern"]
    other = spoiled(adapter, tmp_path / "adapter", {})
    (other / "adapter_config.json").write_text(json.dumps(config))
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = peft.PeftModel.from_pretrained(load(base, dtype=torch.float32), other)
    expected = theirs.merge_and_unload().state_dict()
    found = tensors_of(models.merge_adapter(other, tmp_path / "merged", base=base))
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name].half().numpy(), err_msg=name)


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
@pytest.mark.parametrize("saved", [True, False])
def test_lora_of_head_and_embeddings_gets_a_reason(module, saved, tmp_path):
    base = save(make_torch("llama"), tmp_path / "base")
    load, adapter = transformers.AutoModelForCausalLM.from_pretrained, tmp_path / "adapter"
    theirs = make_adapter(load(base), adapter, target_modules=[module, "q_proj"])
    if saved:  # as PEFT does by default
        theirs.save_pretrained(adapter, save_embedding_layers=True)
    ways: list[Callable[[], Any]] = [lambda: train_from(base, adapter)]
    if module == "lm_head" and not saved:
        found = tensors_of(models.merge_adapter(adapter, tmp_path / "merged", base=base))
        head = theirs.merge_and_unload().lm_head.weight.detach().numpy()
        np.testing.assert_allclose(found["lm_head.weight"], head, rtol=1e-6, atol=1e-6)
    else:
        ways.append(lambda: models.merge_adapter(adapter, tmp_path / "merged", base=base))
    remedy = "merge_adapter" if len(ways) == 1 else "merge_and_unload"
    for way in ways:
        with pytest.raises(ValueError, match=f"{adapter}.*{module}.*{remedy}"):
            way()


@pytest.mark.filterwarnings("ignore:PiSSA changes the base weights:UserWarning")
def test_adapters_that_peft_converted_are_merged(tmp_path):
    """The way that the refusal of PiSSA names."""
    base = save(make_torch("llama"), tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    settings = {"r": 4, "target_modules": ATTENTION, "init_lora_weights": "pissa"}
    theirs = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    theirs.peft_config["default"].init_lora_weights = True
    theirs.save_pretrained(tmp_path / "initial")
    theirs.peft_config["default"].init_lora_weights = "pissa"
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    initial = str(tmp_path / "initial")
    theirs.save_pretrained(tmp_path / "adapter", path_initial_model_for_weight_conversion=initial)
    found = tensors_of(models.merge_adapter(tmp_path / "adapter", tmp_path / "merged", base=base))
    for name, tensor in theirs.merge_and_unload().state_dict().items():
        np.testing.assert_allclose(found[name], tensor, atol=5e-6, err_msg=name)


FP8, UP = {"quant_method": "fp8"}, "model.layers.1.mlp.up_proj"
WHOLE = {"strategy": "tensor", "type": "float"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"all": {"targets": ["Linear"], "weights": WHOLE}},
}


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize(
    ("about", "parts", "named"),
    [
        # Methods that can't be read.
        ({"quant_method": "hqq", "bits": 4}, {"qweight": "I32", "scales": "F16"}, "hqq"),
        ({"quant_method": "modelopt"}, {"weight": "F8", "weight_scale": "F32"}, "modelopt"),
        ({"quant_method": "fbgemm_fp8"}, {"weight": "F8", "weight_scale": "F32"}, "fbgemm_fp8"),
        (COMPRESSED | {"format": "nvfp4-pack-quantized"}, {"weight_packed": "U8"}, "nvfp4-pack"),
        # Codes without their scales, and scales without codes.
        (FP8, {"weight": "F8"}, f"{UP}.weight_scale_inv"),
        (FP8, {"weight": "F8", "weight_scale": "F32"}, f"{UP}.weight_scale"),
        (COMPRESSED, {"weight": "F8"}, f"{UP}.weight_scale"),
        (COMPRESSED, {"weight": "I8"}, f"{UP}.weight_scale"),
        (
            COMPRESSED,
            {"weight": "F8", "weight_scale": "F32", "weight_g_idx": "I32"},
            "weight_g_idx",
        ),
        ({"load_in_8bit": True}, {"weight": "I8"}, f"{UP}.SCB"),
        ({"load_in_4bit": True}, {"weight": "U8", "weight.absmax": "F32"}, f"{UP}.weight.absmax"),
        (None, {"weight": "F8"}, f"{UP}.weight"),
        (None, {"weight_scale": "F32"}, f"{UP}.weight_scale"),
        (None, {"qweight": "I32", "qzeros": "I32"}, f"{UP}.qweight"),
    ],
)
def test_bases_with_codes_that_nothing_decodes_are_refused(
    about, parts, named, inner, fitting, tmp_path
):
    """As by `load_pretrained`, also if no matrix with codes has adapters."""
    import safetensors.torch as files

    _, adapter = fitting
    base = shutil.copytree(fitting[0], tmp_path / "base")
    arrays = files.load_file(base / "model.safetensors")
    dtypes = {"F8": torch.float8_e4m3fn, "F16": torch.float16, "F32": torch.float32}
    dtypes |= {"I8": torch.int8, "I32": torch.int32, "U8": torch.uint8}
    matrix = arrays.pop(f"{UP}.weight")
    for part, dtype in parts.items():
        whole = matrix if part == "weight" else torch.ones(1)
        arrays[f"{UP}.{part}"] = whole.to(dtypes[dtype])
    files.save_file(arrays, base / "model.safetensors")
    values = json.loads((base / "config.json").read_text())
    quantised = {} if about is None else {"quantization_config": about}
    values |= {"text_config": quantised} if inner else quantised
    (base / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=f"(?s){base}.*{named}"):
        models.merge_adapter(adapter, tmp_path / "merged", base=base)
    assert not (tmp_path / "merged").exists()
    if not inner:
        with pytest.raises(ValueError):
            models.load_pretrained(base)


def test_bytes_that_are_no_codes_are_merged(fitting, tmp_path):
    """Masks in old checkpoints, and numbers whose names resemble those of scales."""
    base, adapter = shutil.copytree(fitting[0], tmp_path / "base"), fitting[1]
    file = base / "model.safetensors"
    further = {
        "model.layers.0.attention.bias": np.ones((1, 1, 4, 4), np.uint8),
        "model.layers.0.attention.mask": np.ones((1, 1, 4, 4), bool),
        "model.layers.0.router.per_expert_scale": np.ones(4, np.float32),
        "logit_scale": np.ones((), np.float32),
    }
    save_file(load_file(file) | further, file)
    found = tensors_of(models.merge_adapter(adapter, tmp_path / "merged", base=base))
    for name, array in further.items():
        np.testing.assert_array_equal(found[name], array, strict=True)


SMALL = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def of_other_names(family: str, folder: Path, **options: Any) -> Path:
    """A base whose embeddings or head aren't called `embed_tokens` and `lm_head`."""
    torch.manual_seed(0)
    inside = {"intermediate_size": 64} if family == "GPTNeoX" else {}
    config = getattr(transformers, f"{family}Config")(**SMALL, **inside, **options)
    return save(transformers.AutoModelForCausalLM.from_config(config).eval(), folder)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize(
    ("family", "target", "embeddings"),
    [
        ("Falcon", "query_key_value", "word_embeddings"),
        ("Bloom", "query_key_value", "word_embeddings"),
        ("GPTNeoX", "query_key_value", "embed_in"),
    ],
)
def test_tied_embeddings_of_any_name_are_refused(family, target, embeddings, tmp_path):
    """PEFT trains a copy of the embeddings, and leaves the head as it was."""
    tied = {"tie_word_embeddings": True} if family == "GPTNeoX" else {}
    base, adapter = of_other_names(family, tmp_path / "base", **tied), tmp_path / "adapter"
    load = transformers.AutoModelForCausalLM.from_pretrained
    make_adapter(load(base), adapter, target_modules=[target], modules_to_save=[embeddings])
    with pytest.raises(ValueError, match=f"{embeddings}.*`tie_word_embeddings`"):
        models.merge_adapter(adapter, tmp_path / "merged", base=base)
    make_adapter(load(base), tmp_path / "head", target_modules=["lm_head"])
    with pytest.raises(ValueError, match="lm_head.*`tie_word_embeddings`"):
        models.merge_adapter(tmp_path / "head", tmp_path / "merged", base=base)


@pytest.mark.parametrize(
    ("family", "options", "whole"),
    [
        ("GPTNeoX", {}, ["embed_in", "lm_head"]),
        ("Falcon", {"tie_word_embeddings": False}, ["word_embeddings", "lm_head"]),
    ],
)
def test_new_tokens_of_embeddings_of_any_name_are_merged(family, options, whole, tmp_path):
    base = of_other_names(family, tmp_path / "base", **options)
    load = transformers.AutoModelForCausalLM.from_pretrained
    larger = load(base)
    larger.resize_token_embeddings(62)
    settings = {"target_modules": ["query_key_value"], "modules_to_save": whole}
    theirs = make_adapter(larger, tmp_path / "adapter", **settings)
    if family == "GPTNeoX":  # before Transformers 5, the head's module had the name in the files
        file = tmp_path / "adapter" / "adapter_model.safetensors"
        arrays = {n.replace("lm_head", "embed_out"): a for n, a in load_file(file).items()}
        save_file(arrays, file)
        about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        about["modules_to_save"] = ["embed_in", "embed_out"]
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(about))
    found = load(models.merge_adapter(tmp_path / "adapter", tmp_path / "merged", base=base))
    assert found.config.vocab_size == 62
    expected = theirs.merge_and_unload().state_dict()
    for name, tensor in found.state_dict().items():
        np.testing.assert_allclose(tensor, expected[name], rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("layers", [0, 1, [0]])
def test_adapters_of_some_layers_are_merged_as_by_peft(layers, fitting, tmp_path):
    base, adapter = fitting[0], tmp_path / "adapter"
    load = transformers.AutoModelForCausalLM.from_pretrained
    options = {"layers_to_transform": layers, "layers_pattern": "layers"}
    theirs = make_adapter(load(base, dtype=torch.float32), adapter, **options)
    expected = theirs.merge_and_unload().state_dict()
    found = tensors_of(models.merge_adapter(adapter, tmp_path / "merged", base=base))
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name].half().numpy(), err_msg=name)
    train_from(base, adapter)


@pytest.mark.parametrize("way", ["merged", "trained"])
@pytest.mark.parametrize(
    "renamed",
    [
        lambda name: name.removeprefix("base_model.model."),
        lambda name: name.removesuffix(".weight"),
    ],
)
def test_two_tensors_for_one_are_refused(renamed, way, fitting, tmp_path):
    base, adapter = fitting

    def change(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        name = next(name for name in arrays if "q_proj.lora_A" in name)
        return arrays | {renamed(name): 2 * arrays[name]}

    other = spoiled(adapter, tmp_path / "adapter", {}, change)
    with pytest.raises(ValueError, match=f"{other}.*q_proj.lora_A.*q_proj.lora_A"):
        if way == "merged":
            models.merge_adapter(other, tmp_path / "merged", base=base)
        else:
            train_from(base, other)


def test_whole_matrices_alone_are_merged_only(fitting, tmp_path):
    base, adapter = fitting

    def change(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: array for name, array in arrays.items() if "lora_" not in name}

    other = spoiled(adapter, tmp_path / "adapter", {}, change)
    with pytest.raises(ValueError, match=f"{other}.*`modules_to_save`.*merge_adapter"):
        train_from(base, other)
    models.merge_adapter(other, tmp_path / "merged", base=base)
