"""Names in Keras, Lightning, PyTorch, Transformers, TRL, PEFT and vLLM, and ours for the same.

All hints come from the tables in `other_libraries.json`: of functions, records, attributes, modules
and the command. Names in a row are separated by spaces:

    same        this library's arguments, options of the command and public names: names elsewhere
    dtypes      names of dtypes, among them those of mixed precision
    takers      which functions of this library take an option that the called one doesn't have
    modules     public names of the modules, which people look for in the package and elsewhere
    ways        texts that several tables have, as `$remat`
    options     what has no option: how a call reaches the same, and the names of it
    attributes  attributes that trainers, results and models have elsewhere
    public      public names, there or in other libraries, that have none here
    command     options that the command doesn't have

A name of several of this library's options means the first one that the called function has.
"""

import json
from pathlib import Path
from typing import Any

RUN_OPTIONS = (
    "params microbatches waves precision device_budget host_budget trainable eval_loss_fn "
    "on_nonfinite max_skipped seed hardware mesh"
).split()
LOOP_OPTIONS = (
    "steps epochs eval_data eval_every checkpoint_dir checkpoint_every keep callbacks progress"
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
