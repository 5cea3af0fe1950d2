"""Fivefold's run file, and jobs of other launchers that start it.

run_file     a layout as a run file, read and written kubernetes   a Kubeflow Trainer job of a run file      skypilot
a SkyPilot task of one
"""

from __future__ import annotations

from fivefold.interop.format import ConfigFormat
from fivefold.interop.launch import kubernetes, run_file, skypilot

FORMATS = (
    ConfigFormat(
        "fivefold", "", "fivefold", run_file.is_run_file, run_file.parse, run_file.to_job, run_file.emit_run_file
    ),
    ConfigFormat("kubernetes", "", "fivefold", lambda document: False, None, None, kubernetes.emit),
    ConfigFormat("skypilot", "", "fivefold", lambda document: False, None, None, skypilot.emit),
)
