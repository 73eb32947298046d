"""Distributed SGD that communicates little, needs no center and tolerates uneven machines.

Every method is an optax transform, and one text of it runs on one chip, on a mesh and on a pod: see
`runtime`.
"""

from jax_dsgd import algorithms as algorithms
from jax_dsgd import checkpoint as checkpoint
from jax_dsgd import clusters as clusters
from jax_dsgd import codes as codes
from jax_dsgd import collectives as collectives
from jax_dsgd import compressors as compressors
from jax_dsgd import exchange as exchange
from jax_dsgd import ledger as ledger
from jax_dsgd import memories as memories
from jax_dsgd import planning as planning
from jax_dsgd import runtime as runtime
from jax_dsgd import servers as servers
from jax_dsgd import simulation as simulation
from jax_dsgd import topologies as topologies
from jax_dsgd import transforms as transforms

__version__ = '0.1.0'
