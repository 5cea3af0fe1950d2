"""Write a run file as a job of Kubeflow Trainer: a TrainJob, its TrainingRuntime, its volume and its files.

  exit code 2, an error in the run file → the job ends     a rank dies or hangs → all restart, max_restarts times
  the node is drained or preempted → SIGTERM, a save within the grace period → restarted elsewhere, and resumed

Source: kubeflow-trainer-api 2.3.0, TrainerV1alpha1TrainJob and TrainerV1alpha1TrainingRuntime.
"""

from __future__ import annotations

from typing import Any

from fivefold.interop.format import ConfigPlan, WrittenConfig
from fivefold.interop.launch.run_file import FOLDER, build_files
from fivefold.interop.render import dump

GRACE_SECONDS = 300  # time for a step and a save
RESTARTS = 3  # as [faults] max_restarts
IMAGE = "your-registry/fivefold:latest"
API = "trainer.kubeflow.org/v1alpha1"


def emit(plan: ConfigPlan) -> WrittenConfig:
    """Return the YAML for ``kubectl apply -f``."""
    name = f"fivefold-{plan.model.name}".replace(".", "-").replace("_", "-").lower()
    parts = [
        _build_volume(name),
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": build_files(plan)},
        _build_runtime(plan, name),
        _build_job(plan, name),
    ]
    about = (
        f"# kubectl apply -f trainjob.yaml: {plan.model.name}, {plan.layout}\n"
        f"# Put your image in the place of {IMAGE}; the volume, which all nodes write to, holds logs and checkpoints.\n"
    )
    return WrittenConfig({"trainjob.yaml": about + dump(parts)})


def _build_volume(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "2Ti"}}},
    }


def _build_runtime(plan: ConfigPlan, name: str) -> dict[str, Any]:
    """Return the TrainingRuntime: one container per node, which torchrun starts from PET_… variables."""
    nodes, _ = plan.hosts
    command = "cp /etc/fivefold/* . && exec torchrun --max-restarts 0 -m fivefold train run.toml"
    container = {
        "name": "node",
        "image": IMAGE,
        "command": ["bash", "-c", command],
        "workingDir": "/work",
        "volumeMounts": [
            {"name": "run", "mountPath": "/etc/fivefold"},
            {"name": "kept", "mountPath": f"/work/{FOLDER}"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [container],
        "volumes": [
            {"name": "run", "configMap": {"name": name}},
            {"name": "kept", "persistentVolumeClaim": {"claimName": name}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    failures = [
        {"action": "FailJob", "onExitCodes": {"containerName": "node", "operator": "In", "values": [2]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    job = {
        "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
        "spec": {"backoffLimit": 0, "podFailurePolicy": {"rules": failures}, "template": {"spec": pod}},
    }
    rules = [{"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]
    policy = {"maxRestarts": RESTARTS, "rules": rules}
    jobs = {"failurePolicy": policy, "replicatedJobs": [{"name": "node", "template": job}]}
    return {
        "apiVersion": API,
        "kind": "TrainingRuntime",
        "metadata": {"name": name, "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {"mlPolicy": {"numNodes": nodes, "torch": {}}, "template": {"spec": jobs}},
    }


def _build_job(plan: ConfigPlan, name: str) -> dict[str, Any]:
    """Return the TrainJob of Kubeflow Trainer that runs the plan."""
    nodes, gpus_per_node = plan.hosts
    return {
        "apiVersion": API,
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name},
            "trainer": {
                "numNodes": nodes,
                "numProcPerNode": gpus_per_node,
                "resourcesPerNode": {"limits": {"nvidia.com/gpu": str(gpus_per_node)}},
            },
        },
    }
