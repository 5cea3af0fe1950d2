"""The machine: a chip, the links between chips, and how many there are.

spec · catalog · toml   the record; chips and nodes with sources; memory; machine files
overrides               changes figures of a catalog machine: "l40s:320 nic=100Gbit/node"
perturbation            scales the speed of kernels and network by factors
datacenter              site facts for a full run: failures, storage, power, the grid
launch                  the commands that start a run on the machine
kernel_efficiency       the share of a data sheet's peaks that kernels reach
"""
