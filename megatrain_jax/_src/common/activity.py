"""A process's current activity in words, and a count of its progress.

A process that waits for this one prints the words, and so does the error of a run that hangs.
"""

import contextlib
import threading
import time
from collections.abc import Iterator


class Activity:
    """The current activity of a process: its main thread writes it, further threads read it.

    Attributes:
        doing: The activity, such as "drawing batch 7 of `data`", and whether it is the user's code
            and may be interrupted; ("", False) outside of this library.
        count: A number that grows with each sign of progress.
    """

    def __init__(self):
        """Begins outside of this library."""
        self.doing: tuple[str, bool] = "", False
        self.count = 0
        self._taker: threading.Thread | None = None
        self._lock = threading.RLock()

    def change(self, doing: tuple[str, bool]) -> tuple[str, bool]:
        """Begins another activity, and returns the one before."""
        with self._lock:
            if self._taker in (None, threading.current_thread()):
                before, self.doing = self.doing, doing
                self.count += 1
                return before
        while True:
            with contextlib.suppress(BaseException):  # a signal raises nothing here
                time.sleep(3600)

    def take(self) -> bool:
        """Lets this thread go on with the process's work, if the main thread is in the user's code.

        The main thread never comes back from there: it waits for the end of the process.
        """
        with self._lock:
            if self.doing[1]:
                self._taker = threading.current_thread()
            return self.doing[1]


HERE = Activity()


@contextlib.contextmanager
def doing(activity: str, *, of_user: bool = False) -> Iterator[None]:
    """Sets the activity during the body of a ``with`` statement.

    Args:
        activity: The activity in words, to follow "it was".
        of_user: Whether the body is the user's code and may be interrupted.
    """
    before = HERE.change((activity, of_user))
    try:
        yield
    finally:
        HERE.change(before)


def progressed() -> None:
    """Counts progress of a long activity."""
    HERE.count += 1


# Seconds between two signs of progress.
_SIGN_SECONDS = 20.0


@contextlib.contextmanager
def getting_on(activity: str) -> Iterator[None]:
    """Sets the activity of a body that may take hours, and counts progress until it ends.

    Args:
        activity: See `doing`.
    """
    done = threading.Event()

    def tell() -> None:
        while not done.wait(_SIGN_SECONDS):
            progressed()

    threading.Thread(target=tell, name="activity", daemon=True).start()
    try:
        with doing(activity):
            yield
    finally:
        done.set()
