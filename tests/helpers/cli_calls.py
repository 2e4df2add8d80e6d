"""A command of the command line whose calls of the library are written down instead of made."""

import contextlib
import inspect
import io
import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optax
import pytest
import transformers
from flax import nnx
from optax import contrib

import megatrain_jax as mt
from cli_runs import SIZES
from megatrain_jax import callbacks, data, models, objectives
from megatrain_jax._src.lm.cli import recipe
from megatrain_jax._src.lm.cli.main import main
from megatrain_jax._src.lm.common import hub

_CALLBACKS = (
    "CSVLog JSONLog TensorBoard Trackio WandB MLflow Samples KeepBest EarlyStopping".split()
)


class Calls(defaultdict[str, list[dict[str, Any]]]):
    """The arguments of all calls, by the function's name."""

    def __init__(self):
        super().__init__(list)

    def given(self, place: str) -> list[Any]:
        """The values of an argument, such as "fit.steps", in each call; None where it was left."""
        name, argument = place.split(".")
        return [arguments.get(argument) for arguments in self[name]]

    def note(self, function: Callable[..., Any], name: str, /, *args: Any, **options: Any) -> None:
        """Writes down a call that has to agree with the function's signature."""
        bound = inspect.signature(function).bind(*args, **options)
        arguments = {key: value for key, value in bound.arguments.items() if key != "self"}
        for parameter in bound.signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                arguments |= arguments.pop(parameter.name, {})
        self[name].append(arguments)


@dataclass(frozen=True)
class Files:
    """A dataset that knows the file it was read from and the share that is held out."""

    source: Any
    chat_template: str | None = None
    share: float | None = None
    seed: int | None = None
    summary: str = "read"
    fingerprint: str = "files"
    num_tokens: int = 1
    num_rows: int = 100
    rows: Any = field(default_factory=lambda: SimpleNamespace(count=None))

    def __len__(self) -> int:
        return 100

    def split(self, share: float, seed: int) -> tuple["Files", "Files"]:
        return self, Files(self.source, share=share, seed=seed)


class _MixedFiles(data.Mixture):
    """A mixture of such datasets."""

    def __len__(self) -> int:
        return 100

    def rows_used(self, num_batches: int | None = None) -> list[int]:
        return [dataset.num_rows for dataset in self.datasets]


@dataclass
class _Tokenizer:
    folder: str
    bos_token_id: None = None
    eos_token_id: None = None
    pad_token_id: None = None
    added: list[str] = field(default_factory=list)

    def __call__(self, text: str) -> None:
        pass

    def add_tokens(self, tokens: list[str]) -> None:
        self.added += tokens

    def apply_chat_template(self, messages: Any) -> None:
        pass

    def save_pretrained(self, folder: str) -> None:
        pass

    def get_vocab(self) -> dict[str, int]:
        return {"word": 40}


class _History(list[dict[str, Any]]):
    def plot(self) -> Any:
        return SimpleNamespace(savefig=lambda path: None)


@dataclass
class _Library:
    """What the command calls, replaced by notes of the calls."""

    interrupts: bool
    patch: pytest.MonkeyPatch
    calls: Calls = field(default_factory=Calls)

    def replace(self, owner: Any, name: str, result: Callable[..., Any]) -> None:
        """Has a function of the library noted, and return what another one makes of its call."""
        self.patch.setattr(owner, name, self._noted(getattr(owner, name), result))

    def _noted(self, real: Callable[..., Any], result: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            self.calls.note(real, real.__name__, *args, **options)
            return result(*args, **options)

        return noted

    def replace_all(self) -> None:
        pretrained = SimpleNamespace(
            model=lambda: None,
            params="those of the checkpoint",
            config=SimpleNamespace(
                family="llama",
                original="{}",
                saved_dtype="bfloat16",
                scores=None,
                vision=None,
            ),
        )
        adapted = SimpleNamespace(
            model=lambda: nnx.Dict(name="with adapters"),
            params="with adapters",
            trainable="lora",
        )
        self.replace(hub, "check_upload", lambda name, repository: None)
        self.replace(hub, "upload", lambda folder, repository, **options: "an address")
        self.replace(mt, "plan", self._plan)
        self.replace(mt, "fit", self._fit)
        self.replace(models, "load_pretrained", lambda *args, **options: pretrained)
        for name in ("reward_model", "resize_vocabulary"):
            self.replace(models, name, lambda pretrained, *args, **options: pretrained)
        self.replace(models, "neftune", lambda model, **options: model)
        for name in ("lora", "load_lora"):
            self.replace(models, name, lambda *args, **options: adapted)
        self.patch.setattr(models, "Decoder", self._decoder)
        self.patch.setattr(nnx, "Rngs", lambda seed: seed)
        for name in ("save_lora", "save_pretrained"):
            self.replace(models, name, lambda trainer, folder, **options: folder)
        for name in ("chat", "text", "preferences", "unpaired", "distillation"):
            self.replace(
                data,
                name,
                lambda source, tokenizer, **options: Files(source, options.get("chat_template")),
            )
        self.replace(data, "mix", lambda parts, *weights: _MixedFiles(parts, [1, 1]))
        for name in objectives.__all__:
            self.replace(objectives, name, getattr(objectives, name))
        self.replace(recipe, "counted", recipe.counted)
        for name in "adamw lion adafactor sgd lamb clip_by_global_norm".split():
            self.replace(optax, name, getattr(optax, name))
        self.replace(contrib, "muon", contrib.muon)
        self.patch.setattr(transformers.AutoTokenizer, "from_pretrained", self._tokenizer)
        for name in _CALLBACKS:
            self._replace_callback(name)
        self.patch.setattr(callbacks.KeepBest, "path", None)

    def _replace_callback(self, name: str) -> None:
        kind = getattr(callbacks, name)
        real = kind.__init__
        self.patch.setattr(
            kind,
            "__init__",
            lambda callback, *args, **options: self.calls.note(
                real, name, callback, *args, **options
            ),
        )

    def _decoder(self, config: models.DecoderConfig, *, rngs: int) -> None:
        self.calls["Decoder"].append({"config": config, "rngs": rngs})

    def _plan(self, model: Callable[[], Any], *args: Any, **options: Any) -> Any:
        model()
        return SimpleNamespace(
            microbatches=2,
            waves=1,
            seconds_per_step=1.0,
            fits_device=True,
            fits_host=True,
            attention_flops_per_step=1,
            hardware=None,
            host_bytes=1,
            host_fixed_bytes=None,
            host_process_limit=None,
        )

    def _fit(self, *args: Any, steps: int, **options: Any) -> Any:
        history = _History(
            {"step": step, "loss": 1.0, "grad_norm": 1.0, "tokens": 4.0, "seconds": 1.0}
            for step in range(1, steps + 1)
        )
        plan = SimpleNamespace(num_parameters=1, num_frozen=0, microbatches=2)
        trainer: Any = SimpleNamespace(plan=plan, num_steps=steps)
        for record in history:
            options["callbacks"][0](trainer, record)
        return SimpleNamespace(
            trainer=trainer,
            history=history,
            interrupted=self.interrupts,
            ended="finished",
            reason=None,
        )

    def _tokenizer(self, folder: str, **options: Any) -> _Tokenizer:
        return _Tokenizer(Path(folder).name)


def calls_of(folder: Path, command: str, words: list[str], *, interrupts: bool = False) -> Calls:
    """The calls that a command makes in a new folder, which has the files that it may name.

    Beside functions of the library there are `printed`, with the `steps` of the lines, and
    `report`, with the numbers of report.json.
    """
    for name in ("model", "other-model", "tokenizer", "other-tokenizer"):
        (folder / name).mkdir(parents=True)
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        (folder / name).touch()
    (folder / "sizes.json").write_text(json.dumps(SIZES))
    (folder / "wide.json").write_text(json.dumps(SIZES | {"hidden_size": 64}))
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.chdir(folder)
        library = _Library(interrupts, patch)
        library.replace_all()
        status = main([command, *words])
        assert status == (130 if interrupts else 0), (command, words)
    calls = library.calls
    lines = re.findall(r"^step (\d+)/.*$", out.getvalue(), re.MULTILINE)
    calls["printed"].append({"steps": list(map(int, lines))})
    for report in folder.glob("*/report.json"):
        calls["report"].append(json.loads(report.read_text()))
    return calls
