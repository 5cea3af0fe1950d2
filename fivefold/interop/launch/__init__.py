"""Our own run file, and what starts it elsewhere.

run_file     a layout as a run file, read and written
kubernetes   a Kubeflow Trainer job of a run file      skypilot   a SkyPilot task of one
"""
