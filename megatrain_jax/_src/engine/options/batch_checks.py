"""Checks of batches: a wrong array is named by its path, before the compiler fails on it."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax._src.common import trees
from megatrain_jax._src.common.sizes import counted

# Arrays of a batch that a note names.
_MOST_NAMED = 8
_FEWER = "mesh=jax.make_mesh(({n},), ('data',), devices=jax.devices()[:{n}])"
_ARRAYS = (np.ndarray, jax.Array)
_SCALAR = "write np.full(n, x) for a number x of n examples, or have loss_fn close over a constant"


def check_batch(
    batch: Any,
    microbatches: int = 1,
    name: str = "batch",
    num_devices: int = 1,
    *,
    of: str = "the batch",
    or_shapes: bool = False,
    needs_rows: bool = False,
    fewer: str = _FEWER,
) -> None:
    """Checks that `batch` is a pytree of arrays that can be cut into microbatches.

    Args:
        batch: A pytree of NumPy or JAX arrays. Their leading axes, with one entry per example, must
            have the same size if the batch is divided; if one has size 1, always, since arrays
            would be broadcast.
        microbatches: Number of equal parts that the leading axis will be cut into.
        name: Name of the batch, for messages.
        num_devices: Number of devices that each of these parts is divided over.
        of: The batch in words, for messages.
        or_shapes: Whether `jax.ShapeDtypeStruct`s are allowed in place of arrays.
        needs_rows: Whether the batch is divided in another way.
        fewer: The argument that chooses `{n}` devices, for a message.

    Raises:
        TypeError: If it is no pytree, or a leaf is no array or holds something a device can't
            compute with.
        ValueError: If there are no leaves, or the leading axes are missing, empty, unequal or not
            divisible by `microbatches` and the number of devices.
    """
    leaves = trees.leaves(name, batch)
    if not leaves:
        kind = "None" if batch is None else f"an empty {type(batch).__name__}"
        raise ValueError(
            f'`{name}` holds no arrays: it is {kind}; pass arrays, such as {{"x": x, "y": y}}'
        )
    for path, leaf in leaves:
        _check_leaf(_name(path, name), leaf, or_shapes)
    is_divided = microbatches > 1 or num_devices > 1 or needs_rows
    for path, leaf in leaves:
        # A graph may have nodes, but no edges.
        if not leaf.shape[0] and (is_divided or not any(x.shape[0] for _, x in leaves)):
            raise ValueError(
                f"{_name(path, name)} has shape {leaf.shape}: there are no examples in it"
            )
    (first_path, first), *others = leaves
    examples = first.shape[0]
    for path, leaf in others:
        if leaf.shape[0] != examples and (is_divided or 1 in (examples, leaf.shape[0])):
            raise ValueError(
                f"the arrays of a batch must agree in their leading axis (the examples), but "
                f"{_name(first_path, name)} has shape {first.shape} and {_name(path, name)} has "
                f"shape {leaf.shape}. Put the examples first, repeat what all of them share with "
                "np.repeat, or have loss_fn close over it. Only one microbatch on one device needs "
                "no rows of examples, as in a padded graph"
            )
    if examples % microbatches:
        raise ValueError(
            f"`microbatches`={microbatches} does not divide the {counted(examples, 'example')} of "
            f"{of}: {_name(first_path, name)} has shape {first.shape}. Use a number that divides "
            "every batch, and leave out a last batch with fewer examples"
        )
    # Each microbatch is divided by itself: every device has as many of its examples.
    if examples // microbatches % num_devices:
        parts = "" if microbatches == 1 else f" in each of `microbatches`={microbatches} parts"
        each = examples // microbatches
        most = max(n for n in range(1, num_devices) if each % n == 0)
        raise ValueError(
            f"the {num_devices} devices can't share the {counted(each, 'example')}{parts} of "
            f"{of} evenly: {_name(first_path, name)} has shape {first.shape}. Use a batch that "
            f"{num_devices * microbatches} divides, or fewer devices: {fewer.format(n=most)}"
        )


def check_like(batch: Any, sample: Any) -> None:
    """Checks that `batch` has the tree structure and the dtypes of `sample`; shapes may differ.

    Both must have passed `check_batch`. Dtypes are compared as JAX will see them: without
    ``jax_enable_x64``, int64 and int32 are the same.

    Raises:
        ValueError: If a path is missing, is new, or has another dtype.
    """
    if others := other_arrays(batch, sample, shapes=False):
        raise ValueError(f"the batch is built differently from the first one: {others}")
    # Equal paths may still have different containers: a tuple where the first batch had a list.
    structure, expected = jax.tree.structure(batch), jax.tree.structure(sample)
    if structure != expected:
        raise ValueError(f"the batch has the structure {structure}, but the first had {expected}")


def other_arrays(batch: Any, sample: Any, *, shapes: bool = True) -> str:
    """A sentence on the arrays that differ from the first batch's; "" if none.

    Args:
        batch: A batch that has passed `check_batch`.
        sample: The first batch, or its shapes.
        shapes: Whether arrays of other shapes differ.
    """
    ours, theirs = (
        {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (batch, sample)
    )
    found = [f"{name} is missing, but is in the first batch" for name in theirs if name not in ours]
    for name, leaf in ours.items():
        if (other := theirs.get(name)) is None:
            found.append(f"{name} is not in the first batch")
            continue
        if shapes and leaf.shape != other.shape:
            found.append(f"{name} has shape {leaf.shape}, and {other.shape} in the first batch")
        if (dtype := _dtype(leaf)) != (wanted := _dtype(other)):
            found.append(f"{name} has dtype {dtype}, and {wanted} in the first batch")
    return "; ".join(found)


@contextlib.contextmanager
def naming_first_batch(batch: Any, microbatches: int) -> Iterator[None]:
    """Adds the first batch's shapes to an error raised while the loss is traced with it.

    The error may be JAX's own, about two shapes in the middle of the model, or the user's.

    Args:
        batch: The batch, or its shapes.
        microbatches: Number of equal parts that it is cut into.
    """
    try:
        yield
    except Exception as error:
        rows = jax.tree_util.tree_leaves_with_path(batch)
        named = [f"{_name(path)} has shape {x.shape} and dtype {x.dtype}" for path, x in rows]
        if len(named) > _MOST_NAMED:
            named[_MOST_NAMED:] = [f"{len(named) - _MOST_NAMED} more arrays"]
        part = "" if microbatches == 1 else f"one of {microbatches} microbatches of "
        error.add_note(
            f"This came with {part}the first batch (`sample_batch`, or the first of `data`): "
            f"{'; '.join(named)}."
        )
        if advice := _advice_on_kind(batch, error):
            error.add_note(advice)
        raise


def _advice_on_kind(batch: Any, error: Exception) -> str | None:
    """Advice on how to read this kind of batch; None if the error seems to have another cause."""
    if isinstance(batch, Mapping):
        # Unpacked like a tuple, a dict gives its keys to the model.
        of_keys = ("to unpack", "'str'", *map(repr, batch))
        if isinstance(error, KeyError) or not any(words in str(error) for words in of_keys):
            return None
        named = " and ".join(f"`batch[{key!r}]`" for key in list(batch)[:2])
        return (
            "The batch is a dict, and unpacking a dict, as in `x, y = batch`, gives its keys: read "
            f"its arrays by name, {named}."
        )
    if not isinstance(error, TypeError):
        return None
    if isinstance(batch, tuple | list) and not hasattr(batch, "_fields"):
        names = "xyz"[: len(batch)] if len(batch) <= 3 else "abc"
        more = ", ..." if len(batch) > 3 else ""
        unpacked = ", ".join(names) + ("," if len(batch) == 1 else more)
        keys = ", ".join(f'"{name}": {name}' for name in names)
        return (
            f"The batch is a {type(batch).__name__}, which the loss gets whole: unpack it, as in "
            f"`{unpacked} = batch`, or pass batches with names, such as {{{keys}{more}}}."
        )
    if jax.tree_util.all_leaves([batch]):
        return (
            "The batch is one array, not a dict of arrays: read it as `batch`, or pass batches "
            'with names, such as {"x": x, "y": y}.'
        )
    return None


def num_rows(batch: Any) -> int | None:
    """The number of examples in a checked batch; None if its arrays have unequal leading axes."""
    numbers = {leaf.shape[0] for leaf in jax.tree.leaves(batch)}
    return numbers.pop() if len(numbers) == 1 else None


def batch_size(batch: Any) -> tuple[int, str]:
    """Says how much work a checked batch is, for the progress bar.

    Returns:
        The size and its unit. An integer array of two axes is taken for token ids (the largest,
        if there are several), and its entries are counted as ``"tokens"``; without one the
        leading axis is counted as ``"examples"``, or the batch as one of ``"batches"`` if its
        arrays have unequal leading axes.
    """
    leaves = jax.tree.leaves(batch)
    tokens = [
        # Labels have one axis, images three or four: integers of two are tokens, as a rule.
        leaf.size
        for leaf in leaves
        if leaf.ndim == 2 and jnp.issubdtype(leaf.dtype, jnp.integer)
    ]
    if any(tokens):
        return max(tokens), "tokens"
    rows = num_rows(batch)
    return (1, "batches") if rows is None else (rows, "examples")


def _check_leaf(name: str, leaf: Any, or_shapes: bool) -> None:
    is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
    if is_shape and not or_shapes:
        raise TypeError(
            f"{name} is a jax.ShapeDtypeStruct, a shape without values; only the `sample_batch` of "
            "`Trainer` and `plan` may hold shapes: pass arrays"
        )
    if not is_shape and not isinstance(leaf, _ARRAYS):
        kind = type(leaf).__name__
        if callable(getattr(leaf, "numpy", None)):
            advice = f"pass `.numpy()` of a {kind}"
        else:
            advice = f"convert a list with np.asarray; {_SCALAR}"
        raise TypeError(
            f"a batch must be a pytree of NumPy or JAX arrays, but {name} is of type {kind}; "
            f"{advice}"
        )
    # Random keys are of extended dtypes.
    known = (np.number, np.bool_, jax.dtypes.extended)
    if not any(jnp.issubdtype(leaf.dtype, kind) for kind in known):
        raise TypeError(
            f"{name} has dtype {leaf.dtype}, which can't go to a device; a batch holds numbers "
            "only (object arrays usually come from lists of unequal lengths: pad them)"
        )
    if not leaf.shape:
        raise ValueError(
            f"{name} is a scalar, but every array of a batch needs a leading axis of examples; "
            f"{_SCALAR}"
        )
    if isinstance(leaf, np.ndarray):
        _check_range(name, leaf)


def _check_range(name: str, leaf: np.ndarray) -> None:
    """Refuses integers that would overflow in the dtype that JAX gives them."""
    dtype = _dtype(leaf)
    if dtype == leaf.dtype or leaf.dtype.kind not in "iu" or not leaf.size:
        return
    limits = np.iinfo(dtype)
    least, most = leaf.min(), leaf.max()
    if least < limits.min or most > limits.max:
        raise ValueError(
            f"{name} of dtype {leaf.dtype} has numbers from {least} to {most}, which don't fit "
            f"{dtype}, as JAX has it without jax_enable_x64: the numbers would change"
        )


def _name(path: tuple[Any, ...], batch: str = "batch") -> str:
    return f"{batch}{jax.tree_util.keystr(path)}"


def _dtype(leaf: Any) -> Any:
    return jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
