"""Whether a model's blocks are coded, and where: what was asked for, and what is possible here."""

from __future__ import annotations

import logging
from typing import Literal, Protocol

from kvstore import ConfigError
from kvstore_kernels.codec import device_trial
from kvstore_kernels.codec.places import Unplaced
from kvstore_transformers.coded_device import DeviceCoding
from kvstore_transformers.coded_host import HostCoding
from kvstore_transformers.coding import Coding
from kvstore_transformers.direct import DirectMode
from kvstore_transformers.namespace import Layout

logger = logging.getLogger(__name__)

Record = Literal["auto", "l3", "raw"]
Fidelity = Literal["exact", "ep"]


class OpenCoding(Protocol):
    """Opens what codes the blocks of a model. Raises Unplaced where that is not possible."""

    def __call__(self, layout: Layout, block_tokens: int, *, lossy: bool) -> Coding: ...


def record_beside(record: Record, direct_storage: DirectMode) -> Record:
    """Return which records are meant, where blocks may be read straight from files: coded ones
    never are. Raises ConfigError if both were asked for by name."""
    if direct_storage == "always" and record == "l3":
        raise ConfigError(
            "record='l3' is not read straight from files: leave out direct_storage='always', or "
            "use record='raw'"
        )
    return "raw" if direct_storage == "always" and record == "auto" else record


def coding_on(layout: Layout, block_tokens: int, *, lossy: bool) -> Coding:
    """Return what codes blocks where the model is."""
    kind: OpenCoding = HostCoding if layout.device.type == "cpu" else DeviceCoding
    return kind(layout, block_tokens, lossy=lossy)


def open_coding(
    layout: Layout,
    block_tokens: int,
    record: Record,
    fidelity: Fidelity = "exact",
    *,
    opened: OpenCoding = coding_on,
) -> Coding | None:
    """Return how a model's blocks are coded; None: they are stored as they are. A line in the log
    says why, unless that was asked for.

    Raises ConfigError if coding was asked for by name and is not possible.
    """
    if record not in ("auto", "l3", "raw"):
        raise ConfigError(f"record={record!r}: auto, l3 and raw are known")
    if fidelity not in ("exact", "ep"):
        raise ConfigError(f"fidelity={fidelity!r}: exact and ep are known")
    if record == "raw":
        if fidelity == "ep":
            raise ConfigError(
                "fidelity='ep' stores coded records: leave out record='raw' and "
                "direct_storage='always', or use fidelity='exact'"
            )
        return None
    is_auto = record == "auto" and fidelity == "exact"
    if is_auto and layout.device.type != "cpu" and device_trial.AUTO_ON_A_GPU == "raw":
        logger.info("record=raw reason='raw records come back sooner on a GPU: ask for l3 by name'")
        return None
    try:
        return opened(layout, block_tokens, lossy=fidelity == "ep")
    except Unplaced as error:
        why = str(error)
    if fidelity == "ep":
        raise ConfigError(f"fidelity='ep' is not possible here: {why}; use fidelity='exact'")
    if record == "l3":
        raise ConfigError(f"record='l3' is not possible here: {why}; use 'auto' or 'raw'")
    logger.info("record=raw reason=%r", why)
    return None
