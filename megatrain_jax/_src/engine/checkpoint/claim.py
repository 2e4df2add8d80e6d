"""The claim of a workspace, on a disk or in an object store, for the processes of a run."""

import errno
from pathlib import Path

from megatrain_jax._src.common.object_paths import AnyPath
from megatrain_jax._src.engine.checkpoint.folder import CheckpointError, in_first_process
from megatrain_jax._src.engine.checkpoint.object_workspace import ObjectWorkspace
from megatrain_jax._src.engine.checkpoint.workspace import WRITTEN, FolderWorkspace, Workspace
from megatrain_jax._src.engine.state.processes import Processes


class UnownedWorkspace:
    """A run's workspace in a process that does not own it and must not change the folder.

    The run's first process owns it, or nobody does, because the folder can't be written.

    Attributes:
        path: The folder.
        unwritable: The reason why nobody can write there; None if the first process holds it.
    """

    def __init__(self, path: AnyPath, unwritable: str | None = None):
        """Records the folder."""
        self.path, self.unwritable = path, unwritable

    def share(self) -> None:
        """Does nothing, because only the owner changes the folder."""

    def release(self, *, run: bool) -> None:
        """See `share`."""

    def clear(self) -> None:
        """See `share`."""


def written_at(workspace: AnyPath, path: AnyPath) -> AnyPath:
    """The folder in which the processes of a run write a checkpoint.

    Args:
        workspace: The workspace's folder.
        path: The checkpoint's folder, once it is complete.
    """
    return workspace / WRITTEN if isinstance(workspace, Path) else path


def claim_workspace(
    path: AnyPath,
    what: str,
    processes: Processes,
    *,
    only_read: bool = False,
    by_hand: AnyPath | None = None,
) -> Workspace | UnownedWorkspace:
    """The workspace of a run; its first process takes it for all of them.

    Args:
        path: See `Workspace`.
        what: See `Workspace`.
        processes: The processes that share the run.
        only_read: Whether the run may only need to read, so that a folder that can't be written is
            allowed.
        by_hand: The checkpoint to write, if it is the only one.

    Raises:
        CheckpointError: See `Workspace`; also if a process doesn't see the folder.
    """
    found: list[Workspace | UnownedWorkspace] = [UnownedWorkspace(path)]

    def claim() -> str | None:
        try:
            kind = FolderWorkspace if isinstance(path, Path) else ObjectWorkspace
            found[0] = own = kind(path, what)
        except CheckpointError as error:
            reason = getattr(error.__cause__, "errno", None)
            if not only_read or reason not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            return str(error)
        if by_hand is not None:
            try:
                own.prepare(by_hand)
            except BaseException:
                own.release(run=True)
                raise
        return None

    unwritable = in_first_process(processes, f"the claim of {path.name}", claim)
    if unwritable is not None:
        return UnownedWorkspace(path, unwritable)
    sees = processes.gather(f"a look at {path.name}", path.is_dir())
    if not all(sees):
        found[0].release(run=True)
        raise CheckpointError(
            f"process {sees.index(False)} does not see {what}, which process 0 has made: "
            "checkpoints of several processes need a folder that all of them share, on a network "
            "file system or in an object store (gs://bucket/folder, s3://bucket/folder)"
        )
    return found[0]
