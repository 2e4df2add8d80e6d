"""Defaults of public calls and of the command's options: none changes unintended."""

import importlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGE = "megatrain_jax"
HOUSES = ["callbacks", "data", "distributed", "losses", "models", "objectives"]
SETTINGS = {
    "finetune_settings": ["FinetuneSettings"],
    "grpo_settings": ["GrpoSettings"],
    "plan_settings": ["ChatSettings", "MergeSettings", "PlanSettings"],
    "run_settings": ["PretrainSettings"],
}


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """The defaults of a call that are not None; of functions and dtypes, their names."""
    given = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    return {
        name: json.loads(json.dumps(value, default=lambda x: getattr(x, "__name__", str(x))))
        for name, value in given.items()
        if value is not None and value is not inspect.Parameter.empty
    }


def calls_of(name: str, thing: Any) -> dict[str, Callable[..., Any]]:
    """A public function, or a class and its public methods, by name."""
    if not inspect.isclass(thing):
        return {name: thing} if callable(thing) else {}
    if issubclass(thing, BaseException | dict):
        return {}
    methods = {n: f for n, f in vars(thing).items() if n[0] != "_" and inspect.isfunction(f)}
    return {name: thing} | {f"{name}.{n}": f for n, f in methods.items()}


def defaults_by_call() -> dict[str, dict[str, Any]]:
    """The defaults of all calls that have some."""
    calls: dict[str, Callable[..., Any]] = {}
    for house in ["", *HOUSES]:
        module = importlib.import_module(f"{PACKAGE}.{house}".rstrip("."))
        for name in module.__all__:
            calls |= calls_of(f"{house}.{name}".lstrip("."), getattr(module, name))
    for file, names in SETTINGS.items():
        module = importlib.import_module(f"{PACKAGE}._src.lm.cli.{file}")
        calls |= {f"command.{name}": getattr(module, name) for name in names}
    found = {name: defaults(call) for name, call in calls.items()}
    return {name: values for name, values in found.items() if values}


def test_defaults_are_the_written_ones():
    written = json.loads((Path(__file__).parent.parent / "helpers/defaults.json").read_text())
    found = defaults_by_call()
    assert found.keys() == written.keys()
    for name, values in found.items():
        assert values == written[name], name
