"""What a router knows of a prompt: digests that are shared as far as the prompts are."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.deploy.ray.prompt_prefix import (
    BYTES_PER_BLOCK,
    DIGEST_BYTES,
    MOST_DIGESTS,
    TOKENS_PER_BLOCK,
    PromptPrefix,
    prefix_of_body,
)
from forerun.kv.prefix_cache import block_digests, root_digest

IDS = list(range(3 * TOKENS_PER_BLOCK))
TEXT = "".join(chr(97 + n % 26) for n in range(3 * BYTES_PER_BLOCK))


def prefix(**fields):
    found = prefix_of_body(json.dumps(fields).encode())
    assert found is not None
    return found


def num_shared(one, other):
    return next(
        (n for n, (a, b) in enumerate(zip(one.digests, other.digests, strict=False)) if a != b),
        min(len(one.digests), len(other.digests)),
    )


@given(st.integers(0, len(IDS) - 1))
def test_prompts_of_token_ids_share_the_digests_of_the_blocks_before_they_part(place):
    other = [*IDS[:place], 10**6, *IDS[place + 1 :]]
    assert num_shared(prefix(prompt=IDS), prefix(prompt=other)) == place // TOKENS_PER_BLOCK


@given(st.integers(0, len(TEXT) - 1))
def test_prompts_of_text_share_the_digests_of_the_blocks_before_they_part(place):
    other = TEXT[:place] + "#" + TEXT[place + 1 :]
    assert num_shared(prefix(prompt=TEXT), prefix(prompt=other)) == place // BYTES_PER_BLOCK


def test_digests_of_token_ids_are_those_of_the_prefix_cache_shortened():
    own = block_digests(root_digest("s"), IDS, block_size=TOKENS_PER_BLOCK)
    assert prefix(prompt=IDS, cache_salt="s").digests == tuple(one[:DIGEST_BYTES] for one in own)


@pytest.mark.parametrize("prompt", [IDS, TEXT])
def test_prompts_with_different_salts_share_nothing(prompt):
    plain, salted, other = (
        prefix(prompt=prompt),
        prefix(prompt=prompt, cache_salt="a"),
        prefix(prompt=prompt, cache_salt="b"),
    )
    assert not set(plain.digests) & set(salted.digests)
    assert not set(other.digests) & set(salted.digests)


@pytest.mark.parametrize("name", ["messages", "input"])
def test_the_next_turn_of_a_conversation_shares_all_whole_blocks_of_those_before(name):
    first = [{"role": "user", "content": TEXT}]
    second = [*first, {"role": "assistant", "content": "yes"}, {"role": "user", "content": TEXT}]
    before, after = prefix(**{name: first}), prefix(**{name: second})
    assert num_shared(before, after) == len(before.digests) >= 3


def test_other_tools_or_instructions_make_another_prompt():
    messages = [{"role": "user", "content": TEXT}]
    assert num_shared(prefix(messages=messages), prefix(messages=messages, tools=[{"type": "function"}])) == 0
    assert num_shared(prefix(input=messages), prefix(input=messages, instructions="Be kind.")) == 0


@pytest.mark.parametrize("form", ["text", "parts"])
def test_a_long_system_text_is_shared_whatever_line_of_each_request_stands_before_it(form):
    def sent(number, question, text=TEXT):
        line = f"x-anthropic-billing-header: cch={number}\n"
        parts = [{"type": "text", "text": line}, {"type": "text", "text": text}]
        return prefix(system=line + text if form == "text" else parts, messages=[{"role": "user", "content": question}])

    assert num_shared(sent(1, "a"), sent(2, "b")) >= len(TEXT) // BYTES_PER_BLOCK
    assert num_shared(sent(1, "a"), sent(1, "a", text="#" + TEXT)) == 0


def test_an_input_that_is_a_text_is_what_a_user_says():
    alone = prefix(input=TEXT, instructions="Be kind.")
    assert alone.digests == prefix(input=[{"role": "user", "content": TEXT}], instructions="Be kind.").digests
    assert num_shared(alone, prefix(input=TEXT, instructions="Be brief.")) == 0


def test_of_several_prompts_the_first_counts():
    assert prefix(prompt=[TEXT, "other"]).digests == prefix(prompt=TEXT).digests
    assert prefix(prompt=[IDS, [1]]).digests == prefix(prompt=IDS).digests


def test_a_long_prompt_is_known_by_its_beginning():
    found = prefix(prompt="x" * (BYTES_PER_BLOCK * (MOST_DIGESTS + 5)))
    assert len(found.digests) == MOST_DIGESTS
    assert found.num_tokens == TOKENS_PER_BLOCK * (MOST_DIGESTS + 5)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"prompt": null}', b'{"prompt": [null]}', b'{"prompt": [1, "a"]}', b"\xff"]
)
def test_what_is_no_prompt_has_no_prefix(body):
    assert prefix_of_body(body) is None


@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(
        lambda prompt: json.dumps({"prompt": prompt}).encode()
    )
)
def test_no_body_makes_it_raise(body):
    found = prefix_of_body(body)
    assert found is None or found.num_tokens >= 0


def test_no_depth_of_nesting_makes_it_raise():
    for depth in range(900, 1100):
        deep = b"[" * depth + b"]" * depth
        found = prefix_of_body(b'{"messages": [{"content": "x", "more": ' + deep + b"}]}")
        assert found is None or found.num_tokens > 0


@given(st.lists(st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES)), st.integers(0, 10**9))
def test_a_header_carries_all(digests, num_tokens):
    found = PromptPrefix.from_header(PromptPrefix(digests, num_tokens).to_header())
    assert (found.digests, found.num_tokens) == (tuple(digests), num_tokens)


@pytest.mark.parametrize("value", [b"", b"1", b":", b"1:zz", b"1:abc", b"-1:", b"\xff:", b"1:00"])
def test_a_header_of_another_form_is_refused(value):
    with pytest.raises(ValueError):
        PromptPrefix.from_header(value)
