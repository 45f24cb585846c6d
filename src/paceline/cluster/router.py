"""ReplicaRouter: our policies behind Ray Serve's request-router interface. Lives in the process of who sends."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from paceline.cluster.features import candidate
from paceline.cluster.routing import HANDED_OVER, POLICIES, Candidate, Features, Policy, PrefixAware

PROBE_S = 2.0
"""A replica of which Serve has not heard for ten seconds is asked how it is before it is sent anything. One that is
busy may take a while, and with Serve's own tenth of a second the request would go where nothing of it is cached."""


class ReplicaRouter(RequestRouter):  # type: ignore[misc]
    """Orders bring their Features along as the first argument; replicas publish what they hold by
    record_routing_stats(). Calls without Features go to anybody."""

    queue_len_response_deadline_s = PROBE_S

    def initialize_state(self, routing: str = "prefix", handed_over: bool = False, **_: Any) -> None:
        """`handed_over`: the replicas do not compute prompts, they are brought them."""
        self._policy: Policy = PrefixAware(prompt_cost=HANDED_OVER) if routing == "prefix" and handed_over else (
            POLICIES[routing]())
        self._known: dict[str, tuple[dict[str, Any], Candidate]] = {}
        """What each replica last said, read once."""
        self._sent: dict[str, tuple[Features, str]] = {}
        """By Serve's id of a call: orders that are under way."""

    async def choose_replicas(self, candidate_replicas: list[RunningReplica],
                              pending_request: PendingRequest | None = None) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # all of them are offered below: do not spin
        available = self.select_available_replicas(candidate_replicas)
        order = _features(pending_request)
        by_name = {one.replica_id.unique_id: one for one in available}
        chosen = self._policy.choose(order, [self._candidate(one) for one in available])
        if chosen is None:
            return [available]
        if pending_request is not None and order.prompt_tokens:
            self._note(pending_request, order, chosen)
        return [[by_name[chosen]], [one for one in available if one is not by_name[chosen]]]

    def _candidate(self, replica: RunningReplica) -> Candidate:
        name, said = replica.replica_id.unique_id, replica.routing_stats
        known = self._known.get(name)
        if known is None or known[0] is not said:
            known = self._known[name] = (said, candidate(name, said))
        return known[1]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """It may have become another than the chosen one, where that was full."""
        order = _features(pending_request)
        if order.prompt_tokens:
            self._note(pending_request, order, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._forget(internal_request_id)

    def _note(self, pending: PendingRequest, order: Features, name: str) -> None:
        """Where it goes counts from when it is chosen: who comes in the same moment is to know of it."""
        call = pending.metadata.internal_request_id
        if self._sent.get(call) == (order, name):
            return
        self._forget(call)
        self._sent[call] = (order, name)
        order.progress.replica = name
        self._policy.begun(order, name)
        pending.future.add_done_callback(lambda future: self._forget(call) if future.cancelled() else None)

    def _forget(self, call: str) -> None:
        if (sent := self._sent.pop(call, None)) is not None:
            self._policy.ended(*sent)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        here = {one.replica_id.unique_id for one in replicas}
        for name in [name for name in self._known if name not in here]:
            del self._known[name]
            if isinstance(self._policy, PrefixAware):
                self._policy.forget(name)
        super().update_replicas(replicas)


def _features(pending: PendingRequest | None) -> Features:
    """Of a call that is no order: nothing to go by."""
    first = pending.args[0] if pending is not None and pending.args else None
    return first if isinstance(first, Features) else Features(0)
