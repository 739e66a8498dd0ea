"""A real model on the CPU: the same tokens with and without the store, whatever happens to it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import GenerationConfig  # noqa: E402

from kvstore import Client, Incompatible, InvalidRequest, Unauthorized  # noqa: E402
from kvstore.testing.daemon import Daemon  # noqa: E402
from kvstore.testing.wait import until  # noqa: E402
from kvstore_transformers import Prefixes  # noqa: E402
from kvstore_transformers.compat import in_forward  # noqa: E402
from tests.connectors.vllm.tiny_models import make_gemma3, make_llama  # noqa: E402

MAKE = {"llama": make_llama, "gemma3": make_gemma3}
NEW_TOKENS = 12


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon("dram.capacity=128MiB", "dram.extent=64MiB") as daemon:
        yield daemon.start()


@pytest.fixture(
    scope="module",
    params=[
        *MAKE,
        *(pytest.param(f"{name} cuda", marks=pytest.mark.gpu) for name in MAKE),
    ],
)
def model(request):
    name, _, device = request.param.partition(" ")
    if device and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return make_model(name).to(device or "cpu")


def make_model(name: str, seed: int = 7):
    """float32, where cold and restored KV give the same tokens; random, but every token counts."""
    torch.manual_seed(seed)
    return MAKE[name]().eval()


def prompt(tokens: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, 1000, (1, tokens), generator=generator)


def plain(model, ids, **options):
    return greedy(model.generate, model, ids, options)


def stored(prefixes, ids, **options):
    return greedy(prefixes.generate, prefixes.model, ids, options)


def greedy(generate, model, ids, options):
    ids = ids.to(model.device)
    return generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, **options).cpu()


def test_tokens_are_equal_cold_resumed_and_after_kill_9(model, daemon):
    first = prompt(708)
    answer = plain(model, first)
    second = torch.cat([answer, prompt(70, seed=1)], 1)
    second_answer = plain(model, second)

    with Prefixes(model, daemon.target) as prefixes:
        assert torch.equal(stored(prefixes, first), answer)
        assert prefixes.flush()
        assert prefixes.saved_blocks > 0
        # The prompt again, and the next turn: its prompt, and the answer as far as it was computed.
        assert prefixes.load(first).restored_blocks == 707 // 32
        assert torch.equal(stored(prefixes, first), answer)
        assert prefixes.load(second).restored_blocks == 719 // 32
        assert torch.equal(stored(prefixes, second), second_answer)
        assert prefixes.flush()

    daemon.kill()
    daemon.start()
    with Prefixes(model, daemon.target) as prefixes:
        assert prefixes.load(second).restored_blocks == 789 // 32
        assert torch.equal(stored(prefixes, second), second_answer)
        assert torch.equal(stored(prefixes, first), answer)
        assert prefixes.loads_failed == 0
        assert prefixes.flush()
        assert prefixes.saved_blocks == 0, "what was restored is not stored again"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_a_daemon_of_another_user_is_used_only_if_one_says_so(daemon):
    model, ids = make_model("llama"), prompt(100)
    os.chown(daemon.socket, 65534, 65534)
    expected = plain(model, ids)
    with Prefixes(model, daemon.target) as prefixes:
        assert torch.equal(stored(prefixes, ids), expected)
        with pytest.raises(Unauthorized, match="daemon_uid=65534"):
            prefixes.flush()
    with Prefixes(model, daemon.target, daemon_uid=65534) as prefixes:
        assert torch.equal(stored(prefixes, ids), expected)
        assert prefixes.flush()
        assert prefixes.load(ids).restored_blocks == 3


@pytest.mark.parametrize("tokens", [1, 32, 33, 65, 129, 160])
def test_every_length_of_prompt_gives_the_same_tokens(model, daemon, tokens):
    """Shorter and longer than a block and than the sliding window of 128 tokens."""
    ids = prompt(tokens)
    expected = plain(model, ids)
    with Prefixes(model, daemon.target) as prefixes:
        assert torch.equal(stored(prefixes, ids), expected)
        assert prefixes.flush()
        assert prefixes.load(ids).restored_blocks == (tokens - 1) // 32
        assert torch.equal(stored(prefixes, ids), expected)


def test_restored_kv_is_what_was_computed(model, daemon):
    ids = prompt(300)
    with Prefixes(model, daemon.target, block_tokens=16) as prefixes:
        cold = prefixes.load(ids)
        model(input_ids=ids.to(model.device), **in_forward(model, cold), use_cache=True)
        prefixes.save(cold, ids)
        assert prefixes.flush()
        warm = prefixes.load(ids)
        assert warm.get_seq_length() == warm.restored_tokens == 288
        for before, after in zip(cold.layers, warm.layers, strict=True):
            begin = 288 - after.keys.shape[-2]
            assert torch.equal(before.keys[:, :, begin:288], after.keys)
            assert torch.equal(before.values[:, :, begin:288], after.values)


def test_another_prompt_gets_only_what_it_shares(model, daemon):
    shared = prompt(256)
    one = torch.cat([shared, prompt(64, seed=1)], 1)
    other = torch.cat([shared, prompt(64, seed=2)], 1)
    with Prefixes(model, daemon.target) as prefixes:
        stored(prefixes, one)
        assert prefixes.flush()
        # Of sliding windows only the prompt's end was stored, where no other prompt resumes.
        hybrid = len(prefixes.load(one).is_sliding) and any(prefixes.load(one).is_sliding)
        assert prefixes.load(other).restored_blocks == (0 if hybrid else 256 // 32)
        assert torch.equal(stored(prefixes, other), plain(model, other))


def test_bfloat16_is_stored_bit_for_bit(daemon):
    model = make_model("llama").to(torch.bfloat16)
    ids = prompt(200)
    with Prefixes(model, daemon.target) as prefixes:
        cold = prefixes.load(ids)
        model(input_ids=ids, **in_forward(model, cold), use_cache=True)
        prefixes.save(cold, ids)
        assert prefixes.flush()
        warm = prefixes.load(ids)
        assert warm.restored_blocks == 6
        for before, after in zip(cold.layers, warm.layers, strict=True):
            assert torch.equal(before.keys[:, :, :192], after.keys)


def test_other_weights_share_nothing(daemon):
    ids = prompt(200)
    with Prefixes(make_model("llama"), daemon.target) as prefixes:
        stored(prefixes, ids)
        assert prefixes.flush()
        assert prefixes.load(ids).restored_blocks
    with Prefixes(make_model("llama"), daemon.target) as same:
        assert same.load(ids).restored_blocks
    changed = make_model("llama")
    with torch.no_grad():
        changed.model.layers[2].mlp.up_proj.weight[0, 0] += 1
    for other in (make_model("llama", seed=8), changed):
        with Prefixes(other, daemon.target) as prefixes:
            assert prefixes.load(ids).restored_blocks == 0
            assert torch.equal(stored(prefixes, ids), plain(other, ids))


def test_without_a_daemon_it_computes_and_asks_nobody(model):
    ids = prompt(200)
    with Daemon() as never_started:
        prefixes = Prefixes(model, never_started.target)
        assert torch.equal(stored(prefixes, ids), plain(model, ids))
        took = []
        for _ in range(50):
            started = time.perf_counter()
            assert prefixes.load(ids).restored_blocks == 0
            took.append(time.perf_counter() - started)
        assert min(took) < 0.01, "the breaker is open: nothing is waited for"
        prefixes.close()


def test_a_daemon_killed_between_calls_costs_misses_and_comes_back(model, daemon):
    ids, other = prompt(300), prompt(300, seed=1)
    expected, other_expected = plain(model, ids), plain(model, other)
    with Prefixes(model, daemon.target) as prefixes:
        stored(prefixes, ids)
        assert prefixes.flush()
        daemon.kill()
        assert torch.equal(stored(prefixes, ids), expected)
        assert torch.equal(stored(prefixes, other), other_expected)
        daemon.start()
        until(lambda: prefixes.load(ids).restored_blocks == 299 // 32, timeout_s=20)
        assert torch.equal(stored(prefixes, ids), expected)


@pytest.mark.fault
def test_a_daemon_that_hangs_delays_one_prompt_by_its_deadline(daemon):
    model, ids = make_model("llama"), prompt(100)
    expected = plain(model, ids)
    with Prefixes(model, daemon.target, load_deadline_s=0.5) as prefixes:
        stored(prefixes, ids)
        assert prefixes.flush()
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            took = []
            for _ in range(2):
                began = time.monotonic()
                assert prefixes.load(ids).restored_blocks == 0
                took.append(time.monotonic() - began)
            assert took[0] < 0.5 + 1.0  # that and the test's machine
            assert took[1] < 0.4, "nobody asks it again before it has answered a ping"
            assert prefixes.loads_failed == 1
            assert torch.equal(stored(prefixes, ids), expected)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        until(lambda: prefixes.load(ids).restored_blocks == 3, timeout_s=20)


def test_a_rotten_record_is_a_miss_and_is_dropped(daemon):
    model = make_model("llama")
    ids = prompt(300)
    expected = plain(model, ids)
    with Prefixes(model, daemon.target) as prefixes, Client(daemon.target) as intruder:
        stored(prefixes, ids)
        assert prefixes.flush()
        intruder.connect()
        for extent in intruder.extents().values():
            extent[1000] ^= 1  # somewhere in the first record
        assert prefixes.load(ids).restored_blocks == 0
        assert prefixes.loads_failed == 1
        assert torch.equal(stored(prefixes, ids), expected)
        assert prefixes.flush()
        assert prefixes.load(ids).restored_blocks == 299 // 32, "computed and stored anew"


def test_what_a_key_does_not_name_bypasses_the_store(daemon):
    model = make_model("llama")
    batch = torch.cat([prompt(100), prompt(100, seed=1)])
    padded = prompt(100)
    padded[0, :10] = model.generation_config.pad_token_id
    half = torch.ones(1, 100, dtype=torch.int64)
    half[0, :50] = 0
    with Prefixes(model, daemon.target) as prefixes:
        stored(prefixes, prompt(100))  # something to be wrong with
        assert prefixes.flush()
        before = prefixes.saved_blocks
        for ids, options in [
            (batch, {}),
            (padded, {}),
            (prompt(100), {"attention_mask": half}),
            (prompt(100), {"num_beams": 2}),
            (prompt(100), {"use_cache": False}),
            (prompt(100), {"prefill_chunk_size": 32}),
            (prompt(100), {"prompt_lookup_num_tokens": 2}),
            (prompt(100), {"generation_config": GenerationConfig(num_beams=2)}),
        ]:
            assert torch.equal(stored(prefixes, ids, **options), plain(model, ids, **options))
        options = {"output_hidden_states": True, "return_dict_in_generate": True}
        output = prefixes.generate(prompt(100), max_new_tokens=2, do_sample=False, **options)
        assert output.hidden_states[0][1].shape[1] == 100, "of every token of the prompt"
        assert prefixes.flush()
        assert prefixes.saved_blocks == before
        with pytest.raises(InvalidRequest, match="one prompt"):
            prefixes.load(batch)
        cache = prefixes.load(prompt(100))
        with pytest.raises(InvalidRequest, match="one sequence"):
            model(input_ids=batch, **in_forward(model, cache))
        with pytest.raises(InvalidRequest, match="do not start"):
            prefixes.save(cache, prompt(100, seed=1))


def test_options_that_change_only_what_is_sampled_keep_the_store(daemon):
    model = make_model("llama")
    ids = prompt(100)
    ids[0, 50] = 2
    mask = torch.ones_like(ids)
    ends = {"eos_token_id": [1, 2], "pad_token_id": 2}
    with Prefixes(model, daemon.target) as prefixes:
        assert torch.equal(stored(prefixes, ids, **ends), plain(model, ids, **ends))
        assert prefixes.flush()
        assert prefixes.load(ids).restored_blocks == 3
        output = prefixes.generate(
            ids,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            attention_mask=mask,
            return_dict_in_generate=True,
        )
        assert torch.equal(output.sequences, plain(model, ids, attention_mask=mask))


def test_the_pace_of_prefill_is_measured_and_told(daemon):
    """The daemon does not begin, or wait for, loads that computing would beat."""
    model = make_model("llama")
    with Prefixes(model, daemon.target) as prefixes, Client(daemon.target) as client:
        cold = prefixes.load(prompt(1000))
        started = time.perf_counter()
        model(input_ids=prompt(1000), **in_forward(model, cold), use_cache=True)
        took = time.perf_counter() - started
        assert 0.2 * took < 1000 * cold.pace.s_per_token < 1.5 * took
        prefixes.save(cold, prompt(1000))
        assert prefixes.flush()
        warm = prefixes.load(prompt(1000))
        (outcome,) = client.admin.outcomes(warm.request_id)
        assert outcome.hit_blocks == warm.restored_blocks == 31


def test_what_is_computed_in_another_precision_neither_comes_nor_goes(daemon):
    model = make_model("llama")
    with Prefixes(model, daemon.target) as prefixes:
        with torch.autocast("cpu", torch.bfloat16):
            stored(prefixes, prompt(100))
            cache = prefixes.load(prompt(100))
            model(input_ids=prompt(100), **in_forward(model, cache))
            assert not cache.exact
            prefixes.save(cache, prompt(100))
        assert prefixes.load(prompt(100)).restored_blocks == 0
        prefixes.save(cache, prompt(100))
        assert prefixes.flush()
        assert prefixes.saved_blocks == 0
        assert torch.equal(stored(prefixes, prompt(100)), plain(model, prompt(100)))
        assert prefixes.flush()
        with torch.autocast("cpu", torch.bfloat16):
            assert prefixes.load(prompt(100)).restored_blocks == 0
        assert prefixes.load(prompt(100)).restored_blocks == 3
        model.to(torch.bfloat16)
        with pytest.raises(Incompatible, match="converted"):
            prefixes.load(prompt(100))


def test_models_that_cannot_be_kept_are_refused(daemon):
    training = make_model("llama").train()
    with pytest.raises(Incompatible, match="eval"):
        Prefixes(training, daemon.target)
    with Prefixes(make_model("llama"), daemon.target) as prefixes:
        prefixes.model.train()
        with pytest.raises(Incompatible, match="eval"):
            prefixes.load(prompt(100))
    scaled = make_model("llama")
    scaled.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(Incompatible, match="length"):
        Prefixes(scaled, daemon.target)
    with pytest.raises(InvalidRequest, match="unix:"):
        Prefixes(make_model("llama"), "127.0.0.1:7700")


def test_a_model_with_forward_hooks_is_refused(daemon):
    def steer(module, args, output=None):
        return None if output is None else output + 1

    model, ids = make_model("llama"), prompt(100)
    layer = model.model.layers[1].mlp
    with Prefixes(model, daemon.target) as prefixes:
        expected = stored(prefixes, ids)
        for register in (layer.register_forward_hook, layer.register_forward_pre_hook):
            hook = register(steer)
            with pytest.raises(Incompatible, match=f"forward hook of {__name__}"):
                stored(prefixes, ids)
            with pytest.raises(Incompatible, match="forward hook"):
                Prefixes(model, daemon.target)
            hook.remove()
        model(input_ids=ids, output_hidden_states=True)  # transformers leaves hooks of its own
        assert torch.equal(stored(prefixes, ids), expected)


def test_a_full_store_refuses_and_counts(daemon):
    model = make_model("llama")
    with Prefixes(model, daemon.target, save_queue_jobs=0) as prefixes:
        assert torch.equal(stored(prefixes, prompt(100)), plain(model, prompt(100)))
        assert prefixes.saves_dropped == 1
        assert prefixes.saved_blocks == 0
