"""Clusters: the described machine room, how fast its workers compute and what its links carry.

A cluster is a law of compute time for each worker, links between workers and to a server, memory,
who is up in which round, and how often a worker fails. Times are seconds, sizes bytes, and work is
counted in nominal batches. The same seed gives the same machines to every policy.
"""

from jax_dsgd.clusters._cluster import Availability as Availability
from jax_dsgd.clusters._cluster import Cluster as Cluster
from jax_dsgd.clusters._given import from_yaml as from_yaml
from jax_dsgd.clusters._laws import Law as Law
from jax_dsgd.clusters._laws import Sampler as Sampler
from jax_dsgd.clusters._laws import constant as constant
from jax_dsgd.clusters._laws import log_normal as log_normal
from jax_dsgd.clusters._laws import markov_slowdown as markov_slowdown
from jax_dsgd.clusters._laws import periodic as periodic
from jax_dsgd.clusters._laws import recorded as recorded
from jax_dsgd.clusters._laws import shifted_exponential as shifted_exponential
from jax_dsgd.clusters._presets import data_centers as data_centers
from jax_dsgd.clusters._presets import gpu_rack as gpu_rack
from jax_dsgd.clusters._presets import phones as phones
from jax_dsgd.clusters._presets import tpu_pod as tpu_pod
from jax_dsgd.clusters._presets import uniform as uniform
from jax_dsgd.clusters._presets import with_stragglers as with_stragglers
