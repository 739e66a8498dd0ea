"""What is in the context of a model, and is not what its token ids say, or not all of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from kvstore.testing.daemon import Daemon
from tests.connectors.llamacpp.conftest import Chat, Open

Words = Callable[[int, int], list[int]]


def write_image(llama: Any, places: list[int]) -> None:
    """Write KV past `eval`, as the handlers of images do. It is that of these tokens."""
    llama._batch.set_batch(batch=places, n_past=llama.n_tokens, logits_all=False)
    llama._ctx.decode(llama._batch)
    llama.n_tokens += len(places)


def ask_of_image(chat: Chat, text: list[int], image: list[int], at: int) -> list[int]:
    """Ask `text` with an image in it, as the handlers do: compute it, then ask for its ids.

    Before, the ids at the places of the image are those of `text`.
    """
    llama = chat.llama
    llama.input_ids[: len(text)] = text
    llama.reset()
    llama._ctx.kv_cache_clear()
    if at:
        llama.eval(text[:at])
    write_image(llama, image)
    llama.eval(text[at + len(image) :])
    return chat.ask(llama.input_ids[: llama.n_tokens].tolist())


@pytest.mark.parametrize(
    "case", list(product(("llama", "gemma3"), (False, True), (0, 40))), ids=str
)
def test_kv_of_an_image_is_neither_stored_nor_forgotten(
    chat: Open, daemon: Daemon, words: Words, case: tuple[str, bool, int]
) -> None:
    kind, exact, at = case
    text, image = words(180, 1), words(100, 2)
    kept, plain = chat(kind, daemon, cache={"exact": exact}), chat(kind, None)
    plain_answer = plain.ask(text)
    kept.ask(words(150, 3))
    answer = ask_of_image(plain, text, image, at)
    assert answer != plain_answer
    assert ask_of_image(kept, text, image, at) == answer
    assert kept.cache.counts.bypassed == 1
    kept.saved()
    other = chat(kind, daemon, cache={"exact": exact})
    assert other.ask(text) == plain_answer
    assert other.cache.counts.loads == 0
    # The same ids as text: not on top of the image.
    longer = text[:160] + words(30, 4)
    assert kept.ask(longer) == chat(kind, None).ask(longer)
    assert kept.cache.counts.bypassed == 1
    kept.saved()
    again = chat(kind, daemon, cache={"exact": exact})
    assert again.ask(longer) == chat(kind, None).ask(longer)
    assert again.cache.counts.loaded_tokens == 160


@pytest.fixture
def unknown_layout(llama_cpp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models with attention whose state has a layout that is not known: stored as snapshots."""
    from kvstore_llamacpp import namespace
    from kvstore_llamacpp.state import UnknownState

    def unknown(*_: Any) -> None:
        raise UnknownState("for this test")

    monkeypatch.setattr(namespace, "read_state", unknown)


@pytest.mark.usefixtures("unknown_layout")
@pytest.mark.parametrize("options", [{}, {"swa_full": False}])
def test_what_a_snapshot_has_not_is_computed_again(
    chat: Open, daemon: Daemon, words: Words, options: dict[str, Any]
) -> None:
    """llama.cpp writes no more of a window than the next token needs, in a snapshot as well."""
    prompt = words(200, 1)
    first = chat("gemma3", daemon, **options)
    first.ask(prompt)
    first.saved()
    resumed = chat("gemma3", daemon, **options)
    resumed.ask(prompt)
    assert resumed.cache.stores_snapshots
    assert resumed.cache.counts.loads == 1
    for parted in (prompt[:195] + words(20, 2), prompt[:70] + words(40, 3)):
        assert resumed.ask(parted) == chat("gemma3", None, **options).ask(parted)


@pytest.mark.usefixtures("unknown_layout")
def test_a_shorter_snapshot_does_not_replace_what_is_there(
    chat: Open, daemon: Daemon, words: Words
) -> None:
    prompt = words(200, 1)
    kept = chat("llama", daemon)
    for each in (prompt, prompt[:96] + words(30, 2), prompt):
        kept.ask(each)
        kept.saved()  # of the second: where it parted from the first
    loads = kept.cache.counts.loads
    longer = prompt[:180] + words(30, 3)
    assert kept.ask(longer) == chat("llama", None).ask(longer)
    assert kept.cache.counts.loads == loads
