"""``fivefold machines``: the catalog of machines. Does not import torch."""

from __future__ import annotations

from fivefold.cli.options import print_line, show
from fivefold.cli.request_options import accept_request
from fivefold.requests.commands import MachinesOptions


@accept_request(MachinesOptions)
def machines(request: MachinesOptions) -> None:
    """List the machines of the catalog, or those that contain a word: names for MACHINE."""
    from fivefold.rendering import catalogs
    from fivefold.requests.catalogs import dump_entries, list_machines

    entries = list_machines(request.word)
    if request.as_json:
        show(dump_entries(entries))
        return
    show(catalogs.list_machines(entries))
    print_line("link and NIC: bandwidth of one GPU in each direction")
    print_line("Instances of clouds are names too: p5.48xlarge is one node, 4xp5.48xlarge are four (all: --json).")
    print_line("A card on PCIe has no usual node: rtx4090 is one GPU, rtx4090:2 are two.")
    print_line("Write h100 for one node, h100:512 for 512 GPUs; local is this computer, after `fivefold calibrate`.")
