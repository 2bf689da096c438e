"""Run by test_whole_plan.py with Triton's interpreter on: the error of a network rewritten by every pass, kernels and all."""

from __future__ import annotations

import sys

import torch

from tests.factories.networks import make
from voxtune.plan.api import READY
from voxtune.plan.build import build
from voxtune.plan.plan import Plan

net, args = make(sys.argv[1])
# Products of bfloat16 are not to be trusted in the interpreter.
names = [n.replace("bf16", "fp16") for n in READY[0].without("cuda_graph", "cudnn_benchmark").names]
with torch.no_grad():
    truth = net.double()(*(a.double() if a.is_floating_point() else a for a in args))
    y = build(net.float(), args, None, Plan.of(*names), twin=True)(*args)
print(float((y.double() - truth).norm() / truth.norm()))
