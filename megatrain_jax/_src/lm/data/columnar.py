"""Restores rows of columnar files: removes the nulls that stand for absent fields.

Parquet and Arrow give all objects of a column the same fields, and store a null for each field that
an object lacks. A null in the original data looks the same. Objects that lack fields are common, as
different tools have different arguments, so each null field is treated as absent. Lists, maps and
JSON get no such nulls, and stay unchanged.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow

from megatrain_jax._src.common.outside import parsed_json
from megatrain_jax._src.lm.data.report import NO_JSON, InvalidRow, invalid_utf8, to_fault


def without_filler_nulls(value: Any, kind: Any, is_decoded: bool = False) -> Any:
    """Returns a column's value as it was before the column added fields to it.

    For example, a column stores the rows ``{"city": "Paris"}`` and ``{"a": 1}`` as ``{"city":
    "Paris", "a": None}`` and ``{"city": None, "a": 1}``; this restores them.

    Args:
        value: The value in Python, as returned by `pyarrow`.
        kind: Type of the column in Arrow. With None (unknown), null fields of any object are
            treated as absent.
        is_decoded: Whether JSON, stored as text in a column, is already decoded in `value`.

    Raises:
        InvalidRow: If a JSON column has invalid JSON.
    """
    if value is None:
        return None
    if isinstance(kind, pyarrow.JsonType):
        return value if is_decoded else _decoded(value)
    if isinstance(kind, pyarrow.BaseExtensionType):
        return without_filler_nulls(value, kind.storage_type, is_decoded)
    if kind is not None and pyarrow.types.is_map(kind):
        values = dict(value).items()
        return {
            key: without_filler_nulls(inner, kind.item_type, is_decoded) for key, inner in values
        }
    if isinstance(value, Mapping):
        return {
            name: without_filler_nulls(inner, _field_type(kind, name), is_decoded)
            for name, inner in value.items()
            if inner is not None
        }
    if isinstance(value, np.ndarray | np.generic):  # in cells of pandas
        value = value.tolist()
    if isinstance(value, list):
        item = getattr(kind, "value_type", None)
        return [without_filler_nulls(inner, item, is_decoded) for inner in value]
    return value


def restored_row(
    row: Mapping[str, Any], kind: pyarrow.StructType | None, is_decoded: bool = False
) -> Any:
    """Returns a row, restored, or an `InvalidRow` if it can't be read."""
    try:
        return without_filler_nulls(row, kind, is_decoded)
    except Exception as error:
        return to_fault(error)


def check_batch(batch: pyarrow.RecordBatch) -> None:
    """Checks a batch whose buffers come from a file as they are; invalid UTF-8 is left to rows.

    Raises:
        pyarrow.ArrowInvalid: If values point outside of the buffers: reading them would end the
            process.
    """
    try:
        batch.validate(full=True)
    except pyarrow.ArrowInvalid:
        whole = batch.to_struct_array()
        whole.view(_without_text(whole.type)).validate(full=True)


def _without_text(kind: Any) -> Any:
    """A type in Arrow with bytes in place of texts."""
    if pyarrow.types.is_string(kind):
        return pyarrow.binary()
    if pyarrow.types.is_large_string(kind):
        return pyarrow.large_binary()
    if pyarrow.types.is_struct(kind):
        return pyarrow.struct([field.with_type(_without_text(field.type)) for field in kind])
    for is_kind, make in (
        (pyarrow.types.is_list, pyarrow.list_),
        (pyarrow.types.is_large_list, pyarrow.large_list),
    ):
        if is_kind(kind):
            return make(kind.value_field.with_type(_without_text(kind.value_type)))
    return kind


def batch_rows(batch: pyarrow.RecordBatch) -> Iterator[Any]:
    """Yields the rows of a batch, restored, and faults in place of those that can't be read."""
    kind = pyarrow.struct(batch.schema)
    try:
        rows = batch.to_pylist()
    except Exception:
        # Only some rows are faulty, so rows are read one by one.
        for index in range(batch.num_rows):
            try:
                row = batch.slice(index, 1).to_pylist()[0]
            except UnicodeDecodeError as caught:
                yield invalid_utf8(caught.object[caught.start])
            except Exception as caught:  # such as a time that Python can't represent
                yield to_fault(caught)
            else:
                yield restored_row(row, kind)
        return
    for row in rows:
        yield restored_row(row, kind)


def table_rows(name: str, given: Any) -> Iterator[Any] | None:
    """The rows of a table in memory, of pandas, Arrow, Polars and others; None if it is no table.

    Args:
        name: Name of the argument.
        given: Its value.

    Raises:
        ValueError: If two of its columns have the same name.
    """
    if is_columnar(given):
        return None
    # These libraries may not be installed. Arrow would convert cells of pandas, such as whole
    # numbers beside others, so those are taken as they are.
    if hasattr(given, "itertuples") and hasattr(given, "columns"):
        names = [str(column) for column in given.columns]
        if len(set(names)) < len(names):
            raise ValueError(f"`{name}` has two columns of the same name: {names}")
        return _frame_rows(names, given)
    if hasattr(given, "__arrow_c_stream__"):
        batches = pyarrow.RecordBatchReader.from_stream(given)
        return (row for batch in batches for row in batch_rows(batch))
    return None


def _frame_rows(names: list[str], frame: Any) -> Iterator[Any]:
    for cells in frame.itertuples(index=False, name=None):
        row = {column: cell for column, cell in zip(names, cells, strict=True) if not _misses(cell)}
        yield without_filler_nulls(row, None)


def _misses(cell: Any) -> bool:
    """Whether a cell of pandas is empty: None, NaN, NA or NaT."""
    is_nan = isinstance(cell, float) and cell != cell
    return cell is None or is_nan or type(cell).__name__ in ("NAType", "NaTType")


def is_columnar(given: Any) -> bool:
    """Whether rows are given as a dataset of the library `datasets`, which stores columns."""
    # Identified by module name, because the library may not be installed.
    return any(kind.__module__.partition(".")[0] == "datasets" for kind in type(given).__mro__)


def restored_rows(dataset: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    """Yields the rows of a dataset of the library `datasets`, restored; images stay encoded."""
    dataset = _with_encoded_images(dataset)
    features = getattr(dataset, "features", None)
    kind = None if features is None else pyarrow.struct(features.arrow_schema)
    for row in dataset:
        yield restored_row(row, kind, is_decoded=True)


def _with_encoded_images(dataset: Any) -> Any:
    """The dataset with images as bytes or paths, because decoded ones would fill the memory."""
    for name, feature in (getattr(dataset, "features", None) or {}).items():
        encoded = _encoded(feature)
        if encoded is not feature:
            dataset = dataset.cast_column(name, encoded)
    return dataset


def _encoded(feature: Any) -> Any:
    """A feature of `datasets` in which no image is decoded; the same object if it has none."""
    if type(feature).__name__ == "Image" and getattr(feature, "decode", False):
        return type(feature)(decode=False)
    if isinstance(feature, dict):
        inner = {name: _encoded(value) for name, value in feature.items()}
        return inner if any(inner[name] is not feature[name] for name in inner) else feature
    if isinstance(feature, list):
        inner = [_encoded(value) for value in feature]
        return inner if any(a is not b for a, b in zip(inner, feature, strict=True)) else feature
    if (item := getattr(feature, "feature", None)) is not None:
        inner = _encoded(item)
        return feature if inner is item else type(feature)(inner)
    return feature


def _decoded(text: str) -> Any:
    try:
        return parsed_json(text)
    except ValueError as caught:
        raise InvalidRow(NO_JSON, f"in a column of JSON: {caught}") from None


def _field_type(kind: Any, name: str) -> Any:
    # A dataset may have more fields than its features list.
    if kind is None or not pyarrow.types.is_struct(kind) or kind.get_field_index(name) < 0:
        return None
    return kind.field(name).type
