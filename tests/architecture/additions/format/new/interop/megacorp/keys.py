"""The keys of the format."""

from fivefold.interop.keys import approximate_keys, field, ignored_keys, part, unmodelled_key

TABLE = {
    "megacorp.model": part("model", None),
    "megacorp.tensor": field("layout.tp", 1),
    "megacorp.batch": field("job.global_batch", None),
    "megacorp.tokens": field("job.sequence", 4096),
    "megacorp.micro": field("layout.mbs", 1),
    "megacorp.shard": field("layout.zero", 0),
    "megacorp.adapters": unmodelled_key("adapters, not the weights, are trained", False),
    **approximate_keys("another kernel", "megacorp.kernel", default="usual"),
    **ignored_keys("megacorp.log.*"),
}
