"""Reads signatures and the outputs of notebooks on the pages of the site, as they are rendered."""

import ast
import dataclasses
import html
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# A heading with its object's path, and the signature right below it, if there is one.
_DOCUMENTED = re.compile(
    r'<h\d id="(megatrain_jax[\w.]*)"[^>]*class="doc doc-heading">(?:(?!</h\d>).)*</h\d>\s*'
    r'<div class="doc-signature highlight"><pre>(.*?)</pre>',
    re.S,
)
_TAG = re.compile(r"<[^>]+>")
Parameters = list[tuple[str, str, Any]]
"""The name, kind and default of each parameter, in their order."""
REQUIRED = "no default"


def rendered(site: Path) -> Iterator[tuple[str, str]]:
    """The path and the text of the signature of each function and class on the API pages."""
    for page in sorted((site / "api").rglob("index.html")):
        for path, signature in _DOCUMENTED.findall(page.read_text(encoding="utf-8")):
            text = html.unescape(_TAG.sub("", signature)).strip()
            if re.match(r"\w+\(", text):  # not an attribute
                yield path, text


def shown_outputs(page: Path) -> str:
    """The text of what a notebook's cells print or show, on its page of the site."""
    text = re.sub(r"<(style|script)\b.*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.S)
    outputs = re.findall(r'<div class="[^"]*\bjp-OutputArea-output\b.*?</div>\s*</div>', text, re.S)
    return html.unescape(" ".join(_TAG.sub(" ", output) for output in outputs))


def documented(path: str) -> tuple[Any, bool]:
    """The object that the library has under a path, and whether it takes a `self` there."""
    parts = path.split(".")
    number = next(n for n in range(len(parts), 0, -1) if _is_module(".".join(parts[:n])))
    parent, value = None, importlib.import_module(".".join(parts[:number]))
    for name in parts[number:]:
        parent, value = value, getattr(value, name)
    if not isinstance(parent, type) or not inspect.isfunction(value):
        return value, False
    return value, not isinstance(inspect.getattr_static(parent, parts[-1]), staticmethod)


def _is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return True


def parameters_said(signature: str, value: Any) -> Parameters:
    """The parameters of a signature's text; its defaults are evaluated in the object's module."""
    (function,) = ast.parse(f"def {signature}: ...").body
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    names = vars(sys.modules[value.__module__])
    placed = [(arg, "by position only") for arg in given.posonlyargs]
    placed += [(arg, "placed") for arg in given.args]
    defaults = [None] * (len(placed) - len(given.defaults)) + list(given.defaults)
    rows = [
        (arg.arg, kind, _evaluated(default, names))
        for (arg, kind), default in zip(placed, defaults, strict=True)
    ]
    rows += [(arg.arg, "*", REQUIRED) for arg in [given.vararg] if arg]
    named = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    rows += [(arg.arg, "by name", _evaluated(default, names)) for arg, default in named]
    return rows + [(arg.arg, "**", REQUIRED) for arg in [given.kwarg] if arg]


def _evaluated(default: ast.expr | None, names: Mapping[str, Any]) -> Any:
    return REQUIRED if default is None else eval(ast.unparse(default), dict(names))


_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "by position only",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "placed",
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.KEYWORD_ONLY: "by name",
    inspect.Parameter.VAR_KEYWORD: "**",
}


def parameters_had(value: Any, takes_self: bool) -> Parameters:
    """The parameters that the object really has."""
    signature = inspect.signature(value)
    if isinstance(value, type) and list(signature.parameters) == ["args", "kwargs"]:
        signature, takes_self = inspect.signature(value.__init__), True  # NNX hides it
    made: dict[str, Any] = {f.name: f.default_factory for f in _fields(value)}
    rows = []
    for p in list(signature.parameters.values())[takes_self:]:
        default = REQUIRED if p.default is p.empty else p.default
        if p.name in made and made[p.name] is not dataclasses.MISSING:
            default = made[p.name]()
        rows.append((p.name, _KINDS[p.kind], default))
    return rows


def _fields(value: Any) -> tuple[dataclasses.Field, ...]:
    return dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
