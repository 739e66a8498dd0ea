"""Namespaces that a client remembers, to tell a daemon that does not know them."""

from __future__ import annotations

from collections import OrderedDict

from kvstore.model.block import Namespace, NamespaceId
from kvstore.rpc.v1 import kvstore_pb2 as pb

NAMESPACES_MAX = 4096  # an engine that trains makes ever more
NAMESPACES_TOLD = 8  # to a new daemon at once, the others when it asks for them


class Namespaces:
    """Those of one client."""

    def __init__(self) -> None:
        self._known: OrderedDict[NamespaceId, Namespace] = OrderedDict()  # used last: last

    def get(self, namespace_id: NamespaceId) -> Namespace | None:
        """Return a namespace that is remembered; it was used last."""
        namespace = self._known.get(namespace_id)
        if namespace is not None:
            self._known.move_to_end(namespace_id)
        return namespace

    def add(self, namespace_id: NamespaceId, namespace: Namespace) -> None:
        """Remember a namespace; it was used last."""
        self._known[namespace_id] = namespace
        self._known.move_to_end(namespace_id)
        if len(self._known) > NAMESPACES_MAX:
            self._known.popitem(last=False)

    def registration(self, namespace_id: NamespaceId) -> pb.RegisterNamespaceRequest | None:
        """Return what tells a daemon of a namespace; None if it is not known here either."""
        namespace = self._known.get(namespace_id)
        return _registration(namespace) if namespace is not None else None

    def last_registrations(self) -> list[pb.RegisterNamespaceRequest]:
        """Return what tells a new daemon of those that were used last."""
        return [_registration(each) for each in [*self._known.values()][-NAMESPACES_TOLD:]]


def _registration(namespace: Namespace) -> pb.RegisterNamespaceRequest:
    return pb.RegisterNamespaceRequest(spec_json=namespace.to_json(), name=namespace.name)
