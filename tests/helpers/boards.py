"""A board in this process's memory, with peers that answer at once or never."""

import json
from typing import Any

from megatrain_jax._src.engine.state.presence import Clock, Presence
from megatrain_jax._src.engine.state.processes import Processes

MESSAGES, PRESENCE = "megatrain/messages/", "megatrain/presence/"


class FakeClock(Clock):
    """A clock that stands still; tests write `seconds`."""

    def tick(self) -> None:
        """Counts nothing."""


class FakeBoard:
    """The notes of several processes.

    Attributes:
        notes: All notes by key.
        answers: By number of a peer, the message that it sends in every exchange, or a function
            that makes it of ours.
        is_lost: Whether it can't be reached.
    """

    def __init__(self, answers: dict[int, Any] | None = None):
        """Makes an empty board."""
        self.notes: dict[str, bytes] = {}
        self.answers = answers or {}
        self.is_lost, self._waits = False, 0

    def write(self, key: str, text: bytes) -> None:
        """Writes a note, and lets the peers answer."""
        self._reach()
        self.notes[key] = text
        folder, _, _ = key.rpartition("/")
        if key.startswith(MESSAGES):
            for i, answer in self.answers.items():
                message = answer(json.loads(text)) if callable(answer) else answer
                self.notes[f"{folder}/{i}"] = json.dumps(message).encode()

    def read(self, folder: str) -> dict[str, bytes]:
        """The notes of a folder."""
        self._reach()
        begin = f"{folder}/"
        return {k.removeprefix(begin): v for k, v in self.notes.items() if k.startswith(begin)}

    def wait(self, key: str, seconds: float) -> None:
        """Returns at once, a few times."""
        self._reach()
        if key.startswith(MESSAGES):
            assert seconds <= 0.5, "a wait is interrupted, to look for signals and verdicts"
        self._waits += 1
        assert self._waits < 10, f"nobody writes {key}"

    def erase(self, folder: str) -> None:
        """Deletes the notes of a folder."""
        self._reach()
        self.notes = {k: v for k, v in self.notes.items() if not k.startswith(f"{folder}/")}

    def show(self, index: int, **sign: Any) -> None:
        """Writes a peer's sign of life."""
        text = json.dumps({"host": f"node{index}", **sign}).encode()
        self.notes[f"{PRESENCE}{index}"] = text

    def _reach(self) -> None:
        if self.is_lost:
            raise ConnectionError("the board is lost")


def processes_of(board: FakeBoard, count: int = 2, index: int = 0) -> Processes:
    """One of several processes, without threads, whose clock stands still."""
    processes = Processes(count, index, board)
    present(processes).clock = FakeClock()
    return processes


def present(processes: Processes) -> Presence:
    """What a process knows of its peers."""
    assert processes.presence is not None
    return processes.presence


def look(processes: Processes, seconds: float, *, heard: bool = True) -> str:
    """What a process finds after some seconds, with or without its peers' newest signs."""
    presence = present(processes)
    presence.clock.seconds += seconds
    if heard:
        presence.exchange()
    presence.look()
    return presence.verdict()
