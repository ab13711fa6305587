"""What prompts begin with in common: held against a prefix cache without limit."""

from hypothesis import given
from hypothesis import strategies as st

from forerun.plan.shared_prefixes import common_beginning, repeated_share, share_of_beginning
from forerun.plan.simulation.requests import SimulatedRequest

PIECE = 4


def request(pieces: list[int]) -> SimulatedRequest:
    return SimulatedRequest(
        arrival=0.0,
        num_prompt_tokens=PIECE * len(pieces) - 1,
        num_output_tokens=1,
        piece_hashes=tuple(pieces),
        piece_size=PIECE,
    )


prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5).map(request), min_size=1, max_size=12)


@given(prompts)
def test_at_least_half_begin_with_what_is_common_and_fewer_with_anything_longer(
    requests: list[SimulatedRequest],
) -> None:
    found = common_beginning(requests)

    def num_with(pieces: tuple[int, ...]) -> int:
        return sum(one.piece_hashes[: len(pieces)] == pieces for one in requests)

    least = max(2, len(requests) / 2)
    assert not found or num_with(found) >= least
    assert all(num_with((*found, piece)) < least for piece in range(3))


@given(prompts)
def test_a_cache_without_limit_finds_what_is_repeated(requests: list[SimulatedRequest]) -> None:
    seen: set[tuple[int, ...]] = set()
    num_found = 0
    for one in requests:
        prefixes = [one.piece_hashes[:count] for count in range(1, len(one.piece_hashes) + 1)]
        known = [prefix for prefix in prefixes if prefix in seen]
        num_found += min(PIECE * len(known), one.num_prompt_tokens - 1)
        seen.update(prefixes)
    assert repeated_share(requests) == num_found / sum(one.num_prompt_tokens for one in requests)


@given(prompts)
def test_the_common_beginning_is_at_most_all_but_the_last_token(requests: list[SimulatedRequest]) -> None:
    beginning = common_beginning(requests)
    share = share_of_beginning(requests, beginning)
    assert 0.0 <= share < 1.0
    assert (share > 0.0) == any(
        beginning and one.piece_hashes[0] == beginning[0] and one.num_prompt_tokens > 1 for one in requests
    )


def test_prompts_without_names_share_nothing() -> None:
    plain = [SimulatedRequest(arrival=0.0, num_prompt_tokens=9, num_output_tokens=1)] * 3
    assert common_beginning(plain) == ()
    assert share_of_beginning(plain, ()) == repeated_share(plain) == 0.0
