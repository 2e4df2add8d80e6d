"""Shows every option of a function on the site, with its type and default, as `help` does.

`fit` and others take the fields of records as `**options`; the decorator `shows` names the records.
"""

from typing import Any

import griffe


class ShownOptions(griffe.Extension):
    """Puts the fields of the records in a `shows` decorator in place of `**options`."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Changes the parameters of a function with that decorator."""
        for decorator in func.decorators:
            call = decorator.value
            if isinstance(call, griffe.ExprCall) and call.canonical_path.endswith(".shows"):
                options = [p for p in func.parameters if p.kind is griffe.ParameterKind.var_keyword]
                for parameter in options:
                    del func.parameters[parameter.name]
                for record in call.arguments:
                    assert isinstance(record, griffe.Expr)
                    for field in func.modules_collection[record.canonical_path].attributes.values():
                        func.parameters.add(
                            griffe.Parameter(
                                field.name,
                                annotation=field.annotation,
                                kind=griffe.ParameterKind.keyword_only,
                                default=field.value,
                            )
                        )
