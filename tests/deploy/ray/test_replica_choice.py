"""Which replica a router takes, without Ray."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from forerun.deploy.ray.prompt_prefix import TOKENS_PER_BLOCK, PromptPrefix
from forerun.deploy.ray.replica_choice import COSTS, SESSION_PATIENCE, ReplicaChoice
from forerun.errors import ConfigError
from forerun.plan.simulation.routing import (
    DECODE_TOKENS,
    FREE_REQUESTS,
    ReplicaLoad,
    RoundRobin,
    RoutedRequest,
    prefix_cost,
    routing_policy,
)

NAMES = ["a", "b", "c"]


def prompt(family, length=4):
    return PromptPrefix([bytes([family, n]) for n in range(length)], length * TOKENS_PER_BLOCK)


def serve(choice, request_id, prefix, session=""):
    """Route a request and end it; the replica that took it."""
    best = choice.ranking(NAMES, prefix, session)[0]
    choice.sent(request_id, best, prefix, session)
    choice.ended(request_id)
    return best


def test_prompts_of_one_beginning_go_where_it_was_read():
    choice = ReplicaChoice()
    families = [family for family in range(3) for _ in range(5)]
    random.Random(0).shuffle(families)
    places = {}
    for number, family in enumerate(families):
        places.setdefault(family, set()).add(serve(choice, str(number), prompt(family)))
    assert all(len(one) == 1 for one in places.values())


def test_round_robin_takes_each_in_turn():
    choice = ReplicaChoice("round-robin")
    taken = [serve(choice, str(n), prompt(0)) for n in range(6)]
    assert taken[:3] == taken[3:]
    assert set(taken) == set(NAMES)


def test_load_outweighs_a_prefix_that_is_shorter_than_what_waits():
    choice = ReplicaChoice()
    home = serve(choice, "0", prompt(0, 4))
    choice.sent("1", home, prompt(1, 3))
    assert choice.ranking(NAMES, prompt(0, 4))[0] == home
    choice.sent("2", home, prompt(2, 3))
    assert choice.ranking(NAMES, prompt(0, 4))[0] != home


def test_requests_without_a_prefix_go_to_the_replica_with_the_fewest():
    choice = ReplicaChoice()
    choice.sent("0", "a", None)
    choice.sent("1", "c", None)
    assert choice.ranking(NAMES, None)[0] == "b"


def test_a_session_stays_where_it_was_served():
    choice = ReplicaChoice()
    home = serve(choice, "0", prompt(0), session="s")
    assert {serve(choice, str(n), prompt(n), session="s") for n in range(1, 9)} == {home}


def test_a_session_takes_no_more_memory_however_long_its_id_is():
    def memory(length):
        choice = ReplicaChoice()
        tracemalloc.start()
        try:
            for number in range(50):
                serve(choice, str(number), None, session=f"{number} {'s' * length}")
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    assert memory(50_000) < memory(1) + 50_000


def test_a_session_leaves_a_replica_that_is_much_busier():
    choice = ReplicaChoice()
    home = serve(choice, "0", prompt(0), session="s")
    for number in range(SESSION_PATIENCE):
        choice.sent(f"busy {number}", home, prompt(9))
    assert choice.ranking(NAMES, prompt(1), "s")[0] == home
    choice.sent("one more", home, prompt(9))
    assert choice.ranking(NAMES, prompt(1), "s")[0] != home


def test_a_conversation_stays_although_the_end_of_its_last_turn_is_not_known_yet():
    choice, places = ReplicaChoice(), set()
    for turn in range(1, 6):
        place = choice.ranking(NAMES, prompt(0, 2 * turn))[0]
        choice.sent(str(turn), place, prompt(0, 2 * turn))
        choice.ended(str(turn - 1))
        places.add(place)
    assert len(places) == 1


def test_a_session_whose_replica_is_gone_goes_on_elsewhere():
    choice = ReplicaChoice()
    home = serve(choice, "0", prompt(0), session="s")
    left = [one for one in NAMES if one != home]
    choice.keep_only(left)
    assert choice.ranking(left, prompt(0), "s")[0] in left


def test_a_replica_forgets_what_its_memory_cannot_hold():
    choice = ReplicaChoice()
    for one in NAMES:
        choice.set_memory(one, 4 * TOKENS_PER_BLOCK)
    choice.sent("0", "a", prompt(0))
    choice.sent("1", "a", prompt(1))
    choice.ended("0")
    choice.ended("1")
    choice.sent("2", "b", prompt(0))
    choice.ended("2")
    assert choice.ranking(NAMES, prompt(0))[0] == "b"
    assert choice.ranking(NAMES, prompt(1))[0] == "a"


def test_a_cached_prompt_under_way_is_no_load():
    """Ends are heard of late: the second turn of a prompt that was read must not meet the first as if it were read still."""
    choice, family = ReplicaChoice(), prompt(0, 6)
    home = serve(choice, "read", family)
    for turn in range(FREE_REQUESTS):
        assert choice.ranking(NAMES, family)[0] == home
        choice.sent(str(turn), home, family)
    assert choice.load_of(home) == ReplicaLoad(FREE_REQUESTS, FREE_REQUESTS * family.num_tokens, 0)


def test_what_many_requests_write_is_load_even_where_their_prompts_are_cached():
    choice, family = ReplicaChoice(), prompt(0, 6)
    home = serve(choice, "read", family)
    most = FREE_REQUESTS + family.num_tokens // DECODE_TOKENS
    for turn in range(most + 1):
        assert choice.ranking(NAMES, family)[0] == home
        choice.sent(str(turn), home, family)
    assert choice.ranking(NAMES, family)[0] != home


def test_a_request_that_was_sent_on_was_not_read_where_it_was_sent_first():
    choice = ReplicaChoice()
    choice.sent("0", "a", prompt(0))
    choice.sent("0", "b", prompt(0))
    assert choice.load_of("a") == ReplicaLoad()
    choice.ended("0")
    assert choice.ranking(NAMES, prompt(0))[0] == "b"


def test_a_request_that_is_noted_twice_for_one_replica_stays_uncached():
    choice = ReplicaChoice()
    choice.sent("0", "a", prompt(0))
    choice.sent("0", "a", prompt(0))
    assert choice.load_of("a").num_uncached_tokens == prompt(0).num_tokens


def test_the_rule_is_that_of_the_simulator():
    chooser, simulator, seed = ReplicaChoice(), routing_policy("prefix", 0), random.Random(1)
    known = {one: set() for one in NAMES}
    loads = {one: ReplicaLoad() for one in NAMES}
    underway = {}

    class Prompt:
        def __init__(self, prefix):
            self.prefix, self.num_tokens = prefix, prefix.num_tokens

        def num_cached_tokens(self, replica):
            count = 0
            for digest in self.prefix.digests:
                if digest not in known[NAMES[replica]]:
                    break
                count += 1
            return count * TOKENS_PER_BLOCK

    for number in range(200):
        wanted = prompt(seed.randrange(5), seed.randrange(1, 6))
        best = chooser.ranking(NAMES, wanted)[0]
        simulated = simulator.choose(Prompt(wanted), [loads[one] for one in NAMES])
        place = NAMES.index(best)
        costs = [prefix_cost(Prompt(wanted), loads[one], NAMES.index(one)) for one in NAMES]
        assert costs[place] == costs[simulated] == min(costs)
        request = RoutedRequest(wanted.num_tokens, wanted.num_tokens - Prompt(wanted).num_cached_tokens(place))
        chooser.sent(str(number), best, wanted)
        known[best].update(wanted.digests)
        loads[best].add(request)
        underway[number] = (best, request)
        if number % 3 == 0:
            continue
        ended = seed.choice(sorted(underway))
        chooser.ended(str(ended))
        place, request = underway.pop(ended)
        loads[place].remove(request)


def test_prefix_routing_finds_more_than_round_robin():
    """The share of prompt tokens that a replica has read before, for conversations that take turns."""

    def hit_rate(routing):
        choice, read = ReplicaChoice(routing), {one: set() for one in NAMES}
        found = total = 0
        for turn in range(6):
            for family in range(8):
                wanted = prompt(family, 2 * (turn + 1))
                place = serve(choice, f"{turn} {family}", wanted)
                found += sum(one in read[place] for one in wanted.digests)
                total += len(wanted.digests)
                read[place].update(wanted.digests)
        return found / total

    assert hit_rate("prefix") > hit_rate("round-robin") + 0.1


def test_a_rule_that_does_not_exist_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="prefix"):
        ReplicaChoice("prefixes")


def test_round_robin_is_that_of_the_simulator_but_for_where_it_begins():
    ours, theirs = ReplicaChoice("round-robin"), RoundRobin()
    first = [NAMES.index(serve(ours, str(n), None)) for n in range(4)]
    second = [theirs.choose(None, [ReplicaLoad()] * 3) for _ in range(4)]  # type: ignore[arg-type]
    assert {(a - b) % 3 for a, b in zip(first, second, strict=True)} in ({0}, {1}, {2})


class Routing(RuleBasedStateMachine):
    """Requests that come, move and end, replicas that come and go: loads are those of what is under way."""

    def __init__(self):
        super().__init__()
        self.choice = ReplicaChoice()
        self.replicas = list(NAMES)
        self.underway = {}
        self.count = 0

    @rule(family=st.integers(0, 3), length=st.integers(0, 4), session=st.sampled_from(["", "s", "t"]))
    def comes(self, family, length, session):
        wanted = prompt(family, length)
        ordered = self.choice.ranking(self.replicas, wanted, session)
        assert sorted(ordered) == sorted(self.replicas)
        self.choice.sent(str(self.count), ordered[0], wanted, session)
        self.underway[str(self.count)] = (ordered[0], wanted)
        self.count += 1

    @rule(data=st.data())
    def moves(self, data):
        if self.underway:
            name = data.draw(st.sampled_from(sorted(self.underway)))
            place, wanted = data.draw(st.sampled_from(self.replicas)), self.underway[name][1]
            self.choice.sent(name, place, wanted)
            self.underway[name] = (place, wanted)

    @rule(data=st.data())
    def ends(self, data):
        if self.underway:
            name = data.draw(st.sampled_from(sorted(self.underway)))
            self.choice.ended(name)
            self.choice.ended(name)
            del self.underway[name]

    @rule(data=st.data())
    def replicas_change(self, data):
        self.replicas = sorted(data.draw(st.sets(st.sampled_from([*NAMES, "d", "e"]), min_size=1)))
        self.choice.keep_only(self.replicas)
        self.underway = {name: one for name, one in self.underway.items() if one[0] in self.replicas}

    @invariant()
    def loads_are_of_what_is_under_way(self):
        for one in self.replicas:
            mine = [wanted for place, wanted in self.underway.values() if place == one]
            load = self.choice.load_of(one)
            assert (load.num_requests, load.num_tokens) == (len(mine), sum(wanted.num_tokens for wanted in mine))
            assert 0 <= load.num_uncached_tokens <= load.num_tokens


TestRouting = Routing.TestCase
TestRouting.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


def test_every_rule_ranks_all_replicas():
    for name in COSTS:
        assert sorted(ReplicaChoice(name).ranking(NAMES, prompt(0))) == NAMES
