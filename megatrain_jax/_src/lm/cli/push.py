"""Uploads the export of a finished run to the Hugging Face Hub."""

import sys

from megatrain_jax._src.lm.cli.run_folder import RunFolder
from megatrain_jax._src.lm.cli.training_settings import TrainingSettings
from megatrain_jax._src.lm.common import hub

_FAILED = 1
# The name of the note that holds the repository of an uploaded export.
_PUSHED = "pushed to"


def check_push(settings: TrainingSettings) -> None:
    """Checks before training that the user can upload, as far as this is known now.

    Raises:
        ImportError: See `hub.check_upload`.
        ValueError: See `hub.check_upload`.
    """
    if settings.push is not None:
        hub.check_upload("push", settings.push)


def push(settings: TrainingSettings, folder: RunFolder) -> int:
    """Uploads the export, unless it was uploaded before or the settings name no repository.

    Returns:
        The exit status: 1 if the upload failed; the export stays where it is.
    """
    name = settings.push
    if name is None or folder.note(_PUSHED) == name:
        return 0
    export = folder.path / settings.exports[0]
    try:
        commit = hub.upload(export, name, private=settings.push_private)
    except Exception as error:  # HTTP and disk errors have no common type
        why = " ".join(str(error).split())[:300]
        print(
            f"`push`={name} failed: {type(error).__name__}: {why}. The export is complete in "
            f"{export}; the same command tries again, and so does `hf upload {name} {export}`",
            file=sys.stderr,
            flush=True,
        )
        return _FAILED
    folder.take_note(_PUSHED, name)
    print(f"pushed to {commit}", flush=True)
    return 0
