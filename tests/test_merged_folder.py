"""Adapters' folders merged into their base, against PEFT's own merging and our models' export."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from megatrain_jax import models

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
                "rank_pattern": {"down_proj": 2},
                "alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 32},
            },
            torch.float32,
        ),
        ({"use_dora": True, "modules_to_save": ["lm_head"]}, torch.float32),
    ],
    ids=["rslora", "patterns", "dora"],
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
    merged = models.merge_adapter(tmp_path / "adapter", tmp_path / "merged", base=base)
    found = transformers.AutoModelForCausalLM.from_pretrained(merged)
    assert found.config.vocab_size == rows
    expected = theirs.merge_and_unload().state_dict()
    for name, tensor in found.state_dict().items():
        np.testing.assert_allclose(tensor, expected[name], rtol=1e-6, atol=1e-6, err_msg=name)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({n: a for n, a in load_file(file).items() if "lm_head" not in n}, file)
    with pytest.raises(ValueError, match=f"differ in .* rows: .*embed_tokens.weight has {rows}"):
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
        ({"peft_type": "LOHA"}, {}, "type 'LOHA', but only LORA"),
        ({"bias": "all"}, {}, "`bias` = 'all', which can't be merged"),
        ({"base_model_name_or_path": None}, {}, "names no base model: pass its folder as `base`"),
        ({}, {"layers.0.self_attn.q_proj.lora_B": (8, 4)}, "other shapes .*layers.0.self_attn"),
        ({}, {"layers.9.self_attn.q_proj.lora_B": (8, 4)}, "there is no model.layers.9"),
        ({}, {"layers.0.self_attn.q_proj.lora_B.bias": (8,)}, "tensors that can't be merged"),
        ({}, {"embed_tokens.lora_A": (4, 8)}, "tie_word_embeddings"),
        ({}, {"norm": (3,)}, "no tensor of that shape for model.norm.weight"),
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
