"""The processes that share a run, and the short messages that synchronise them.

All processes run the same script, and each step, evaluation and checkpoint needs all of them.
Before each of these points, every process sends its position to its peers. A process that has to
end, after a signal or an error that its peers can't see, sends that instead. Messages travel
between the hosts' CPUs, in parallel with the devices' computation.

Example: in a run of two processes, the second one's data fails after step 3.

    process 0                           process 1
    gather("step 3", ...)               gather("step 3", ...)       both go on
    its next batch is drawn             its data raises OSError
    gather("the end of data", ...)      leave("OSError: ...")
    raises PeerEndedError               goes on to save step 3
    goes on to save step 3
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from megatrain_jax._src.common.host_memory import memory_owner

_AXIS = "process"
# Bytes of a message that one exchange carries, and of the length at its beginning. Exchanged arrays
# have equal sizes, so longer messages take a second exchange with the size of the longest.
_SHORT, _PREFIX = 512, 4


class PeerEndedError(RuntimeError):
    """Raised when another process of the run has ended or can't be reached.

    Attributes:
        signal: Name of the signal that ended that process, such as "SIGTERM"; None after an error.
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
        unreachable: The reason why the peers can't be reached any more; None while they can.
    """

    def __init__(self, devices: Sequence[Any] = ()):
        """Makes the record of a run's processes.

        Args:
            devices: One CPU device of each process, in the order of the processes' numbers; empty
                for a single process.
        """
        self.count, self.num_here = max(1, len(devices)), 1
        self.index = [d.process_index for d in devices].index(jax.process_index()) if devices else 0
        self.unreachable: str | None = None
        if devices:
            row = Mesh(np.array(devices), _AXIS, axis_types=(AxisType.Auto,))
            self._divided = NamedSharding(row, PartitionSpec(_AXIS))
            whole = NamedSharding(row, PartitionSpec())
            self._gathered = jax.jit(lambda rows: rows, out_shardings=whole)

    def find_hosts(self) -> None:
        """Counts the processes on this host; every process has to call this."""
        here = memory_owner()
        self.num_here = self.gather("the first run of several processes", here).count(here)

    @property
    def spread(self) -> tuple[int, int]:
        """The number of processes, and the number of processes on this host."""
        return self.count, self.num_here

    @property
    def is_first(self) -> bool:
        """Whether this is the process that prints, and writes the files that exist once."""
        return self.index == 0

    def gather(self, where: str, value: Any = None) -> list[Any]:
        """Waits until all processes reach this point, and returns their values in order.

        Args:
            where: Name of the point of the run that all processes have to reach.
            value: A JSON value.

        Raises:
            PeerEndedError: If another process has left, or can't be reached.
            RuntimeError: If another process is at another point.
        """
        if self.count == 1:
            return [value]
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
            ValueError: If values differ; lists their names.
        """
        if self.count == 1:
            return
        # Values may be long, such as the text of a jaxpr; 64 bits of a hash suffice to compare.
        digests = {k: hashlib.sha256(repr(v).encode()).hexdigest()[:16] for k, v in facts().items()}
        first, *others = self.gather(where, digests)
        if names := [k for k in digests if any(row[k] != first[k] for row in others)]:
            raise ValueError(f"{', '.join(names)} must be the same in each process, but differ")

    def leave(self, why: str, signal: str | None = None) -> None:
        """Tells the waiting peers that this process has to end.

        Args:
            why: The reason, for their error message.
            signal: Name of the signal that ended it; None after an error.
        """
        if self.count > 1 and self.unreachable is None:
            self._exchange({"left": why, "signal": signal})

    def concatenated(self, part: np.ndarray) -> np.ndarray:
        """Concatenates the processes' arrays, of equal shapes, along their first axis."""
        if self.count == 1:
            return part
        flat = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        rows = [row.view(part.dtype) for row in self._rows(flat)]
        return np.concatenate(rows).reshape(-1, *part.shape[1:])

    def _exchange(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        text = json.dumps(message).encode()
        # The length comes first, in little-endian order, then as much of the text as fits.
        first = np.zeros(_SHORT, np.uint8)
        first[:_PREFIX] = np.frombuffer(len(text).to_bytes(_PREFIX, "little"), np.uint8)
        head = np.frombuffer(text[: _SHORT - _PREFIX], np.uint8)
        first[_PREFIX : _PREFIX + head.size] = head
        rows = self._rows(first)
        sizes = [int.from_bytes(row[:_PREFIX].tobytes(), "little") for row in rows]
        found = [row[_PREFIX:].tobytes() for row in rows]
        # Every process knows all sizes, so either all of them make the second exchange or none.
        if max(sizes) > _SHORT - _PREFIX:
            whole = np.zeros(max(sizes), np.uint8)
            whole[: len(text)] = np.frombuffer(text, np.uint8)
            found = [row.tobytes() for row in self._rows(whole)]
        return [json.loads(text[:size]) for text, size in zip(found, sizes, strict=True)]

    def _rows(self, row: np.ndarray) -> np.ndarray:
        """The processes' byte arrays, which have equal sizes."""
        if self.unreachable is not None:
            raise PeerEndedError(self.unreachable)
        shape = (self.count, row.size)
        try:
            with jax.transfer_guard("allow"):
                mine = jax.make_array_from_callback(shape, self._divided, lambda _: row[None])
                return np.asarray(self._gathered(mine))
        except (ValueError, RuntimeError) as error:  # JAX's own, whose kind depends on its version
            self.unreachable = (
                "another process of this run has ended without a word or can't be reached; the "
                f"run needs all {self.count} ({' '.join(str(error).split())[:200]})"
            )
            raise PeerEndedError(self.unreachable) from error
