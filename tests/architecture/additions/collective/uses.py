"""An algorithm of a collective is priced by its constant where it is the fastest, and searched with."""

from shared import JOB, NODE, TINY, search_few

from fivefold.layout.mesh import RankGroup
from fivefold.planner.time.constants import PUBLISHED
from fivefold.planner.time.network import Network

group = RankGroup(ranks=8, stride=1)
without, full = (
    Network(NODE, PUBLISHED.replace(direct_share=share)).seconds("all_gather", 10**6, group) for share in (1e-9, 1.0)
)
assert Network(NODE).seconds("all_gather", 10**6, group) == full
assert full < without
assert search_few(model=TINY, machine=NODE, job=JOB).best
