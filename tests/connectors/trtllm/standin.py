"""Stands in for TensorRT-LLM, whose wheel needs a GPU: its classes as their signatures say.

The base classes have the methods, and the abstract methods, that are kept as facts; what the few
that are not abstract do is what its documentation says. Ranks talk by pipes instead of MPI.
"""

from __future__ import annotations

import json
import sys
from abc import ABC
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

FACTS = Path(__file__).with_name("trtllm_1_2_1.json")
CONNECTOR = "tensorrt_llm/_torch/pyexecutor/kv_cache_connector.py"
MODULES = (
    "tensorrt_llm",
    "tensorrt_llm._torch",
    "tensorrt_llm._torch.pyexecutor",
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
    "tensorrt_llm._utils",
)


def facts() -> dict[str, Any]:
    """Return the facts of the version that is kept: its number, and the classes."""
    found: dict[str, Any] = json.loads(FACTS.read_text())
    return found


class World:
    """The ranks of one engine. links: of rank 0, to the others; of another, to rank 0."""

    def __init__(self, rank: int = 0, links: Sequence[Connection] = ()) -> None:
        self.rank = rank
        self.links = links

    def gather(self, told: Any) -> list[Any]:
        """Return what all ranks tell."""
        if self.rank:
            self.links[0].send(told)
            return list(self.links[0].recv())
        everything = [told, *(link.recv() for link in self.links)]
        for link in self.links:
            link.send(everything)
        return everything


def _method(name: str, parameters: list[str], abstract: bool) -> Any:
    own = ", ".join(["self", *(each.replace("=", "=None") for each in parameters)])
    scope: dict[str, Any] = {}
    exec(f"def {name}({own}):\n    return None", scope)
    scope[name].__isabstractmethod__ = abstract
    return scope[name]


def _init(self: Any, llm_args: Any) -> None:
    self._llm_args = llm_args
    self._metadata = None


def _bind(self: Any, metadata: object) -> None:
    self._metadata = metadata


DOCUMENTED = {"__init__": _init, "bind_connector_meta": _bind}


def make_class(name: str) -> type:
    """Return a class with the methods that the facts say."""
    known = facts()["facts"][f"{CONNECTOR}:{name}"]
    methods = {
        each: DOCUMENTED.get(each) or _method(each, parameters, each in known["abstract"])
        for each, parameters in known["methods"].items()
    }
    return type(ABC)(name, (ABC,), methods)


_here = World()


def enter(world: World) -> None:
    """Be a rank of a world from now on."""
    global _here  # noqa: PLW0603 # as it is with MPI
    _here = world


def _gather(told: Any) -> list[Any]:
    return _here.gather(told)


def install() -> None:
    """Make `import tensorrt_llm` find this, in this process."""
    for name in MODULES:
        sys.modules[name] = ModuleType(name)
    sys.modules["tensorrt_llm"].__version__ = facts()["version"]  # type: ignore[attr-defined]
    connector = sys.modules[MODULES[3]]
    for name in ("KvCacheConnectorScheduler", "KvCacheConnectorWorker"):
        setattr(connector, name, make_class(name))
    utils: Any = sys.modules["tensorrt_llm._utils"]
    utils.mpi_rank = lambda: _here.rank
    utils.mpi_allgather = _gather


def remove() -> None:
    """Forget it, and the connector that stands on it."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("tensorrt_llm", "kvstore_trtllm"):
            del sys.modules[name]
