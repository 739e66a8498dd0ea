"""Files that commands write: what is wrong with them is found out before the work, not after it."""

from __future__ import annotations

from pathlib import Path

from kvstore.model.errors import InvalidRequest

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def check_outputs(*paths: Path | None) -> None:
    """Raise InvalidRequest for a path that cannot be written. Leaves what is there as it is."""
    for path in paths:
        if path is None or (path.exists() and not (path.is_file() or path.is_dir())):
            continue  # such as /dev/stdout
        if not path.absolute().parent.is_dir():
            raise InvalidRequest(f"{path}: cannot be written: there is no directory {path.parent}")
        existed = path.exists()
        try:
            path.open("ab").close()
        except OSError as error:
            raise InvalidRequest(f"{path}: cannot be written: {error.strerror}") from error
        if not existed:
            path.unlink()


def check_plot(path: Path | None) -> None:
    """Raise InvalidRequest for a picture that cannot be written, or of a kind that is not drawn."""
    if path is not None and path.suffix.lower() not in PLOT_SUFFIXES:
        raise InvalidRequest(f"{path}: pictures are {', '.join(PLOT_SUFFIXES)}: name it so")
    check_outputs(path)
