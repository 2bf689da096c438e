"""Plans: a network rewritten by named passes, measured and gated."""

from voxtune.plan.api import optimize
from voxtune.plan.gate import Gate, Verdict
from voxtune.plan.optimized import Optimized
from voxtune.plan.plan import Plan, Step
from voxtune.plan.tuner import Tuned, tune

__all__ = ["Gate", "Optimized", "Plan", "Step", "Tuned", "Verdict", "optimize", "tune"]
