"""JAX's coordination service, as a board on which the processes of a run leave notes.

The first process runs the service; each process has a client. JAX makes it public only for
barriers over all devices (`jax.experimental.multihost_utils`), which have no time limit.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import jax

_MISSING = "DEADLINE_EXCEEDED"
_CALL_SECONDS = 2.0


class Board(Protocol):
    """Notes by key, of which folders are prefixes; each process can write and read all of them.

    Every method raises `ConnectionError` if the board can't be reached.
    """

    def write(self, key: str, text: bytes) -> None:
        """Writes a note, in place of the one that has this key."""

    def read(self, folder: str) -> dict[str, bytes]:
        """The notes of a folder, by their names in it."""
        raise NotImplementedError

    def wait(self, key: str, seconds: float) -> None:
        """Returns as soon as there is a note with this key, or when the time is over."""

    def erase(self, folder: str) -> None:
        """Deletes the notes of a folder."""


class CoordinationService:
    """The board of the processes that `jax.distributed.initialize` has connected."""

    def write(self, key: str, text: bytes) -> None:
        """See `Board`."""
        try:
            _client().key_value_set_bytes(key, text, allow_overwrite=True)
        except jax.errors.JaxRuntimeError as error:
            raise _lost(error) from error

    def read(self, folder: str) -> dict[str, bytes]:
        """See `Board`."""
        try:
            rows = _client().key_value_dir_get_bytes(f"{folder}/")
        except jax.errors.JaxRuntimeError as error:
            raise _lost(error) from error
        return {key.removeprefix(f"{folder}/"): text for key, text in rows}

    def wait(self, key: str, seconds: float) -> None:
        """See `Board`."""
        try:
            _client().blocking_key_value_get_bytes(key, max(1, round(1000 * seconds)))
        except jax.errors.JaxRuntimeError as error:
            if _MISSING not in str(error):
                raise _lost(error) from error

    def erase(self, folder: str) -> None:
        """See `Board`."""
        try:
            _client().key_value_delete(folder)
        except jax.errors.JaxRuntimeError as error:
            raise _lost(error) from error


class BoundedBoard:
    """A board whose calls end in time, as JAX's own don't if the first process is stopped.

    They are made on a thread that waits in their place, in order. The one that it waits in may
    still be made late: notes are only written anew, or deleted after all have read them.
    """

    def __init__(self, board: Board):
        """Makes a board for one thread's calls.

        Args:
            board: The board that is asked.
        """
        self._board = board
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def write(self, key: str, text: bytes) -> None:
        """See `Board`."""
        self._within(_CALL_SECONDS, lambda: self._board.write(key, text))

    def read(self, folder: str) -> dict[str, bytes]:
        """See `Board`."""
        return self._within(_CALL_SECONDS, lambda: self._board.read(folder))

    def wait(self, key: str, seconds: float) -> None:
        """See `Board`."""
        self._within(seconds + _CALL_SECONDS, lambda: self._board.wait(key, seconds))

    def erase(self, folder: str) -> None:
        """See `Board`."""
        self._within(_CALL_SECONDS, lambda: self._board.erase(folder))

    def _within(self, seconds: float, call: Callable[[], Any]) -> Any:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="messages", daemon=True)
            self._thread.start()
        answer: Future[Any] = Future()
        self._calls.put((answer, call))
        try:
            return answer.result(seconds)
        except TimeoutError:
            answer.cancel()
            raise ConnectionError("JAX's coordination service does not answer") from None

    def _work(self) -> None:
        while True:
            answer, call = self._calls.get()
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(call())
                except BaseException as error:
                    answer.set_exception(error)


def _client():
    # Looked up each time: `jax.distributed.shutdown` drops it.
    from jax._src.distributed import global_state

    if global_state.client is None:
        raise ConnectionError("`jax.distributed` is not initialized, or has been shut down")
    return global_state.client


def _lost(error: Exception) -> ConnectionError:
    return ConnectionError(" ".join(str(error).split())[:200])
