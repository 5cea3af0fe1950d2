"""Write a run file as a task of SkyPilot: `sky jobs launch task.yaml`, in the folder of the task and the run file.

A managed job is restarted after a preemption, and after an error up to max_restarts times; each start resumes from the
newest checkpoint of the bucket. Source: skypilot 0.14.1 sky/utils/schemas.py, get_task_schema, get_resources_schema.
"""

from __future__ import annotations

from typing import Any

from fivefold.interop.format import ConfigPlan, WrittenConfig
from fivefold.interop.launch.kubernetes import RESTARTS
from fivefold.interop.launch.run_file import FOLDER, build_files
from fivefold.interop.launch.run_file import format_machine as machine_of
from fivefold.interop.render import dump

RUN = """export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
HEAD=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
torchrun --nnodes "$SKYPILOT_NUM_NODES" --nproc-per-node "$SKYPILOT_NUM_GPUS_PER_NODE" \\
    --node-rank "$SKYPILOT_NODE_RANK" --master-addr "$HEAD" --master-port 29400 \\
    -m fivefold train run.toml
"""


def emit(plan: ConfigPlan) -> WrittenConfig:
    """Return the task, and the run file for its workdir."""
    nodes, gpus_per_node = plan.hosts
    chip = machine_of(plan).partition(":")[0].partition(" ")[0].upper()
    name = f"fivefold-{plan.model.name}".replace(".", "-").replace("_", "-").lower()
    task: dict[str, Any] = {
        "name": name,
        "workdir": ".",
        "num_nodes": nodes,
        "resources": {
            "accelerators": f"{chip}:{gpus_per_node}",
            "use_spot": True,
            "job_recovery": {"strategy": "EAGER_NEXT_REGION", "max_restarts_on_errors": RESTARTS},
        },
        "file_mounts": {f"~/sky_workdir/{FOLDER}": {"name": f"{name}-runs", "mode": "MOUNT"}},
        "setup": "pip install 'fivefold[train]'\n",
        "run": RUN,
    }
    about = (
        f"# sky jobs launch task.yaml: {plan.model.name}, {plan.layout}\n"
        "# The bucket holds logs and checkpoints; use_spot: false for machines that are not taken away; setup: yours.\n"
    )
    return WrittenConfig({"task.yaml": about + dump([task]), **build_files(plan)})
