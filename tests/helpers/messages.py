"""Messages are asserted by what they name, not by their sentences."""

import re
from typing import Any

import pytest


def naming(*named: Any) -> str:
    """A regular expression of texts with all these words, in any order."""
    return r"(?s)\A" + "".join(f"(?=.*?{_word(str(name))})" for name in named)


def _word(name: str) -> str:
    # "1" is neither in "10" nor in "1.5", and "step" not in "steps".
    before = r"(?<!\w)(?<!\d\.)" if re.match(r"\w", name) else ""
    after = r"(?!\w)(?!\.\d)" if re.search(r"\w\Z", name) else ""
    return before + r"\s+".join(map(re.escape, name.split())) + after


def tells(text: str, *named: Any) -> bool:
    return re.match(naming(*named), text) is not None


def refuses(error: type[BaseException] | tuple[type[BaseException], ...], *named: Any) -> Any:
    """As `pytest.raises`, of a message that names all these."""
    return pytest.raises(error, match=naming(*named))


def warns(kind: type[Warning], *named: Any) -> Any:
    """As `pytest.warns`, of a message that names all these."""
    return pytest.warns(kind, match=naming(*named))
