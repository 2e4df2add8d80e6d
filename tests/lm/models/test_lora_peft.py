"""Adapters against PEFT's: trained side by side, and read from the files that it reads."""

import json
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax import nnx
from safetensors.numpy import load_file

from megatrain_jax import models
from megatrain_jax._src.lm.models.lora import adapted_modules, merged_matrix
from messages import refuses

peft = pytest.importorskip("peft", reason='compared with PEFT: pip install -e ".[torch]"')

from families import make_torch, random_tokens, save  # noqa: E402
from peft_curves import PEFT_WARNINGS, STEPS, batches, curves, make_trainer, torch, trainer_of  # noqa: E402

pytestmark = PEFT_WARNINGS


def logits_of(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens).long()).logits.numpy()


def check_files(ours, theirs):
    """Compares the tensors in the folders of both, name by name."""
    found, expected = (load_file(f / "adapter_model.safetensors") for f in (ours, theirs))
    assert set(found) == set(expected)
    for key, array in expected.items():
        limit = 2e-5 * np.abs(array).max()
        np.testing.assert_allclose(found[key], array, atol=limit, err_msg=key)
    return found


@pytest.mark.parametrize(
    ("name", "targets", "options"),
    [
        ("llama", r"self_attn/(q|v)_proj|mlp", {"alpha": 6.0}),
        pytest.param("phi3", r"layers/1", {"rslora": True}, marks=pytest.mark.long),
    ],
)
def test_training_is_that_of_peft(name, targets, options, tmp_path):
    trainer = make_trainer(save(make_torch(name), tmp_path / "base"), targets, rank=4, **options)
    models.save_lora(trainer, tmp_path / "fresh")
    theirs = peft.PeftModel.from_pretrained(make_torch(name), tmp_path / "fresh", is_trainable=True)
    trained = [p for p in theirs.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == trainer.plan.num_parameters - trainer.plan.num_frozen
    curve, expected = curves(trainer, theirs, STEPS)
    np.testing.assert_allclose(curve, expected, rtol=4e-6)
    # The files of both, name by name, and the model that both are merged into.
    models.save_lora(trainer, tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    ours = check_files(tmp_path / "ours", tmp_path / "theirs")
    tokens = random_tokens()
    exported = models.save_pretrained(trainer, tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    expected = logits_of(theirs.merge_and_unload(), tokens)
    np.testing.assert_allclose(logits_of(merged, tokens), expected, atol=1e-4)
    before, after = (load_file(tmp_path / f / "model.safetensors") for f in ("base", "merged"))
    changed = {key for key in before if not np.array_equal(before[key], after[key])}
    prefix, end = "base_model.model.", ".lora_A.weight"
    assert changed == {
        key.removeprefix(prefix).replace(end, ".weight") for key in ours if key.endswith(end)
    }


@pytest.mark.parametrize(
    ("rslora", "scale", "chosen"), [(False, 5 / 4, (0, 1)), (True, 5 / 2, (1,))]
)
def test_peft_scales_and_drops_as_the_settings_say(rslora, scale, chosen, tmp_path):
    base = make_torch("llama")
    pretrained = models.load_pretrained(save(base, tmp_path / "base"))
    options = {"rank": 4, "alpha": 5.0, "dropout": 0.25, "rslora": rslora}
    numbers = "".join(map(str, chosen))
    adapted = models.lora(pretrained.model, targets=f"[{numbers}]/self_attn/q_proj", **options)
    model = adapted.model()
    modules = [model.layers[number].self_attn.q_proj for number in chosen]
    for module in modules:
        module.lora_B.set_value(jnp.ones((32, 4)))
    models.save_lora(model, tmp_path / "lora")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "lora", is_trainable=True)
    layers = [m for m in theirs.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
    for module, layer in zip(modules, layers, strict=True):
        assert layer.scaling == {"default": scale} and layer.lora_dropout["default"].p == 0.25
        change = np.asarray(merged_matrix(module)) - np.asarray(module.weight[...])
        np.testing.assert_allclose(layer.get_delta_weight("default").detach(), change, atol=1e-6)
    whole, half = (
        load_file(
            models.save_lora(model, tmp_path / dtype, dtype=dtype) / "adapter_model.safetensors"
        )
        for dtype in ("float32", "bfloat16")
    )
    for name, array in whole.items():
        np.testing.assert_array_equal(half[name], array.astype(jnp.bfloat16), strict=True)


def make_peft(name, folder, seed=3, **options):
    """A model of PEFT with adapters that change it, and the folder of the adapters."""
    torch.manual_seed(seed)
    theirs = peft.get_peft_model(
        make_torch(name), peft.LoraConfig(task_type="CAUSAL_LM", **options)
    )
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            if "lora_B" in key or "modules_to_save" in key:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.parametrize("saved", [None, ["embed_tokens", "lm_head", "model.norm"]])
def test_training_goes_on_from_adapters_of_peft(saved, tmp_path):
    base = save(make_torch("llama"), tmp_path / "base")
    make_peft(
        "llama",
        tmp_path / "lora",
        r=3,
        lora_alpha=5,
        use_rslora=True,
        target_modules=["q_proj", "up_proj", "model.layers.1.mlp.down_proj"],
        modules_to_save=saved,
    )
    adapted = models.load_lora(models.load_pretrained(base), tmp_path / "lora")
    assert len(adapted.targets) == 5
    trainer = trainer_of(adapted)
    theirs = peft.PeftModel.from_pretrained(
        make_torch("llama"), tmp_path / "lora", is_trainable=True
    )
    curve, expected = curves(trainer, theirs, 5)
    np.testing.assert_allclose(curve, expected, rtol=4e-6)
    models.save_lora(trainer, tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    found = check_files(tmp_path / "ours", tmp_path / "theirs")
    assert len(found) == 10 + len(saved or ())
    settings = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    targets = {"q_proj", "up_proj", "model.layers.1.mlp.down_proj"}
    assert set(settings["target_modules"]) == targets
    if saved is not None:
        assert {name.removeprefix("model.") for name in settings["modules_to_save"]} == {
            name.removeprefix("model.") for name in saved
        }
        again = peft.PeftModel.from_pretrained(make_torch("llama"), tmp_path / "ours")
        tokens = random_tokens()
        ours = jax.tree.map(jnp.asarray, trainer.model)(tokens)
        np.testing.assert_allclose(ours, logits_of(again, tokens), atol=1e-4)


def test_ranks_and_alphas_by_pattern_are_those_of_peft(tmp_path):
    base = save(make_torch("llama"), tmp_path / "base")
    patterns: dict[str, Any] = {
        "rank_pattern": {"q_proj": 5, r"layers\.1\.mlp\..*": 1},
        "alpha_pattern": {"1.self_attn.q_proj": 7, "[qu]p?_proj": 2.5},
    }
    theirs = make_peft("llama", tmp_path / "lora", r=3, target_modules="all-linear", **patterns)
    adapted = models.load_lora(models.load_pretrained(base), tmp_path / "lora")
    trainer = trainer_of(adapted)
    tokens = random_tokens()
    ours = jax.tree.map(jnp.asarray, trainer.model)(tokens)
    np.testing.assert_allclose(ours, logits_of(theirs, tokens), atol=1e-5)
    theirs = peft.PeftModel.from_pretrained(
        make_torch("llama"), tmp_path / "lora", is_trainable=True
    )
    curve, expected = curves(trainer, theirs, 3)
    np.testing.assert_allclose(curve, expected, rtol=4e-6)
    # Written with each module's own numbers, it is the same model in PEFT and here.
    models.save_lora(trainer, tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    check_files(tmp_path / "ours", tmp_path / "theirs")
    again = peft.PeftModel.from_pretrained(make_torch("llama"), tmp_path / "ours")
    ours = jax.tree.map(jnp.asarray, trainer.model)(tokens)
    np.testing.assert_allclose(ours, logits_of(again, tokens), atol=1e-5)
    fresh = models.lora(
        models.load_pretrained(base).model,
        targets="[qv]_proj",
        rank=lambda path: 2 if path == "layers/1/self_attn/q_proj/weight" else 4,
        alpha=lambda path: 3.0 if "v_proj" in path else 4.0,
    ).model()
    found = [(m.lora_A.shape[0], m.lora_settings.scale) for _, m in adapted_modules(fresh)]
    assert found == [(4, 1.0), (4, 0.75), (2, 2.0), (4, 0.75)]


def test_dora_is_that_of_peft(tmp_path):
    base = save(make_torch("qwen2"), tmp_path / "base")  # its projections have biases
    targets = r"self_attn/(q|v)_proj|down_proj"
    trainer = make_trainer(base, targets, rank=3, alpha=5.0, dora=True)
    models.save_lora(trainer, tmp_path / "fresh")
    theirs = peft.PeftModel.from_pretrained(
        make_torch("qwen2"), tmp_path / "fresh", is_trainable=True
    ).double()  # in fp32 PEFT is off by up to 3.2e-5, ours by 8e-6
    curve, expected = curves(trainer, theirs, 5)
    np.testing.assert_allclose(curve, expected, rtol=4e-6)
    models.save_lora(trainer, tmp_path / "ours")
    theirs.float().save_pretrained(tmp_path / "theirs")
    found = check_files(tmp_path / "ours", tmp_path / "theirs")
    assert sum("magnitude" in name for name in found) == len(found) / 3
    # Read again, it has the same loss; and merged, the same logits.
    again = trainer_of(models.load_lora(models.load_pretrained(base), tmp_path / "theirs"))
    batch = next(batches())
    losses = [one.read(one.step(batch))["loss"] for one in (trainer, again)]
    np.testing.assert_allclose(*losses, rtol=4e-6)
    tokens = random_tokens()
    exported = models.save_pretrained(again, tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    ours = jax.tree.map(jnp.asarray, again.model)(tokens)
    np.testing.assert_allclose(logits_of(merged, tokens), ours, atol=1e-4)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_dora_of_any_module_is_its_merged_matrix(dropout):
    model = nnx.LinearGeneral((2, 3), (4, 5), axis=(-2, -1), rngs=nnx.Rngs(0))
    options: dict[str, Any] = {"targets": "kernel", "rank": 2, "dropout": dropout}
    adapted = models.lora(model, dora=True, **options).model
    x = jnp.asarray(np.random.default_rng(0).normal(size=(7, 2, 3)), jnp.float32)
    still = nnx.view(adapted, deterministic=True) if dropout else adapted
    np.testing.assert_allclose(still(x), model(x), atol=1e-5)
    adapted.lora_B.set_value(jnp.full((20, 2), 0.3))
    adapted.lora_magnitude.set_value(jnp.arange(1.0, 21.0))
    adapted.bias.set_value(jnp.ones((4, 5)))
    merged: Any = models.merge_lora(adapted)
    expected = merged(x)
    np.testing.assert_allclose(still(x), expected, atol=2e-5 * np.abs(expected).max())
    norms = np.linalg.norm(np.reshape(merged.kernel[...], (6, 20)), axis=0)
    np.testing.assert_allclose(norms, np.arange(1.0, 21.0), rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "saved", "told"),
    [
        ("llama", ["head"], ["'head'"]),  # of lm_head only the end
        ("llama", ["mlp"], ["layers/0/mlp", "modules"]),
        ("llama", ["q_proj"], ["`modules_to_save`", "`targets`", "layers/0/self_attn/q_proj"]),
        ("qwen2", ["embed_tokens"], ["embed_tokens", "head"]),
    ],
)
def test_modules_that_cannot_be_saved_are_refused(name, saved, told, tmp_path):
    pretrained = models.load_pretrained(save(make_torch(name), tmp_path / "base"))
    with refuses(ValueError, *told):
        models.lora(pretrained.model, targets="q_proj", modules_to_save=saved)


def test_adapters_are_read_as_they_were_saved(tmp_path):
    pretrained = models.load_pretrained(save(make_torch("qwen3-moe"), tmp_path / "base"))
    model = models.lora(
        pretrained.model,
        targets="0/self_attn/.*_proj|1/.*_proj",
        rank=lambda path: 3 if "experts" in path else 2,
        alpha=lambda path: 5.0 if "up_proj" in path else 6.0,
        rslora=True,
    ).model()
    for number, (_, module) in enumerate(adapted_modules(model)):
        module.lora_B.set_value(jnp.full_like(module.lora_B[...], number))
    folder = models.save_lora(model, tmp_path / "lora")
    # PEFT joins experts' matrices by the rank that all modules have.
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 3
    again = models.load_lora(pretrained, folder, seed=4)
    assert again.params is not None
    modules = dict(adapted_modules(again.model()))
    for path, module in adapted_modules(model):
        at = again.params
        for key in path:
            at = at[str(key)]
        for factor in ("lora_A", "lora_B"):
            np.testing.assert_array_equal(at[factor], getattr(module, factor)[...])
        assert modules[path].lora_settings == replace(module.lora_settings, seed=4)


def test_adapters_that_do_not_fit_are_refused(tmp_path):
    pretrained = models.load_pretrained(save(make_torch("llama"), tmp_path / "base"))
    other = models.load_pretrained(save(make_torch("qwen3-moe"), tmp_path / "other"))
    folder = models.save_lora(
        models.lora(other.model, targets="_proj", rank=3).model(), tmp_path / "adapter"
    )
    with pytest.raises(ValueError, match=r".*/other\b.*/base\b.* part of it: .*experts"):
        models.load_lora(pretrained, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    for change, told in (
        ({"r": 2}, ["shape: base_model"]),
        ({"rank_pattern": {"q_proj": 2}}, ["shape: base_model", "q_proj"]),
        ({"alpha_pattern": {"2.up_proj": 2}}, ["experts", "alphas"]),
        ({"alpha_pattern": {"q_proj": 0}}, ["adapter_config.json:", "alpha_pattern.q_proj"]),
        ({"init_lora_weights": "pissa"}, ["init_lora_weights='pissa'"]),
        ({"bias": "all"}, ["bias='all'"]),
        ({"peft_type": "LOHA"}, ["peft_type='LOHA'"]),
        ({"lora_alpha": None}, ["adapter_config.json:", "`lora_alpha`", "finite"]),
    ):
        (folder / "adapter_config.json").write_text(json.dumps(config | change))
        with refuses(ValueError, *told):
            models.load_lora(other, folder)
    with refuses(FileNotFoundError, "adapter_config.json", tmp_path / "base", "whole"):
        models.load_lora(other, tmp_path / "base")
    with refuses(FileNotFoundError, "config.json", folder, "adapters"):
        models.load_pretrained(folder)
    with refuses(FileNotFoundError, folder):
        models.load_lora(other, folder.parent)
    with refuses(TypeError, "`pretrained`", "models.load_pretrained"):
        models.load_lora(other.model, folder)  # type: ignore[arg-type]


def test_adapters_beside_experts_are_loaded_by_peft(tmp_path):
    """PEFT takes names such as `gate_proj` for those of experts."""
    base = save(make_torch("deepseek-v3"), tmp_path / "base")
    pretrained = models.load_pretrained(base)
    model = models.lora(
        pretrained.model,
        targets="0/mlp/(gate|down)_proj|1/mlp/.*_proj",
        rank=lambda path: 2 if "shared" in path or "/0/" in path else 3,
        alpha=lambda path: 5.0 if "shared" in path else 6.0,
        rslora=True,
    ).model()
    for number, (_, module) in enumerate(adapted_modules(model)):
        module.lora_B.set_value(jnp.full_like(module.lora_B[...], 0.1 * (number + 1)))
    folder = models.save_lora(model, tmp_path / "lora")
    tokens = random_tokens()
    plain = logits_of(make_torch("deepseek-v3"), tokens)
    theirs = logits_of(peft.PeftModel.from_pretrained(make_torch("deepseek-v3"), folder), tokens)
    load = transformers.AutoModelForCausalLM.from_pretrained
    merged = load(models.merge_adapter(folder, tmp_path / "merged", base=base))
    assert np.abs(theirs - plain).max() > 0.01
    np.testing.assert_allclose(theirs, logits_of(merged, tokens), atol=1e-4)
    again = dict(adapted_modules(models.load_lora(pretrained, folder).model()))
    for path, module in adapted_modules(model):
        assert again[path].lora_settings == module.lora_settings


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["qwen3-moe", pytest.param("mixtral", marks=pytest.mark.long)])
def test_adapters_of_experts_are_loaded_by_peft(name, tmp_path):
    trainer = make_trainer(save(make_torch(name), tmp_path / "base"), r"_proj", rank=3)
    for batch in list(batches())[:2]:
        trainer.step(batch)
    models.save_lora(trainer, tmp_path / "lora")
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert len(config["target_modules"]) == 7
    tokens = random_tokens()
    base = make_torch(name)
    plain = logits_of(base, tokens)
    theirs = logits_of(peft.PeftModel.from_pretrained(base, tmp_path / "lora"), tokens)
    assert np.abs(theirs - plain).max() > 0.01
    ours = jax.jit(lambda model: model(tokens))(jax.tree.map(jnp.asarray, trainer.model))
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
