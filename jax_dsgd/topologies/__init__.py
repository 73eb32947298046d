"""Topologies: who talks to whom at round t, and with which weight.

A topology is a table of full permutations, self-loops included, and of per-worker weights. With its
mixing matrix W, worker i replaces its value by sum_j W[i, j] x_j. Every constructor returns doubly
stochastic matrices, so mixing keeps the mean over workers, but for `from_arrows` and what is given
to `from_matrix`; symmetric and of period 1 unless it says otherwise. Sizes are ints >= 1, anything
else is a ValueError. Gaps are `Topology.spectral_gap()`.
"""

from jax_dsgd.topologies._given import from_arrows as from_arrows
from jax_dsgd.topologies._given import from_edges as from_edges
from jax_dsgd.topologies._given import from_matrix as from_matrix
from jax_dsgd.topologies._graphs import complete as complete
from jax_dsgd.topologies._graphs import directed_ring as directed_ring
from jax_dsgd.topologies._graphs import exponential as exponential
from jax_dsgd.topologies._graphs import hypercube as hypercube
from jax_dsgd.topologies._graphs import random_regular as random_regular
from jax_dsgd.topologies._graphs import ring as ring
from jax_dsgd.topologies._graphs import star as star
from jax_dsgd.topologies._graphs import torus as torus
from jax_dsgd.topologies._plan import TopologyPlan as TopologyPlan
from jax_dsgd.topologies._plan import plan_topology as plan_topology
from jax_dsgd.topologies._rates import expected_consensus_rate as expected_consensus_rate
from jax_dsgd.topologies._schedules import butterfly_groups as butterfly_groups
from jax_dsgd.topologies._schedules import concatenate as concatenate
from jax_dsgd.topologies._schedules import inter_intra as inter_intra
from jax_dsgd.topologies._schedules import one_peer_exponential as one_peer_exponential
from jax_dsgd.topologies._schedules import one_peer_hypercube as one_peer_hypercube
from jax_dsgd.topologies._schedules import random_groups as random_groups
from jax_dsgd.topologies._schedules import random_pairs as random_pairs
from jax_dsgd.topologies._schedules import then_mean_every as then_mean_every
from jax_dsgd.topologies._topology import Round as Round
from jax_dsgd.topologies._topology import Topology as Topology
