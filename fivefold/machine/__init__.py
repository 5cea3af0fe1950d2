"""The machine: a chip, the links between chips, and how many there are.

spec · catalog · total_memory · toml   the record; chips and nodes with sources; memory; machine files
varied · otherwise      a machine of the catalog with some figures changed: "l40s:320 nic=100Gbit/node"; by factors
site                    what a site adds over a whole run: failures, storage, power, the grid
launch                  the commands that start a run on it
reached · balance       what kernels reach of a data sheet; FLOPs per byte that links ask for
"""
