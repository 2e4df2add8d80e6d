"""Completions that call tools: their tokens are the template's, and results are not learned."""

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optax
import pytest
import transformers
from flax import nnx
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models

from megatrain_jax import models
from megatrain_jax._src.lm.grpo.policy_batch import policy_batch
from megatrain_jax._src.lm.grpo.tools import ToolUse
from megatrain_jax._src.lm.models.generation.generate import Completion
from messages import refuses, warns

END = "<|end|>"
SPECIAL = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", END]
# Behind a turn's last token is a line break, as in ChatML.
TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NO_RESULTS = TEMPLATE.replace("in messages %}", "in messages if m.role != 'tool' %}")
OTHER_CALLS = TEMPLATE.replace("tool_call>", "function>")
STRICT = "{% if messages[-1].role == 'tool' %}{{ raise_exception('needs a call') }}{% endif %}"
STRICT += TEMPLATE
ROOM = 1500


def make_tokenizer(template: str = TEMPLATE) -> Any:
    """A tokenizer of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {character: number for number, character in enumerate(alphabet)}
    tokenizer = Tokenizer(tokenizer_models.BPE(ids, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    fast.chat_template = template
    return fast


def add(a: int, b: int) -> int:
    """Adds numbers.

    Args:
        a: A number.
        b: Another one.
    """
    return a + b


async def divide(a: int, b: int) -> float:
    """Divides numbers.

    Args:
        a: A number.
        b: Another one.
    """
    return a / b


def call(name: str, **arguments: Any) -> str:
    function = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{function}\n</tool_call>"


# What the model writes, turn by turn, by the question.
TURNS = {
    "one": ["let me see" + call("add", a=1, b=2), "3"],
    "many": [
        call("add", a=3, b=4) + call("divide", a=1, b=0),
        call("divide", a=6, b=4) + call("multiply", a=1),
        "7 and 1.5",
    ],
    "broken": ["<tool_call>\n{\n</tool_call>" + call("add", a=1), "well"],
    "none": ["hello"],
}


class Written:
    """Writes the turns as `models.generate` would.

    Attributes:
        seeds: The seed of each call.
    """

    def __init__(self, tokenizer: Any, turns: dict[str, list[str]] = TURNS):
        self._tokenizer, self._turns = tokenizer, turns
        self.seeds: list[int] = []

    def __call__(
        self, trainer: Any, prompts: Sequence[Sequence[int]], **options: Any
    ) -> list[Completion]:
        self.seeds.append(options["seed"])
        count = options["num_samples"]
        return [
            self._completion(prompt, sample, [*map(int, ids)], options["max_tokens"])
            for prompt, ids in enumerate(prompts)
            for sample in range(count)
        ]

    def _completion(self, prompt: int, sample: int, given: list[int], most: int) -> Completion:
        assert most > 0
        text = self._tokenizer.decode(given)
        found = re.search(r"<\|user\|>(\w+)", text)
        assert found is not None and text.endswith("<|assistant|>")
        turn = self._turns[found[1]][text.count("<|assistant|>") - 1]
        ids = self._tokenizer.encode(turn + END)[:most]
        logs = -5 - np.arange(1, len(ids) + 1, dtype=np.float32) / 1000
        return Completion(
            prompt=prompt,
            sample=sample,
            text=self._tokenizer.decode(ids, skip_special_tokens=True),
            prompt_ids=np.array(given, np.int32),
            ids=np.array(ids, np.int32),
            log_probs=logs,
            tempered_log_probs=2 * logs,
            drawn_log_probs=3 * logs,
            finish="stop" if len(ids) < most else "length",
        )


def decoder() -> models.Decoder:
    sizes: dict[str, Any] = {"vocab_size": 264, "hidden_size": 8, "intermediate_size": 8}
    sizes |= {"num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8}
    config = models.DecoderConfig(**sizes, rope=models.Rope(dim=8, base=100.0))
    return models.Decoder(config, rngs=nnx.Rngs(0))


def question(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def completed(
    questions: Sequence[str],
    room: int = ROOM,
    turns: int | None = None,
    count: int = 2,
    texts: dict[str, list[str]] = TURNS,
) -> tuple[list[Completion], ToolUse, Any]:
    tokenizer = make_tokenizer()
    use = ToolUse([add, divide], tokenizer, Written(tokenizer, texts), turns)
    rendered = [
        tokenizer.apply_chat_template(
            question(text), tools=use.schemas, add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for text in questions
    ]
    options: Any = {"max_tokens": room, "num_samples": count, "seed": 2**32 - 1}
    return use(None, rendered, **options), use, tokenizer  # type: ignore[arg-type]


def test_tokens_are_those_of_the_rendered_conversation():
    questions = ["one", "many", "broken", "none"]
    found, use, tokenizer = completed(questions)
    assert [(one.prompt, one.sample) for one in found] == [(p, s) for p in range(4) for s in (0, 1)]
    for one in found:
        text = questions[one.prompt]
        assert one.finish == "stop" and one.messages is not None
        messages = one.messages
        given = tokenizer.apply_chat_template(
            [*question(text), *messages], tools=use.schemas, return_dict=True
        )["input_ids"]
        ids = [*one.prompt_ids.tolist(), *one.ids.tolist()]
        if text != "broken":  # a call that can't be read is not rendered as it was written
            assert ids == given[: len(ids)] and len(given) - len(ids) == 1
        own = np.ones(len(one.ids), bool) if one.own is None else one.own
        written = [tokenizer.decode(ids) for ids in runs_of(one.ids, own)]
        assert written == [turn + END for turn in TURNS[text]]
        sizes = [len(tokenizer.encode(turn)) + 1 for turn in TURNS[text]]
        logs = np.concatenate([-5 - np.arange(1, n + 1, dtype=np.float32) / 1000 for n in sizes])
        for factor, name in enumerate(["log_probs", "tempered_log_probs", "drawn_log_probs"], 1):
            values = getattr(one, name)
            np.testing.assert_array_equal(values[own], factor * logs)
            assert not values[~own].any() and values.dtype == np.float32
    assert (use.num_calls, use.num_failures) == (2 * (1 + 4 + 2), 2 * (2 + 2))


def runs_of(ids: np.ndarray, own: np.ndarray) -> list[list[int]]:
    """The ids of each run of own tokens."""
    starts = np.flatnonzero(own & ~np.r_[False, own[:-1]])
    ends = np.flatnonzero(own & ~np.r_[own[1:], False])
    return [ids[a : b + 1].tolist() for a, b in zip(starts, ends, strict=True)]


def test_messages_have_calls_and_results_and_errors():
    (one,), *_ = completed(["many"], count=1)
    assert one.messages is not None
    roles = [message["role"] for message in one.messages]
    assert roles == "assistant tool tool assistant tool tool assistant".split()
    results = [message["content"] for message in one.messages if message["role"] == "tool"]
    assert results[0] == "7" and results[2] == "1.5"
    assert "division" in results[1] and "'multiply'" in results[3] and "add" in results[3]
    calls = one.messages[0]["tool_calls"]
    assert calls[0]["function"] == {"name": "add", "arguments": {"a": 3, "b": 4}}


def test_calls_are_read_as_the_tokenizer_says():
    function = {"name": "{name}", "arguments": "{content}"}
    calls = {"open_pattern": r"CALL (?P<name>\w+) ", "close_pattern": ";", "repeats": True}
    calls |= {"content": "json", "transform": {"type": "function", "function": function}}
    content = {"close_pattern": r"<\|end\|>", "content": "text"}
    tokenizer = make_tokenizer()
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|assistant|>",
        "fields": {"tool_calls": calls, "content": content},
    }
    turns = {
        "x": ['CALL add {"a": 1, "b": 2};', "3"],
        "y": ['CALL add {"a": 1 "b": 2};', "unused"],
        "z": [call("add", a=1, b=2), "unused"],
    }
    use = ToolUse([add], tokenizer, Written(tokenizer, turns), None)
    prompts = [tokenizer.encode(f"<|user|>{name}{END}\n<|assistant|>") for name in turns]
    found = use(None, prompts, max_tokens=ROOM, num_samples=1, seed=0)  # type: ignore[arg-type]
    messages = [one.messages for one in found]
    assert [len(rows or ()) for rows in messages] == [3, 1, 1]
    assert messages[0] is not None
    assert [message["content"] for message in messages[0]] == ["", "3", "3"]


def test_each_turn_has_a_seed_of_its_own_and_turns_may_be_limited():
    tokenizer = make_tokenizer()
    for most, number in ((None, 3), (1, 2), (2, 3)):
        write = Written(tokenizer)
        use = ToolUse([add, divide], tokenizer, write, most)
        ids = tokenizer.encode("<|user|>many<|end|>\n<|assistant|>")
        (one,) = use(None, [ids], max_tokens=ROOM, num_samples=1, seed=7)  # type: ignore[arg-type]
        assert write.seeds == [7, 8, 9][:number]
        assert one.messages is not None
        assert sum(m["role"] == "assistant" for m in one.messages) == number


@pytest.mark.parametrize("kind", ["in the call", "in the result", "at its end", "in the answer"])
def test_a_completion_without_room_ends_there(kind):
    """Or before a result that no turn can follow."""
    (whole,), *_ = completed(["one"], count=1)
    assert whole.own is not None
    first, last = np.flatnonzero(~whole.own)[[0, -1]]
    length = len(whole.ids)
    room = {"in the call": first - 1, "in the result": last, "at its end": last + 1}
    most = int(room.get(kind, length - 1))
    (one,), *_ = completed(["one"], room=most, count=1)
    is_before = kind in ("in the result", "at its end")
    assert one.finish == ("stop" if is_before else "length")
    assert len(one.ids) == (first if is_before else most)
    np.testing.assert_array_equal(one.ids, whole.ids[: len(one.ids)])
    assert (one.own is None) == (kind != "in the answer")
    if one.own is not None:
        np.testing.assert_array_equal(one.own, whole.own[:most])
    assert one.messages is not None and len(one.messages) == (3 if kind == "in the answer" else 1)


@pytest.mark.parametrize("seed", range(4))
def test_completions_have_the_same_room_beside_others(seed):
    """Whatever turns they have, and however many."""
    rng = np.random.default_rng(seed)

    def turn(rest: str) -> str:
        return "a" * int(rng.integers(1, 60)) + rest

    turns = {
        name: [turn(call("add", a=1, b=2)) for _ in range(rng.integers(3))] + [turn("")]
        for name in ("p", "q", "r")
    }
    for room in rng.integers(100, 400, 4).tolist():
        alone = [completed([name], room=room, count=1, texts=turns)[0][0] for name in turns]
        beside, *_ = completed([*turns], room=room, count=1, texts=turns)
        for one, other in zip(beside, alone, strict=True):
            np.testing.assert_array_equal(one.ids, other.ids)
            assert (one.finish, one.messages) == (other.finish, other.messages)
        assert max(len(one.ids) for one in beside) <= room


def answers(text: str, tools: Sequence[Callable[..., Any]]) -> list[str]:
    """The results of the calls in a turn; a next one ends the completion."""
    tokenizer = make_tokenizer()
    use = ToolUse(tools, tokenizer, Written(tokenizer, {"q": [text, "done"]}), None)
    ids = tokenizer.encode(f"<|user|>q{END}\n<|assistant|>")
    (one,) = use(None, [ids], max_tokens=9000, num_samples=1, seed=0)  # type: ignore[arg-type]
    assert one.messages is not None
    return [message["content"] for message in one.messages if message["role"] == "tool"]


def leave() -> None:
    """Leaves."""
    raise SystemExit(3)


def echo(text: str) -> str:
    """Repeats.

    Args:
        text: A text.
    """
    return text


async def cancel() -> None:
    """Cancels itself."""
    raise asyncio.CancelledError


@pytest.mark.filterwarnings("ignore:all .* calls of tools have failed")
def test_whatever_a_model_writes_is_answered():
    tools = [leave, echo, cancel]
    call_of = "<tool_call>{}</tool_call>".format
    for text in ("[" * 1500 + "]" * 1500, "{", "3", '{"name": "echo", "arguments": "x"}'):
        (found,) = answers(call_of(text), tools)
        assert "error" in found and "arguments" in found
    assert answers(call("echo", text="\ud83d"), tools) == ["?"]
    assert "3" in answers(call("leave"), tools)[0]
    assert "CancelledError" in answers(call("cancel"), tools)[0]


def test_calls_in_thoughts_are_not_made():
    thought = f"<think>{call('echo', text='a')}</think>"
    assert answers(thought + "b", [echo]) == []
    assert answers(thought + call("echo", text="b"), [echo]) == ["b"]


def test_async_tools_run_side_by_side():
    begun = []

    async def meet(number: int) -> int:
        """Waits for another call.

        Args:
            number: A number.
        """
        begun.append(number)
        for _ in range(10_000):
            if len(begun) < 2:
                await asyncio.sleep(0)
        return len(begun)

    assert answers(call("meet", number=1) + call("meet", number=2), [meet]) == ["2", "2"]


def test_a_warning_tells_if_all_calls_fail():
    with warns(UserWarning, 2, "calls of tools", "division"):
        answers(2 * call("divide", a=1, b=0), [divide])


def test_completions_are_continued_in_few_numbers(monkeypatch):
    """Generation compiles programs for each number of texts."""
    tokenizer = make_tokenizer()
    write, numbers = Written(tokenizer), []

    def generate(trainer: Any, prompts: Any, **options: Any) -> list[Completion]:
        numbers.append(len(prompts) * options["num_samples"])
        return write(trainer, prompts, **options)

    monkeypatch.setattr("megatrain_jax._src.lm.grpo.tools.generate", generate)
    use = ToolUse([add, divide], tokenizer, None, None)
    for waiting in range(1, 17):
        names = ["one"] * waiting + ["none"] * (16 - waiting)
        prompts = [tokenizer.encode(f"<|user|>{name}{END}\n<|assistant|>") for name in names]
        found = use(None, prompts, max_tokens=ROOM, num_samples=1, seed=0)  # type: ignore[arg-type]
        assert [len(one.messages or ()) for one in found] == [3] * waiting + [1] * (16 - waiting)
    assert set(numbers) == {2, 4, 8, 16}


def test_results_do_not_count_in_the_loss():
    found, *_ = completed(["one", "none"], count=1)
    options = models.GrpoOptions(loss_type="grpo")
    length = max(len(one.prompt_ids) + len(one.ids) for one in found)
    batch = policy_batch([[0], [1]], found, np.array([1.0, -1.0]), length=length, options=options)
    for row, one in enumerate(found):
        own = np.ones(len(one.ids), bool) if one.own is None else one.own
        at = len(one.prompt_ids) - 1
        weights = batch["weights"][row, at : at + len(one.ids)]
        np.testing.assert_array_equal(weights > 0, own)
        # The mean of each completion first: each has a half, times the number of rows.
        np.testing.assert_allclose(batch["weights"][row].sum(), 1, rtol=1e-6)
    counted = sum(len(one.ids) if one.own is None else one.own.sum() for one in found)
    assert batch["tokens_per_row"].sum() == counted


def test_runs_learn_from_messages_with_results():
    tokenizer = make_tokenizer()
    seen: list[Any] = []

    def reward(completions: list[Any]) -> list[float]:
        seen.extend(completions)
        return [float(number) for number in range(len(completions))]

    result = models.train_grpo(
        decoder,
        [{"prompt": question("one")}, {"prompt": question("none")}],
        reward,
        optax.sgd(1e-2),
        steps=1,
        tokenizer=tokenizer,
        options=models.GrpoOptions(
            num_generations=2, prompts_per_step=2, max_completion_length=200, shuffle=False
        ),
        generate=Written(tokenizer),
        tools=[add],
        precision="float32",
        progress=False,
    )
    (record,) = result.history
    assert (record["tools/call_frequency"], record["tools/failure_frequency"]) == (0.5, 0.0)
    roles = [[message["role"] for message in messages] for messages in seen]
    assert roles == 2 * [["assistant", "tool", "assistant"]] + 2 * [["assistant"]]
    assert record["weight"] == sum(
        len(tokenizer.encode(turn)) + 1 for text in ("one", "none") for turn in 2 * TURNS[text]
    )


@pytest.mark.exhaustive
def test_the_model_goes_on_from_results_as_it_is_trained(monkeypatch):
    """Each turn of a random model is taken for a call; the first update's ratios are 1."""
    own_message = ToolUse._message

    def message(self: ToolUse, one: Completion) -> dict[str, Any]:
        function = {"name": "add", "arguments": {"a": 1, "b": len(one.prompt_ids)}}
        return own_message(self, one) | {"tool_calls": [{"function": function}]}

    monkeypatch.setattr(ToolUse, "_message", message)
    result = models.train_grpo(
        decoder,
        [{"prompt": question("one")}, {"prompt": question("none")}],
        lambda completion_ids: [float(sum(ids)) for ids in completion_ids],
        optax.sgd(1e-2),
        steps=1,
        tokenizer=make_tokenizer(),
        options=models.GrpoOptions(
            num_generations=2, prompts_per_step=2, max_completion_length=80, stop=[*range(200)]
        ),
        tools=[add],
        precision="float32",
        progress=False,
    )
    (record,) = result.history
    assert record["tools/call_frequency"] > 2 and record["grad_norm"] > 0
    assert record["sampling/sampling_logp_difference/mean"] < 1e-6
    assert record["weight"] == 4 * record["completions/mean_length"] < record["tokens"]


def undescribed(a):
    return a


@pytest.mark.parametrize(
    ("tools", "template", "error", "named"),
    [
        (add, TEMPLATE, TypeError, "`tools` list"),
        ([add, 3], TEMPLATE, TypeError, "`tools` functions"),
        ([undescribed], TEMPLATE, ValueError, "`tools` undescribed"),
        ([add, divide, add, lambda: 0], TEMPLATE, ValueError, "`tools`"),
        ([add], TEMPLATE.partition("{% endif %}")[2], ValueError, "`tools` `tokenizer` template"),
        ([add], OTHER_CALLS, ValueError, "`tools` `tokenizer.response_template`"),
        ([add], NO_RESULTS, ValueError, "`tools` `tokenizer` template results"),
        ([add], STRICT, ValueError, "`tools` `tokenizer` template results needs a call"),
        ([add], None, ValueError, "`tools` `tokenizer` template"),
    ],
)
def test_tools_that_cannot_be_told_are_refused(tools: Any, template: Any, error: Any, named: str):
    with refuses(error, *named.split()):
        ToolUse(tools, make_tokenizer(template), None, None)


def test_two_tools_of_a_name_and_prompts_of_ids_are_refused():
    def another() -> Callable[..., int]:
        def add(a: int) -> int:
            """Adds nothing.

            Args:
                a: A number.
            """
            return a

        return add

    tokenizer = make_tokenizer()
    with refuses(ValueError, "`tools`", "add"):
        ToolUse([add, another()], tokenizer, None, None)
    with refuses(ValueError, "`tools`", "messages", 1):
        models.train_grpo(
            lambda: None,  # type: ignore[arg-type,return-value]
            [{"prompt": question("one")}, {"prompt": [5, 7]}],
            lambda completions: [0.0] * len(completions),
            optax.sgd(1e-2),
            steps=1,
            tokenizer=tokenizer,
            tools=[add],
        )
