"""Ray Serve's side of routing: a `RequestRouter` that asks `ReplicaChoice`. Ray is imported with this module.

Interfaces as in Ray 2.60, where they are marked alpha: `choose_replicas` returns ranks, of which Ray takes the first
with room; `on_request_routed` and `on_request_completed` frame the time in which a request is under way.
"""

from __future__ import annotations

import pickle
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from forerun.deploy.ray.prefix_header import PREFIX_HEADER
from forerun.deploy.ray.prompt_prefix import PromptPrefix
from forerun.deploy.ray.replica_choice import ReplicaChoice

KV_TOKENS = "kv_tokens"
"""What a replica calls the size of its KV memory in its routing stats."""


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Sends a request to the replica with the least to do, the prompts that it has read before left out.

    Ray asks a replica of which it has not heard lately how busy it is. One that is late with its answer, as a replica
    whose engine has all of its cores may be, is passed over, and the prompt is read again elsewhere: so it gets longer
    than Ray's 0.1 s.
    """

    queue_len_response_deadline_s = 1.0
    max_queue_len_response_deadline_s = 4.0

    def initialize_state(self, routing: str = "prefix") -> None:
        """Called by Ray with `request_router_kwargs`."""
        self._choice = ReplicaChoice(routing)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray whenever replicas come, go, or tell of themselves."""
        self._choice.keep_only([one.replica_id for one in replicas])
        for one in replicas:
            if num_tokens := one.routing_stats.get(KV_TOKENS):
                self._choice.set_memory(one.replica_id, int(num_tokens))
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Called by Ray when a replica does not answer any more."""
        super().on_replica_actor_died(replica_id)
        self._choice.keep_only(list(self.curr_replicas))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Each replica is a rank of its own, the best first."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        replicas = {one.replica_id: one for one in candidate_replicas}
        request_id, session = pending_request.metadata.internal_request_id, pending_request.metadata.session_id
        prefix = prefix_of_request(pending_request.args)
        order = self._choice.ranking(list(replicas), prefix, session)
        # requests that come before this one is under way must know of it
        self._choice.sent(request_id, order[0], prefix, session)

        def forget_cancelled(future: Any) -> None:
            if future.cancelled():
                self._choice.ended(request_id)

        pending_request.future.add_done_callback(forget_cancelled)
        return [[replicas[one]] for one in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:  # noqa: ARG002
        """Called by Ray when a replica has taken a request, which may be another than the best."""
        metadata = pending_request.metadata
        prefix = prefix_of_request(pending_request.args)
        self._choice.sent(metadata.internal_request_id, replica_id, prefix, metadata.session_id)

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:  # noqa: ARG002
        """Called by Ray once for each request that a replica had taken."""
        self._choice.ended(internal_request_id)


def prefix_of_request(args: Any) -> PromptPrefix | None:
    """The prefix in the header of a request from Ray's proxy, which pickles it; None where there is none."""
    if not args or not isinstance(args[0], bytes):
        return None
    headers = pickle.loads(args[0]).asgi_scope["headers"]  # from Ray's own proxy, which made it
    value = next((value for name, value in headers if name == PREFIX_HEADER), None)
    try:
        return None if value is None else PromptPrefix.from_header(value)
    except ValueError:  # a client's own header, where the proxy does not drop it
        return None
