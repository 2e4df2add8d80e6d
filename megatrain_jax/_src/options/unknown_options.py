"""The error for an unknown keyword, with the intended option or the function that takes it."""

from collections.abc import Iterable, Mapping

from megatrain_jax._src.common.suggestions import did_you_mean

# Names in Keras, Lightning, Transformers and Flax's examples for options of this library.
_ELSEWHERE = {
    "steps": "max_steps num_steps total_steps train_steps num_train_steps max_iters iterations",
    "epochs": "num_epochs max_epochs n_epochs num_train_epochs nb_epoch",
    "microbatches": "gradient_accumulation_steps accumulate_grad_batches grad_accum_steps "
    "gradient_accumulation accumulation_steps num_microbatches",
    "eval_data": "val_data validation_data eval_dataset val_dataset eval_dataloader "
    "val_dataloader val_dataloaders",
    "eval_every": "eval_steps eval_interval",
    "checkpoint_dir": "output_dir save_dir ckpt_dir default_root_dir checkpoint_path",
    "checkpoint_every": "save_steps save_every save_interval checkpoint_interval",
    "keep": "save_total_limit max_to_keep",
    "resume": "resume_from_checkpoint",
    "progress": "verbose progress_bar enable_progress_bar show_progress",
    "precision": "dtype mixed_precision compute_dtype bf16",
    "seed": "random_seed rng rngs key",
    "hardware": "gpu card",
    "device_budget": "device_memory gpu_memory gpu_budget",
    "host_budget": "host_memory cpu_memory host_gib",
    "num_gpus": "gpus n_gpus num_devices devices",
    "mesh": "gpus n_gpus num_gpus num_devices devices",
}
_MEANT: dict[str, list[str]] = {}
for _option, _names in _ELSEWHERE.items():
    for _name in _names.split():
        _MEANT.setdefault(_name, []).append(_option)

_OPTIMIZER = "the optimizer has it, as in optax.adamw(1e-3, weight_decay=0.1)"
_CLIPPING = "the optimizer clips: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))"
_MESH = 'write mesh=jax.make_mesh((n,), ("data",)) for n GPUs'
_NO_OPTION = {
    **dict.fromkeys(("lr", "learning_rate", "weight_decay", "momentum"), _OPTIMIZER),
    **dict.fromkeys(("max_grad_norm", "gradient_clip_val", "clip"), _CLIPPING),
    "metrics": 'loss_fn returns them, as in (loss, {"accuracy": accuracy})',
}


def unknown_option(
    function: str, name: str, allowed: Iterable[str], takers: Mapping[str, str]
) -> str:
    """The message for a keyword that a function doesn't take.

    Args:
        function: The function's name.
        name: The keyword.
        allowed: The keywords that the function takes.
        takers: The functions that take an option, in words, by the option's name.

    Returns:
        Python's own sentence, followed by a suggestion if there is one.
    """
    hint = _hint(name, list(allowed), takers)
    return f"{function}() got an unexpected keyword argument {name!r}{hint}"


def _hint(name: str, allowed: list[str], takers: Mapping[str, str]) -> str:
    if name in _NO_OPTION:
        return f"; {_NO_OPTION[name]}"
    if name in ("batch_size", "per_device_train_batch_size"):
        batches = "batches come from `data`" if "data" in allowed else "`sample_batch` has it"
        return f"; {batches}: its arrays' first axis is the number of examples"
    meant = _MEANT.get(name, [])
    for option in meant:
        if option in allowed:
            more = f" ({_MESH})" if option == "mesh" else ""
            return f"; did you mean `{option}`{more}?"
    for option in (name, *meant):
        if option in takers:
            return f"; {takers[option]} `{option}`"
    return did_you_mean(name, allowed)
