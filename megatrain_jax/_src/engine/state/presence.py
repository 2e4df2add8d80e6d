"""Signs of life of a run's processes: which are there, what they do, and which can't be waited for.

Each process writes a row every second, from a thread that works while the main thread
computes, compiles or hangs, and reads the rows of its peers. A verdict is a sentence that says why
a process can't be waited for any longer.

Example: process 1 is stopped while it draws a batch, and its peers wait for it:

    0 s    its last row: beat 41, "drawing batch 7 of `data`"
    30 s   the verdict: "process 1 on node1 has been silent for 30 s ... It was drawing batch 7"

After a signal, when a run has to end within the ten seconds that some schedulers grant, 5 s without
a row are enough; so are 7 s in the user's code, as in a read that nothing interrupts.
"""

import dataclasses
import json
import socket
import time
from collections.abc import Mapping

from megatrain_jax._src.common.activity import HERE
from megatrain_jax._src.engine.state.coordination import Board

EVERY_SECONDS = 1.0
# JAX's own heartbeats end a process after 100 seconds, and a broken connection does after 58.
SILENT_SECONDS, SILENT_SECONDS_AT_END = 30.0, 5.0
# Before, the peer itself interrupts the user's code.
_USERS_SECONDS_AT_END = 7.0
# A wait in JAX for a peer that has left.
_STUCK_SECONDS = 10.0
_FOLDER = "megatrain/presence"


class Clock:
    """Seconds in which this process was able to work, so that a pause is nobody's silence.

    Attributes:
        seconds: The seconds so far, as of the last `tick`.
    """

    def __init__(self):
        """Begins at zero."""
        self.seconds, self._last = 0.0, time.monotonic()

    def tick(self) -> None:
        """Counts the time since the last call, at most a second."""
        now = time.monotonic()
        self.seconds += min(now - self._last, EVERY_SECONDS)
        self._last = now


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sign:
    """A process's row.

    Attributes:
        beat: A number that grows with each row.
        host: The host's name.
        doing: What it is doing; "" outside of this library.
        of_user: Whether the user's code does it.
        count: A number that grows as the process gets on.
        ending: The reason why it wants all processes to end soon, such as "SIGTERM"; "" for none.
        lost: The error after which it has no state left to save; "" while it has.
        gone: Whether it has left the run for good.
        why: The reason why it has left, if it could not wait for a peer or its own main thread.
        written: Number of the last checkpoint of which it has written its part.
        failed: Whether it has left after an error, or without its main thread, and takes no part in
            JAX's end.
    """

    beat: int = 0
    host: str = ""
    doing: str = ""
    of_user: bool = False
    count: int = 0
    ending: str = ""
    lost: str = ""
    gone: bool = False
    why: str = ""
    written: int = 0
    failed: bool = False


class Presence:
    """This process's row, and what it knows of its peers.

    Attributes:
        ending: See `Sign`; of this process.
        lost: See `Sign`; of this process.
        gone: See `Sign`; of this process.
        why: See `Sign`; of this process.
        written: See `Sign`; of this process.
        failed: See `Sign`; of this process.
        waits: Whether the main thread waits for its peers in Python, and so notices a verdict.
        has_lost_service: Whether JAX's coordination service, and so the first process, is gone.
        signs: The newest row of each process; None of one that has not begun a run.
    """

    def __init__(self, count: int, index: int, board: Board, clock: Clock | None = None):
        """Begins without signs of others.

        Args:
            count: Number of processes.
            index: Number of this one.
            board: The board for the rows.
            clock: The clock; None for a new one.
        """
        self.clock = clock or Clock()
        self.ending = self.lost = self.why = ""
        self.written = 0
        self.gone = self.failed = self.waits = self.has_lost_service = False
        self.signs: list[Sign | None] = [None] * count
        self._index, self._board, self._beat = index, board, 0
        now = self.clock.seconds
        self._heard = self._moved = self._moved_here = now
        # When the row of each process, what it does, and its last error have changed.
        self._changed, self._turned, self._failed = ([now] * count for _ in range(3))
        self._began_ending: float | None = None
        self._count_here = HERE.count

    def exchange(self) -> None:
        """Writes this process's row, and reads those of its peers.

        Raises:
            ConnectionError: If the board can't be reached.
        """
        self._beat += 1
        what, of_user = HERE.doing
        sign = Sign(
            beat=self._beat,
            host=socket.gethostname(),
            doing=what,
            of_user=of_user,
            count=HERE.count,
            ending=self.ending,
            lost=self.lost,
            gone=self.gone,
            why=self.why,
            written=self.written,
            failed=self.failed,
        )
        text = json.dumps(dataclasses.asdict(sign)).encode()
        self._board.write(f"{_FOLDER}/{self._index}", text)
        self._take(self._board.read(_FOLDER))
        self._heard = self.clock.seconds

    def _take(self, rows: Mapping[str, bytes]) -> None:
        now = self.clock.seconds
        for name, text in rows.items():
            i, new = int(name), Sign(**json.loads(text))
            old, self.signs[i] = self.signs[i], new
            if old is None or new.beat != old.beat:
                self._changed[i] = now
            if old is None or (new.doing, new.count) != (old.doing, old.count):
                self._turned[i] = self._moved = now
            if new.lost and (old is None or not old.lost):
                self._failed[i] = now

    def look(self) -> None:
        """Notices whether this process gets on, and whether the run is ending; call it often."""
        self.clock.tick()
        if HERE.count != self._count_here:
            self._count_here = HERE.count
            self._moved = self._moved_here = self.clock.seconds
        if self.asked_to_end:
            self._began_ending = self._began_ending or self.clock.seconds
        else:
            self._began_ending = None

    @property
    def asked_to_end(self) -> str:
        """The reason why the run ends soon, of this process or another one; "" if it goes on."""
        others = (sign.ending for sign in self.signs if sign is not None and not sign.gone)
        return self.ending or next(filter(None, others), "")

    @property
    def idle_seconds(self) -> float:
        """Seconds since any process has got on."""
        return self.clock.seconds - self._moved

    @property
    def has_peers(self) -> bool:
        """Whether any peer is in a run and will leave it: it is neither silent nor can't end."""
        now = self.clock.seconds
        return any(
            not sign.gone
            and now - self._changed[i] < SILENT_SECONDS_AT_END
            and not self._does_not_end(i, sign)
            for i, sign in enumerate(self.signs)
            if sign is not None and i != self._index
        )

    def have_written(self, number: int) -> bool:
        """Whether all processes have written their parts of a checkpoint."""
        return all(sign is not None and sign.written >= number for sign in self.signs)

    @property
    def is_in_charge(self) -> bool:
        """Whether this is the first of the processes that are neither gone nor silent."""
        return not any(
            sign is not None
            and not (sign.gone or sign.lost)
            and not (i == 0 and self.has_lost_service)
            and self._heard - self._changed[i] < SILENT_SECONDS_AT_END
            and not self._does_not_end(i, sign)
            for i, sign in enumerate(self.signs[: self._index])
        )

    def _does_not_end(self, index: int, sign: Sign) -> bool:
        """Whether a peer is in the user's code for too long, although the run has to end."""
        if not sign.of_user or (began := self._began_ending) is None:
            return False
        return self._heard - max(self._turned[index], began) > _USERS_SECONDS_AT_END

    @property
    def most_silent(self) -> int:
        """The peer whose newest sign of life is the oldest."""
        peers = [i for i in range(len(self.signs)) if i != self._index]
        return min(peers, key=self._changed.__getitem__)

    @property
    def failures(self) -> str:
        """The peers that have failed, in words with their reasons; "" if there are none."""
        rows = [(i, s) for i, s in enumerate(self.signs) if s and s.failed and i != self._index]
        return "; ".join(
            f"{self.named(i)} has ended{f': {s.why}' if s.why else ' with an error'}"
            for i, s in rows
        )

    def verdict(self) -> str:
        """Why this process can't wait for one of its peers any longer; "" if it can."""
        now, began = self.clock.seconds, self._began_ending
        most = SILENT_SECONDS if began is None else SILENT_SECONDS_AT_END
        if now - self._heard > most:
            self.has_lost_service = True
            first = self.named(0) if self._index else "this process"
            return (
                f"JAX's coordination service, which {first} runs, has not answered for "
                f"{now - self._heard:.0f} s: that process, its host or the network is gone"
            )
        for i, sign in enumerate(self.signs):
            if i == self._index or sign is None:
                continue
            if sign.gone or sign.lost:
                is_stuck = HERE.doing[0] and not HERE.doing[1] and not self.waits
                since = max(self._moved_here, self._changed[i] if sign.gone else self._failed[i])
                if is_stuck and now - since > _STUCK_SECONDS:
                    why = (sign.lost or sign.why).rstrip(".")
                    return f"{self.named(i)} has ended{why and ': '}{why}"
            # What came after the service was heard last is not known.
            elif (silent := self._heard - self._changed[i]) > most:
                return (
                    f"{self.named(i)} has been silent for {silent:.0f} s: it is "
                    f"killed or stopped, or its host or network is gone. {self.doing(i)}"
                )
            elif self._does_not_end(i, sign):
                return f"{self.named(i)} does not end after {self.asked_to_end}. {self.doing(i)}"
        return ""

    def named(self, index: int) -> str:
        """A process in words, with its host."""
        sign = self.signs[index]
        return f"process {index}" + ("" if sign is None else f" on {sign.host}")

    def doing(self, index: int) -> str:
        """What a process was doing, as a sentence."""
        sign = self.signs[index]
        if sign is None:
            return "It has not begun a run"
        return f"It was {sign.doing}" if sign.doing else "It was not in a call of this library"
