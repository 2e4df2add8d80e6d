"""Shows every option of a function on the site, with its type and default, as `help` does.

`fit` and others take the fields of records as `**options`; the decorator `shows` names the records.
"""

from collections.abc import Iterator
from typing import Any

import griffe

_BY_NAME = griffe.ParameterKind.keyword_only


class ShownOptions(griffe.Extension):
    """Puts the fields of the records in a `shows` decorator in place of `**options`."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Changes the parameters of a function with that decorator."""
        for decorator in func.decorators:
            call = decorator.value
            if isinstance(call, griffe.ExprCall) and call.canonical_path.endswith(".shows"):
                own = [p for p in func.parameters if p.kind is not griffe.ParameterKind.var_keyword]
                # In the order of `__signature__`: options come before the function's own arguments
                # by name.
                placed = [p for p in own if p.kind is not _BY_NAME]
                options = [option for record in call.arguments for option in _options(func, record)]
                func.parameters = griffe.Parameters(*placed, *options, *own[len(placed) :])


def _options(func: griffe.Function, record: Any) -> Iterator[griffe.Parameter]:
    """The fields of a record as parameters."""
    assert isinstance(record, griffe.Expr)
    for field in func.modules_collection[record.canonical_path].attributes.values():
        # Griffe calls properties attributes, too.
        if "property" not in field.labels:
            yield griffe.Parameter(
                field.name, annotation=field.annotation, kind=_BY_NAME, default=field.value
            )
