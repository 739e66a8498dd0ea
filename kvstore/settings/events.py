"""KV events: what is announced to routers, where, and as whose."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.model.errors import ConfigError
from kvstore.settings.declare import setting
from kvstore.settings.values import is_loopback

if TYPE_CHECKING:
    from kvstore.settings.sections import Settings

TOPICS = ("own", "engines")
MODEL_CHARS_MAX = 128
_ENDPOINT = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9*][A-Za-z0-9._-]*):([0-9]{1,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSettings:
    """KV events for routers. Whoever reads them learns the token ids of prompts."""

    publish: str = setting(
        'ZMQ address at which blocks are announced, such as tcp://127.0.0.1:5567; "" switches '
        "events off. Beyond loopback it needs events.open.",
        "",
    )
    replay: str = setting(
        'ZMQ address at which announcements can be had again, such as tcp://127.0.0.1:5568; "" '
        "is none. Routers that miss some ask there.",
        "",
    )
    open: bool = setting(
        "Allow events.publish and events.replay beyond loopback: everybody who reaches them may "
        "read the token ids of prompts.",
        False,
    )
    topics: str = setting(
        "Whose announcements they are: own (a stream of the daemon, under events.dp_rank, for "
        "Dynamo and Conductor) or engines (kv@<engine's address>@<model>, for llm-d).",
        "own",
    )
    dp_rank: int = setting(
        "For own: the data-parallel rank of the stream. No engine that a router knows under the "
        "same instance may have it.",
        1000,
    )
    model: str = setting(
        'Only blocks of the model of this name are announced; "" is all. A router that knows a '
        "stream by one model needs it where a daemon serves several.",
        "",
    )
    replay_batches: int = setting("Announcements of a topic that can be had again.", 10_000)

    @property
    def on(self) -> bool:
        """Whether anything is announced."""
        return bool(self.publish)


def check_events(settings: Settings) -> None:
    """Raise ConfigError on addresses that are none, or that would be open by mistake."""
    events = settings.events
    for key, text in (("events.publish", events.publish), ("events.replay", events.replay)):
        if text:
            _check_endpoint(key, text, open_=events.open)
    if events.replay and not events.publish:
        raise ConfigError("events.replay without events.publish: set both, or none")
    if events.replay == events.publish != "" and not events.publish.endswith(":0"):
        raise ConfigError("events.replay is the address of events.publish: give it another port")
    if events.topics not in TOPICS:
        raise ConfigError(f"events.topics={events.topics!r}: choose one of {', '.join(TOPICS)}")
    if "@" in events.model or len(events.model) > MODEL_CHARS_MAX:
        raise ConfigError(
            f"events.model={events.model[:200]!r}: a name has no @, which parts the topics of "
            f"routers, and at most {MODEL_CHARS_MAX} characters"
        )
    if events.on and settings.tenants:
        raise ConfigError(
            "events.publish with [tenants.NAME]: who reads events reads all prompts: leave one of "
            "them out"
        )


def _check_endpoint(key: str, text: str, *, open_: bool) -> None:
    found = _ENDPOINT.fullmatch(text)
    if found is None or int(found[2]) > 65535:
        raise ConfigError(f"{key}={text[:200]!r} is not an address: write tcp://127.0.0.1:5567")
    host = found[1].removeprefix("[").removesuffix("]")
    if not (is_loopback(host) or open_):
        raise ConfigError(
            f"{key}={text!r} lets everybody who reaches it read the token ids of prompts. If the "
            "network is yours alone, add --set events.open=true"
        )
