"""Completions by an inference server beside training: vLLM, which serves a folder of weights."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from os import PathLike
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np

from megatrain_jax import Trainer, distributed
from megatrain_jax._src.common import checks
from megatrain_jax._src.common.activity import progressed
from megatrain_jax._src.common.progress import tell_phase
from megatrain_jax._src.lm.models.export import save_pretrained
from megatrain_jax._src.lm.models.generation.generate import Completion

# Prompts that are asked for at once; the server batches them.
_CONNECTIONS = 64
_SECONDS_BETWEEN_TRIALS = 2.0


class _UnreachableError(OSError):
    """Raised if nobody answers."""


class InferenceServer:
    """Writes the completions of `train_grpo` by a server of vLLM, on GPUs of its own.

    Pass ``generate=models.InferenceServer("http://localhost:8000", "served")`` to `train_grpo`.
    Before each generation, the policy is exported to the folder that the server serves, and the
    server reads it again. The first generation waits until the server is there. Start it when the
    folder exists, on another GPU::

        VLLM_SERVER_DEV_MODE=1 vllm serve served --port 8000

    The server's log-probabilities are the old ones of the loss, so that the clipped ratio also
    counts what the server computes differently; `sampling/sampling_logp_difference/mean` of the
    records measures that. Weights are reloaded by `/collective_rpc`, which vLLM has in this mode
    only, and ids of tokens need version 0.10.2 or later. Whoever reaches the port can reload them,
    too: don't open it to others.

    Attributes:
        url: The server's address.
        folder: The folder that it serves.
    """

    def __init__(self, url: str, folder: str | PathLike[str], *, timeout: float = 3600.0):
        """Connects to nothing yet.

        Args:
            url: The server's address, such as ``"http://localhost:8000"``.
            folder: The folder that it serves: new, or an earlier export, which is replaced.
            timeout: Seconds to wait for the server's start, and for an answer.

        Raises:
            TypeError: If an argument has a wrong type.
            ValueError: If `url` is no address.
        """
        checks.instance("url", url, str, "a str")
        if not url.startswith(("http://", "https://")):
            raise ValueError(checks.refused("url", 'an address such as "http://host:8000"', url))
        self.url = url.rstrip("/").removesuffix("/v1")
        self.folder = Path(checks.path("folder", folder)).absolute()
        self._timeout = checks.number("timeout", timeout, above=0)
        self._is_there = False

    def __call__(
        self,
        trainer: Trainer,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int | None,
        min_p: float,
        repetition_penalty: float,
        stop: Collection[int | str] | None,
        seed: int,
        num_samples: int,
        tokenizer: Any = None,
    ) -> list[Completion]:
        """Hands the policy over, and has the server write; see `models.generate`.

        Raises:
            ValueError: If `temperature` is not 1: vLLM's log-probabilities are those at 1.
            OSError: If the server can't be reached, refuses, or answers otherwise than vLLM does.
        """
        if temperature != 1:
            raise ValueError(
                f"`temperature`={temperature:g}: a server's log-probabilities are those at "
                "temperature 1, so completions have to be drawn at 1, too"
            )
        save_pretrained(trainer, self.folder, overwrite=True)
        stops = [*(stop or ())]
        asked = {
            "n": num_samples,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k or -1,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "stop": [x for x in stops if isinstance(x, str)],
            "stop_token_ids": [int(x) for x in stops if not isinstance(x, str)],
            "logprobs": 1,
            "return_token_ids": True,
        }

        def write() -> list[Any]:
            model = self._model()
            self._answer("/collective_rpc", {"method": "reload_weights"})
            self._answer("/reset_prefix_cache", {})
            rows = [
                asked | {"model": model, "prompt": [*map(int, ids)], "seed": seed + number}
                for number, ids in enumerate(prompts)
            ]
            with ThreadPoolExecutor(_CONNECTIONS) as threads:
                return list(threads.map(self._choices, rows))

        # The first process asks, and the others get its answers.
        found = distributed.in_first(write, trainer)
        restricted = top_p < 1 or bool(top_k) or min_p > 0 or repetition_penalty != 1
        return [
            _completion(number, prompts[number], sample, choice, restricted=restricted)
            for number, choices in enumerate(found)
            for sample, choice in enumerate(choices)
        ]

    def _model(self) -> str:
        """The name of the served model; at first, waits until the server is there."""
        end, is_told = monotonic() + self._timeout, False
        while True:
            try:
                found = self._read("/v1/models", lambda answer: answer["data"][0]["id"])
            except _UnreachableError:
                if self._is_there or monotonic() > end:
                    raise
                command = f"VLLM_SERVER_DEV_MODE=1 vllm serve {self.folder}"
                tell_phase(f"waiting for {self.url}: start it by `{command}` ...", not is_told)
                is_told = True
                sleep(_SECONDS_BETWEEN_TRIALS)
                progressed()
            else:
                self._is_there = True
                return found

    def _choices(self, request: dict[str, Any]) -> list[Any]:
        """The samples of a prompt: text, ids, their log-probabilities and the reason of the end."""

        def read(answer: Any) -> list[Any]:
            return [
                [
                    choice["text"],
                    choice.get("token_ids"),
                    (choice.get("logprobs") or {}).get("token_logprobs"),
                    choice["finish_reason"],
                ]
                for choice in sorted(answer["choices"], key=lambda choice: choice["index"])
            ]

        found = self._read("/v1/completions", read, request)
        for _, ids, logs, _ in found:
            if not ids or logs is None or len(ids) != len(logs):
                raise OSError(
                    f"{self.url} returned no ids of tokens with a log-probability each: "
                    "`InferenceServer` needs vLLM 0.10.2 or later"
                )
        if len(found) != request["n"]:
            raise OSError(f"{self.url} returned {len(found)} completions of {request['n']}")
        return found

    def _read(
        self, path: str, read: Callable[[Any], Any], body: dict[str, Any] | None = None
    ) -> Any:
        """What a function reads in the JSON of an answer."""
        text = self._answer(path, body)
        try:
            return read(json.loads(text))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise OSError(
                f"{self.url}{path} answered otherwise than vLLM does: {text[:200]!r}"
            ) from error

    def _answer(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """The answer to a request: GET without a body, else POST."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:500]
            hint = ": start it with VLLM_SERVER_DEV_MODE=1" if error.code == 404 else ""
            raise OSError(f"{self.url}{path} answered {error.code} {said}{hint}") from error
        except (OSError, HTTPException) as error:
            text = f"the inference server {self.url} can't be reached: {error}"
            raise _UnreachableError(text) from error


def _completion(
    prompt: int, prompt_ids: Sequence[int], sample: int, choice: Sequence[Any], *, restricted: bool
) -> Completion:
    text, ids, logs, finish = choice
    log_probs = np.array(logs, np.float32)
    # The server's log-probabilities are among all tokens, before any restriction or penalty.
    drawn = np.full_like(log_probs, np.nan) if restricted else log_probs
    return Completion(
        prompt=prompt,
        sample=sample,
        text=text,
        prompt_ids=np.array(prompt_ids, np.int32),
        ids=np.array(ids, np.int32),
        log_probs=log_probs,
        tempered_log_probs=log_probs,
        drawn_log_probs=drawn,
        finish="length" if finish == "length" else "stop",
    )
