"""Files that several processes write: each is whole or not there."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4


def write_whole(path: Path, text: str) -> None:
    """Writes `text` to `path`, making its folder, so that a reader finds the old file or the new one, never a part.

    The draft's name is this call's alone: ranks of one seed, threads, and hosts that share a folder do not meet in it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        draft.write_text(text)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
