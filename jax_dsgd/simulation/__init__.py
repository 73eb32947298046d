"""Simulation of uneven machines: a cluster and a policy give a trace, which a run replays.

`simulate_events` plays a parameter server, `simulate_rounds` rounds of meetings; a `Policy` is four
small functions: who goes on when, who is chosen, how much each does, and who meets whom. All is
NumPy, the same seed gives the same trace, and what cannot end is refused with the reason.
"""

from jax_dsgd.simulation._amounts import adaptive_hogbatch as adaptive_hogbatch
from jax_dsgd.simulation._amounts import dynamic_batching as dynamic_batching
from jax_dsgd.simulation._amounts import dynamic_local_updates as dynamic_local_updates
from jax_dsgd.simulation._arrivals import adaptive_fastest as adaptive_fastest
from jax_dsgd.simulation._arrivals import bulk as bulk
from jax_dsgd.simulation._arrivals import elastic_norm as elastic_norm
from jax_dsgd.simulation._arrivals import elastic_variance as elastic_variance
from jax_dsgd.simulation._arrivals import fastest as fastest
from jax_dsgd.simulation._barriers import asp as asp
from jax_dsgd.simulation._barriers import bsp as bsp
from jax_dsgd.simulation._barriers import psp as psp
from jax_dsgd.simulation._barriers import ssp as ssp
from jax_dsgd.simulation._events import simulate_events as simulate_events
from jax_dsgd.simulation._groups import group_generator as group_generator
from jax_dsgd.simulation._groups import static_groups as static_groups
from jax_dsgd.simulation._groups import wait_avoiding_groups as wait_avoiding_groups
from jax_dsgd.simulation._policy import Meeting as Meeting
from jax_dsgd.simulation._policy import Policy as Policy
from jax_dsgd.simulation._policy import Task as Task
from jax_dsgd.simulation._policy import View as View
from jax_dsgd.simulation._prices import dap_throughput as dap_throughput
from jax_dsgd.simulation._prices import layered_seconds as layered_seconds
from jax_dsgd.simulation._prices import overlapped_seconds as overlapped_seconds
from jax_dsgd.simulation._prices import tap_throughput as tap_throughput
from jax_dsgd.simulation._replay import Replayed as Replayed
from jax_dsgd.simulation._replay import controls as controls
from jax_dsgd.simulation._replay import replay_events as replay_events
from jax_dsgd.simulation._replay import replay_rounds as replay_rounds
from jax_dsgd.simulation._rounds import simulate_rounds as simulate_rounds
from jax_dsgd.simulation._selection import at_random as at_random
from jax_dsgd.simulation._selection import availability_and_freshness as availability_and_freshness
from jax_dsgd.simulation._selection import availability_only as availability_only
from jax_dsgd.simulation._selection import availability_weighted as availability_weighted
from jax_dsgd.simulation._selection import inverse_availability as inverse_availability
from jax_dsgd.simulation._theory import BestStep as BestStep
from jax_dsgd.simulation._theory import WorkerCount as WorkerCount
from jax_dsgd.simulation._theory import best_step as best_step
from jax_dsgd.simulation._theory import best_worker_count as best_worker_count
from jax_dsgd.simulation._theory import contraction as contraction
from jax_dsgd.simulation._theory import dominant_root as dominant_root
from jax_dsgd.simulation._theory import elastic_constant as elastic_constant
from jax_dsgd.simulation._theory import error_feedback_bound as error_feedback_bound
from jax_dsgd.simulation._theory import stability_threshold as stability_threshold
from jax_dsgd.simulation._theory import staleness_bound as staleness_bound
from jax_dsgd.simulation._trace import EventTrace as EventTrace
from jax_dsgd.simulation._trace import RoundTrace as RoundTrace
