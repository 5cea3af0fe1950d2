#!/bin/bash
# DeepSpeed: llama3-8b, dp8 zero3 mbs2 ac=full
# deepspeed.json: see https://www.deepspeed.ai/docs/config-json for each of its keys
cd "$(dirname "$0")"
deepspeed --num_nodes 1 --num_gpus 8 train.py arguments.yaml
