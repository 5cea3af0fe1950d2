#!/bin/sh
# From a question to a trained, proven step on this computer: calibrate, search, train, compare. Needs `fivefold` on PATH.
set -eu
cd "$(dirname "$0")/.."

# A processor without instructions for bf16 takes about twenty times as long in bf16 as in fp32.
if grep -qwE 'amx_bf16|avx512_bf16|bf16' /proc/cpuinfo 2>/dev/null; then
    precision=bf16 steps=350
else
    precision=fp32 steps=200
fi
mkdir -p runs
rm -rf runs/demo  # of an earlier demo: a finished run is not trained again
sed "s/^precision = .*/precision = \"$precision\"/; s/^steps = .*/steps = $steps/" examples/demo.toml > runs/demo.toml

echo "1/4  What can this computer do?"
fivefold calibrate --quick

echo "2/4  Which layout is fastest for the model of demo.toml here?"
fivefold search tiny local:2 --seq 256 --gbs 8 --precision "$precision"

echo "3/4  Train it on two processes, on Python's own library, for about two minutes."
fivefold train runs/demo.toml

echo "4/4  Draw the run."
fivefold show runs/demo --charts > /dev/null # it prints the table of the training again
