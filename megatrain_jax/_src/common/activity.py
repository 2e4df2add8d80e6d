"""What this process is doing, in words, and whether it gets on with it.

The peers of a process show these words when they wait for it, and a run that hangs ends with them.
"""

import contextlib
import threading
from collections.abc import Iterator


class Activity:
    """What a process is doing; its main thread writes it, others read it.

    Attributes:
        doing: The words, such as "drawing batch 7 of `data`", and whether the user's code does it,
            which may be interrupted; ("", False) outside of this library.
        count: A number that grows whenever something has got on.
    """

    def __init__(self):
        """Begins outside of this library."""
        self.doing: tuple[str, bool] = "", False
        self.count = 0


HERE = Activity()


@contextlib.contextmanager
def doing(what: str, *, of_user: bool = False) -> Iterator[None]:
    """Says what the body of a ``with`` statement does.

    Args:
        what: The words, after "it was".
        of_user: Whether the body is the user's code, which may be interrupted.
    """
    before, HERE.doing = HERE.doing, (what, of_user)
    HERE.count += 1
    try:
        yield
    finally:
        HERE.doing = before
        HERE.count += 1


def progressed() -> None:
    """Says that what takes long has got on."""
    HERE.count += 1


# Seconds between two signs of a process whose work may take hours.
_SIGN_SECONDS = 20.0


@contextlib.contextmanager
def getting_on(what: str) -> Iterator[None]:
    """Says what the body does, and keeps saying that it gets on, as peers may wait for hours.

    Args:
        what: See `doing`.
    """
    done = threading.Event()

    def tell() -> None:
        while not done.wait(_SIGN_SECONDS):
            progressed()

    threading.Thread(target=tell, name="activity", daemon=True).start()
    try:
        with doing(what):
            yield
    finally:
        done.set()
