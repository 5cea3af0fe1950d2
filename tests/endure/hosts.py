"""Hosts as network namespaces: a run of two of them is cut in two, goes on, and ends in the bits of one host's run.

    python -m tests.endure.hosts

    host1 ─ switch ─ host2        torchrun, two ranks a host; one of three is spare
              └───── host3

The same run file as four ranks of one host; on two hosts; on two of which one is cut off in mid-step, comes back, is
cut off again and replaced by the third; on two, then one. All live in namespaces, cleared however this ends.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.endure.kills import enter_folder
from tests.trainer.test_faults import events, losses, read_last_step, saved_bits, saved_step, set_run, wait_for

PORT = 29400
PATIENCE_SECONDS = 180.0
STEPS = 200
RUN: dict[str, Any] = {
    "layout": "dp4 zero2 mbs1",
    "job": {"global_batch": 4, "steps": STEPS},
    "checkpoints": {"every_steps": 10},
    "faults": {"watchdog_seconds": 5},
}
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}  # docs/how-to/multi-node.md
NEAR = 1e-3  # of two layouts, which sum in other orders
NAMED = "ranks 2, 3 did not come for 5 s: no answer, stopped or cut off"
SILENT = "the store of the processes does not answer"


def describe_missing() -> str:
    """What is not here that namespaces need; empty if nothing."""
    for command in ("ip", "unshare", "setpriv", "torchrun"):
        if shutil.which(command, path=_path()) is None:
            return f"there is no {command} here (Debian: iproute2, util-linux)"
    trial = "mount -t tmpfs tmpfs /run && ip netns add host && ip -n host link add eth0 type veth peer name eth1"
    tried = subprocess.run([*unshare(), "sh", "-c", trial], capture_output=True, text=True, check=False)
    return f"namespaces are not permitted here: {tried.stderr.strip()}" if tried.returncode else ""


def unshare() -> list[str]:
    """The command before a command that gives it namespaces; who is not root is root in them."""
    user = ["--user", "--map-root-user"] if os.geteuid() else []
    words = ["unshare", *user, "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return ["setpriv", "--pdeathsig", "KILL", *words]  # whoever ends this process ends all in them


def _path() -> str:
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"


class Hosts:
    """``host1`` to ``hostN`` on one switch, whose own names are 127.0.1.1 to them, as Debian has it."""

    def __init__(self, count: int) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)  # ``ip`` names namespaces there
        _ip(
            "link set lo up",
            "netns add switch",
            "-n switch link add bridge type bridge",
            "-n switch link set bridge up",
        )
        names = "".join(f"{address(number)} host{number}\n" for number in range(1, count + 1))
        for number in range(1, count + 1):
            Path(f"hosts-{number}.txt").write_text(f"127.0.0.1 localhost\n127.0.1.1 host{number}\n{names}")
            host, port = f"host{number}", f"port{number}"
            _ip(
                f"netns add {host}",
                f"-n {host} link add eth0 type veth peer name {port} netns switch",
                f"-n switch link set {port} master bridge up",
                f"-n {host} link set lo up",
                f"-n {host} addr add {address(number)}/24 dev eth0",
                f"-n {host} link set eth0 up",
            )

    def wire(self, number: int, *, up: bool) -> None:
        """Connect or disconnect host ``number``: what is sent is lost without an error."""
        _ip(f"-n switch link set port{number} {'up' if up else 'down'}")

    @staticmethod
    def read_output(number: int) -> str:
        """What has been said on host ``number``."""
        return Path(f"said-{number}.txt").read_text()

    def train(self, number: int, *, nodes: str = "2") -> subprocess.Popen[bytes]:
        """torchrun on host ``number``."""
        return self.start(number, torchrun(number, "train run.toml --json", nodes=nodes, ranks=2))

    def start(self, number: int, command: str, *, piped: bool = False, **environment: str) -> subprocess.Popen[bytes]:
        """``command`` on host ``number``, which says what is wrong to a file; ``piped``: and hears and answers us."""
        inside = f"hostname host{number}; mount --bind hosts-{number}.txt /etc/hosts; exec {command}"
        with Path(f"said-{number}.txt").open("ab") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", f"host{number}", "unshare", "--uts", "--mount", "sh", "-c", inside],
                stdin=subprocess.PIPE if piped else None,
                stdout=subprocess.PIPE if piped else subprocess.DEVNULL,
                stderr=file,
                env=os.environ | ENVIRONMENT | {"PATH": _path()} | environment,
            )


def torchrun(number: int, words: str, *, nodes: str = "2", ranks: int) -> str:
    """The command on host ``number`` that runs ``fivefold WORDS`` as ``ranks`` ranks on each of ``nodes``."""
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {ranks} --max-restarts 9 --rdzv-backend c10d --rdzv-id run "
        f"--rdzv-endpoint {address(1)}:{PORT} --local-addr {address(number)} -m fivefold {words}"
    )


def address(number: int) -> str:
    """The IPv4 address of a host on the switch."""
    return f"10.0.0.{number}"


def _ip(*commands: str) -> None:
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)


def processes(number: int) -> set[int]:
    """The process ids of host ``number``."""
    pids = subprocess.run(["ip", "netns", "pids", f"host{number}"], capture_output=True, text=True, check=True)
    return {int(pid) for pid in pids.stdout.split()}


def ranks(number: int) -> set[int]:
    """The process ids of the ranks on host ``number``."""
    result = set()
    for pid in processes(number):
        try:
            result |= {pid} if b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes() else set()
        except OSError:
            continue
    return result


def run_on_one_host() -> dict[str, str]:
    """The bits of the run on one host, which is this one."""
    write_run("straight")
    with Path("said-straight.txt").open("wb") as file:
        command = [sys.executable, "-m", "fivefold", "train", "run.toml", "--json"]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=file, check=True)
    return saved_bits("straight")


def run_on_two_hosts(hosts: Hosts) -> dict[str, str]:
    """The bits of the run on two hosts that nothing disturbs."""
    write_run("run")
    check_ended(hosts.train(1), hosts.train(2))
    bits = saved_bits()
    shutil.rmtree("run")
    return bits


def cut_in_two(hosts: Hosts) -> dict[str, str]:
    """The bits of the run whose second host is cut off and comes back, and is cut off and replaced by the third."""
    write_run("run")
    first, second = hosts.train(1), hosts.train(2)
    cut_off(hosts, at=STEPS // 4)
    hosts.wire(2, up=True)
    before = saved_step()
    wait_for(lambda: saved_step() > before, seconds=PATIENCE_SECONDS)  # torchrun there has waited, and joins again
    print(f"host2 came back, and the run went on from step {before}", flush=True)
    cut_off(hosts, at=STEPS // 2)
    second.kill()
    check_ended(first, hosts.train(3))
    print("host3 took its place", flush=True)
    hosts.wire(2, up=True)
    lines = [event["event"] for event in events()]
    assert [line.split(";")[0] for line in lines] == [NAMED, NAMED], lines
    assert len(losses()) == STEPS
    bits = saved_bits()
    shutil.rmtree("run")
    return bits


def go_on_smaller(hosts: Hosts) -> float:
    """How far the last loss is from one host's, where host1 goes on alone in the fastest layout of its two ranks."""
    write_run("run", layout="auto")
    first = hosts.train(1, nodes="1:2")
    hosts.train(2, nodes="1:2")
    wait_for(lambda: read_last_step() >= STEPS // 4, seconds=PATIENCE_SECONDS)
    hosts.wire(2, up=False)
    assert first.wait(timeout=PATIENCE_SECONDS) == 0
    layouts = re.findall(r"^layout (.*?):", hosts.read_output(1), re.MULTILINE)
    assert len(losses()) == STEPS
    print(f"{layouts[0]!r} went on as {layouts[-1]!r}", flush=True)
    return abs(losses()[-1] / losses("straight")[-1] - 1)


def cut_off(hosts: Hosts, *, at: int) -> None:
    """Pull host2's plug after step ``at``, and wait until no rank is left; each host must have said why."""
    wait_for(lambda: read_last_step() >= at, seconds=PATIENCE_SECONDS)
    begin, alive, said = time.monotonic(), ranks(1) | ranks(2), {host: len(hosts.read_output(host)) for host in (1, 2)}
    assert len(alive) == 4, alive
    hosts.wire(2, up=False)
    wait_for(lambda: not alive & (ranks(1) | ranks(2)), seconds=PATIENCE_SECONDS)
    new = {host: hosts.read_output(host)[length:].splitlines() for host, length in said.items()}
    lines = {host: [line for line in lines if line.startswith("fivefold: ")] for host, lines in new.items()}
    assert [line.split(";")[0] for line in lines[1]] == [f"fivefold: {NAMED}"], new
    assert sorted(lines[2]) == [f"fivefold: rank {rank} is cut off: {SILENT}" for rank in (2, 3)], new
    print(f"cut off after step {at}: all ranks ended in {time.monotonic() - begin:.0f} s", flush=True)


def write_run(folder: str, **changes: Any) -> None:
    set_run(**RUN | {"folder": folder} | changes)


def check_ended(*started: subprocess.Popen[bytes]) -> None:
    """Both have come to a good end."""
    codes = [process.wait(timeout=PATIENCE_SECONDS) for process in started]
    assert codes == [0, 0], codes


def run_in_namespaces(module: str, *, missing: str) -> int | None:
    """None in namespaces of our own; else the exit code of ``module`` run again with the same words in such."""
    if "--inside" in sys.argv:
        os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:2])  # as many threads per rank whatever the hosts
        return None
    if missing:
        print(f"skipped: {missing}")
        return 0
    return subprocess.run([*unshare(), sys.executable, "-m", module, *sys.argv[1:], "--inside"], check=False).returncode


def main() -> int:
    """The same bits three times."""
    parser = argparse.ArgumentParser(description="two hosts, one cut off; the weights must be those of one host's run")
    parser.add_argument("--folder", type=Path, default=Path("runs/hosts"))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if (code := run_in_namespaces("tests.endure.hosts", missing=describe_missing())) is not None:
        return code
    shutil.rmtree(options.folder, ignore_errors=True)
    with enter_folder(options.folder):
        hosts, bits = Hosts(3), run_on_one_host()
        same = {"two hosts": run_on_two_hosts(hosts) == bits, "two hosts, one cut off twice": cut_in_two(hosts) == bits}
        far = go_on_smaller(hosts)
        print(f"two hosts, then one: last loss {far:.1e} from that of one host, at most {NEAR:g}")
    for name, equal in same.items():
        print(f"{name}: {'the same bits' if equal else 'OTHER BITS'} as one host")
    return 0 if all(same.values()) and far <= NEAR else 1


if __name__ == "__main__":
    sys.exit(main())
