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
from concurrent.futures import Future
from pathlib import Path

from kvstore import Incompatible
from kvstore.settings import default_digest_memory
from kvstore.system.file_digests import FileDigests
from kvstore.system.file_watch import Stamp, stamp_of
from kvstore.system.fingerprints import REMEDY, Fingerprints
from kvstore.system.model_files import weights_files

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks at the files of a model
LOOK_WAIT_S = 0.1  # for one; a file system that is slower is a miss
ASK_AGAIN_S = 30.0  # of a model that nothing told the weights of
MODELS_MAX = 64  # remembered
ADVICE = (
    'set "weights_id" to a text that changes when the weights do (any text, e.g. "by-name", where '
    "the same name always means the same weights)"
)
SERVER_REMEDY = "restart LMCache's server, then the engine, or set weights_id"


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
        self._exchanged = False
        self._readable = True
        self._look_at = time.monotonic() + LOOK_S if watched else float("inf")
        self._looking: threading.Thread | None = None
        try:
            if not (self._model.is_absolute() and self._model.exists()):
                raise Incompatible(f"nothing here tells the weights of {model!r}: {ADVICE}")
            self._stamp = self._look()
            self._prints = Fingerprints(
                {"weights": self._files()},
                FileDigests(default_digest_memory()),
                began,
                SERVER_REMEDY if watched else REMEDY,
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
            if self._looking is not None and self._looking.is_alive():
                return False  # whoever comes while one hangs does not wait
            looking = threading.Thread(target=self._compare, name="kvstore-look", daemon=True)
            try:
                looking.start()
            except RuntimeError:  # there is no thread left, now
                return False
            self._looking = looking
            looking.join(LOOK_WAIT_S)
            if looking.is_alive():
                return False
            self._looking = None
        return self._readable and not self._exchanged

    def _compare(self) -> None:
        began = time.monotonic()
        was_readable, self._readable = self._readable, False
        try:
            same = self._look() == self._stamp
            self._readable = True
        except Exception as error:  # it may be there again at the next look
            same = True
            if was_readable:
                logger.warning(
                    "weights=unreadable cache=paused model=%s reason=%r", self._model, str(error)
                )
        if not same:
            self._exchanged = True
            began = float("inf")
            logger.error(
                "weights=exchanged cache=off model=%s reason='its files are not what they were' "
                "do='restart its engines and LMCache'",
                self._model,
            )
        self._look_at = began + LOOK_S

    def _look(self) -> tuple[list[Path], Stamp]:
        """Raises OSError, Incompatible where they cannot be read as a whole."""
        files = self._files()
        stamp = stamp_of(files)
        if None in stamp:
            raise OSError(f"{files[stamp.index(None)]} cannot be read")
        return files, stamp

    def _files(self) -> list[Path]:
        return weights_files(self._model, advice=ADVICE)


class ModelWeights:
    """The weights of all models that one LMCache server is asked for. Any thread may ask.

    weights_id: names them instead of their files, of every model.
    """

    def __init__(self, weights_id: str) -> None:
        self._weights_id = weights_id
        self._models: OrderedDict[str, _Asked] = OrderedDict()
        self._lock = threading.Lock()

    def identity(self, model: str) -> str | None:
        """Return what tells a model's weights; None: not known yet, or not any more.

        Returns after about LOOK_WAIT_S at most. Raises Incompatible, saying what to set, where
        nothing tells them.
        """
        if self._weights_id:
            return self._weights_id
        with self._lock:
            asked, wait_s = self._models.get(model), 0.0
            if asked is None or asked.is_stale:
                asked, wait_s = _Asked(model), LOOK_WAIT_S  # others do not wait while this hangs
                self._models[model] = asked
                if len(self._models) > MODELS_MAX:
                    self._models.popitem(last=False)
        try:
            weights = asked.answer.result(wait_s)
        except TimeoutError:
            return None
        except Incompatible as error:
            raise Incompatible(str(error)) from None  # the answer's own would gather tracebacks
        with self._lock:
            return weights.identity


class _Asked:
    """What a model's weights are, read in a thread: file systems have no bound of time."""

    def __init__(self, model: str) -> None:
        self.answer: Future[Weights] = Future()
        self._model = model
        self._again_at = time.monotonic() + ASK_AGAIN_S
        try:
            threading.Thread(target=self._ask, name="kvstore-model", daemon=True).start()
        except RuntimeError as error:  # there is no thread left, now
            self.answer.set_exception(Incompatible(f"cannot read {model!r} now: {error}"))

    @property
    def is_stale(self) -> bool:
        """Nothing told the weights, some time ago."""
        done = self.answer.done() and self.answer.exception() is not None
        return done and time.monotonic() >= self._again_at

    def _ask(self) -> None:
        try:
            self.answer.set_result(Weights(self._model, watched=True))
        except Incompatible as error:
            self.answer.set_exception(error)
        except Exception as error:  # whoever waits has to hear of it
            logger.exception("weights=unknown model=%s", self._model)
            self.answer.set_exception(Incompatible(f"cannot read {self._model!r}: {error!r}"))
