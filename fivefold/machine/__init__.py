"""The machine: a chip, the links between chips, and how many there are.

spec · catalog · toml   the record; chips and nodes with sources; machine files
varied                  a machine of the catalog with some figures changed: "l40s:320 nic=100Gbit/node"
reached · balance       what kernels reach of a data sheet; FLOPs per byte that links ask for
"""
