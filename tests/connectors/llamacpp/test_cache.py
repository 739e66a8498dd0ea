"""Answers that start from stored KV are those of a model without a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstore import Incompatible, InvalidRequest
from kvstore.system.engine_versions import ALLOW
from kvstore.testing.daemon import Daemon
from tests.connectors.llamacpp.conftest import Open

Words = Callable[[int, int], list[int]]
KINDS = [
    ("llama", {}),
    ("llama", {"type_k": 8}),
    ("gemma3", {}),
    ("gemma3", {"swa_full": False}),
    ("mamba", {}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_another_process_resumes_and_answers_the_same(
    chat: Open, daemon: Daemon, words: Words, kind: str, options: dict[str, Any]
) -> None:
    prompt = words(200, 1)
    plain = chat(kind, None, **options).ask(prompt, 40)
    first = chat(kind, daemon, **options)
    assert first.ask(prompt, 40) == plain
    first.saved()
    again = chat(kind, daemon, **options)
    assert again.ask(prompt, 40) == plain
    assert again.cache.counts.loaded_tokens == 192
    # A further turn resumes in the answer of the first, where the state is known or was kept.
    longer = prompt + plain + words(30, 2)
    third = chat(kind, daemon, **options)
    assert third.ask(longer) == chat(kind, None, **options).ask(longer)
    assert third.cache.counts.loaded_tokens == 224


@pytest.mark.parametrize("options", [{}, {"type_k": 8, "type_v": 8}])
def test_with_flash_attention_it_is_as_with_the_models_own_prefix(
    chat: Open, daemon: Daemon, words: Words, options: dict[str, Any]
) -> None:
    """There, what llama.cpp computes depends a little on how many tokens it computes at once."""
    prompt = words(200, 1)
    first = chat("llama", daemon, flash_attn=True, **options)
    first.ask(prompt)
    first.saved()
    first.llama.n_tokens = 192
    wanted = first.ask(prompt, 40)
    again = chat("llama", daemon, flash_attn=True, **options)
    assert again.ask(prompt, 40) == wanted
    assert (first.cache.counts.loads, again.cache.counts.loads) == (0, 1)


def test_everything_was_killed(chat: Open, own_daemon: Daemon, words: Words) -> None:
    prompt = words(200, 1)
    first = chat("gemma3", own_daemon)
    answer = first.ask(prompt)
    first.saved()
    own_daemon.kill()
    own_daemon.start()
    again = chat("gemma3", own_daemon)
    assert again.ask(prompt) == answer
    assert again.cache.counts.loaded_tokens == 192


@pytest.mark.parametrize(
    ("kind", "records"), [("llama", (7, 2)), ("gemma3", (9, 6)), ("mamba", (1, 2))]
)
def test_what_two_prompts_share_is_stored_once(
    chat: Open, daemon: Daemon, words: Words, kind: str, records: tuple[int, int]
) -> None:
    """Records: of 7 blocks, and of 2 that differ; of windows, 2 blocks for each place to resume."""
    shared = words(161, 1)
    one, two, three = (shared + words(70, seed)[1:] for seed in (2, 3, 4))
    kept = chat(kind, daemon)
    kept.ask(one)
    kept.saved()
    assert kept.cache.saved_blocks == records[0]
    assert kept.ask(two) == chat(kind, None).ask(two)
    kept.saved()
    assert kept.cache.saved_blocks == sum(records)
    # The second prompt told where prompts part: the third may resume there.
    other = chat(kind, daemon)
    assert other.ask(three) == chat(kind, None).ask(three)
    assert other.cache.counts.loaded_tokens == 160


def test_a_conversation_goes_on_in_the_model_itself(
    chat: Open, daemon: Daemon, words: Words
) -> None:
    kept, plain = chat("gemma3", daemon), chat("gemma3", None)
    prompt = words(100, 1)
    for seed in range(2, 6):
        answer = kept.ask(prompt)
        assert answer == plain.ask(prompt)
        prompt = prompt + answer + words(20, seed)
    assert kept.cache.counts.loads == 0


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba"])
def test_an_exact_cache_uses_no_kv_of_answers(
    chat: Open, daemon: Daemon, words: Words, kind: str
) -> None:
    kept = chat(kind, daemon, cache={"exact": True})
    prompt = words(100, 1)
    for seed in range(2, 6):
        answer, asked = kept.ask(prompt, 20), len(prompt)
        assert answer == chat(kind, None).ask(prompt, 20)
        prompt = prompt + answer + words(23, seed)
        kept.saved()
    # A recurrent model cannot be cut where its answer began: there, each turn loads its prompt.
    assert kept.cache.counts.loads == (3 if kind == "mamba" else 0)
    again = chat(kind, daemon, cache={"exact": True})
    assert again.ask(prompt) == chat(kind, None).ask(prompt)
    assert asked - 33 < again.cache.counts.loaded_tokens <= asked


def test_an_exact_cache_does_not_load_what_another_stored(
    chat: Open, daemon: Daemon, words: Words
) -> None:
    first = chat("llama", daemon)
    prompt = words(100, 1)
    prompt += first.ask(prompt, 60)
    first.saved()
    exact = chat("llama", daemon, cache={"exact": True})
    exact.ask(prompt)
    assert (exact.cache.counts.lookups, exact.cache.counts.loads) == (1, 0)
    another = chat("llama", daemon)
    another.ask(prompt)
    assert another.cache.counts.loads == 1


def test_a_window_that_is_gone_is_computed_again(chat: Open, daemon: Daemon, words: Words) -> None:
    """After a resume, the model has the window alone; a prompt that parts before it cannot use
    what is there."""
    prompt = words(200, 1)
    first = chat("gemma3", daemon)
    first.ask(prompt)
    first.saved()
    resumed = chat("gemma3", daemon)
    resumed.ask(prompt)
    assert resumed.cache.counts.loads == 1
    parted = prompt[:70] + words(40, 3)
    plain = chat("gemma3", None)
    assert resumed.ask(parted) == plain.ask(parted)
    tokens = prompt[:50] + words(9, 4)
    generated = []
    for each in (resumed, plain):  # not by way of the cache
        each.llama.set_cache(None)
        steps = each.llama.generate(tokens, temp=0.0)
        generated.append([next(steps) for _ in range(8)])
    assert generated[0] == generated[1]


def test_drafts_that_are_dropped_are_not_stored(
    chat: Open, daemon: Daemon, words: Words, llama_cpp: Any
) -> None:
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    prompt = words(100, 1) * 2
    for kind in ("llama", "gemma3"):
        drafts = LlamaPromptLookupDecoding(num_pred_tokens=4)
        first = chat(kind, daemon, draft_model=drafts, logits_all=True)
        answer = first.ask(prompt, 60)
        first.saved()
        longer = prompt + answer + words(20, 2)
        again = chat(kind, daemon)
        assert again.ask(longer) == chat(kind, None).ask(longer)
        assert again.cache.counts.loads == 1


def test_an_answer_that_nobody_reads_to_its_end_is_stored(
    chat: Open, daemon: Daemon, words: Words
) -> None:
    prompt = words(100, 1)
    first = chat("llama", daemon)
    steps = first.llama.create_completion(prompt, max_tokens=50, temperature=0.0, stream=True)
    next(steps)
    steps.close()
    first.saved()
    again = chat("llama", daemon)
    again.ask(prompt)
    assert again.cache.counts.loaded_tokens == 96


@pytest.mark.parametrize("by", ["a completion", "a handler"])
def test_an_answer_that_is_interrupted_is_stored(
    chat: Open, daemon: Daemon, words: Words, by: str
) -> None:
    """llama-cpp-python's server leaves a stream where it is when the next request comes."""
    prompt, other = words(100, 1), words(80, 2)
    first = chat("llama", daemon)
    steps = first.llama.create_completion(prompt, max_tokens=50, temperature=0.0, stream=True)
    next(steps)
    if by == "a handler":  # of images and text: it computes the prompt itself
        first.llama.reset()
        first.llama.eval(other)
    assert first.ask(other) == chat("llama", None).ask(other)
    steps.close()
    first.saved()
    again = chat("llama", daemon)
    again.ask(prompt)
    assert again.cache.counts.loaded_tokens == 96


def test_an_answer_during_which_the_model_is_hashed_is_stored(
    chat: Open, daemon: Daemon, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstore_llamacpp import KVStoreCache
    from kvstore_llamacpp.namespace import ModelFiles

    prompt, complete = words(100, 1), ModelFiles.complete
    monkeypatch.setattr(ModelFiles, "complete", lambda files, namespace: None)
    llama = chat("llama", None).llama
    with KVStoreCache(llama, daemon.target) as cache:
        llama.set_cache(cache)
        steps = llama.create_completion(prompt, max_tokens=20, temperature=0.0, stream=True)
        next(steps)
        monkeypatch.setattr(ModelFiles, "complete", complete)
        assert cache.wait_ready(30)
        assert len(list(steps)) > 1
        assert cache.flush()
    again = chat("llama", daemon)
    again.ask(prompt)
    assert again.cache.counts.loaded_tokens == 96


def test_logits_of_the_prompt_are_computed(chat: Open, daemon: Daemon, words: Words) -> None:
    kept, plain = (chat("llama", to, logits_all=True) for to in (daemon, None))
    text = "".join(f" w{token % 90}" for token in words(60, 1))
    options = {"max_tokens": 4, "temperature": 0.0, "logprobs": 1, "echo": True}
    wanted = plain.llama.create_completion(text, **options)["choices"][0]["logprobs"]
    for _ in range(2):
        found = kept.llama.create_completion(text, **options)["choices"][0]["logprobs"]
        assert found["token_logprobs"] == wanted["token_logprobs"]
        kept.llama.reset()
    assert kept.cache.counts.loads == 0
    kept.llama.create_completion(text, max_tokens=4, temperature=0.0)
    kept.saved()
    resumed = chat("llama", daemon, logits_all=True)
    resumed.llama.create_completion(text, max_tokens=4, temperature=0.0)
    assert resumed.cache.counts.loads == 1, "what comes with a state has no logits"
    found = resumed.llama.create_completion(text, **options)["choices"][0]["logprobs"]
    assert found["token_logprobs"] == wanted["token_logprobs"]


def test_the_model_is_as_before_without_its_cache(
    chat: Open, daemon: Daemon, words: Words, llama_cpp: Any
) -> None:
    kept = chat("llama", daemon)
    prompt = words(70, 1)
    answer = kept.ask(prompt)
    state = kept.llama.save_state()  # the caller's own: whole
    assert state.llama_state_size > 1000
    with pytest.raises(InvalidRequest, match="close that one first"):
        type(kept.cache)(kept.llama, daemon.target)
    kept.cache.close()
    assert "eval" not in vars(kept.llama)
    assert kept.llama.cache is None
    kept.llama.load_state(state)
    assert kept.ask(prompt) == answer


def test_whether_something_is_stored(chat: Open, daemon: Daemon, words: Words) -> None:
    kept = chat("llama", daemon)
    prompt = words(70, 1)
    assert prompt not in kept.cache
    kept.ask(prompt)
    kept.saved()
    assert prompt in kept.cache
    assert words(70, 2) not in kept.cache
    assert kept.cache.cache_size > 0


def test_a_version_that_is_not_known_is_refused_with_the_list(
    chat: Open, daemon: Daemon, words: Words, llama_cpp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ALLOW, raising=False)
    monkeypatch.setattr(llama_cpp, "__version__", "0.9.1")
    with pytest.raises(Incompatible, match=r"0\.9\.1 is not tested .* 0\.3\.36.*allow_untested"):
        chat("llama", daemon)
    kept = chat("llama", daemon, cache={"allow_untested": True})
    prompt = words(70, 1)
    assert kept.ask(prompt) == chat("llama", None).ask(prompt)


def test_a_package_that_lacks_a_function_is_refused(
    chat: Open, daemon: Daemon, llama_cpp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(llama_cpp, "llama_state_seq_get_data_ext")
    with pytest.raises(Incompatible, match="llama_state_seq_get_data_ext"):
        chat("llama", daemon, cache={"allow_untested": True})


def test_blocks_have_to_fit_the_window(chat: Open, daemon: Daemon) -> None:
    with pytest.raises(InvalidRequest, match="use block_tokens=32"):
        chat("gemma3", daemon, cache={"block_tokens": 48})
