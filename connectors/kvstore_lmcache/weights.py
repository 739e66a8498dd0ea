"""What tells the weights of the models that LMCache names.

LMCache names a model as its engine does. Where that is a folder or a file of this machine, a digest
of what is there tells the weights. Any other name says nothing of them: the user has to.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from kvstore import Incompatible
from kvstore.settings import default_digest_memory
from kvstore.system.file_digests import FileDigests
from kvstore.system.file_watch import Stamp, stamp_of
from kvstore.system.fingerprints import Fingerprints
from kvstore.system.model_files import weights_files

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks at the files of a model
LOOK_WAIT_S = 0.1  # for one; a file system that is slower is a miss
MODELS_MAX = 64  # remembered
ADVICE = (
    'set "weights_id" to a text that changes when the weights do (any text, e.g. "by-name", where '
    "the same name always means the same weights)"
)


class Weights:
    """The weights of one model, as its files say. For one thread at a time."""

    def __init__(
        self, model: str, *, watched: bool, began: Callable[[], float] | None = None
    ) -> None:
        """Begin to read the files, if what they hold is not remembered.

        watched: the engine is another process than this one, so what the files say counts only as
        long as they stay as they are. began: as for `Fingerprints`. Raises Incompatible, saying
        what to set, for a name that is no path on this machine.
        """
        self._model = Path(model)
        self._changed = False
        self._look_at = time.monotonic() + LOOK_S if watched else float("inf")
        self._looking: threading.Thread | None = None
        try:
            if not (self._model.is_absolute() and self._model.exists()):
                raise Incompatible(f"nothing here tells the weights of {model!r}: {ADVICE}")
            self._stamp = self._look()
            self._prints = Fingerprints(
                {"weights": self._files()}, FileDigests(default_digest_memory()), began
            )
        except (OSError, ValueError) as error:  # ValueError: a name that no path can be
            raise Incompatible(f"cannot read {model!r} ({error!r}): {ADVICE}") from error

    @property
    def identity(self) -> str | None:
        """What tells them; None: not known yet, or not any more."""
        found = self._prints.found
        if found is None or not self._same():
            return None
        return f"sha256 {found['weights']}"

    def _same(self) -> bool:
        """Say whether the files are what they were, a moment ago."""
        if time.monotonic() >= self._look_at:
            looking, wait_s = self._looking, 0.0  # whoever comes while one hangs waits no more
            if looking is None:
                looking = threading.Thread(target=self._compare, name="kvstore-look", daemon=True)
                self._looking, wait_s = looking, LOOK_WAIT_S
                looking.start()
            looking.join(wait_s)
            if looking.is_alive():
                return False
            self._looking = None
        return not self._changed

    def _compare(self) -> None:
        began = time.monotonic()
        try:
            same = self._look() == self._stamp
        except (OSError, Incompatible):
            same = False
        if not same:
            self._changed = True
            began = float("inf")
            logger.error(
                "weights=exchanged cache=off model=%s reason='its files are not what they were' "
                "do='restart its engines and LMCache'",
                self._model,
            )
        self._look_at = began + LOOK_S

    def _look(self) -> tuple[list[Path], Stamp]:
        files = self._files()
        return files, stamp_of(files)

    def _files(self) -> list[Path]:
        return weights_files(self._model, advice=ADVICE)


class ModelWeights:
    """The weights of all models that one LMCache server is asked for. Any thread may ask.

    weights_id: names them instead of their files, of every model.
    """

    def __init__(self, weights_id: str) -> None:
        self._weights_id = weights_id
        self._models: OrderedDict[str, Weights | Incompatible] = OrderedDict()
        self._lock = threading.Lock()

    def identity(self, model: str) -> str | None:
        """Return what tells a model's weights; None: not known yet, or not any more.

        Raises Incompatible, saying what to set, where nothing tells them.
        """
        if self._weights_id:
            return self._weights_id
        with self._lock:
            weights = self._models.get(model)
            if weights is None:
                weights = self._models[model] = _weights_of(model)
                if len(self._models) > MODELS_MAX:
                    self._models.popitem(last=False)
            if isinstance(weights, Incompatible):
                raise Incompatible(str(weights))
            return weights.identity


def _weights_of(model: str) -> Weights | Incompatible:
    """Return a model's weights, or why nothing tells them, which stays so."""
    try:
        return Weights(model, watched=True)
    except Incompatible as error:
        return error
