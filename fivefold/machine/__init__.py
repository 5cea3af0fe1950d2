"""The machine: a chip, the links between chips, and how many there are.

spec · catalog · total_memory · toml   the record; chips and nodes with sources; memory; machine files
overrides · perturbation   a machine of the catalog with some figures changed: "l40s:320 nic=100Gbit/node"; by factors
datacenter              what a site adds over a whole run: failures, storage, power, the grid
launch                  the commands that start a run on it
kernel_efficiency       what kernels reach of a data sheet
"""
