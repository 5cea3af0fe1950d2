"""Seconds of the messages that carry neither weights nor activations; on a CPU each takes as long as a layer's norm.

norm, loss and stop votes once a step · counts per expert once a step counts and weights of routed tokens in every pass
through a layer of experts
"""

from __future__ import annotations

from fivefold.layout.mesh import make_group
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.traffic import count_passes, list_routing_messages, step_messages
from fivefold.planner.time.network import Network


def estimate_small_messages(
    counts: Counts, network: Network, layout: Layout, *, chunks: tuple[int, ...]
) -> dict[str, float]:
    """Return the exposed seconds of a step by axis, for a rank that holds the stages ``chunks``."""
    if layout.world == 1:
        return {}
    seconds_by_axis = dict[str, float]()
    messages = list(step_messages(counts, layout, chunks=chunks))
    for chunk in chunks:
        for run, times in counts.stage_work(layout)[chunk]:
            if n_moe_layers := counts.count_moe_layers(run.name):
                messages += list_routing_messages(
                    counts, layout, run, times=times * n_moe_layers * count_passes(layout, counts.job)
                )
    for message in messages:
        mesh_group = make_group(layout, message.group, message.ranks)
        seconds = message.times * network.seconds(message.collective, message.payload, mesh_group)
        seconds_by_axis[message.axis] = seconds_by_axis.get(message.axis, 0.0) + seconds
    return seconds_by_axis
