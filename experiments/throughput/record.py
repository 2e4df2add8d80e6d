"""The origin of a result: a commit, a time, a machine and a run; and the file that has it.

Every script writes its files here. Needs neither JAX nor PyTorch.
"""

import argparse
import hashlib
import json
import re
import subprocess
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_GPUS = ("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The origin of a run's results, found before anything is measured.

    Attributes:
        commit: The commit, 40 hexadecimal digits; None if it is not known.
        commit_from: "git", or "argument" where the tree is a copy without Git.
        clean: Whether the tree is as that commit has it: None where only Git could tell.
        run: The same for all files of one run on one machine, and no others.
    """

    commit: str | None
    commit_from: str | None
    clean: bool | None
    run: str

    def options(self) -> dict[str, str]:
        """Returns the options that make another script's rows a part of the same run."""
        found = {"run": self.run}
        if self.commit is not None:
            found["commit"] = self.commit
        if self.commit is None or self.clean is False:
            found["unclean"] = "yes"
        return found


def add_origin_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say where results come from."""
    parser.add_argument("--run", help="id of the run that these results belong to; else a new one")
    parser.add_argument(
        "--commit", help="the tree's commit, 40 digits: for a copy of it that has no Git"
    )
    parser.add_argument(
        "--unclean",
        choices=("yes",),
        help="write results of a tree that no commit has; their files say so",
    )


def find_origin(args: argparse.Namespace, folder: Path = Path(__file__).parent) -> Origin:
    """Returns where results of this tree come from; to be called before anything is measured.

    Args:
        args: What the options of `add_origin_options` say.
        folder: A folder of the tree.

    Raises:
        SystemExit: If no commit stands for the tree and `--unclean yes` is not given, or if
            `--commit` is no commit or not the one that Git names.
    """
    if args.commit is not None and not re.fullmatch("[0-9a-f]{40}", args.commit):
        raise SystemExit(f"--commit must be 40 hexadecimal digits, not {args.commit!r}")
    found = _git(folder, "rev-parse", "HEAD")
    clean = None if found is None else not _git(folder, "status", "--porcelain")
    if found is not None and args.commit not in (None, found):
        raise SystemExit(f"--commit is {args.commit}, but this tree is at {found}")
    commit = found or args.commit
    if not args.unclean:
        if commit is None:
            raise SystemExit("no commit is known: give --commit, or --unclean yes")
        if clean is False:
            raise SystemExit("files differ from the commit: commit them, or give --unclean yes")
    source = "git" if found else "argument" if commit else None
    # A copy without Git is taken at its word, unless it says that it is no commit's.
    clean = False if args.unclean and clean is None else clean
    run = args.run or uuid.uuid4().hex[:12]
    return Origin(commit=commit, commit_from=source, clean=clean, run=run)


def write(path: Path, figures: Mapping[str, Any], origin: Origin) -> dict[str, Any]:
    """Writes figures with where they come from, as JSON, and returns all of it."""
    result = {
        **figures,
        "record": {
            "commit": origin.commit,
            "commit_from": origin.commit_from,
            "clean": origin.clean,
            "utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "host": host_id(),
            "run": origin.run,
        },
    }
    save(path, result)
    return result


def save(path: Path, result: Mapping[str, Any]) -> None:
    """Writes a result that has its record already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


def host_id() -> str:
    """Returns 16 digits that name this machine until it is started anew, and tell nothing else.

    They are a hash of the kernel's boot id and of the GPUs' ids.
    """
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return hashlib.sha256(f"{boot}\n{_output(*_GPUS) or ''}".encode()).hexdigest()[:16]


def _git(folder: Path, *words: str) -> str | None:
    return _output("git", "-C", str(folder), *words)


def _output(*command: str) -> str | None:
    """A command's output, without the last line's end; None if it is not there or fails."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
