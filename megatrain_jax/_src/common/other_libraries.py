"""Names in Keras, Lightning, PyTorch, Transformers, TRL, PEFT and vLLM, and ours for the same.

All hints come from the tables in `other_libraries.json`: of functions, records, attributes, modules
and the command. Names in a row are separated by spaces:

    same        this library's arguments, options of the command and public names: names elsewhere
    dtypes      names of dtypes, among them those of mixed precision
    takers      functions of this library with their options, for hints in the other functions
    modules     public names of the modules, often looked for in the package itself
    ways        texts of several tables, as `$remat`
    options     ways without an option here, with their options elsewhere
    attributes  attributes of trainers, results and models elsewhere
    public      public names of other libraries, and old ones, without an equal here
    command     options of other commands without an equal here

A name of several of this library's options means the first one that the called function has.
"""

import json
from pathlib import Path
from typing import Any

RUN_OPTIONS = (
    "params microbatches waves precision device_budget host_budget disk_dir disk_budget "
    "trainable eval_loss_fn on_nonfinite ema_decay max_skipped seed hardware mesh "
    "state_per_process"
).split()
LOOP_OPTIONS = (
    "steps epochs eval_data eval_every eval_params checkpoint_dir checkpoint_every keep "
    "callbacks stall_seconds progress"
).split()
_TABLES: dict[str, Any] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
MEANT: dict[str, list[str]] = {}
for _row in _TABLES["same"].values():
    for _ours, _theirs in _row.items():
        for _name in _theirs.split():
            MEANT.setdefault(_name, []).append(_ours)
DTYPES = {name: ours for ours, row in _TABLES["dtypes"].items() for name in row.split()}
TAKERS = {
    "`Trainer` and `fit` take": RUN_OPTIONS,
    "`fit` and `train` take": LOOP_OPTIONS,
    **{words: options.split() for words, options in _TABLES["takers"].items()},
}
MODULES: dict[str, str] = _TABLES["modules"]


def _ways(table: str) -> dict[str, str]:
    """Each name's way in a table."""
    shared = {f"${name}": way for name, way in _TABLES["ways"].items()}
    rows = _TABLES[table].items()
    return {name: shared.get(way, way) for way, names in rows for name in names.split()}


SENTENCES, ATTRIBUTES, COMMAND = _ways("options"), _ways("attributes"), _ways("command")
PUBLIC = _ways("public") | {
    name: f'cards go by name: hardware="{shown}", or megatrain_jax.card("{shown}")'
    for name in _TABLES["cards of version 0.1"].split()
    for shown in [name.replace("_", " ")]
}
