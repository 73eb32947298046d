"""Decisions that are made before training, from measured costs."""

from jax_dsgd.planning._phases import plan_phases as plan_phases
