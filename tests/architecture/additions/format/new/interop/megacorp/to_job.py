"""Values to model, layout and job."""

from fivefold.interop.format import build_reading, compute_replicas, resolve_world
from fivefold.model.catalog import resolve


def to_job(config, overrides):
    values, model = config.values, overrides.model or resolve(str(config.values["megacorp.model"]))
    ranks, fields = resolve_world(config.document, overrides), values.fields()
    fields |= {
        "job.stack.name": "megatron-core",
        "layout.dp": compute_replicas(ranks, values.to_int("megacorp.tensor"), of="tensor", origin=values.origin),
    }
    return build_reading(config, fields, model=model, ranks=ranks)
