"""The commands `megatrain-jax chat` and `merge`, against Transformers and PEFT themselves."""

import dataclasses
import io
import json
import os
import shutil
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from safetensors.numpy import load_file

import megatrain_jax as mt
from megatrain_jax import models
from megatrain_jax._src.lm.cli.chat import JaxChatModel, _converse, open_chat_model, sampling_of
from megatrain_jax._src.lm.cli.main import main
from megatrain_jax._src.lm.cli.plan_settings import ChatSettings
from megatrain_jax._src.lm.common.adapter_layers import different_layers
from messages import refuses, tells

torch = pytest.importorskip("torch", reason='answers need PyTorch: pip install -e ".[torch]"')
peft = pytest.importorskip("peft", reason='compared with PEFT: pip install -e ".[torch]"')

from families import make_torch, save  # noqa: E402
from tiny_chats import make_checkpoint  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
OPENED = models.Generator
QUESTION, TOKENS = "count from 3 to 7 please", 6
GREEDY = ["--temperature", "0", "--max-tokens", str(TOKENS)]


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> Path:
    """A run's folder with a model, and beside it adapters for the model."""
    folder = tmp_path_factory.mktemp("chat")
    make_checkpoint(folder / "run" / "model")
    torch.manual_seed(0)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False)
    config.target_modules = {"q_proj", "down_proj"}
    peft.get_peft_model(make_torch("qwen3"), config).save_pretrained(folder / "adapter")
    return folder


def load(folder: Path) -> tuple[Any, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def answer(model: Any, tokenizer: Any, *contents: str, system: str | None = None) -> str:
    """The most likely answer to contents of user and assistant in turn."""
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    found = model.generate(
        **inputs, max_new_tokens=TOKENS, do_sample=False, eos_token_id=tokenizer.eos_token_id
    )
    return tokenizer.decode(found[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_answers_are_those_of_transformers(given, capsys):
    model, tokenizer = load(given / "run" / "model")
    words = ["--prompt", QUESTION, *GREEDY]
    assert main(["chat", str(given / "run" / "model"), *words]) == 0
    plain = answer(model, tokenizer, QUESTION)
    assert capsys.readouterr().out.split() == plain.split() and plain.strip()
    assert main(["chat", str(given / "run"), "--system", "please", *words]) == 0
    expected = answer(model, tokenizer, QUESTION, system="please")
    assert capsys.readouterr().out.split() == expected.split() != plain.split()
    base = ["--base", str(given / "run" / "model")]
    assert main(["chat", str(given / "adapter"), *base, *words]) == 0
    expected = answer(peft.PeftModel.from_pretrained(model, given / "adapter"), tokenizer, QUESTION)
    assert capsys.readouterr().out.split() == expected.split() != plain.split()


def test_warnings_of_other_libraries_are_not_shown(given, monkeypatch, recwarn, capsys):
    def warning(kind: Any, name: str) -> None:
        before = getattr(kind, name)

        def warns(*args: Any, **options: Any) -> Any:
            warnings.warn(f"{name} of another library", stacklevel=2)
            return before(*args, **options)

        monkeypatch.setattr(kind, name, warns)

    warning(peft.PeftModel, "from_pretrained")
    warning(peft.PeftModelForCausalLM, "generate")
    warning(transformers.AutoModelForCausalLM, "from_pretrained")
    base = "--base", str(given / "run" / "model")
    assert main(["chat", str(given / "adapter"), *base, "--prompt", QUESTION, *GREEDY]) == 0
    assert not [one for one in recwarn if "another library" in str(one.message)]
    assert "another library" not in capsys.readouterr().err


def test_adapters_with_new_tokens_answer_as_in_peft(given, tmp_path, capsys):
    model, tokenizer = load(given / "run" / "model")
    tokenizer.add_tokens(["<think>"])
    model.resize_token_embeddings(len(tokenizer))
    torch.manual_seed(0)
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    config.modules_to_save = ["embed_tokens", "lm_head"]
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        head = adapted.get_output_embeddings().weight
        head.add_(torch.randn_like(head))
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    tokenizer.save_pretrained(tmp_path / "adapter")
    base, question = str(given / "run" / "model"), f"<think> {QUESTION}"
    words = ["chat", str(tmp_path / "adapter"), "--base", base, "--prompt", question, *GREEDY]
    assert main(words) == 0
    expected = answer(adapted, tokenizer, question)
    assert capsys.readouterr().out.split() == expected.split() != []
    save(make_torch("qwen3", hidden_size=16), tmp_path / "other")
    words[3] = str(tmp_path / "other")
    assert main(words) == 2
    assert tells(capsys.readouterr().err, "PEFT", words[1])


HOSTILE = [
    "[" * 100_000 + "]" * 100_000,
    "[]",
    "{",
    '{"r": ' + "9" * 5000 + "}",
    '{"a": "\\ud800"}',
]


@pytest.mark.parametrize("text", HOSTILE, ids=["deep", "list", "cut", "digits", "half"])
@pytest.mark.parametrize("name", ["adapter_config.json", "config.json", "generation_config.json"])
def test_hostile_files_are_named(name, text, given, tmp_path, capsys):
    kind = "adapter" if name.startswith("adapter") else "run/model"
    folder = Path(shutil.copytree(given / kind, tmp_path / "folder"))
    (folder / name).write_text(text)
    options = ["--library", "transformers", "--base", str(given / "run" / "model"), *GREEDY]
    options = options if kind == "adapter" else [*options[:2], *GREEDY]
    assert main(["chat", str(folder), "--prompt", QUESTION, *options]) == 2
    assert str(folder / name) in capsys.readouterr().err
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises((ValueError, FileNotFoundError), match=f"{folder}"):
        open_chat_model(ChatSettings(model=str(folder), library="transformers"))


@pytest.mark.parametrize("targets", ["(", 5, {"a": 5}])
def test_targets_that_are_no_pattern_are_named(targets, given, tmp_path):
    folder = Path(shutil.copytree(given / "adapter", tmp_path / "folder"))
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_modules": targets}))
    base = str(given / "run" / "model")
    with pytest.raises((TypeError, ValueError), match=str(folder)):
        open_chat_model(ChatSettings(model=str(folder), base=base, library="transformers"))


def test_a_checkpoint_s_own_sampling_reaches_generation_in_jax(tmp_path):
    own = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.05}
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"do_sample": True, "eos_token_id": 1} | own))
    found = sampling_of(tmp_path, ChatSettings(model=str(tmp_path)))
    assert own.items() <= found.items()
    # It says so by one field alone.
    path.write_text(json.dumps(own))
    found = sampling_of(tmp_path, ChatSettings(model=str(tmp_path)))
    assert (own | {"temperature": 0.0}).items() <= found.items()
    # What it leaves out is what Transformers takes for it, and the user's own word counts.
    usual = {"min_p": 0.0} | transformers.GenerationConfig._get_default_generation_params()
    path.write_text(json.dumps({"do_sample": True}))
    for temperature in (None, 0.3):
        settings = ChatSettings(model=str(tmp_path), temperature=temperature)
        found = sampling_of(tmp_path, settings)
        given = {} if temperature is None else {"temperature": temperature}
        assert {name: found[name] for name in own} == {name: usual[name] for name in own} | given


def test_a_checkpoint_s_own_beams_reach_generation_in_jax(tmp_path):
    path, settings = tmp_path / "generation_config.json", ChatSettings(model=str(tmp_path))
    beams = {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True}
    path.write_text(json.dumps(beams))
    assert beams.items() <= sampling_of(tmp_path, settings).items()
    # Transformers draws with beams, too, and has nothing to compare with one.
    drawn = dataclasses.replace(settings, temperature=0.5)
    with refuses(ValueError, path, "early_stopping, length_penalty, num_beams"):
        sampling_of(tmp_path, drawn)
    path.write_text(json.dumps(beams | {"num_beams": 1}))
    assert not beams.keys() & sampling_of(tmp_path, settings).keys()
    path.write_text(json.dumps(beams | {"num_beams": "3"}))
    with refuses(TypeError, path, "num_beams"):
        sampling_of(tmp_path, settings)


def test_characters_are_shown_when_they_are_whole(monkeypatch, capsys):
    class Written:
        def generate(self, prompts: Any, on_text: Any) -> Any:
            for text in ("a", "a\ufffd", "a\u00e9 b", "a\u00e9 b\ufffd"):
                on_text(0, 0, text)
            return [SimpleNamespace(text="a\u00e9 b.")]

    monkeypatch.setattr(JaxChatModel, "rendered", lambda self, messages: {"tokens": [1, 2]})
    assert JaxChatModel(Written(), None, 3, {}, None).answer([]) == "a\u00e9 b."
    assert capsys.readouterr().out == "a\u00e9 b.\n"
    with refuses(ValueError, 2, "new chat"):  # without room for an answer
        JaxChatModel(Written(), None, 2, {}, None).answer([])


@pytest.mark.parametrize("has_turns", [True, False])
def test_images_belong_to_the_first_question_of_a_conversation(has_turns, monkeypatch):
    asked = []

    def answer(messages: Any) -> str:
        asked.append(messages)
        return "a cat"

    image = {"type": "image", "image": "a.png"}
    monkeypatch.setattr(sys, "stdin", io.StringIO("what\nwhere\n"))
    _converse(SimpleNamespace(answer=answer, has_turns=has_turns), [], [image])  # type: ignore
    contents = [[message["content"] for message in messages] for messages in asked]
    first, alone = ([image, {"type": "text", "text": text}] for text in ("what", "where"))
    # Without a template, each question is a text of its own.
    assert contents == [[first], [first, "a cat", "where"] if has_turns else [alone]]


@pytest.mark.parametrize("library", ["transformers", "jax"])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("generation_config.json", {"eos_token_id": 2**31}),
        ("generation_config.json", {"eos_token_id": [1, 10**30]}),
        ("generation_config.json", {"eos_token_id": 0.5}),
        ("generation_config.json", {"do_sample": True, "top_k": "x"}),
        ("generation_config.json", {"do_sample": True, "top_p": "x"}),
        ("generation_config.json", {"do_sample": True, "temperature": float("nan")}),
        ("config.json", {"max_position_embeddings": -1}),
        ("config.json", {"max_position_embeddings": "x"}),
        ("tokenizer_config.json", {"model_max_length": "x"}),
    ],
)
def test_wrong_numbers_are_named(library, name, change, given, tmp_path, capsys):
    folder = Path(shutil.copytree(given / "run" / "model", tmp_path / "folder"))
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    options = ["--library", library, "--max-tokens", "2"]
    assert main(["chat", str(folder), "--prompt", QUESTION, *options]) == 2
    assert str(folder) in capsys.readouterr().err


@pytest.mark.parametrize("number", [1, 3])
def test_adapters_of_a_base_with_another_number_of_layers_are_refused(number, given, tmp_path):
    """PEFT leaves out adapters, or makes new ones, and says nothing or warns."""
    base, adapter = tmp_path / "base", given / "adapter"
    layers = {"num_hidden_layers": number, "layer_types": ["full_attention"] * number}
    save(make_torch("qwen3", **layers), base)
    load(given / "run" / "model")[1].save_pretrained(base)
    settings = ChatSettings(model=str(adapter), base=str(base), library="transformers")
    with pytest.raises(ValueError, match=r"layers.*layers\.[12]\..*_proj"):
        open_chat_model(settings)
    with refuses(ValueError, "fit"):
        models.merge_adapter(adapter, tmp_path / "merged", base=base)
    with refuses(ValueError, "fit"):
        models.load_lora(models.load_pretrained(base), adapter)


def test_adapters_that_peft_drops_are_refused(given, tmp_path):
    """It takes the name of a dense layer's matrix for that of experts."""
    base, folder = tmp_path / "base", tmp_path / "adapter"
    save(make_torch("deepseek-v3"), base)
    load(given / "run" / "model")[1].save_pretrained(base)
    pretrained = models.load_pretrained(base)
    models.save_lora(models.lora(pretrained.model, targets="0/mlp/.*_proj").model(), folder)
    settings = ChatSettings(model=str(folder), base=str(base), library="transformers")
    open_chat_model(settings)
    config = json.loads((folder / "adapter_config.json").read_text())
    names = [name.removesuffix(".weight") for name in config.pop("target_parameters")]
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": names}))
    with refuses(ValueError, folder, *names, "merge"):
        open_chat_model(settings)


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": r".*layers\.[01]\..*q_proj"},
        {"target_modules": ["model.layers.2.self_attn.q_proj"]},
        {"target_modules": "all-linear"},
        {"target_modules": ["k_proj"], "layers_to_transform": [0, 2]},
    ],
)
def test_layers_without_adapters_are_those_that_peft_would_give_some(changes):
    """Of the modules that PEFT adapts, none is taken for one that was forgotten."""
    layers = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    base = make_torch("qwen3", **layers)
    modules = [name for name, part in base.named_modules() if isinstance(part, torch.nn.Linear)]
    peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **changes))
    found = [name for name in modules if hasattr(base.get_submodule(name), "lora_A")]
    assert found and not different_layers(found, modules, changes)
    if len(found) > 1 and "layers_to_transform" not in changes:
        assert different_layers(found[:-1], modules, changes) == found[-1:]


@pytest.mark.by_default("transformers")
@pytest.mark.parametrize("library", ["transformers", "jax"])
def test_a_conversation_goes_on(library, given, capsys, monkeypatch):
    model, tokenizer = load(given / "run" / "model")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{QUESTION}\n\nfrom 5\n{'to ' * 200}\nto 9\n"))
    assert main(["chat", str(given / "run"), *GREEDY, "--library", library]) == 0
    turns = [QUESTION]
    for question in ("from 5", "to 9"):
        turns += [answer(model, tokenizer, *turns), question]
    turns.append(answer(model, tokenizer, *turns))
    printed = capsys.readouterr()
    assert printed.out.split() == " ".join(turns[1::2]).split()
    # A question that is too long is left out.
    assert tells(printed.err, "maximum")


def test_a_model_without_a_template_continues_texts(given, tmp_path, capsys):
    folder = make_checkpoint(tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    model, tokenizer = load(folder)
    assert main(["chat", str(folder), "--prompt", "count from", *GREEDY]) == 0
    inputs = tokenizer("count from", return_tensors="pt")
    found = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    expected = tokenizer.decode(found[0, 2:], skip_special_tokens=True)
    assert capsys.readouterr().out.split() == expected.split()
    assert main(["chat", str(folder), "--system", "please", "--prompt", "count"]) == 2
    assert tells(capsys.readouterr().err, "`system`", "template")


def test_jax_answers_where_it_knows_the_model_and_its_options(given, tmp_path, capsys, monkeypatch):
    folder = make_checkpoint(tmp_path / "model")
    words = ["chat", str(folder), "--prompt", QUESTION, *GREEDY]
    # As with a GPU; what JAX does not know, Transformers answers.
    monkeypatch.setattr(mt, "this_machine", lambda: mt.card("H100"))
    opened = []
    monkeypatch.setattr(models, "Generator", lambda *a, **k: opened.append(a) or OPENED(*a, **k))
    assert main(words) == 0 and len(opened) == 1
    found = capsys.readouterr().out
    settings = json.loads((folder / "generation_config.json").read_text())
    settings |= {"no_repeat_ngram_size": 3, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    assert main(words) == 0 and len(opened) == 1
    assert capsys.readouterr().out
    assert main([*words, "--library", "jax"]) == 2
    assert tells(capsys.readouterr().err, "no_repeat_ngram_size", "JAX")
    model, tokenizer = load(given / "run" / "model")
    assert found.split() == answer(model, tokenizer, QUESTION).split()


@pytest.mark.parametrize(
    ("words", "without", "error"),
    [
        (["missing"], None, "missing"),
        (["/usr"], None, "`model` /usr"),
        (["adapter"], None, "base `base`"),
        (["run", "--base", "run/model"], None, "`base` adapters"),
        (["run", "--temperature", "-1"], None, "`temperature` -1.0"),
        (["run", "--prompt", " "], None, "`prompt` empty"),
        (["run"], "torch", "pip install torch"),
        (["adapter", "--base", "run/model", "--library", "jax"], None, "`megatrain-jax merge`"),
        (["run", "--library", "jax", "--device", "cpu"], None, "`device` PyTorch"),
        (["adapter", "--base", "run/model"], "peft", "pip install peft `megatrain-jax merge`"),
    ],
)
def test_mistakes_are_told_in_a_line(words, without, error, given, capsys, monkeypatch):
    monkeypatch.chdir(given)
    if without is not None:
        monkeypatch.setitem(sys.modules, without, None)
    assert main(["chat", *words]) == 2
    told = capsys.readouterr().err.strip()
    assert tells(told, "megatrain-jax chat: error:", *error.split()) and "\n" not in told


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("AutoModelForSequenceClassification", "reward scores"),
        ("AutoModel", "whole lm_head.weight"),
    ],
)
def test_models_without_a_head_do_not_answer(kind, error, given, tmp_path, capsys):
    _, tokenizer = load(given / "run" / "model")
    model = getattr(transformers, kind).from_pretrained(given / "run" / "model")
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "other")
    assert main(["chat", str(tmp_path / "other"), "--prompt", QUESTION, *GREEDY]) == 2
    assert tells(capsys.readouterr().err, *error.split())


def test_models_with_images_that_transformers_does_not_load_are_for_jax(given, tmp_path):
    load(given / "run" / "model")[1].save_pretrained(tmp_path)
    transformers.Qwen3VLConfig().save_pretrained(tmp_path)
    with refuses(ValueError, "--library jax", tmp_path):
        open_chat_model(ChatSettings(model=str(tmp_path), library="transformers"))


def test_the_command_merges_once(given, tmp_path, capsys):
    words = [str(given / "adapter"), "--base", str(given / "run" / "model")]
    assert main(["merge", *words, "--out", str(tmp_path / "merged")]) == 0
    expected = models.merge_adapter(words[0], tmp_path / "expected", base=words[2])
    for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "merged" / name).read_bytes() == (expected / name).read_bytes()
    changed = load_file(expected / "model.safetensors")
    before = load_file(given / "run" / "model" / "model.safetensors")
    assert {n for n in before if (before[n] != changed[n]).any()}
    capsys.readouterr()
    assert main(["merge", *words, "--out", str(tmp_path / "merged")]) == 2
    assert tells(capsys.readouterr().err, "`out`", tmp_path / "merged")


def test_the_template_of_adapters_is_the_one_that_they_were_trained_with(tmp_path, capsys):
    """The base has none."""
    base = make_checkpoint(tmp_path / "base")
    template = (base / "chat_template.jinja").read_text()
    (base / "chat_template.jinja").unlink()
    pretrained = models.load_pretrained(base)
    adapted = models.lora(pretrained.model, targets="q_proj", params=pretrained.params)
    adapter = models.save_lora(adapted.model(), tmp_path / "adapter", chat_template=template)
    about = json.loads((adapter / "adapter_config.json").read_text())
    about["base_model_name_or_path"] = str(base)
    (adapter / "adapter_config.json").write_text(json.dumps(about))
    settings = {"temperature": 0.0, "max_tokens": TOKENS, "library": "transformers"}
    opened = open_chat_model(ChatSettings(model=str(adapter), **settings))
    assert opened.has_turns and opened.tokenizer.chat_template == template
    merged = models.merge_adapter(adapter, tmp_path / "merged")
    assert (merged / "chat_template.jinja").read_text() == template
    with pytest.raises(ValueError, match="`chat_template`"):
        models.save_lora(adapted.model(), tmp_path / "other", chat_template="no.jinja")
