"""GRPO with completions by a server that speaks vLLM's protocol, and generates by ours."""

import itertools
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import megatrain_jax as mt
from megatrain_jax import models
from megatrain_jax._src.lm.grpo import inference_server
from megatrain_jax._src.lm.grpo.inference_server import _completion
from messages import refuses

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rope_theta": 100.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
ROWS = [{"prompt": [5, 7, 1], "wanted": 3}, {"prompt": [4], "wanted": 9}]
OPTIONS: dict[str, Any] = {
    "num_generations": 4,
    "prompts_per_step": 2,
    "max_completion_length": 6,
    "stop": [0],
}


class Server(ThreadingHTTPServer):
    """Serves a folder as vLLM does.

    Attributes:
        calls: Paths and bodies of all requests.
        spoil: Changes an answer before it is sent.
    """

    def __init__(self, folder: Path):
        super().__init__(("localhost", 0), _Handler)
        self.folder, self.model, self.calls = folder, None, []
        self.spoil: Any = lambda path, answer: answer
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://localhost:{self.server_port}"

    def answer(self, path: str, body: Any) -> Any:
        self.calls.append((path, body))
        if path == "/v1/models":
            return {"data": [{"id": "served"}]}
        if path == "/collective_rpc":
            assert body == {"method": "reload_weights"}
            found = models.load_pretrained(self.folder)
            self.model = found.model()
            nnx.update(self.model, nnx.State(jax.tree.map(np.asarray, found.params)))
            return {"results": [None]}
        if path == "/v1/completions":
            with self.lock:
                return {"choices": self.choices(body)}
        return None

    def choices(self, body: Any) -> list[Any]:
        assert body["model"] == "served" and body["return_token_ids"] and not body["stop"]
        names = ("max_tokens", "temperature", "top_p", "min_p", "repetition_penalty", "seed")
        found = models.generate(
            self.model,
            [body["prompt"]],
            **{name: body[name] for name in names},
            stop=body["stop_token_ids"],
            num_samples=body["n"],
        )
        rows = [
            {
                "index": i,
                "text": one.text,
                "token_ids": one.ids.tolist(),
                "logprobs": {"token_logprobs": one.log_probs.tolist()},
                "finish_reason": one.finish,
            }
            for i, one in enumerate(found)
        ]
        return rows[::-1]  # in any order


class _Handler(BaseHTTPRequestHandler):
    server: Any

    def do_GET(self) -> None:
        self._send(None)

    def do_POST(self) -> None:
        self._send(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _send(self, body: Any) -> None:
        answer = self.server.spoil(self.path, self.server.answer(self.path, body))
        text = json.dumps(answer).encode() if answer is not None else b""
        self.send_response(404 if answer == "missing" else 200)
        self.send_header("Content-Length", str(len(text) + (answer == "cut")))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "served") as found:
        threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True).start()
        yield found
        found.shutdown()


def run(generate: Any, steps: int = 3, **options: Any) -> mt.FitResult:
    config = models.DecoderConfig.from_hf(CONFIG)

    def share(completion_ids: list[list[int]], wanted: list[int]) -> list[float]:
        pairs = zip(completion_ids, wanted, strict=True)
        return [ids.count(token) / len(ids) + 0.01 * len(ids) for ids, token in pairs]

    return models.train_grpo(
        lambda: models.Decoder(config, rngs=nnx.Rngs(3)),
        ROWS,
        share,
        optax.adam(5e-2),
        steps=steps,
        tokenizer=None,
        options=models.GrpoOptions(**OPTIONS | options),
        precision="float32",
        progress=False,
        generate=generate,
    )


@pytest.fixture(scope="module")
def trainer() -> mt.Trainer:
    """A model to be handed over."""
    config = models.DecoderConfig.from_hf(CONFIG)

    def loss(model: models.Decoder, batch: Any) -> jax.Array:
        return model(batch["tokens"]).astype("float32").mean()

    model, batch = models.Decoder(config, rngs=nnx.Rngs(3)), {"tokens": np.zeros((2, 4), np.int32)}
    return mt.Trainer(model, loss, optax.sgd(0.1), batch, precision="float32", progress=False)


def asked(generate: models.InferenceServer, trainer: mt.Trainer, **options: Any) -> list[Any]:
    """What a server writes when GRPO asks it."""
    usual = {"max_tokens": 6, "temperature": 1.0, "top_p": 1.0, "top_k": None, "min_p": 0.0}
    usual |= {"repetition_penalty": 1.0, "stop": [0], "seed": 0, "num_samples": 2}
    return generate(trainer, [[5, 7, 1], [4]], **usual | options)


def one_token(body: Any) -> list[Any]:
    """The choices of a server that computes nothing."""
    told = {"token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"}
    return [{"index": i, "text": "said"} | told for i in range(body["n"])]


def test_completions_are_the_server_s_by_the_newest_weights(server: Server):
    generate, written = models.InferenceServer(server.url + "/v1/", server.folder), []

    def keeping(*args: Any, **options: Any) -> Any:
        written.append(generate(*args, **options))
        return written[-1]

    result = run(keeping, steps=2, top_k=0)  # as None
    differences = [r["sampling/sampling_logp_difference/mean"] for r in result.history]
    # Without a restriction, tokens are drawn by the probabilities of all.
    for completion in itertools.chain(*written):
        np.testing.assert_array_equal(completion.drawn_log_probs, completion.log_probs)
    # Log-probabilities of other weights, or of other tokens, would differ.
    assert len(differences) == 2 and max(differences) < 1e-5
    assert len({r["loss"] for r in result.history}) == 2
    paths = [path for path, _ in server.calls]
    assert paths.count("/collective_rpc") == paths.count("/reset_prefix_cache") == 2
    asked = [body for path, body in server.calls if path == "/v1/completions"]
    assert len({body["seed"] for body in asked}) == len(asked) == 4
    assert {body["top_k"] for body in asked} == {-1}
    assert {tuple(body["prompt"]) for body in asked} == {(5, 7, 1), (4,)}


def test_a_server_that_starts_late_is_waited_for(
    server: Server, trainer: mt.Trainer, monkeypatch: pytest.MonkeyPatch
):
    trials = 0
    server.choices = one_token

    def sleep(seconds: float) -> None:
        nonlocal trials
        trials += 1
        if trials == 2:
            generate.url = server.url

    monkeypatch.setattr(inference_server, "sleep", sleep)
    generate = models.InferenceServer("http://localhost:1", server.folder)
    assert [found.ids.tolist() for found in asked(generate, trainer)] == [[5]] * 4
    assert trials == 2
    monkeypatch.setattr(inference_server, "monotonic", iter([0.0, 9.0]).__next__)
    with refuses(OSError, "http://localhost:1"):
        asked(models.InferenceServer("http://localhost:1", server.folder, timeout=5), trainer)


@pytest.mark.parametrize(
    ("path", "answer", "named"),
    [
        ("/collective_rpc", "missing", "VLLM_SERVER_DEV_MODE"),
        ("/v1/completions", {"choices": []}, "completions"),
        ("/v1/completions", "no ids", "vLLM"),
        ("/v1/completions", {"choices": ["a text"]}, "/v1/completions"),
        ("/v1/completions", "cut", "IncompleteRead"),
        ("/v1/models", {"data": []}, "/v1/models"),
        ("/v1/models", None, "/v1/models"),
    ],
)
def test_another_server_is_refused(
    path: str, answer: Any, named: str, server: Server, trainer: mt.Trainer
):
    def spoil(asked: str, given: Any) -> Any:
        if asked != path:
            return given
        if answer == "no ids":
            return {"choices": [row | {"token_ids": None} for row in given["choices"]]}
        return answer

    server.choices, server.spoil = one_token, spoil
    with refuses(OSError, server.url, named):
        asked(models.InferenceServer(server.url, server.folder), trainer)


def test_what_a_server_can_t_do_is_refused(server: Server, trainer: mt.Trainer):
    with refuses(ValueError, "`temperature`"):
        asked(models.InferenceServer(server.url, server.folder), trainer, temperature=0.7)
    with refuses(ValueError, "url"):
        models.InferenceServer("localhost:8000", server.folder)


@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("finish", ["length", "stop", "abort", None])
def test_a_completion_ends_by_its_length_or_by_itself(finish, restricted):
    found = _completion(3, [7], 1, ("said", [5, 2], [-0.5, -1.0], finish), restricted=restricted)
    assert found.finish == ("length" if finish == "length" else "stop")
    assert (found.prompt, found.sample, found.text) == (3, 1, "said")
    np.testing.assert_array_equal(found.log_probs, [-0.5, -1])
    np.testing.assert_array_equal(found.drawn_log_probs, np.nan if restricted else [-0.5, -1])
