"""Saved hidden states are those of transformers, whatever the engine did; files are whole or not there."""

from __future__ import annotations

import functools
import gc
import tempfile
import threading
from pathlib import Path

import pytest
import torch
import transformers
from filelock import FileLock
from safetensors.torch import load_file

from forerun import SamplingParams
from forerun.errors import ConfigError, RequestError
from forerun.executor import hidden_states
from tests.contract.drafters import NGRAM
from tests.contract.test_contract import PROMPTS, TIGHT, assert_nothing_is_held
from tests.engines import VOCAB_SIZE, engine_of, native_target, storage, tiny_llm, tiny_target
from tests.native import needs_kernels
from tests.stand_in import save_stand_in
from tests.tiny_models import save_tiny_model

LAYERS = (3, 0, 2)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
WITH_OUTPUT = {"kv_transfer_params": {"include_output_tokens": True}}


def sampling(max_tokens=1, *, output=False, **others):
    extra_args = WITH_OUTPUT if output else None
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra_args, **others)


def extract(layer_ids=LAYERS):
    hf_config = {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}
    return {"method": "extract_hidden_states", "draft_model_config": {"hf_config": hf_config}}


def extracting(folder, *, layer_ids=LAYERS, extra=None, **settings):
    """A tiny LLM that saves the hidden states of `layer_ids` to `folder`."""
    return tiny_llm(extract(layer_ids), kv_transfer_config=storage(folder, **(extra or {})), **settings)


def saved(output):
    return load_file(output.kv_transfer_params["hidden_states_path"])


@functools.cache
def reference_model(vocab_size):
    """Transformers' model with the weights of `tiny_target` (vocabulary of 97) or `native_target` (264)."""
    with tempfile.TemporaryDirectory() as folder:
        if vocab_size == VOCAB_SIZE:
            save_tiny_model(Path(folder), seed=1, vocab_size=VOCAB_SIZE)
        else:
            save_stand_in(Path(folder))
        return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def reference(token_ids, *, layer_ids=LAYERS, vocab_size=VOCAB_SIZE):
    """[num_tokens, num_layers, hidden_size]: the residual stream before each layer, or after the last."""
    model, last = reference_model(vocab_size), []
    hook = model.model.layers[-1].register_forward_hook(lambda _module, _inputs, output: last.append(output))
    with torch.inference_mode():
        states = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    hook.remove()
    end = last[0] if isinstance(last[0], torch.Tensor) else last[0][0]
    stream = [*states[:-1], end]
    return torch.stack([stream[layer][0] for layer in layer_ids], dim=1)


def assert_saved(output, *, with_output=False):
    """The file holds the reference's rows of the request's tokens."""
    token_ids = output.prompt_token_ids + (output.outputs[0].token_ids[:-1] if with_output else [])
    found = saved(output)
    assert set(found) == {"hidden_states", "token_ids"}
    assert found["token_ids"].dtype == torch.int64
    assert found["token_ids"].tolist() == token_ids
    torch.testing.assert_close(found["hidden_states"], reference(token_ids), atol=2e-4, rtol=0)


# --- rows ---------------------------------------------------------------------------------------


def test_rows_are_those_of_transformers_in_the_order_of_the_layers(tmp_path):
    (output,) = extracting(tmp_path).generate([PROMPT], sampling(), use_tqdm=False)
    assert saved(output)["hidden_states"].shape == (8, 3, 48)
    assert_saved(output)


@pytest.mark.parametrize("max_tokens", [1, 12])
def test_output_tokens_are_included_where_a_request_asks(tmp_path, max_tokens):
    prompts = [PROMPT, PROMPT]
    wanted = [sampling(max_tokens, output=True), sampling(max_tokens)]
    with_output, without = extracting(tmp_path).generate(prompts, wanted, use_tqdm=False)
    assert_saved(with_output, with_output=True)
    assert len(saved(with_output)["token_ids"]) == 8 + max_tokens - 1
    assert_saved(without)


def test_rows_are_the_same_after_a_prefix_hit(tmp_path):
    llm = extracting(tmp_path)
    llm.generate([PROMPT * 4], sampling(), use_tqdm=False)
    (output,) = llm.generate([PROMPT * 4 + [7, 8]], sampling(5, output=True), use_tqdm=False)
    assert output.num_cached_tokens == 32
    assert_saved(output, with_output=True)


def test_rows_are_the_same_with_preempted_sequences_and_prompts_in_chunks(tmp_path):
    llm = extracting(tmp_path, **TIGHT)
    outputs = llm.generate(PROMPTS[:16], sampling(24, output=True), use_tqdm=False)
    scheduler = engine_of(llm).scheduler
    assert scheduler.num_preemptions > 0
    assert scheduler.num_cached_tokens > 0
    for output in outputs:
        assert_saved(output, with_output=True)
    assert len(list(tmp_path.glob("*.safetensors"))) == 16
    assert_nothing_is_held(llm)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rows_come_from_the_kernels_too_in_the_models_dtype(tmp_path, dtype):
    llm = extracting(tmp_path, target=native_target(dtype))
    (output,) = llm.generate(["a text of some length"], sampling(4, output=True), use_tqdm=False)
    found = saved(output)
    assert found["hidden_states"].dtype == dtype
    expected = reference(found["token_ids"].tolist(), vocab_size=264)
    error = (found["hidden_states"].float() - expected).square().mean(dim=(0, 2)).sqrt()
    assert (error < (1e-5 if dtype == torch.float32 else 0.05) * expected.std()).all()


def test_a_layer_beyond_the_last_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"got layer 4; may be 0 \(the embeddings\) to 3"):
        extracting(tmp_path, layer_ids=[1, 4])


def test_nothing_is_drafted_and_nothing_counted(tmp_path):
    llm = extracting(tmp_path)
    (output,) = llm.generate([PROMPT], sampling(12), use_tqdm=False)
    (plain,) = tiny_llm().generate([PROMPT], sampling(12), use_tqdm=False)
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert output.speculation == plain.speculation
    assert llm.stats.speculation.num_drafts == 0
    assert plain.kv_transfer_params is None


# --- files --------------------------------------------------------------------------------------


def test_a_file_is_named_after_its_request(tmp_path):
    outputs = extracting(tmp_path).generate([PROMPT, PROMPT], sampling(), use_tqdm=False)
    names = [Path(output.kv_transfer_params["hidden_states_path"]).name.split("-") for output in outputs]
    assert [request_id for request_id, _ in names] == [output.request_id for output in outputs]
    assert all(len(rest) == len("01234567.safetensors") for _, rest in names)


def test_each_completion_has_a_file(tmp_path):
    wanted = SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True, extra_args=WITH_OUTPUT)
    (output,) = extracting(tmp_path).generate([PROMPT], wanted, use_tqdm=False)
    for completion in output.outputs:
        assert Path(completion.hidden_states_path).name.startswith(f"{completion.index}_{output.request_id}-")
        token_ids = load_file(completion.hidden_states_path)["token_ids"].tolist()
        assert token_ids == PROMPT + completion.token_ids[:-1]
    assert output.kv_transfer_params == {"hidden_states_path": output.outputs[0].hidden_states_path}


@pytest.mark.parametrize("use_lock", [True, False])
def test_a_lock_lies_beside_the_file_if_it_is_wanted(tmp_path, use_lock):
    llm = extracting(tmp_path, extra={"use_synchronization_lock": use_lock})
    (output,) = llm.generate([PROMPT], sampling(), use_tqdm=False)
    path = Path(output.kv_transfer_params["hidden_states_path"])
    assert {found.name for found in tmp_path.iterdir()} == {path.name} | ({f"{path.name}.lock"} if use_lock else set())


def finish_one(llm):
    """Step one request to its end, as an engine's owner who does not wait for files."""
    llm.engine.add_request("one", PROMPT, sampling())
    (output,) = llm.engine.step().finished
    return Path(output.kv_transfer_params["hidden_states_path"]), output


class Gate:
    """Holds writers up before they write."""

    def __init__(self, save_tensors):
        self.reached, self.opened, self._save_tensors = threading.Event(), threading.Event(), save_tensors

    def __call__(self, tensors, path):
        self.reached.set()
        assert self.opened.wait(60)
        self._save_tensors(tensors, path)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(hidden_states.save_tensors)
    monkeypatch.setattr(hidden_states, "save_tensors", gate)
    yield gate
    gate.opened.set()


def is_locked(path):
    lock = FileLock(f"{path}.lock")
    try:
        lock.acquire(blocking=False)
    except TimeoutError:
        return True
    lock.release()
    return False


def test_the_lock_is_held_until_the_file_is_complete(tmp_path, gate):
    path, _ = finish_one(extracting(tmp_path))
    assert gate.reached.wait(60)  # the thread that writes takes the lock: the engine does not wait for locks
    assert is_locked(path)
    assert not path.exists()
    gate.opened.set()
    with FileLock(f"{path}.lock", timeout=60):
        assert len(load_file(path)["token_ids"]) == 8


def test_a_file_is_written_though_the_engine_is_dropped(tmp_path, gate):
    llm = extracting(tmp_path)
    path, _ = finish_one(llm)
    del llm
    gc.collect()
    assert gate.reached.wait(60)
    gate.opened.set()
    with FileLock(f"{path}.lock", timeout=60):
        assert len(load_file(path)["token_ids"]) == 8


def test_a_new_file_may_be_read_by_whoever_may_read_new_files(tmp_path):
    (output,) = extracting(tmp_path).generate([PROMPT], sampling(), use_tqdm=False)
    (tmp_path / "new").touch()
    assert Path(output.kv_transfer_params["hidden_states_path"]).stat().st_mode == (tmp_path / "new").stat().st_mode


def test_the_engine_steps_on_while_every_writer_waits_for_the_disk(tmp_path, gate):
    llm = extracting(tmp_path, extra={"num_writer_threads": 1})
    outputs = [finish_one(llm)[1] for _ in range(4)]
    assert not list(tmp_path.glob("*.safetensors"))
    gate.opened.set()
    for output in outputs:
        llm.engine.finish_files(output)
        assert_saved(output)


def test_the_engine_steps_on_while_a_reader_holds_the_lock_of_a_file(tmp_path):
    llm = extracting(tmp_path, extra={"allow_custom_save_path": True})
    path = tmp_path / "states.safetensors"
    with FileLock(f"{path}.lock"):
        llm.engine.add_request("one", PROMPT, at(path))
        (output,) = llm.engine.step().finished
        finish_one(llm)
        assert not path.exists()
    llm.engine.finish_files(output)
    assert_saved(output)


def test_a_full_queue_fails_the_one_request_and_says_why(tmp_path, gate, monkeypatch):
    monkeypatch.setattr(hidden_states, "MOST_WAITING_BYTES", 2 * 8 * 3 * 48 * 4)  # two prompts' files
    llm = extracting(tmp_path, extra={"num_writer_threads": 1})
    outputs = [finish_one(llm)[1] for _ in range(3)]
    gate.opened.set()
    for output in outputs:
        llm.engine.finish_files(output)
    assert [output.error for output in outputs[:2]] == [None, None]
    assert "2 files wait for a disk that is slower than the engine" in outputs[2].error
    assert outputs[2].kv_transfer_params is None
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


def test_generate_waits_for_a_slow_disk_where_a_server_would_fail_requests(tmp_path, monkeypatch):
    monkeypatch.setattr(hidden_states, "MOST_WAITING_BYTES", 3 * 8 * 3 * 48 * 4)
    llm = extracting(tmp_path, max_num_seqs=1, extra={"num_writer_threads": 2})
    outputs = llm.generate([PROMPT] * 9, sampling(), use_tqdm=False)
    for output in outputs:
        assert_saved(output)
    assert not engine_of(llm).exporter._writes


def test_the_last_of_two_files_of_one_path_stays(tmp_path, gate):
    llm = extracting(tmp_path, extra={"allow_custom_save_path": True})
    path, outputs = tmp_path / "states.safetensors", []
    for prompt in (PROMPT, PROMPT[:5]):
        llm.engine.add_request("one", prompt, at(path))
        outputs += llm.engine.step().finished
    gate.opened.set()
    for output in outputs:
        llm.engine.finish_files(output)
    assert_saved(outputs[1])


def test_streams_end_with_their_files_complete(tmp_path):
    list(extracting(tmp_path).stream([PROMPT, PROMPT], sampling(3)))
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


def test_aborted_requests_write_nothing(tmp_path):
    llm = extracting(tmp_path)
    stream = llm.stream([PROMPT], sampling(20))
    next(stream)
    stream.close()
    llm.engine.add_request("waiting", PROMPT, sampling())
    assert llm.engine.abort("waiting").kv_transfer_params is None
    assert not list(tmp_path.iterdir())


def test_a_request_that_fails_writes_nothing(tmp_path):
    def fail(output_ids, logits):
        raise ValueError("no")

    llm = extracting(tmp_path)
    (output,) = llm.generate([PROMPT], sampling(3, logits_processors=[fail]), use_tqdm=False)
    assert output.error
    assert output.kv_transfer_params is None
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_its_requests_error(tmp_path, monkeypatch, caplog):
    def fail(tensors, path):
        Path(path).write_bytes(b"half")
        raise OSError("no space left")

    llm = extracting(tmp_path)
    monkeypatch.setattr(hidden_states, "save_tensors", fail)
    (output,) = llm.generate([PROMPT], sampling(), use_tqdm=False)
    assert "no space left" in output.error
    assert output.kv_transfer_params is None
    assert len(output.outputs[0].token_ids) == 1
    assert not [found for found in tmp_path.iterdir() if found.suffix != ".lock"]
    monkeypatch.undo()
    (output,) = llm.generate([PROMPT], sampling(), use_tqdm=False)
    assert_saved(output)
    engine_of(llm).exporter._writers.shutdown()
    assert "cannot write" in caplog.text


# --- who may choose a path ----------------------------------------------------------------------


def at(path, **others):
    extra_args = {"kv_transfer_params": {"hidden_states_path": path}}
    return SamplingParams(max_tokens=1, extra_args=extra_args, **others)


def test_a_request_may_choose_its_file_where_that_is_allowed(tmp_path):
    llm = extracting(tmp_path / "shared", extra={"allow_custom_save_path": True})
    path = tmp_path / "own" / "states.safetensors"
    for prompt in (PROMPT, PROMPT[:3]):
        (output,) = llm.generate([prompt], at(path), use_tqdm=False)
        assert output.kv_transfer_params == {"hidden_states_path": str(path)}
        assert_saved(output)
    last, same = llm.generate([PROMPT, PROMPT[:5]], at(path), use_tqdm=False)
    assert last.error is None is same.error
    assert len(saved(same)["token_ids"]) == 5


def test_a_file_where_none_can_be_is_its_requests_error(tmp_path):
    llm = extracting(tmp_path, extra={"allow_custom_save_path": True})
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "x", "a\0b"):
        (output,) = llm.generate([PROMPT], at(path), use_tqdm=False)
        assert "cannot write" in output.error


@pytest.mark.parametrize("path", ["/etc/x", "../x", "x.safetensors"])
def test_a_request_may_not_choose_its_file_otherwise(tmp_path, path):
    llm = extracting(tmp_path)
    with pytest.raises(RequestError, match="requests may not choose where to write"):
        llm.generate([PROMPT], at(path), use_tqdm=False)
    assert_nothing_is_held(llm)


def test_one_file_for_several_completions_is_refused(tmp_path):
    llm = extracting(tmp_path, extra={"allow_custom_save_path": True})
    with pytest.raises(RequestError, match="a file each"):
        llm.generate([PROMPT], at(tmp_path / "x", n=2), use_tqdm=False)


def test_a_request_id_with_a_slash_is_refused(tmp_path):
    with pytest.raises(RequestError, match="choose one without slashes"):
        extracting(tmp_path).engine.add_request("../x", PROMPT, sampling())


def test_without_the_method_a_request_may_not_ask_for_files():
    with pytest.raises(RequestError, match="saves no hidden states"):
        tiny_llm().generate([PROMPT], sampling(output=True), use_tqdm=False)


# --- engines ------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="shared_storage_path: cannot make the folder"):
        extracting(tmp_path / "file" / "folder")


def test_engines_with_and_without_files_share_weights(tmp_path):
    llm = extracting(tmp_path)
    assert llm.with_speculation(None).generate([PROMPT], sampling(), use_tqdm=False)[0].kv_transfer_params is None
    again = llm.with_speculation(NGRAM).with_speculation(extract(), kv_transfer_config=storage(tmp_path))
    assert_saved(again.generate([PROMPT], sampling(), use_tqdm=False)[0])
    assert again._target is tiny_target()
