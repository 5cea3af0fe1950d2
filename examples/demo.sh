#!/bin/sh
# From a question to a trained, proven step on this computer: calibrate, search, train, compare. Needs `fivefold` on PATH.
set -eu
cd "$(dirname "$0")/.."

echo "1/4  What can this computer do?"
fivefold calibrate --quick

echo "2/4  Which layout is fastest for the model of demo.toml here?"
fivefold search tiny local:2 --seq 256 --gbs 8 --precision bf16

echo "3/4  Train it on two processes, on Python's own library, for about two minutes."
fivefold train examples/demo.toml

echo "4/4  Draw the run."
fivefold show runs/demo --charts
