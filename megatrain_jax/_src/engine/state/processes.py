"""The processes that share a run, and the short messages that synchronise them.

All processes run the same script, and each step, evaluation and checkpoint needs all of them.
Before each of these points, every process leaves its position for its peers on JAX's coordination
service. A process that has to end, after a signal or an error that its peers can't see, leaves that
instead. This happens in parallel with the devices' computation. No wait is without a limit; see
`presence.py`.

Example: in a run of two processes, the second one's data fails after step 3.

    process 0                           process 1
    gather("step 3", ...)               gather("step 3", ...)       both go on
    its next batch is drawn             its data raises OSError
    gather("the end of data", ...)      leave("OSError: ...")
    raises PeerEndedError               goes on to save step 3
    goes on to save step 3
"""

import atexit
import contextlib
import hashlib
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from megatrain_jax._src.common.activity import HERE, doing
from megatrain_jax._src.common.host_memory import memory_owner
from megatrain_jax._src.common.progress import tqdm
from megatrain_jax._src.engine.state.aborts import end, explain_aborts
from megatrain_jax._src.engine.state.coordination import Board, BoundedBoard
from megatrain_jax._src.engine.state.presence import EVERY_SECONDS, Presence

_FOLDER = "megatrain/messages"
# Messages that are deleted together, so that the service's memory doesn't grow with the steps.
_BLOCK = 32
# A wait for a peer is interrupted this often, to look for signals and verdicts.
_SHORTEST_WAIT, _LONGEST_WAIT = 0.05, 0.5
_LOOK_SECONDS = 0.5
# Seconds of a wait after which a line says for whom.
_TOLD_AFTER = 60.0
# After a verdict, the main thread has so long to notice it before the process is ended.
_SECONDS_TO_NOTICE, _SECONDS_TO_NOTICE_AT_END = 8.0, 2.0
# The first process, whose end ends JAX's coordination service, waits so long for its peers' end.
_SECONDS_FOR_PEERS = 5.0
# The last sign of life may take so long.
_LAST_SIGN_SECONDS = 2.0
# A peer that is late by this much more than `patience` is not waited for: before, its own watch
# interrupts it, and it leaves with its reason.
_LATE_SECONDS = 15.0
PATIENCE_SECONDS = 600.0
# Characters of a value that a message may show, and of an error; and values that it lists.
_SHORT, _LONGEST_ERROR, _MOST_TOLD = 60, 300, 8
_HASHED = "#"


class PeerEndedError(RuntimeError):
    """Raised when another process of the run has ended or can't be reached.

    Attributes:
        signal: Name of the signal that ended that process, such as "SIGTERM", or "StopTraining";
            None after an error.
    """

    def __init__(self, message: str, signal: str | None = None):
        """Makes the error of a process that ended by a signal or, without one, by an error."""
        super().__init__(message)
        self.signal = signal


class Processes:
    """The processes of a run; with a single process, all methods return at once.

    Attributes:
        count: Number of processes.
        index: Number of this process, from 0.
        num_here: Number of processes on this host.
        patience: Seconds without any progress in any process, after which a wait for one ends in an
            error; None for no limit.
        status: The exit status if the peers can't be reached at this process's end.
        saved: A sentence about the newest checkpoint, for the message of such an end.
        waited: Seconds that this process has waited for its peers so far.
        num_saves: Number of checkpoints that were begun, the same in each process.
        is_alone: Whether this process goes on without its peers, which can't be reached.
    """

    def __init__(self, count: int = 1, index: int = 0, board: Board | None = None):
        """Makes the record of a run's processes.

        Args:
            count: Number of processes.
            index: Number of this one.
            board: The board on which several processes leave their messages.
        """
        self.count, self.index, self.num_here = count, index, 1
        self.patience: float | None = PATIENCE_SECONDS
        self.status, self.saved, self.waited = 1, "", 0.0
        self.num_saves, self.is_alone = 0, False
        self._sent, self._oldest = 0, 0  # messages; the block of the oldest one that is there
        self.presence = None if board is None else Presence(count, index, board)
        # Of several processes; a single one uses neither.
        self._board, self._peers = BoundedBoard(cast(Board, board)), cast(Presence, self.presence)
        self._unreachable: str | None = None
        self._since, self._has_noticed, self._is_held = 0.0, False, False
        self._changed, self._is_over = threading.Event(), False
        self._signs = threading.Thread(target=self._show_signs, name="signs of life", daemon=True)

    def connect(self) -> None:
        """Begins to show signs of life, and finds the hosts; every process has to call this."""
        # JAX's preemption service takes SIGTERM, and would leave this process running.
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._signs.start()
        threading.Thread(target=self._look, name="verdicts", daemon=True).start()
        atexit.register(self._leave_for_good)
        explain_aborts(self._explained_abort)
        here = memory_owner()
        self.num_here = self.gather("the first run of several processes", here).count(here)

    @property
    def is_first(self) -> bool:
        """Whether this is the process that prints, and writes the files that exist once."""
        return self.index == 0 or self.is_alone

    @property
    def unreachable(self) -> str | None:
        """The reason why the peers can't be reached any more; None while they can."""
        return self._unreachable

    def gather(self, where: str, value: Any = None) -> list[Any]:
        """Waits until all processes reach this point, and returns their values in order.

        Args:
            where: Name of the point of the run that all processes have to reach.
            value: A JSON value.

        Raises:
            PeerEndedError: If another process has left, or can't be reached or waited for.
            RuntimeError: If another process is at another point.
        """
        if self.count == 1 or self.is_alone:
            return [value] * self.count
        rows = self._exchange({"where": where, "value": value})
        for i, row in enumerate(rows):
            if "left" in row:
                raise PeerEndedError(f"process {i} has ended: {row['left']}", row["signal"])
        other = next((i for i, row in enumerate(rows) if row["where"] != where), None)
        if other is not None:
            raise RuntimeError(
                f"processes are at different points of the run: {self.index} at {where}, {other} "
                f"at {rows[other]['where']}. Each has to run the same script, with the same "
                "arguments."
            )
        return [row["value"] for row in rows]

    def agree(self, where: str, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Checks that facts are the same in all processes.

        Args:
            where: See `gather`.
            facts: Returns values by name; different values must have different `repr`s. Not called
                in a run of one process.

        Raises:
            ValueError: If values differ; lists their names, with those that are short.
        """
        if self.count == 1:
            return
        digests = {name: _digest(value) for name, value in facts().items()}
        first, *others = self.gather(where, digests)
        differing = [
            f"{name} of process {i}{_differs(first[name], row[name])}"
            for name in digests
            for i, row in enumerate(others, 1)
            if row[name] != first[name]
        ]
        if differing:
            more = f" and {len(differing) - _MOST_TOLD} more" if len(differing) > _MOST_TOLD else ""
            raise ValueError(
                "what differs from process 0 must be the same in each process: "
                f"{', '.join(differing[:_MOST_TOLD])}{more}"
            )

    def leave(self, why: str, signal: str | None = None) -> None:
        """Tells the peers that this process has to end; waits for none of them.

        Args:
            why: The reason, for their error message.
            signal: Name of the signal that ended it; None after an error.

        Raises:
            PeerEndedError: If they can't be reached.
        """
        if self.count > 1:
            # JAX may wait forever for a service that is gone.
            with doing("telling the other processes of its end"):
                self._send({"left": why, "signal": signal})

    def begin_run(self) -> None:
        """Takes back what `hurry` and `lose` have told, for one more run in this process."""
        self.hurry("")
        self.lose("")

    def hurry(self, reason: str) -> None:
        """Asks all processes to end soon, by a signal's name or another reason; "" takes it back.

        From then on, waits for peers that don't react have shorter limits.
        """
        if self.presence is not None and self.presence.ending != reason:
            self.presence.ending = reason
            self._changed.set()

    def lose(self, error: str) -> None:
        """Tells the peers that this process can't save its state any more, after an error."""
        if self.presence is not None:
            self.presence.lost = error
            self._changed.set()

    def tell_written(self, number: int) -> None:
        """Tells the peers that this process has written its part of a checkpoint."""
        if self.presence is not None:
            self.presence.written = number
            self._changed.set()

    def give_up(self, why: str) -> None:
        """Makes the peers unreachable, for a reason, and all further waits for them end."""
        if self._unreachable is None:
            self._since = self.presence.clock.seconds if self.presence else 0.0
            self._unreachable = why

    def end_held(self, why: str) -> None:
        """Ends this process, after the run, though its main thread is held.

        Args:
            why: The reason, for a message here and in all other processes.
        """
        self._is_held = True
        if self.presence is not None:
            self._wait_for_end_of_peers(why)
        _end_children()
        logging.shutdown()
        end(f"This process ends: {why}.", self.status)

    @contextlib.contextmanager
    def going_on_alone(self) -> Iterator[None]:
        """Goes on without the peers, which can't be reached.

        From now on, `gather` returns this process's value for all. If the body waits in JAX for a
        peer, the process ends after some seconds.

        Raises:
            PeerEndedError: If another process that holds all state may go on, or this one has lost
                its state.
        """
        if self._peers.lost or not self._peers.is_in_charge:
            raise PeerEndedError(str(self._unreachable))
        self.is_alone = True
        self._since, self._has_noticed = self._peers.clock.seconds, False
        try:
            with doing("completing the last step without other processes"):
                yield
        finally:
            self._has_noticed = True

    def activities(self) -> str:
        """What each process is doing, for a message."""
        if self.presence is None:
            return f"It was {HERE.doing[0]}"
        rows = (f"{self.presence.named(i)}: {self.presence.doing(i)}" for i in range(self.count))
        return "; ".join(rows)

    # ---- messages

    def _exchange(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        with doing(f"waiting for other processes at {message['where']}"):
            began = time.perf_counter()
            folder = self._send(message)
            rows = self._received(folder, message["where"])
            self._erase_older()
            self.waited += time.perf_counter() - began
        return [json.loads(rows[str(i)]) for i in range(self.count)]

    def _send(self, message: dict[str, Any]) -> str:
        """Leaves a message, and returns the folder of this exchange."""
        block, number = divmod(self._sent, _BLOCK)
        folder, text = f"{_FOLDER}/{block}/{number}", json.dumps(message).encode()
        self._sent += 1
        while True:
            self._check(folder, message.get("where", "its end"), ())
            try:
                self._board.write(f"{folder}/{self.index}", text)
                return folder
            except ConnectionError:
                time.sleep(_SHORTEST_WAIT)

    def _erase_older(self) -> None:
        """Deletes the blocks before that of the newest message, once all have sent theirs."""
        while self.is_first and self._oldest < (self._sent - 1) // _BLOCK:
            try:
                self._board.erase(f"{_FOLDER}/{self._oldest}")
            except ConnectionError:
                return  # the next exchange tries again
            self._oldest += 1

    def _received(self, folder: str, where: str) -> dict[str, bytes]:
        """The messages of all processes."""
        seconds, told = _SHORTEST_WAIT, time.monotonic() + _TOLD_AFTER
        missing: Sequence[int] = ()
        self._peers.waits = True
        try:
            while True:
                try:
                    rows = self._board.read(folder)
                    missing = [i for i in range(self.count) if str(i) not in rows]
                    if not missing:
                        return rows
                    self._board.wait(f"{folder}/{missing[0]}", seconds)
                except ConnectionError:
                    time.sleep(_SHORTEST_WAIT)
                seconds = min(2 * seconds, _LONGEST_WAIT)
                self._check(folder, where, missing)
                if missing and time.monotonic() > told:
                    told = float("inf")
                    self._tell(where, missing)
        finally:
            self._peers.waits = False

    def _check(self, folder: str, where: str, missing: Sequence[int]) -> None:
        """Raises an error if this process can't wait for its peers any longer."""
        presence = self._peers
        left = [(i, sign) for i, sign in enumerate(presence.signs) if sign and sign.gone]
        # What was sent before they left may have come since.
        late = set(missing) - set(map(int, self._board.read(folder))) if missing and left else ()
        # One that gave another one up is not there, although its own message may be.
        gone = next(((i, sign) for i, sign in left if i in late or (late and sign.why)), None)
        if gone is not None:
            why = gone[1].why.rstrip(".") or "each process has to make the same calls"
            self.give_up(f"{presence.named(gone[0])} has left the run, which is at {where}: {why}")
        elif missing and self.patience and presence.idle_seconds > self.patience + _LATE_SECONDS:
            late = missing[0]
            self.give_up(
                f"{presence.named(late)} has not come to {where} within {self.patience:.0f} s. "
                f"{presence.doing(late)}. Each process has to make the same calls"
            )
        if self._unreachable is not None:
            self._has_noticed = True
            raise PeerEndedError(self._unreachable)

    def _tell(self, where: str, missing: Sequence[int]) -> None:
        if self.index == min(set(range(self.count)) - set(missing)):
            late = missing[0]
            tqdm.write(
                f"waiting since {_TOLD_AFTER:.0f} s, at {where}, for {self._peers.named(late)}. "
                f"{self._peers.doing(late)}.",
                file=sys.stderr,
            )

    # ---- threads

    def _show_signs(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._is_over
            try:
                self._peers.exchange()
            except ConnectionError:
                pass  # `Presence.verdict` notices if this goes on
            if not is_over:
                self._changed.wait(EVERY_SECONDS)
                self._changed.clear()

    def _look(self) -> None:
        """Looks for verdicts, and ends the process if its main thread doesn't notice one."""
        while True:
            time.sleep(_LOOK_SECONDS)
            self._peers.look()
            self._judge()

    def _judge(self) -> None:
        if self._unreachable is None:
            if found := self._peers.verdict():
                self.give_up(found)
        elif not self._has_noticed and HERE.doing[0]:
            limit = _SECONDS_TO_NOTICE_AT_END if self._peers.asked_to_end else _SECONDS_TO_NOTICE
            if self._peers.clock.seconds - self._since > limit:
                self._end_at_once()

    def _end_at_once(self) -> None:
        """Ends the process while its main thread waits for a peer in JAX, which has no limit."""
        saved = f" {self.saved}" if self.saved else ""
        text = (
            f"{PeerEndedError.__name__}: {self._unreachable}. This process waited for it in JAX: "
            f"it was {HERE.doing[0]}.{saved}"
        )
        self._wait_for_end_of_peers()
        end(text, self.status)

    def _explained_abort(self, is_own: bool) -> str:
        """The cause of JAX's abort; see `explain_aborts`."""
        if self.index:
            who = f"{self._peers.named(0)}, which runs JAX's coordination service,"
        else:
            who = self._peers.named(self._peers.most_silent)
        text = (
            f"JAX has aborted, with its message above: most likely {who} has ended or can't be "
            "reached"
        )
        if not is_own:
            self._peers.has_lost_service = self.index > 0
            self.give_up(text)
        saved = f". {self.saved}" if self.saved else ""
        return f"{PeerEndedError.__name__}: {text}{saved}"

    # ---- the end

    def _leave_for_good(self) -> None:
        """Ends the process's part in the run, before JAX's own waits at its end.

        After an error of any process, nobody takes part in these: they have no useful limits.
        """
        self._wait_for_end_of_peers()
        presence = self._peers
        text = (
            "" if self._unreachable is None else f"{PeerEndedError.__name__}: {self._unreachable}"
        )
        if not self._has_failed:
            # The thread must not use JAX's client while that is shut down.
            if not presence.failures and not self._signs.is_alive():
                return
            text = presence.failures or "a peer has ended with an error"
        _end_children()
        logging.shutdown()
        end(f"{text}. Exit status {self.status}" if text else "", self.status, stacks=False)

    def _wait_for_end_of_peers(self, why: str = "") -> None:
        """Waits until all peers that show signs of life have left; not long after an error."""
        presence = self._peers
        presence.gone, presence.failed = True, self._has_failed
        presence.why = self._unreachable or why or _error_of_script()
        self._changed.set()
        while presence.has_peers and not self._has_failed:
            time.sleep(_LOOK_SECONDS)
        presence.failed = self._has_failed
        # JAX's service ends with the first process, and that would abort its peers.
        until = time.monotonic() + _SECONDS_FOR_PEERS
        has_service = self.index == 0
        while has_service and presence.has_peers and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        if has_service and self._has_failed:
            time.sleep(2 * _LOOK_SECONDS)  # between their last signs and their ends
        self._is_over = True
        self._changed.set()
        self._signs.join(_LAST_SIGN_SECONDS)

    @property
    def _has_failed(self) -> bool:
        """Whether the peers can't be reached, or the script has not come to its own end."""
        is_cut_off = self._is_held or getattr(sys, "last_value", None) is not None
        return self._unreachable is not None or is_cut_off


def _digest(value: Any) -> str:
    """A value to compare: its text or, since that may be that of a jaxpr, 64 bits of its hash."""
    text = repr(value)
    return text if len(text) <= _SHORT else _HASHED + hashlib.sha256(text.encode()).hexdigest()[:16]


def _differs(first: str, other: str) -> str:
    """Two values that differ, for a message; "" if one is known by its hash alone."""
    return "" if _HASHED in (first[0], other[0]) else f" ({other}, not {first})"


def _error_of_script() -> str:
    """The error that ends this process's script, in one line; "" if there is none."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return ""
    return " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_ERROR]


def _end_children() -> None:
    """Ends what `multiprocessing` has started, as it would itself at a process's end."""
    if (module := sys.modules.get("multiprocessing")) is not None:
        for child in module.active_children():
            if child.daemon:
                child.terminate()
