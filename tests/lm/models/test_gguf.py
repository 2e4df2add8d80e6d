"""GGUF files: the numbers, configurations and logits of Transformers, and what is refused."""

import json
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from megatrain_jax import models
from megatrain_jax._src.lm.cli.catalogue import config_values
from megatrain_jax._src.lm.cli.model_and_batch import checkpoint_folder
from megatrain_jax._src.lm.models import gguf_files
from megatrain_jax._src.lm.models.pretrained import filled, leaves, parameter_tensors
from messages import refuses

gguf: Any = pytest.importorskip("gguf", reason='pip install "megatrain-jax[gguf]"')

from gguf_writer import METADATA, SIZES, tensors_of, write_gguf  # noqa: E402


def of_head(size: int) -> dict[str, int]:
    return {f"attention.{part}_length": size for part in ("key", "value")}


_WINDOW = {"attention.sliding_window": 6}
# The class of Transformers, fields of its configuration, and those of the metadata. What
# Transformers doesn't read in a file is its default.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": (
        "Llama",
        {"rope_theta": 5e4, "tie_word_embeddings": False},
        {"rope.freq_base": 5e4, "rope.dimension_count": 16},
    ),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, {}),
    "qwen3": ("Qwen3", {"head_dim": 128, "tie_word_embeddings": False}, of_head(128)),
    "qwen3moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
        },
        {
            **of_head(16),
            "expert_count": 3,
            "expert_used_count": 2,
            "expert_feed_forward_length": 768,
        },
    ),
    "gemma": ("Gemma", {"head_dim": 16}, {**of_head(16), "vocab_size": None}),
    "gemma2": (
        "Gemma2",
        {"head_dim": 256, "sliding_window": 6},
        {
            **of_head(256),
            **_WINDOW,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {"head_dim": 256, "sliding_window": 6},
        {**of_head(256), **_WINDOW, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4},
    ),
}
KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0"]


def config_of(arch: str) -> models.DecoderConfig:
    name, own, _ = FAMILIES[arch]
    model_type = {"Qwen3Moe": "qwen3_moe", "Gemma3Text": "gemma3_text"}.get(name, name.lower())
    return models.DecoderConfig.from_hf(SIZES | own | {"model_type": model_type})


def write(
    folder: Path, arch: str, kind: str = "F32", own: Any = None, more: Any = None
) -> tuple[Path, dict[str, np.ndarray]]:
    """Writes a file of random tensors, and returns these, too."""
    tensors = tensors_of(config_of(arch))
    metadata = METADATA | FAMILIES[arch][2] | (own or {})
    metadata = {name: value for name, value in metadata.items() if value is not None}
    return write_gguf(folder / "own.gguf", arch, tensors | (more or {}), metadata, kind), tensors


def read_back(pretrained: models.Pretrained) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint by the names of Hugging Face."""
    arrays = dict(leaves(filled("p", pretrained.model, pretrained.params)))
    found = {}
    for entry in parameter_tensors(pretrained.config):
        array = np.asarray(arrays[entry.path])
        found |= dict(zip(entry.names, array if entry.stacked else [array], strict=True))
    return found


@pytest.mark.parametrize(
    ("arch", "kind"),
    [
        ("llama", "Q4_0"),
        ("qwen2", "F32"),
        ("qwen3moe", "Q8_0"),
        ("gemma3", "BF16"),
        ("qwen3", "F16"),
        ("gemma", "Q4_0"),
    ],
)
def test_tensors_are_those_that_were_written(arch: str, kind: str, tmp_path: Path):
    path, tensors = write(tmp_path, arch, kind)
    pretrained = models.load_pretrained(path)
    found = read_back(pretrained)
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        own = gguf.GGMLQuantizationType[kind if array.ndim > 1 else "F32"]
        expected = gguf.dequantize(gguf.quantize(array, own), own)
        if pretrained.config.norm_offset and name.endswith("norm.weight"):
            expected = (array + np.float32(1)) - np.float32(1)
        np.testing.assert_array_equal(found[name].astype(np.float32), expected)
    ours, theirs = pretrained.config, config_of(arch)
    for field in ("rope", "norm_eps", "windows", "experts", "end_tokens", "attention_scale"):
        assert getattr(ours, field) == getattr(theirs, field)
    matrix = {"F16": "float16", "BF16": "bfloat16"}.get(kind, "float32")
    assert (ours.saved_dtype, found["model.norm.weight"].dtype) == (matrix, np.float32)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", [arch for arch in FAMILIES if arch != "gemma"])  # not read there
def test_numbers_and_logits_are_those_of_transformers(arch: str, kind: str, tmp_path: Path):
    torch = pytest.importorskip("torch", reason='pip install -e ".[torch]"')
    from transformers import AutoModelForCausalLM

    path, _ = write(tmp_path, arch, kind)
    theirs: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    ).eval()
    pretrained = models.load_pretrained(path)
    there = theirs.state_dict()
    for name, array in read_back(pretrained).items():
        at, _, last = name.partition(".experts.")
        if not last:
            expected = there[name]
        else:
            number, part, _ = last.split(".")
            gate_up = there[f"{at}.experts.gate_up_proj"][int(number)].chunk(2)
            down = there[f"{at}.experts.down_proj"][int(number)]
            expected = {"gate_proj": gate_up[0], "up_proj": gate_up[1], "down_proj": down}[part]
        np.testing.assert_array_equal(array.astype(np.float32), expected.numpy())
    model = filled("p", pretrained.model, pretrained.params)
    for path_, value in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        at_: Any = model
        for key in path_[:-1]:
            at_ = at_[key] if isinstance(key, int) else getattr(at_, str(key))
        setattr(at_, str(path_[-1]), nnx.Param(jnp.asarray(np.asarray(value), jnp.float32)))
    tokens = np.random.default_rng(1).integers(0, 64, (2, 12))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(model(jnp.asarray(tokens)), expected, atol=1e-5)


def test_a_weight_is_decoded_when_it_is_read(tmp_path: Path, monkeypatch):
    path, tensors = write(tmp_path, "qwen3moe", "Q8_0")
    decoded: list[int] = []
    dequantize = gguf.dequantize

    def counting(data: np.ndarray, kind: Any) -> np.ndarray:
        found = dequantize(data, kind)
        decoded.append(found.size)
        return found

    monkeypatch.setattr(gguf, "dequantize", counting)
    pretrained = models.load_pretrained(path)
    assert max(decoded) <= 768  # a row of each kind
    decoded.clear()
    head = np.asarray(pretrained.params["lm_head"]["weight"])
    assert decoded == [head.size] == [tensors["lm_head.weight"].size]


def test_a_file_becomes_an_ordinary_folder(tmp_path: Path):
    path, tensors = write(tmp_path, "llama", "Q8_0")
    # In a folder without a config.json, it need not be named.
    pretrained = models.load_pretrained(tmp_path)
    assert pretrained.folder == tmp_path
    folder = models.save_pretrained(pretrained, tmp_path / "out", dtype="bfloat16")
    saved = models.load_pretrained(folder)
    for name, array in read_back(models.load_pretrained(path)).items():
        np.testing.assert_array_equal(read_back(saved)[name], array.astype(jnp.bfloat16))
    assert json.loads((folder / "config.json").read_text())["rms_norm_eps"] == 1e-5
    # Ollama's files have no suffix; and adapters name the file, not its folder.
    blob = path.rename(tmp_path / "sha256-0a")
    adapted = models.lora(models.load_pretrained(blob).model, targets="q_proj", rank=2)
    model = nnx.eval_shape(adapted.model)
    nnx.update(model, jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), nnx.state(model)))
    adapter = models.save_lora(model, tmp_path / "adapter")
    named = json.loads((adapter / "adapter_config.json").read_text())
    assert named["base_model_name_or_path"] == str(blob)
    blob.rename(path)
    (tmp_path / "second.GGUF").write_bytes(b"")
    with refuses(ValueError, tmp_path, "own.gguf", "second.GGUF"):
        models.load_pretrained(tmp_path)


def test_the_scaling_of_llama_3_is_found_in_its_factors(tmp_path: Path):
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    wavelengths = 2 * np.pi * 5e4 ** (np.arange(0, 16, 2) / 16)
    # As in llama.cpp's convert_hf_to_gguf.py.
    smooth = (8192 / wavelengths - 1.0) / (4.0 - 1.0)
    between = 1 / ((1 - smooth) / 8 + smooth)
    factors = np.where(
        wavelengths < 8192 / 4, 1, np.where(wavelengths > 8192 / 1, 8, between)
    ).astype(np.float32)
    assert len({*factors.tolist()}) > 2
    path, _ = write(tmp_path, "llama", more={"rope_freqs.weight": factors})
    expected = models.DecoderConfig.from_hf(
        SIZES | {"model_type": "llama", "rope_theta": 5e4, "rope_scaling": rope}
    )
    assert models.load_pretrained(path).config.rope == expected.rope
    path, _ = write(tmp_path, "llama", more={"rope_freqs.weight": factors[::-1]})
    with refuses(ValueError, path, "rope_freqs.weight"):
        models.load_pretrained(path)


@pytest.mark.parametrize("kind", ["none", "linear", "yarn"])
def test_scalings_of_rotary_embeddings_are_read(kind: str, tmp_path: Path):
    own: dict[str, Any] = {"rope.scaling.type": kind, "rope.scaling.finetuned": 1}
    expected: dict[str, Any] = {"rope_type": kind, "factor": 4.0}
    if kind != "none":
        own["rope.scaling.factor"] = 4.0
    if kind == "yarn":
        own["rope.scaling.original_context_length"] = 32
        expected["original_max_position_embeddings"] = 32
    path, _ = write(tmp_path, "qwen2", own=own)
    scaling = {} if kind == "none" else {"rope_scaling": expected}
    config = models.DecoderConfig.from_hf(SIZES | scaling | {"model_type": "qwen2"})
    assert models.load_pretrained(path).config.rope == config.rope


def test_arrays_in_the_metadata_are_passed_over(tmp_path: Path):
    arrays = {"tokenizer.ggml.tokens": ["a", "bcd", ""], "tokenizer.ggml.scores": [1.0, 2.0]}
    path, tensors = write(tmp_path, "qwen2", own=arrays)
    pretrained = models.load_pretrained(path)
    assert pretrained.config.end_tokens == (2,)
    norm = np.asarray(pretrained.params["norm"]["weight"])
    np.testing.assert_array_equal(norm, tensors["model.norm.weight"])
    path, _ = write(tmp_path, "qwen2", own={"feed_forward_length": [96, 96]})
    with refuses(ValueError, path, "qwen2.feed_forward_length"):
        models.load_pretrained(path)


@pytest.mark.parametrize(("arch", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_models_scale_by_another_width(arch: str, layers: int):
    for number, expected in ((layers, 16), (layers - 1, 256)):
        fields = METADATA | FAMILIES[arch][2] | {"block_count": number}
        fields = {
            name if name[:9] == "tokenizer" else f"{arch}.{name}": x for name, x in fields.items()
        }
        values = gguf_files._values({"general.architecture": arch} | fields, {}, frozenset())
        assert values["query_pre_attn_scalar"] == expected


@pytest.mark.parametrize(
    ("own", "named"),
    [
        ({"attention.clamp_kqv": 3.0}, "llama.attention.clamp_kqv"),
        ({"attention.key_length": 16, "rope.dimension_count": 8}, "llama.rope.dimension_count"),
        ({"attention.value_length": 8}, "llama.attention.value_length"),
        ({"rope.scaling.type": "longrope"}, "llama.rope.scaling.type"),
        ({"expert_count": 8}, "llama.expert_count"),
        ({"split.count": 2}, "llama-gguf-split"),
        ({"embedding_length": None}, "llama.embedding_length"),
        ({"attention.head_count": None}, "llama.attention.head_count"),
        ({"general.type": "adapter"}, "general.type"),
        ({"block_count": 3}, "model.layers.2.mlp.down_proj.weight"),
        ({"block_count": 300}, "300"),
        ({"feed_forward_length": 95}, "model.layers.0.mlp.down_proj.weight"),
    ],
)
def test_what_is_not_read_is_refused_by_name(own: Any, named: str, tmp_path: Path):
    tensors = tensors_of(config_of("llama"))
    metadata = METADATA | FAMILIES["llama"][2] | own
    metadata = {name: value for name, value in metadata.items() if value is not None}
    path = write_gguf(tmp_path / "own.gguf", "llama", tensors, metadata)
    with refuses(ValueError, path, named):
        models.load_pretrained(path)
    if named == "llama.attention.clamp_kqv":
        models.load_pretrained(path, ignore=[named])


def test_files_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch):
    path, _ = write(tmp_path, "llama")
    content = path.read_bytes()
    endless = tmp_path / "endless.gguf"
    # An array of more numbers than there are.
    endless.write_bytes(
        struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"a", 9, 4, 2**60) + bytes(64)
    )
    cut = tmp_path / "cut.gguf"
    for size in (*range(4, 2000, 23), len(content) - 4):
        cut.write_bytes(content[:size])
        with refuses(ValueError, cut, "cut off"):
            models.load_pretrained(cut)
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "json.gguf").write_text("{}")
    for file in ("empty", "json", "endless"):
        with refuses(ValueError, tmp_path / f"{file}.gguf"):
            models.load_pretrained(tmp_path / f"{file}.gguf")
    with refuses(FileNotFoundError, tmp_path / "none.gguf"):
        models.load_pretrained(tmp_path / "none.gguf")
    for read in (lambda x: models.merge_adapter(x, tmp_path / "out"), config_values):
        with refuses(FileNotFoundError, path, "save_pretrained"):
            read(str(path))
    with refuses(FileNotFoundError, path, "save_pretrained"):
        checkpoint_folder(str(path))
    writer = gguf.GGUFWriter(tmp_path / "bert.gguf", "bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with refuses(ValueError, tmp_path / "bert.gguf", "general.architecture", "'bert'", "qwen3moe"):
        models.load_pretrained(tmp_path / "bert.gguf")

    with monkeypatch.context() as patch:
        patch.setattr(gguf_files, "_MOST_VALUES", 100)
        with refuses(ValueError, path, "values"):
            models.load_pretrained(path)

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(gguf_files.importlib, "import_module", missing)
    with refuses(ModuleNotFoundError, "megatrain-jax[gguf]"):
        models.load_pretrained(path)
