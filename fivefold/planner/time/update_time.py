"""Seconds of a rank's optimizer update: elementwise, or of full matrices (Muon), and the host's launches for it."""

from __future__ import annotations

from fivefold.job import Job
from fivefold.layout.mesh import group
from fivefold.layout.sharding import get_policy, is_trained
from fivefold.layout.spec import Layout
from fivefold.optimizers.cost import find_cost
from fivefold.planner.counts.counts import get_group_degrees
from fivefold.planner.counts.memory.peak import RankMemory
from fivefold.planner.counts.operations.local_shapes import get_local_degrees
from fivefold.planner.counts.update import update_messages, update_products
from fivefold.planner.time.unit_time import combine_host_and_device
from fivefold.planner.time.units import Units


def update_seconds(units: Units, layout: Layout, memory: RankMemory, chunks: tuple[int, ...]) -> float:
    """Return the seconds of the full update of a rank that holds the stages ``chunks``."""
    device_seconds = estimate_elementwise_seconds(units, layout, memory, chunks) + estimate_matrix_seconds(
        units, layout, chunks
    )
    host_seconds = launch_seconds(units, layout, chunks)
    return combine_host_and_device(device_seconds, host_seconds, units.constants) if host_seconds else device_seconds


def launch_seconds(units: Units, layout: Layout, chunks: tuple[int, ...]) -> float:
    """Return the seconds of the host's launches if it launches kernels weight by weight (``Stack.update_kernels``).

    It had waited for the backward, so it is not ahead of the device. What a machine measured of its updates has it.
    """
    stack = units.job.stack
    is_measured = units.profiled is not None or "update" in units.prices(layout).step_factors
    if not stack.update_kernels or not units.machine.has_gpus or is_measured:
        return 0.0
    shards = layout.shards if stack.flat_shards else 1
    work, updated = units.counts.stage_work(layout), 0.0
    for run, times in (entry for chunk in chunks for entry in work[chunk]):
        weights = units.counts.weights(layout, run.name)
        n_weights = sum(is_trained(weight, units.job) for weight in weights)
        # a rank holds parts of 1 + (n - 1) / s of the n weights of a flat tensor in s shards, on average
        updated += times * (1 + (n_weights - 1) / shards if n_weights else 0)
    return updated * stack.update_kernels * units.machine.chip.launch_seconds


def estimate_elementwise_seconds(units: Units, layout: Layout, rank: RankMemory, chunks: tuple[int, ...]) -> float:
    """Return the seconds of an elementwise update: it reads gradient, weight and moments and writes the last two.

    Clipping reads the gradient twice and writes it. Other software zeroes the gradient sums and, on several ranks,
    scales them. Fivefold's trainer scales the loss instead, and its first micro-batch overwrites the sums
    (``trainer/parallel/gradients.py``). Forwards and backwards have replaced weights, gradients and moments in the
    caches. On a calibrated machine each weight and each step take time of the host as well.
    """
    job = units.job
    recipe = job.precision
    prices = units.prices(layout)
    numel = rank.updated_numel
    measured = units.profiled.update(layout) if units.profiled is not None else None
    if measured is not None:
        return measured.seconds * numel / measured.elements
    update_bytes = int(numel * (3 * recipe.updated_bytes + 2 * find_cost(job.optimizer.kind).moved_bytes(job)))
    clip_bytes = numel * 3 * recipe.updated_bytes if job.optimizer.clip else 0
    cast_bytes = numel * (recipe.updated_bytes + recipe.weights_bytes) if recipe.master_bytes else 0
    overwrites_sums = job.stack.kernel_facts.separate_adds and not job.stack.adds_in_wgrad
    sums_passes = 0 if overwrites_sums else 3 if layout.dp * layout.cp > 1 else 1
    seconds = prices.uncached_seconds(update_bytes, kernel="adamw") + prices.uncached_seconds(
        clip_bytes + cast_bytes + sums_passes * rank.gradients_bytes, kernel="copy"
    )
    if factor := prices.step_factors.get("update"):
        weights = count_weights(units, layout, chunks)
        seconds = factor.forward * seconds + factor.forward_kernel_seconds * weights + factor.backward_kernel_seconds
    offloaded, constants = layout.list_offloaded(job), units.constants
    sent_bytes = count_update_link_bytes(layout, job, numel)
    if "optimizer" in offloaded:
        clips_on_host = job.stack.offloads_with_parameters or get_policy(layout, job).host_gradients
        seconds = 0.0 if clips_on_host else prices.uncached_seconds(clip_bytes, kernel="copy")
        seconds += (update_bytes + cast_bytes * _casts_on_host(layout, job)) / constants.host_memory_bandwidth
    return seconds + sent_bytes / (constants.host_link_share * constants.host_link_bandwidth)


def count_update_link_bytes(layout: Layout, job: Job, numel: int) -> int:
    """Return the bytes of ``numel`` updated elements that cross the link to the host with the update.

    DeepSpeed copies fp32 gradients to an optimizer in host memory, and back what the update makes of weights on the
    device; its ZeRO-3 updated weights to host memory if only they are there (stage3.py,
    _offload_grad_partition_at_boundary and _reassign_or_swap_out_partitioned_parameters; stage_1_and_2.py,
    async_inplace_copy_grad_to_fp32_buffer_from_gpu). FSDP2 has sent all with the gathers and reductions of each pass.
    Megatron's copies do not block, so that PyTorch converts them on the device: both have the dtype of the update
    (NVIDIA/Megatron-LM@core_v0.16.1:megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py;
    pytorch/pytorch@v2.13.0:aten/src/ATen/native/cuda/Copy.cu, copy_kernel_cuda).
    """
    offloaded, recipe = layout.list_offloaded(job), job.precision
    if "parameters" in offloaded and job.stack.offloads_with_parameters:
        return 0
    if "optimizer" in offloaded:
        returned_bytes = recipe.weights_bytes if _casts_on_host(layout, job) else recipe.updated_bytes
        return numel * (recipe.updated_bytes + (0 if "parameters" in offloaded else returned_bytes))
    return numel * recipe.weights_bytes if "parameters" in offloaded else 0


def _casts_on_host(layout: Layout, job: Job) -> bool:
    """Return whether the CPU, which updates master weights, also casts them."""
    return job.stack.is_own_trainer or bool(get_policy(layout, job).host_gradients)


def count_weights(units: Units, layout: Layout, chunks: tuple[int, ...]) -> int:
    """Return the number of weight tensors of a rank that holds the stages ``chunks``."""
    part = get_local_degrees(layout)
    stage_work = units.counts.stage_work(layout)
    return sum(
        times * sum(len(op.wgrad_numels) for op in units.counts.list_ops(get_group_degrees(part, run), run.name))
        for chunk in chunks
        for run, times in stage_work[chunk]
    )


def estimate_matrix_seconds(units: Units, layout: Layout, chunks: tuple[int, ...]) -> float:
    """Return the seconds of an update of full matrices (Muon): its messages and its products, with no overlap."""
    prices, network, seconds = units.prices(layout), units.network, 0.0
    for message in update_messages(units.counts, layout, chunks=chunks):
        mesh_group = group(layout, message.group)
        seconds += message.times * network.seconds(message.collective, message.payload, mesh_group)
    for product in update_products(units.counts, layout, chunks=chunks):
        product_seconds = prices.matmul(
            product.rows, product.columns, product.inner, dtype="bf16", batch=product.number
        )
        seconds += product.times * product_seconds
    return seconds
