"""Checkpoints there and back: bit for bit, in pieces, never whole in memory, and damaged ones."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy as safetensors_numpy
import transformers
from flax import nnx

import megatrain_jax as mt
from megatrain_jax._src.lm.models import pretrained as of_pretrained
from megatrain_jax._src.lm.models.pretrained import leaves, parameter_tensors
from megatrain_jax._src.lm.models.tensors import NamedTensor, Tensor, split_experts, write_tensors
from megatrain_jax.models import Decoder, DecoderConfig, load_pretrained, save_pretrained
from messages import refuses, tells

torch = pytest.importorskip("torch", reason='compared with PyTorch: pip install -e ".[torch]"')

import safetensors.torch as safetensors_torch  # noqa: E402

from families import FAMILIES, make_torch, random_tokens, save  # noqa: E402
from filled_models import at, filled, tensors_of, traced_peak  # noqa: E402


def check_same_tensors(ours: Path, theirs: Path) -> None:
    found, expected = tensors_of(ours), tensors_of(theirs)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype and found[name].tobytes() == array.tobytes(), name


@pytest.mark.by_default(
    *(f"float32-{name}" for name in FAMILIES),
    *(
        f"bfloat16-{name}"
        for name in ("qwen3-moe", "gpt-oss", "nemotron-h", "gemma4", "kimi-linear")
    ),
)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.filterwarnings("ignore:Casting complex values")  # of Llama 4's vision tower
def test_there_and_back_is_the_same_bits(name, dtype, tmp_path):
    reference = make_torch(name)
    source = save(reference, tmp_path / "source", getattr(torch, dtype))
    (source / "tokenizer.json").write_text("{}")
    pretrained = load_pretrained(source)
    folder = save_pretrained(filled(pretrained), tmp_path / "saved")
    check_same_tensors(folder, source)
    for file in ("config.json", "generation_config.json", "tokenizer.json"):
        read = (json.loads((path / file).read_text()) for path in (folder, source))
        assert next(read) == next(read)
    if dtype == "float32":
        read, found = type(reference).from_pretrained(folder, output_loading_info=True)
        assert not found["missing_keys"] and not found["unexpected_keys"]
        again = read.state_dict()
        for key, value in reference.state_dict().items():
            assert torch.equal(value, again[key]), key


def test_a_trained_model_goes_back(tmp_path):
    source = save(make_torch("mixtral"), tmp_path / "source", torch.bfloat16)
    pretrained = load_pretrained(source)
    batch = {"tokens": random_tokens(2)}

    def loss_fn(model: Decoder, batch: Any) -> Any:
        return jnp.mean(model(batch["tokens"]) ** 2)

    precision = mt.Precision(compute=jnp.float32)
    trainer = mt.Trainer(
        pretrained.model,
        loss_fn,
        optax.sgd(0.1),
        batch,
        precision=precision,
        params=pretrained.params,
    )
    check_same_tensors(save_pretrained(trainer, tmp_path / "untrained"), source)
    trainer.read(trainer.step(batch))
    folder = save_pretrained(trainer, tmp_path / "trained", dtype="float32")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = reference(torch.tensor(batch["tokens"]).long()).logits.numpy()
    np.testing.assert_allclose(trainer.model(batch["tokens"]), logits, atol=1e-4)
    half = save_pretrained(trainer, tmp_path / "half")
    assert json.loads((half / "config.json").read_text())["dtype"] == "bfloat16"
    assert {a.dtype.name for a in tensors_of(half).values()} == {"bfloat16"}


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_shards(name, tmp_path):
    source = save(make_torch(name), tmp_path / "source", max_shard_size="20KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    model = filled(load_pretrained(source))
    folder = save_pretrained(model, tmp_path / "saved", max_shard_bytes=16_000)
    check_same_tensors(folder, source)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 1 and all(re.fullmatch(r"model-\d{5}-of-\d{5}", f.stem) for f in files)
    again = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for key, value in make_torch(name).state_dict().items():
        assert torch.equal(value, again[key]), key


def wide(folder: Path) -> tuple[Path, int]:
    """Writes a checkpoint of about 20 MiB; returns it and the bytes of its largest tensor."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    save(make_torch("llama", **sizes), folder)
    return folder, 4 * 256 * 1024


def test_one_tensor_at_a_time(tmp_path):
    source, largest = wide(tmp_path / "source")
    model = filled(load_pretrained(source))
    total = sum(array.nbytes for array in tensors_of(source).values())
    assert total > 12 * largest
    opened = []
    load_pretrained(source)  # what is only imported or traced once
    assert traced_peak(lambda: opened.append(load_pretrained(source))) < largest

    def read() -> None:
        for entry in parameter_tensors(opened[0].config):
            np.asarray(at(opened[0].params, entry.path))

    assert largest <= traced_peak(read) < 2 * largest
    written = traced_peak(lambda: save_pretrained(model, tmp_path / "saved", dtype="bfloat16"))
    assert written < 2 * largest


def test_leaves_have_shapes_without_being_read(tmp_path):
    pretrained = load_pretrained(save(make_torch("mixtral"), tmp_path / "m", torch.bfloat16))
    stack = pretrained.params["layers"][0]["mlp"]["experts"]["gate_proj"]["weight"]
    assert stack.shape == (4, 48, 32) and stack.dtype == jnp.bfloat16
    assert np.asarray(stack).dtype == jnp.bfloat16
    assert np.asarray(stack, np.float32).dtype == np.float32
    found = {path: value.shape for path, value in leaves(nnx.eval_shape(pretrained.model))}
    assert found == {
        e.path: at(pretrained.params, e.path).shape for e in parameter_tensors(pretrained.config)
    }
    assert ("layers", 0, "self_attn", "q_proj", "weight") in found


def rewrite(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors_numpy.load_file(path)
    change(tensors)
    safetensors_numpy.save_file(tensors, path)


def test_tensors_that_do_not_fit_are_named(tmp_path):
    source = save(make_torch("llama"), tmp_path / "m")

    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.0.rotary_emb.inv_freq"] = np.zeros(4, np.float32)  # allowed
        tensors["model.embed_tokens.weight"] = np.zeros((3, 5), np.float32)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int8)
        tensors |= {f"extra.{i}": np.zeros(1, np.float32) for i in range(13)}

    rewrite(source, change)
    with pytest.raises(ValueError) as error:
        load_pretrained(source)
    message = str(error.value)
    assert tells(message, "missing: model.norm.weight", "lm_head.weight", "I8")
    assert tells(message, "embed_tokens.weight", (3, 5), (96, 32))
    assert "extra.0" in message and tells(message, 3, "more")
    assert "inv_freq" not in message


def test_a_tied_head_may_be_in_the_file(tmp_path):
    source = save(make_torch("gemma2"), tmp_path / "m")
    rewrite(source, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    assert "lm_head" not in load_pretrained(source).params
    # Another one, though the configuration says that they are tied: Transformers reads it, too.
    rewrite(source, lambda t: t.update({"lm_head.weight": -t["model.embed_tokens.weight"]}))
    model = filled(load_pretrained(source))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    tokens = random_tokens(1)
    with torch.no_grad():
        logits = theirs(torch.tensor(tokens).long()).logits.numpy()
    np.testing.assert_allclose(model(tokens), logits, atol=1e-4)


def test_towers_are_kept_and_come_from_the_checkpoint(tmp_path):
    source = save(make_torch("gemma3-multimodal"), tmp_path / "m", torch.bfloat16)
    (source / "preprocessor_config.json").write_text("{}")
    pretrained = load_pretrained(source)
    assert set(pretrained.params) == {"embed_tokens", "layers", "norm"}
    model = filled(pretrained)
    source.rename(tmp_path / "moved")
    saved = {"source": tmp_path / "moved", "dtype": "float32", "max_shard_bytes": 40_000}
    folder = save_pretrained(model, tmp_path / "saved", **saved)
    assert (folder / "preprocessor_config.json").exists()
    found, read = tensors_of(folder), tensors_of(tmp_path / "moved")
    assert found.keys() == read.keys()
    for name, array in found.items():
        trained = name.startswith("language_model.")
        assert array.dtype == (np.float32 if trained else jnp.bfloat16)
        assert trained or array.tobytes() == read[name].tobytes()
    fresh = DecoderConfig.from_hf(json.loads((folder / "config.json").read_text()))
    with refuses(ValueError, "gemma3", "parts"):
        save_pretrained(Decoder(fresh, rngs=nnx.Rngs(0)), tmp_path / "fresh")


def test_buffers_and_further_layers_are_written_as_they_were_read(tmp_path):
    source = save(make_torch("glm4-moe"), tmp_path / "m", torch.bfloat16)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    further = {"model.layers.2.enorm.weight": np.arange(5, dtype=np.float32)}
    rewrite(source, lambda t: t.update(further, **{bias: t[bias].astype(np.float32) + 2**-12}))
    model = filled(load_pretrained(source), jnp.bfloat16)
    check_same_tensors(save_pretrained(model, tmp_path / "saved"), source)


def test_buffers_are_given_beside_parameters(tmp_path):
    """A run would otherwise warn that it keeps those of the model."""
    pretrained = load_pretrained(save(make_torch("glm4-moe"), tmp_path))
    found = []
    for path, value in leaves(nnx.eval_shape(pretrained.model)):
        assert at(pretrained.params, path).shape == value.shape
        found.append(path[-1])
    assert "e_score_correction_bias" in found


def test_what_no_layer_reads_is_written_as_it_was_read(tmp_path):
    source = save(make_torch("gemma4-shared"), tmp_path / "m", torch.bfloat16)
    # The fourth layer attends to keys and values of another; files may have its own, too.
    unread = {
        f"model.layers.3.self_attn.{name}": np.arange(5, dtype=np.float32)
        for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight")
    }
    rewrite(source, lambda t: t.update(unread))
    model = filled(load_pretrained(source), jnp.bfloat16)
    check_same_tensors(save_pretrained(model, tmp_path / "saved"), source)
    rewrite(source, lambda t: t.update({"model.layers.1.self_attn.k2": unread.popitem()[1]}))
    with refuses(ValueError, "model.layers.1.self_attn.k2"):
        load_pretrained(source)


def test_experts_of_a_layer_in_one_tensor_and_some_tensors_in_fp32(tmp_path):
    reference = make_torch("qwen3.5-moe-multimodal")
    source = save(reference, tmp_path / "m", torch.bfloat16)
    tensors = dict(reference.state_dict())
    further = torch.arange(6.0).reshape(1, 2, 3)
    tensors |= {"mtp.layers.0.mlp.experts.gate_up_proj": further}
    for name, tensor in tensors.items():
        if name.endswith(("A_log", "1.mlp.experts.down_proj")):
            tensors[name] = tensor.float() + 2**-12
    safetensors_torch.save_file(tensors, source / "model.safetensors")
    pretrained = load_pretrained(source)
    folder = save_pretrained(filled(pretrained), tmp_path / "saved")
    check_same_tensors(folder, source)
    read, found = type(reference).from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not found["missing_keys"] and not found["unexpected_keys"]
    tokens = random_tokens(1)
    with torch.no_grad():
        logits = read.eval()(torch.tensor(tokens).long()).logits.numpy()
    np.testing.assert_allclose(filled(pretrained)(tokens), logits, atol=1e-4)
    half = tensors_of(save_pretrained(filled(pretrained), tmp_path / "half", dtype="bfloat16"))
    assert {a.dtype.name for n, a in half.items() if "mtp" not in n} == {"bfloat16"}


def test_damaged_files_are_named(tmp_path):
    source = save(make_torch("llama"), tmp_path / "m", max_shard_size="20KB")
    shard = sorted(source.glob("*.safetensors"))[0]
    whole = shard.read_bytes()
    for damaged in (whole[:-100], whole[:5], b"\xff" * 64, b""):
        shard.write_bytes(damaged)
        with refuses(ValueError, shard.name, "damaged"):
            load_pretrained(source)
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=shard.name):
        load_pretrained(source)
    shard.write_bytes(whole)
    index = source / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": weight_map | {"phantom": shard.name}}))
    with pytest.raises(ValueError, match="phantom"):
        load_pretrained(source)
    index.write_text("{")
    with refuses(ValueError, "model.safetensors.index.json", "JSON"):
        load_pretrained(source)
    index.unlink()
    with refuses(FileNotFoundError, "model.safetensors"):
        load_pretrained(source)
    (source / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_pretrained(source)


def test_saving_refuses_what_it_would_spoil(tmp_path):
    source = save(make_torch("llama"), tmp_path / "m")
    model = filled(load_pretrained(source))
    with refuses(FileExistsError, source):
        save_pretrained(model, source)
    with refuses(ValueError, "`dtype`", None, "int8"):
        save_pretrained(model, tmp_path / "new", dtype="int8")
    config = load_pretrained(source).config
    bare = DecoderConfig(
        **{f: getattr(config, f) for f in config.__dataclass_fields__ if f != "original"}
    )
    with refuses(ValueError, "Hugging Face"):
        save_pretrained(Decoder(bare, rngs=nnx.Rngs(0)), tmp_path / "new")
    source.rename(tmp_path / "moved")
    with refuses(FileNotFoundError, "`source`"):
        save_pretrained(model, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]
    save_pretrained(model, tmp_path / "new", source=tmp_path / "moved")
    assert (tmp_path / "new" / "generation_config.json").exists()


def test_a_fresh_decoder_of_a_known_family_is_saved(tmp_path):
    values = make_torch("llama").config.to_dict()
    model = Decoder(DecoderConfig.from_hf(values), rngs=nnx.Rngs(0))
    (tmp_path / "empty").mkdir()
    folder = save_pretrained(model, tmp_path / "empty")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = random_tokens(1)
    with torch.no_grad():
        logits = reference(torch.tensor(tokens).long()).logits.numpy()
    np.testing.assert_allclose(model(tokens), logits, atol=1e-4)


def test_stacked_experts_are_split_but_for_tensors_that_stay():
    def tensor(name: str, *shape: int) -> Tensor:
        more: Any = {"path": Path("f"), "file": None, "dtype": "F32", "start": 0}
        return Tensor(name=name, shape=shape, whole=shape, **more)

    names = {f"{part}.experts.gate_up_proj": (2, 6, 4) for part in ("mtp", "layers.0.mlp")}
    names |= {"layers.0.mlp.experts.down_proj": (2, 4, 3), "v.experts.down_proj": (4, 3)}
    tensors = {name: tensor(name, *shape) for name, shape in names.items()}
    found, are_stacked = split_experts(tensors, lambda name: name.startswith("mtp"))
    assert are_stacked and not split_experts({"a": tensor("a", 2, 6, 4)}, bool)[1]
    left = {name: found.pop(name) for name in ("mtp.experts.gate_up_proj", "v.experts.down_proj")}
    assert all(left[name] is tensors[name] for name in left)
    each = {"gate_proj": slice(0, 3), "up_proj": slice(3, 6), "down_proj": slice(0, 4)}
    assert {name: (x.part, x.shape) for name, x in found.items()} == {
        f"layers.0.mlp.experts.{expert}.{part}.weight": (
            (expert, rows),
            (rows.stop - rows.start, 3 if part == "down_proj" else 4),
        )
        for expert in range(2)
        for part, rows in each.items()
    }


@pytest.mark.parametrize(
    ("sizes", "files"),
    [
        ((4, 4, 4, 4, 4), (2, 2, 1)),
        ((9, 1, 1, 7, 1), (1, 2, 2)),
        ((1, 9, 1), (1, 1, 1)),
        ((4, 4), (2,)),
    ],
)
def test_a_file_holds_tensors_up_to_its_bytes_or_a_single_one(sizes, files, tmp_path):
    arrays = {f"t{i}": np.full(n, i, np.float32) for i, n in enumerate(sizes)}
    tensors = [NamedTensor(name=name, array=array, code="F32") for name, array in arrays.items()]
    write_tensors(tmp_path, tensors, 4 * 8)
    found = [safetensors_numpy.load_file(path) for path in sorted(tmp_path.glob("*.safetensors"))]
    assert tuple(map(len, found)) == files
    for name, array in arrays.items():
        (own,) = [file[name] for file in found if name in file]
        np.testing.assert_array_equal(own, array)
    if len(files) > 1:
        about = json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"]
        assert about == {"total_parameters": sum(sizes), "total_size": 4 * sum(sizes)}


@pytest.mark.parametrize(("experts", "least"), [((), 15), ((2,), 27), ((0, 1, 2), 51)])
@pytest.mark.parametrize("are_stacked", [False, True])
def test_layers_and_experts_have_tensors_at_least(experts, least, are_stacked, monkeypatch):
    family = SimpleNamespace(stacked=are_stacked)
    monkeypatch.setattr(of_pretrained, "family_of", lambda config: family)
    own = SimpleNamespace(num=4, layers=experts) if experts else None
    config: Any = SimpleNamespace(num_layers=3, experts=own)
    least = 15 if are_stacked else least
    tensors: Any = dict.fromkeys(range(least))
    of_pretrained._check_count("folder", config, tensors)
    tensors.pop(0)
    with refuses(ValueError, "folder", least, least - 1):
        of_pretrained._check_count("folder", config, tensors)
