"""Hundreds of spoiled checkpoints: each is refused by name, or read as Transformers reads it."""

import json
import random
import struct
from typing import Any

import pytest
import transformers

from megatrain_jax._src.lm.models.config import FAMILIES as FAMILIES_BY_TYPE
from megatrain_jax.models import DecoderConfig, load_pretrained
from messages import refuses

pytest.importorskip("torch", reason='compared with PyTorch: pip install -e ".[torch]"')

from families import FAMILIES, make_torch, save

NESTED = "[" * 10_000 + "]" * 10_000
DEEP = "a string that stands for lists in lists"
MUTATIONS = 30
_VALUES: list[Any] = [
    None,
    "64",
    "",
    "x" * 10_000,
    True,
    False,
    -1,
    0,
    1,
    0.5,
    10**9,
    10**400,
    float("nan"),
    float("inf"),
    [],
    [[]],
    ["x"],
    {},
    {"a": 1},
    DEEP,
]
# What a configuration of the family may say, too.
_MORE = {
    "head_dim": 8,
    "rope_theta": 500.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "sliding_window": 3,
    "layer_types": ["full_attention"] * 2,
    "partial_rotary_factor": 0.5,
    "num_local_experts": 4,
    "decoder_sparse_step": 2,
    "query_pre_attn_scalar": 2,
}


def spoiled(config: dict[str, Any], rng: random.Random) -> tuple[str, str]:
    """Changes one field, or one of an object in it; returns its name and the file's new text."""
    whole = json.loads(json.dumps(config))
    config = whole.get("text_config", whole)
    inner = [value for value in config.values() if isinstance(value, dict)]
    at = rng.choice(inner) if inner and rng.random() < 0.3 else config
    name = rng.choice([*at, *_MORE] if at is config else [*at])
    match rng.randrange(6):
        case 0:
            at.pop(name, None)
        case 1 if isinstance(at.get(name), int | float):
            at[name] = rng.choice([str(at[name]), at[name] + type(at[name])(1), [at[name]]])
        case 2 if name in _MORE:
            at[name] = _MORE[name]
        case _:
            was, value = at.get(name), rng.choice(_VALUES)
            is_float = isinstance(was, float) and type(value) is int and value < 10**300
            at[name] = float(value) if is_float else value
    return name, json.dumps(whole).replace(f'"{DEEP}"', NESTED)


# What Transformers checks though it changes neither parameters nor logits.
_WITHOUT_EFFECT = {"use_cache", "output_router_logits", "initializer_range", "hidden_activation"}
_WITHOUT_EFFECT |= {"bos_token_id", "eos_token_id", "pad_token_id", "eod_token_id", "dtype"}
_WITHOUT_EFFECT |= {"attention_dropout"}  # null
_WITHOUT_EFFECT |= {"original_max_position_embeddings"}  # null, which is read as if missing
_WITHOUT_EFFECT |= {"layer_types"}  # 0, in families that have none


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_a_spoiled_configuration_is_refused_or_read_as_transformers_reads_it(name, tmp_path):
    folder = save(make_torch(name), tmp_path / "model")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rng = random.Random(name)
    for _ in range(MUTATIONS):
        field, text = spoiled(config, rng)
        path.write_text(text)
        try:
            ours = load_pretrained(folder).config
        except (TypeError, ValueError) as error:
            assert str(folder) in str(error) and len(str(error)) < 4000, text
            continue
        try:
            theirs = transformers.AutoConfig.from_pretrained(folder).to_dict()
        except Exception:
            unread = FAMILIES_BY_TYPE[config["model_type"]].unread.split()
            assert field in _WITHOUT_EFFECT.union(unread), text
            continue
        # With all that it leaves out filled in by Transformers.
        assert ours == DecoderConfig.from_hf(theirs), text


def test_a_spoiled_safetensors_file_is_refused_by_name(tmp_path):
    folder = save(make_torch("llama"), tmp_path / "model")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header, numbers = json.loads(content[8 : 8 + length]), content[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    rng = random.Random(0)

    def write(text: str, length: int | None = None) -> None:
        raw = text.encode()
        path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + numbers)

    for number in range(60):
        spoiled = json.loads(json.dumps(header))
        entry, other = (spoiled[name] for name in rng.sample(names, 2))
        text = None
        match number % 10:
            case 0:
                entry["data_offsets"] = other["data_offsets"]
            case 1:
                entry["data_offsets"][rng.randrange(2)] = rng.choice([-1, 2**63, 2**64, 1.5, "0"])
            case 2:
                entry["shape"] = rng.choice([[2**63, 2], [2**32, 2**32], [-1], ["8"], 5, None])
            case 3:
                entry["dtype"] = rng.choice(["F31", "", 5, None, "F64", "I8"])
            case 4:
                del entry[rng.choice(["dtype", "shape", "data_offsets"])]
            case 5:
                text = NESTED
            case 6:
                text = json.dumps(spoiled)[: rng.randrange(length)]
            case 7:
                write(json.dumps(spoiled), rng.choice([0, length // 2, 2**40, 2**63, 2**64 - 1]))
            case 8:
                path.write_bytes(content[: rng.randrange(len(content))])
            case 9:
                path.write_bytes(rng.randbytes(rng.randrange(200)))
        if number % 10 < 7:
            write(json.dumps(spoiled) if text is None else text)
        with pytest.raises(ValueError, match="model.safetensors .*damaged|tensors .*/model"):
            load_pretrained(folder)


_INDEXES: list[Any] = [
    "",
    "{",
    "[]",
    "5",
    "null",
    NESTED,
    '{"weight_map": ' + NESTED + "}",
    "{}",
    '{"weight_map": null}',
    '{"weight_map": []}',
    '{"weight_map": {}}',
    '{"weight_map": {"a": 5}}',
    '{"weight_map": {"a": null}}',
    '{"weight_map": {"a": ["model.safetensors"]}}',
    '{"weight_map": {"a": "missing.safetensors"}}',
    '{"weight_map": {"a": "../model.safetensors"}}',
    '{"weight_map": {"a": "%s"}}' % ("x" * 5000),
    '{"weight_map": {"a": "\\ud800"}}',
]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_of_another_form_is_refused_by_name(name, tmp_path):
    folder = save(make_torch("llama"), tmp_path / "model", max_shard_size="20KB")
    for text in _INDEXES:
        (folder / name).write_text(text)
        with pytest.raises((ValueError, OSError)) as error:
            load_pretrained(folder)
        assert str(folder) in str(error.value), text[:80]
    with (folder / name).open("wb") as file:
        file.truncate(2**40)  # of zeros, which take no room
    with refuses(ValueError, "268,435,456"):
        load_pretrained(folder)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_sizes_are_compared_with_the_files_before_anything_is_built(name, tmp_path, monkeypatch):
    folder = save(make_torch(name), tmp_path / "model")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    experts = "num_local_experts" if "num_local_experts" in config else "num_experts"
    monkeypatch.setattr("megatrain_jax._src.lm.models.pretrained.parameter_tensors", None)
    for changes in ({"num_hidden_layers": 1000}, {experts: 16_000}, {experts: 100}):
        path.write_text(json.dumps(config | changes))
        with refuses(ValueError, "layers", "hold"):
            load_pretrained(folder)
    for changes in ({"num_hidden_layers": 10**9}, {experts: 10**9}, {"vocab_size": 10**9}):
        path.write_text(json.dumps(config | changes))
        with refuses(ValueError, f"`{[*changes][0]}`", 1):
            load_pretrained(folder)
