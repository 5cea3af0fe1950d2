"""Lion (arXiv:2302.06675): one moment, elementwise."""

from fivefold.optimizers.cost import OptimizerCost, count_local_numel


class LionCost(OptimizerCost):
    """Lion."""

    title = "Lion"
    elementwise = True
    fp32_states = True
    counts_2d_tp = True
    updates_flat_buffer = False

    def state_bytes(self, weights, *, shards, quantised, job):
        return 4 * sum(count_local_numel(weight, shards) for weight in weights)

    def moved_bytes(self, job):
        return 4

    def scratch_bytes(self, weights, job):
        return 0


COST = LionCost()
