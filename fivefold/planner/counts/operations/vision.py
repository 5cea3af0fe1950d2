"""The operations of a vision tower and its projector, and of the step that puts their tokens into the embedding.

    pixels → patches → (+ positions) → norm? → blocks → norm? → projector → tokens ─┐
                                                            ids → embedding → x ────┴→ x with images

The tower belongs to the embedding and runs on the first stage of a pipeline. Tensor parallelism shards its heads and
MLPs as those of text, without sequence parallelism; every rank of context parallelism runs all images of its
sequences. Its blocks are not recomputed, and its matmuls are not in fp8. Source: NVIDIA/Megatron-LM:
examples/multimodal/model.py, model_provider; its layers after the last one whose output is used are left out, as there.
A frozen tower runs without a backward and keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from fivefold.job import RECIPES, Job, Recipe
from fivefold.model.activations import ACTIVATIONS
from fivefold.model.norms import NORMS
from fivefold.model.vision import ProjectorLayer, VisionTower
from fivefold.model.vision_weights import shape_encoder
from fivefold.planner.counts.operations.adapters import differentiate, drop_backward
from fivefold.planner.counts.operations.autocast import apply_autocast
from fivefold.planner.counts.operations.layer import list_block
from fivefold.planner.counts.operations.linear import LinearInput, list_row_parallel
from fivefold.planner.counts.operations.local_shapes import Local, LocalDegrees
from fivefold.planner.counts.operations.op import (
    Op,
    OpMessage,
    elementwise,
    exchange,
    list_tensors,
    matmul,
    norm,
    rename_tensors,
)

Finish = Callable[[Op], Op]
MakeFinish = Callable[[Local], Finish]


def insert_images(local: Local, embedding: Sequence[Op], make_finish: MakeFinish) -> list[Op]:
    """Return the operations of an embedding, of the job's images, and of the step that puts them into its output.

    ``embedding``: operations from token ids to the stream, finished. ``make_finish``: how the operations made from
    other sizes are finished.
    """
    (out, size), *_ = embedding[-1].writes.items()
    tower, tokens = _list_tower(local, make_finish)
    trains = not local.job.freeze_projector
    part, rows = local.part, local.stream_rows
    if trains and part.sp:  # each rank has the gradients of its rows of the stream
        copies = tuple(f"{name}.copy" for name in tokens)
        payload = local.part.sequences * local.job.images * _count_tokens(local) * local.model.width * local.width
        message = OpMessage("tp", "", "all_reduce", payload)
        tower += [
            exchange("vision.copy", name, copy, size=0, message=message)
            for name, copy in zip(tokens, copies, strict=True)
        ]
        tokens = copies
    insert = elementwise("embed.images", "embedding", (out, tokens[0]), "xi", size=size, mask=rows)
    ops = [*embedding, *tower, insert._replace(differentiates=(out, tokens[0]) if trains else (out,))]
    for index, name in enumerate(tokens[1:]):  # added to the stream of the first layers; counted at its entry
        source = next(iter(ops[-1].writes))
        add = elementwise("embed.deepstack", "activation", (source, name), f"xd{index}", size=size)
        ops.append(add._replace(differentiates=(source, name) if trains else (source,)))
    return ops


def _count_tokens(local: Local) -> int:
    """Return the tokens of an image."""
    tower = local.model.vision
    assert tower is not None
    return tower.count_tokens(local.job.image_tokens)


def _list_tower(local: Local, make_finish: MakeFinish) -> tuple[list[Op], tuple[str, ...]]:
    """List the operations from pixels to tokens, and return the names of the tokens and of those of deepstack."""
    tower, job = local.model.vision, local.job
    assert tower is not None
    encoder, tokens = shape_encoder(tower), _count_tokens(local)
    part = LocalDegrees(local.part.sequences * job.images, tp=local.part.tp)
    patches = tokens * tower.patches_per_token
    on_patches = Local(encoder, _make_tower_job(job, patches + tower.class_token), part)
    on_tokens = Local(encoder, _make_tower_job(job, tokens), part)
    finish = make_finish(on_patches)
    ops, stream = _list_patches(on_patches, tower, finish)
    streams = [stream]
    blocks: dict[bool, list[Op]] = {}
    for layer in range(tower.computed_layers):
        kind = tower.has_window(layer)
        if kind not in blocks:
            blocks[kind] = [finish(op) for op in _list_block(on_patches, tower, layer=layer)]
        ops += _move(blocks[kind], f"v{layer}.", {"x": streams[-1], "z": f"v{layer + 1}"})
        streams.append(f"v{layer + 1}")
    rows = part.sequences * patches
    projectors = [_join(on_patches, tower, [streams[index] for index in tower.features] or streams[-1:], rows)]
    ops += [finish(op) for op in projectors[0][0]]
    connector, results = list[Op](), list[str]()
    inputs = tower.width * max(1, len(tower.features))
    sources = [(tower.projector, projectors[0][1], inputs)]
    sources += [(tower.deepstack_projector, streams[layer + 1], tower.width) for layer in tower.deepstack]
    for index, (layers, source, width) in enumerate(sources):
        listed, result = _project(on_tokens, layers, source, rows=rows, width=width, prefix=f"c{index}")
        connector += map(make_finish(on_tokens), listed)
        results.append(result)
    ops, connector = _freeze_parts(ops, connector, job)
    return [_name(op) for op in (*ops, *connector)], tuple(results)


@lru_cache(maxsize=64)
def _make_tower_job(job: Job, rows: int) -> Job:
    """Return the job of a tower whose images are sequences of ``rows``."""
    frozen = job.freeze_vision_tower or job.adapter is not None
    fields = {"images": 0, "image_tokens": None, "freeze_vision_tower": False, "freeze_projector": False}
    return job.replace(
        sequence=rows, adapter=None, precision=_make_tower_precision(job.precision, frozen=frozen), **fields
    )


def _make_tower_precision(recipe: Recipe, *, frozen: bool) -> Recipe:
    """Return the recipe of the tower's operations: frozen weights are in the format of activations, matmuls in it."""
    if recipe.is_low_precision:
        return recipe.replace(compute="bf16", scaling="tensorwise")
    if frozen and recipe.autocasts:
        return RECIPES[recipe.compute]
    return recipe


def _list_patches(local: Local, tower: VisionTower, finish: Finish) -> tuple[list[Op], str]:
    """List the operations from pixels to the first block, and return the name of its input."""
    width, rows, size = local.width, local.rows, local.stream_bytes
    n_pixels = tower.channels * tower.frames * tower.patch**2
    n_patches = rows - local.part.sequences * tower.class_token
    pixels = n_patches * n_pixels * width  # cast from the fp32 of the data
    read = Op("pixels", "activation", ("ids",), {"pixels": pixels}, moved_bytes=3 * pixels, differentiates=())
    product = matmul(
        "patches", "pixels", "v", rows=n_patches, in_features=n_pixels, out_features=tower.width, width=width,
        bias=tower.patch_bias,
    )  # fmt: skip
    ops = [read, product._replace(differentiates=(), backward_products=1)]
    if tower.class_token:
        join = elementwise("class_token", "activation", ("v",), "vc", size=size)
        ops.append(join._replace(parameters=tower.width, wgrad_numels=(tower.width,)))
    if tower.positions:
        add = elementwise("positions", "embedding", (next(iter(ops[-1].writes)),), "vp", size=size)
        table = tower.positions * tower.width
        ops.append(add._replace(parameters=table, wgrad_numels=(table,), passes_gradient=True))
    if tower.first_norm:
        source = next(iter(ops[-1].writes))
        ops.append(norm("first_norm", source, "vn", rows=rows, dim=tower.width, width=width, kind=local.norm))
    ops = [finish(op) for op in [ops[0], *apply_autocast(local, ops[1:])]]
    return ops, next(iter(ops[-1].writes))


def _list_block(local: Local, tower: VisionTower, *, layer: int) -> list[Op]:
    """List the operations of a block, whose queries see all keys of the image or of their window."""
    ops = list[Op]()
    for op in list_block(local, layer=layer):
        if tower.layer_scale and op.name in ("attention.add", "mlp.add"):
            branch = op.reads[1]
            scaled, size = f"{branch}.scaled", local.stream_bytes
            scale = elementwise(f"{op.name.partition('.')[0]}.scale", "activation", (branch,), scaled, size=size)
            ops.append(scale._replace(keeps=(branch,), parameters=tower.width, wgrad_numels=(tower.width,)))
            op = rename_tensors(op, {branch: scaled})
        ops.append(op._replace(causal_flops=op.flops))
    return ops


def _join(local: Local, tower: VisionTower, streams: Sequence[str], rows: int) -> tuple[list[Op], str]:
    """List the operations from the blocks to the projector's input: the final norm, and rows without class tokens."""
    ops, width = list[Op](), local.width
    (source, *other_streams), dim = streams, tower.width * len(streams)
    if tower.final_norm == "used":
        kind = local.norm._replace(norm=NORMS[tower.final_norm_kind or tower.norm])
        ops.append(norm("final_norm", source, "vf", rows=local.rows, dim=tower.width, width=width, kind=kind))
        source = "vf"
    if tower.class_token or other_streams:  # rows of patches alone, of all layers side by side
        reads = (source, *other_streams)
        size = rows * dim * width
        ops.append(
            Op("features", "activation", reads, {"vj": size}, moved_bytes=2 * size, moved_backward_bytes=2 * size)
        )
        source = "vj"
    return ops, source


def _project(
    local: Local, layers: Sequence[ProjectorLayer], source: str, *, rows: int, width: int, prefix: str
) -> tuple[list[Op], str]:
    """List the operations of a projector on ``source`` [rows, width], and return the name of its output."""
    ops = list[Op]()
    for index, layer in enumerate(layers):
        name, out = f"connector.{index}", f"{prefix}.{index}"
        size = rows * width * local.width
        if layer.kind == "merge":  # a view
            rows, width = rows // layer.size, width * layer.size
            continue
        if layer.kind in ("shuffle", "pool"):
            out_size = size // layer.size if layer.kind == "pool" else size
            moved = size + out_size
            ops.append(
                Op(name, "activation", (source,), {out: out_size}, moved_bytes=moved, moved_backward_bytes=moved)
            )
            rows = rows // layer.size
            width = width * (1 if layer.kind == "pool" else layer.size)
        elif layer.kind == "norm":
            kind = local.norm._replace(norm=NORMS[layer.norm], bias=layer.bias)
            ops.append(norm(name, source, out, rows=rows, dim=width, width=local.width, kind=kind))
        elif layer.kind == "linear":
            sizes = {"rows": rows, "in_features": width, "out_features": layer.size}
            ops.append(matmul(name, source, out, **sizes, width=local.width, bias=layer.bias))
            width = layer.size
        elif layer.kind == "activation":
            ops.append(_activate(local, layer, f"{name}.act", (source,), out, size=size))
        else:
            ops += _list_mlp(local, layer, name, source, out, rows=rows, width=width)
            width = layer.size
        source = out
    return apply_autocast(local, ops), source


def _list_mlp(
    local: Local, layer: ProjectorLayer, name: str, source: str, out: str, *, rows: int, width: int
) -> list[Op]:
    """List the operations of a projector's MLP, whose inner channels are sharded over tp."""
    ffn = layer.ffn // local.part.tp
    entry = LinearInput(local, source, in_features=width, rows=rows)
    parts = ("gate", "up") if layer.kind == "gated_mlp" else ("up",)
    inner = tuple(f"{out}.{part}" for part in parts)
    ups = [
        entry.column(f"{name}.{part}", tensor, out_features=ffn, bias=layer.bias)
        for part, tensor in zip(parts, inner, strict=True)
    ]
    act = _activate(local, layer, f"{name}.act", inner, f"{out}.act", size=rows * ffn * local.width)
    down = list_row_parallel(
        local, f"{name}.down", f"{out}.act", out, in_features=ffn, out_features=layer.size, bias=layer.bias
    )
    return [*entry.ops, *ups, act, *down]


def _activate(local: Local, layer: ProjectorLayer, name: str, reads: tuple[str, ...], out: str, *, size: int) -> Op:
    """Return an activation of one tensor, or of a gate times another, with what PyTorch saves of it."""
    op = elementwise(name, "activation", reads, out, size=size, keeps=reads)
    if not local.norm.plain:
        return op._replace(backward_scratch=size) if len(reads) > 1 else op
    saved = ACTIVATIONS[layer.activation].written_out if len(reads) == 1 else ("gated",)
    return op._replace(
        writes=op.writes | {f"{out}.{factor}": size for factor in saved},
        keeps=(*reads, *(f"{out}.{factor}" for factor in saved)),
    )


def _freeze_parts(tower: list[Op], connector: list[Op], job: Job) -> tuple[list[Op], list[Op]]:
    """Return the operations of tower and projector as autograd runs them if one or both are frozen."""
    if not (job.freeze_vision_tower or job.adapter is not None):
        return tower, connector
    tower = _freeze(tower)
    if job.freeze_projector or job.adapter is not None:
        return tower, _freeze(connector)
    return tower, differentiate(connector, set())


def _freeze(ops: Iterable[Op]) -> list[Op]:
    """Return operations without a backward, whose weights are not trained."""
    return [drop_backward(op._replace(parameters=0, wgrad_numels=(), bias_wgrad_numel=0)) for op in ops]


def _move(ops: Iterable[Op], prefix: str, names: dict[str, str]) -> list[Op]:
    """Return the operations of a block with tensors of their own."""
    return [rename_tensors(op, {name: names.get(name, f"{prefix}{name}") for name in list_tensors(op)}) for op in ops]


def _name(op: Op) -> Op:
    """Return an operation under the name of the tower."""
    return op._replace(name=f"vision.{op.name}")
