"""The keys of the format."""

from fivefold.interop.keys import field, foreign, idle, near, part

TABLE = {
    "megacorp.model": part("model", None),
    "megacorp.tensor": field("layout.tp", 1),
    "megacorp.batch": field("job.global_batch", None),
    "megacorp.tokens": field("job.sequence", 4096),
    "megacorp.micro": field("layout.mbs", 1),
    "megacorp.shard": field("layout.zero", 0),
    "megacorp.adapters": foreign("adapters, not the weights, are trained", False),
    **near("another kernel", "megacorp.kernel", default="usual"),
    **idle("megacorp.log.*"),
}
