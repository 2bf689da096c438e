#!/usr/bin/env bash
# From a folder of BraTS cases to a model, volumes, metrics and a page: bash your_data.sh DATA OUT [STEPS]
# docs/guide/your-data.md explains each command.
set -euo pipefail
data=$1 out=$2 steps=${3:-20}

voxtune train --images "$data" --masks "$data" --image t1,t1ce,t2,flair --labels brats2021 \
  --size 32,32,32 --base 32 --batch 2 --accumulation 1 --lr 1e-3 --steps "$steps" -o "$out/run"

voxtune sample "$out/run" --mask "$data" --images "$data" --labels brats2021 \
  --sampler dpm++ --steps 10 -o "$out/synth"

voxtune evaluate "$data" "$out/synth" -o "$out/metrics"

voxtune view "$out/synth" --real "$data" --masks "$data" --metrics "$out/metrics/metrics.json" -o "$out/view.html"
