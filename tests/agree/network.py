"""Compare steps over links of a known speed with predictions: hosts are network namespaces, links are ``tc tbf``.

    python -m tests.agree.network --folder runs/network      # goes on where it stopped; --table only redoes the table

`torchrun -m fivefold calibrate` measures the two hosts, of a core each, over each link. Then every layout runs on both,
its steps over all links in turn, so that a disturbance affects all of them. The unshaped link tells what the step
computes; the network's half of the prediction is judged by what a slower link adds (``network_table.py``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.job import Job, LearningRate, get_recipe
from fivefold.model.experts import MoE
from fivefold.model.spec import Model
from tests.endure import hosts
from tests.endure.hosts import Hosts, address, torchrun

PORT = 29600
ROUNDS = 3
TICK_SECONDS = 4e-3  # of a kernel with 250 a second
ROUND_SECONDS = 1.0  # of a layout over one link
DENSE = Model(name="dense", layers=4, width=256, heads=8, kv_heads=4, head_dim=32, ffn=768, vocab=1024)
SPARSE = DENSE.replace(name="sparse", layers=2, moe=MoE(experts=8, topk=2, ffn=256))
MODELS = {model.name: model for model in (DENSE, SPARSE)}


class Wire(NamedTuple):
    """What each of the two hosts sends at most, as ``tc`` writes it; "": as fast as a veth."""

    name: str
    first: str
    second: str


def make_wire(rate: str) -> Wire:
    return Wire(rate, rate, rate)


WIRES = (
    Wire("unshaped", "", ""),
    make_wire("10gbit"),
    make_wire("1gbit"),
    make_wire("300mbit"),
    make_wire("100mbit"),
    Wire("1gbit-300mbit", "1gbit", "300mbit"),
)


class Case(NamedTuple):
    """A layout of a model; ``overlap``: data parallelism's messages overlap with compute."""

    model: str
    layout: str
    overlap: bool = True
    precision: str = "fp32"
    wires: tuple[str, ...] = tuple(wire.name for wire in WIRES)

    @property
    def name(self) -> str:
        """As it is called in files and tables."""
        plain = "" if self.overlap else " no overlap"
        return f"{self.model} {self.precision} {self.layout}{plain}"

    @property
    def job(self) -> Job:
        """A step of 2,048 tokens."""
        rate = LearningRate(kind="constant", peak=1e-4)
        job = Job(sequence=256, global_batch=8, precision=get_recipe(self.precision), learning_rate=rate)
        return job if self.overlap else job.replace(overlap=())


QUICK = ("unshaped", "300mbit")
BUSY = tuple(wire.name for wire in WIRES if wire.name != "100mbit")  # for what sends much
CASES = (
    Case("dense", "dp2 zero0 mbs4"), Case("dense", "dp2 zero0 mbs4", overlap=False), Case("dense", "dp2 zero1 mbs4"),
    Case("dense", "dp2 zero2 mbs2"), Case("dense", "dp2 zero3 mbs4"), Case("dense", "dp2 zero3 mbs4", overlap=False),
    Case("dense", "tp2 mbs8", wires=BUSY), Case("dense", "cp2 mbs8"), Case("dense", "cp2 cp=ulysses mbs8"),
    Case("dense", "pp2 mbs1"), Case("dense", "pp2 gpipe mbs2"), Case("dense", "pp2 zb1p mbs2"),
    Case("dense", "pp2 v2 interleaved mbs2"), Case("sparse", "dp2 ep2 mbs4"), Case("sparse", "dp2 mbs4"),
    Case("dense", "dp2 zero0 mbs4", precision="bf16"), Case("dense", "dp2 zero3 mbs4", precision="bf16"),
)  # fmt: skip


def describe_missing() -> str:
    """What is not here; empty if nothing."""
    if result := hosts.describe_missing():
        return result
    if shutil.which("tc", path=hosts._path()) is None:
        return "there is no tc here (Debian: iproute2)"
    trial = (
        "ip link add eth0 type veth peer name eth1 && tc qdisc add dev eth0 root tbf rate 1gbit burst 80kb limit 8mb"
    )
    tried = subprocess.run([*hosts.unshare(), "sh", "-c", trial], capture_output=True, text=True, check=False)
    return f"links cannot be shaped here: {tried.stderr.strip()}" if tried.returncode else ""


def shape(wire: Wire) -> None:
    """Let both hosts send at most what ``wire`` says."""
    for number, rate in enumerate((wire.first, wire.second), start=1):
        inside = ["ip", "netns", "exec", f"host{number}"]
        subprocess.run([*inside, "tc", "qdisc", "del", "dev", "eth0", "root"], capture_output=True, check=False)
        packet, burst, queue = _sizes(rate)
        subprocess.run([*inside, "ip", "link", "set", "dev", "eth0", "gso_max_size", str(packet)], check=True)
        limit = f"echo {queue} > /proc/sys/net/ipv4/tcp_limit_output_bytes"
        subprocess.run([*inside, "sh", "-c", limit], check=True)
        if rate:
            words = f"tc qdisc add dev eth0 root tbf rate {rate} burst {burst} limit 8000000"
            subprocess.run([*inside, *words.split()], check=True)


def _sizes(rate: str) -> tuple[int, int, int]:
    """Bytes of the largest packet, of what may leave at once, and of a connection's queue at the NIC, at ``rate``.

    The bucket holds what the link carries in a tick of the scheduler: a NIC sends whether a core is free or not, but
    the bucket's timer waits for one, and what would not fit by then is lost to the link. An acknowledgement waits for
    no more than a NIC's own queue would let it.
    """
    if not rate:
        return 65536, 0, 1 << 20
    bits = float(rate.rstrip("gmbit")) * (1e9 if "g" in rate else 1e6)
    packet = 65536 if bits > 2e8 else 32768
    return packet, int(min(1e6, max(1.25 * packet, TICK_SECONDS * bits / 8))), 1 << (20 if bits > 5e9 else 18)


def calibrate(names: Hosts, wire: Wire, *, quick: bool) -> None:
    """A machine file of the two hosts over ``wire``, by the command that a user has."""
    path = Path("machines", f"{wire.name}.toml")
    if path.exists():
        return
    shape(wire)
    words = f"calibrate {'--quick ' if quick else ''}--out {path.resolve()}"
    started = [names.start(number, _pin_to_core(number, torchrun(number, words, ranks=1))) for number in (1, 2)]
    codes = [process.wait(timeout=300) for process in started]
    if codes != [0, 0]:
        raise SystemExit(
            f"calibration over {wire.name}: {codes}:\n{names.read_output(1)[-800:]}\n{names.read_output(2)[-800:]}"
        )


def _pin_to_core(number: int, command: str) -> str:
    """A host has one core, which serves its network before its ranks."""
    return f"chrt -i 0 taskset -c {(number - 1) % 2} {command}"


@contextlib.contextmanager
def ranks(names: Hosts, case: Case) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run a rank of ``case`` on a host; it takes steps on command."""
    started = []
    for number in (1, 2):
        environment = {
            "RANK": str(number - 1),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": address(1),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": "eth0",
            "PYTHONPATH": ":".join(sys.path),
        }
        order = json.dumps(case).replace("'", "")
        command = _pin_to_core(number, f"{sys.executable} -m tests.agree.network_rank '{order}'")
        started.append(names.start(number, command, piped=True, **environment))
    try:
        yield started
    finally:
        for process in started:
            if process.stdin is not None:
                process.stdin.close()
        for process in started:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()


def steps(started: list[subprocess.Popen[bytes]], count: int) -> list[float]:
    """Seconds of ``count`` steps, each on the slower rank."""
    for process in started:
        assert process.stdin is not None
        process.stdin.write(f"{count}\n".encode())
        process.stdin.flush()
    answers = [process.stdout.readline() for process in started if process.stdout is not None]
    if not all(answers):
        raise SystemExit(
            f"a rank ended: {Path('said-1.txt').read_text()[-800:]}{Path('said-2.txt').read_text()[-800:]}"
        )
    return [max(both) for both in zip(*(json.loads(answer) for answer in answers), strict=True)]


def measure(names: Hosts, case: Case) -> list[dict[str, Any]]:
    """One line per wire: seconds of the steps of each round, rounds of all wires in turn."""
    chosen = [wire for wire in WIRES if wire.name in case.wires]
    result: dict[str, list[list[float]]] = {wire.name: [] for wire in chosen}
    with ranks(names, case) as started:
        shape(WIRES[0])
        steps(started, 2)  # warm
        for _ in range(ROUNDS):
            for wire in chosen:
                shape(wire)
                (first,) = steps(started, 1)
                more = max(1, min(4, round(ROUND_SECONDS / first) - 1))
                result[wire.name].append([first, *steps(started, more)])
        shape(WIRES[0])
    return [{"case": case, "name": case.name, "wire": name, "rounds": rounds} for name, rounds in result.items()]


def run(options: argparse.Namespace) -> None:
    """Calibrate and measure what the folder does not hold yet, for at most ``minutes`` minutes."""
    names, end = Hosts(2), time.monotonic() + 60 * options.minutes
    cases = [case._replace(wires=QUICK) for case in CASES[:10:9]] if options.quick else CASES
    wires = [wire for wire in WIRES if wire.name in QUICK] if options.quick else WIRES
    Path("machines").mkdir(exist_ok=True)
    lines = Path("cases.jsonl")
    for wire in wires:
        if time.monotonic() < end:
            calibrate(names, wire, quick=True)
    known = {json.loads(line)["name"] for line in lines.read_text().splitlines()} if lines.exists() else set()
    for case in cases:
        if case.name in known or options.only not in case.name or time.monotonic() > end:
            continue
        with lines.open("a") as file:
            for line in measure(names, case):
                file.write(json.dumps(line) + "\n")
        print(case.name, flush=True)


def main() -> int:
    """Measure, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/network"))
    parser.add_argument("--minutes", type=float, default=60, help="begin nothing new after so many; then run it again")
    parser.add_argument("--only", default="", metavar="TEXT", help="layouts whose name contains it")
    parser.add_argument("--quick", action="store_true", help="two layouts over one link, in a folder of their own")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument("--markdown", type=Path, help="write the table there, and its picture beside it")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.table:
        if (code := hosts.run_in_namespaces("tests.agree.network", missing=describe_missing())) is None:
            options.folder.mkdir(parents=True, exist_ok=True)
            with contextlib.chdir(options.folder):
                run(options)
            return 0
        if code or not (options.folder / "cases.jsonl").exists():
            return code
    from tests.agree.network_table import report

    return report(options.folder, quick=options.quick, markdown=options.markdown)


if __name__ == "__main__":
    sys.exit(main())
