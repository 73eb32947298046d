"""Bytes counted from shapes, and read out of HLO: both against sums by hand."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_dsgd import ledger, runtime

# Bytes from shapes


@pytest.mark.parametrize(
  ('payload', 'nbytes'),
  [
    ({}, 0),
    (None, 0),
    (jnp.zeros((3, 5)), 60),
    (jnp.zeros(()), 4),
    (jnp.zeros((0, 7)), 0),
    ([jnp.zeros(3, jnp.uint8), (jnp.zeros(2, jnp.uint16), None), jnp.zeros(5, bool)], 3 + 4 + 5),
    ({'a': jnp.zeros(3, jnp.bfloat16), 'b': jnp.zeros(1, jnp.complex64)}, 6 + 8),
    (jnp.zeros(3, ml_dtypes.float8_e4m3fn), 3),
    (jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.float32), 1 << 42),
  ],
  ids=str,
)
def test_payload_bytes(payload, nbytes):
  counted = ledger.payload_bytes(payload)
  assert counted == nbytes
  assert type(counted) is int


def test_payload_bytes_under_jit_are_a_plain_number():
  assert jax.jit(lambda x: jnp.zeros(ledger.payload_bytes(x)))(jnp.zeros(3, jnp.uint8)).shape == (
    3,
  )


# The meter


def number(meter):
  high, low = np.asarray(meter).astype(object)
  return int(high) * 2**32 + int(low)


@jax.jit
def meter_of(high, low):
  return jnp.stack([high, low]).astype(jnp.uint32)


@pytest.mark.parametrize('start', [0, 1, 2**32 - 1, 2**32, 2**32 + 5, 2**40 - 1, 2**62 + 2**32 - 1])
@pytest.mark.parametrize('nbytes', [0, 1, 2**32 - 1, 2**32, 2**33 + 7, 2**40 + 2**32 - 1])
def test_add_is_exact_across_32_bits(start, nbytes):
  meter = meter_of(np.uint32(start >> 32), np.uint32(start & 0xFFFFFFFF))
  after = ledger.add(meter, nbytes)
  assert after.shape == (2,) and after.dtype == jnp.uint32
  assert number(after) == start + nbytes


def test_add_many_times_inside_a_scan():
  nbytes = 3 * 2**30 + 1

  @jax.jit
  def total():
    step = lambda meter, _: (ledger.add(meter, nbytes), None)  # noqa: E731
    return jax.lax.scan(step, ledger.new_meter(), length=1000)[0]

  assert number(total()) == 1000 * nbytes


def test_add_takes_its_entry_of_a_table():
  table = np.array([[0, 2**32 - 1, 7], [2**35 + 3, 2**32, 1]])
  rounds = [1, 0, 1, 1, 0]

  @jax.jit
  def totals(workers):
    def one(worker):
      step = lambda meter, time: (ledger.add(meter, table, time, worker), None)  # noqa: E731
      return jax.lax.scan(step, ledger.new_meter(), jnp.array(rounds))[0]

    return jax.vmap(one)(workers)

  for worker, meter in enumerate(totals(jnp.arange(3))):
    assert number(meter) == sum(int(table[time, worker]) for time in rounds)


# Bytes in states


class SomeState(NamedTuple):
  count: jax.Array
  bytes_sent: jax.Array


class Wrapper(NamedTuple):
  inner: object
  bytes_sent: jax.Array


def some_state(*numbers):
  halves = np.array([[n >> 32, n & 0xFFFFFFFF] for n in numbers], np.uint32)
  halves = halves[0] if len(numbers) == 1 else halves
  return SomeState(jnp.zeros(halves.shape[:-1], jnp.int32), jnp.asarray(halves))


def test_bytes_sent_of_one_worker_sums_over_a_nested_state():
  state = (some_state(5), {'a': [some_state(2**33 + 1), None]}, ())
  assert ledger.bytes_sent(state) == 2**33 + 6
  assert type(ledger.bytes_sent(state)) is int
  assert ledger.bytes_sent(Wrapper(some_state(3), some_state(4).bytes_sent)) == 7


def test_bytes_sent_of_rows_is_a_number_a_worker():
  sent = ledger.bytes_sent(
    (some_state(1, 2**32, 3), Wrapper((), some_state(10, 20, 30).bytes_sent))
  )
  assert sent.dtype == np.int64
  assert sent.tolist() == [11, 2**32 + 20, 33]
  # One row is a row.
  one_row = jax.tree.map(lambda x: x[None], some_state(9))
  assert ledger.bytes_sent(one_row).tolist() == [9]


@pytest.mark.parametrize('state', [(), None, {'bytes': jnp.ones(2)}, SomeState(jnp.ones(()), None)])
def test_bytes_sent_is_zero_where_nothing_counts(state):
  assert ledger.bytes_sent(state) == 0


# Bytes of compiled programs


def compiled(function, *rows, **sizes):
  mesh = runtime.make_mesh(**sizes)
  spec = PartitionSpec(tuple(sizes))
  mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)
  return jax.jit(mapped).lower(*rows).compile().as_text()


def summary(hlo):
  return [(x.kind, sorted(x.operands), x.nbytes) for x in ledger.collectives(hlo)]


REAL = {
  'psum': (
    lambda x: jax.lax.pcast(jax.lax.psum({'a': x, 'b': x[:, :2] + 1}, 'w'), 'w', to='varying'),
    jnp.ones((4, 3)),
    ('all-reduce', ['f32[1,2]', 'f32[1,3]'], 20),
  ),
  'all_gather': (
    lambda x: jax.lax.all_gather(x, 'w'),
    jnp.ones((4, 5), jnp.uint8),
    ('all-gather', ['u8[1,1,5]'], 5),
  ),
  'ppermute': (
    lambda x: jax.lax.ppermute(x, 'w', [(i, (i + 1) % 4) for i in range(4)]),
    jnp.ones((4, 3), jnp.uint16),
    ('collective-permute', ['u16[1,3]'], 6),
  ),
  'psum_scatter': (
    lambda x: jax.lax.psum_scatter(x, 'w', scatter_dimension=1, tiled=True),
    jnp.ones((4, 8)),
    ('reduce-scatter', ['f32[1,8]'], 32),
  ),
}


@pytest.mark.parametrize('name', REAL)
def test_collectives_of_a_compiled_program(name):
  function, rows, right = REAL[name]
  assert summary(compiled(function, rows, w=4)) == [right]


def test_all_to_all_counts_all_that_is_handed_over():
  function = lambda x: jax.lax.all_to_all(x, 'w', split_axis=1, concat_axis=1)  # noqa: E731
  (found,) = ledger.collectives(compiled(function, jnp.ones((4, 4, 3), jnp.uint8), w=4))
  assert (found.kind, found.nbytes) == ('all-to-all', 12)


def test_groups_do_not_change_what_a_device_hands_over():
  ones = jnp.ones((4, 3))
  # One after the other: independent ones may be merged.
  both = lambda x: x + jax.lax.psum(jnp.sin(jax.lax.psum(x, 'a')), 'b')  # noqa: E731
  assert summary(compiled(both, ones, a=2, b=2)) == [('all-reduce', ['f32[1,3]'], 12)] * 2


def test_loops_and_branches_are_listed_once_with_their_computation():
  def function(x):
    step = lambda c, _: (jax.lax.ppermute(c, 'w', [(0, 1), (1, 0)]), None)  # noqa: E731
    x = jax.lax.scan(step, x, length=5)[0]
    far = lambda x: jax.lax.all_gather(x.astype(jnp.uint8), 'w').sum(0).astype(jnp.float32)  # noqa: E731
    flag = jax.lax.psum(x.sum(), 'w') > 0
    return jax.lax.cond(flag, far, lambda x: x, x)

  found = {x.kind: x for x in ledger.collectives(compiled(function, jnp.ones((2, 3)), w=2))}
  assert {kind: x.nbytes for kind, x in found.items()} == {
    'collective-permute': 12,
    'all-gather': 3,
    'all-reduce': 4,
  }
  assert len({x.computation for x in found.values()}) == 3
  assert all(x.computation for x in found.values())


def test_no_collectives():
  assert ledger.collectives(jax.jit(jnp.sin).lower(jnp.ones(3)).compile().as_text()) == []


# Bytes of text written by hand, as other versions and other backends print it

TPU = """
HloModule jit_step, is_scheduled=true

%add.1 (x: f32[], y: f32[]) -> f32[] {
  %x = f32[]{:T(128)} parameter(0)
  %y = f32[]{:T(128)} parameter(1)
  ROOT %add.2 = f32[]{:T(128)} add(%x, %y)
}

ENTRY %main.9_spmd (p0: u8[1024], p1: bf16[8,128], p2: s32[3]) -> (u8[4096], bf16[8,128]) {
  %p0 = u8[1024]{0:T(1024)(128)(4,1)} parameter(0), sharding={devices=[4]<=[4]}
  %p1 = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %p2 = s32[3]{0:T(128)} parameter(2)
  %all-gather-start.1 = (u8[1024]{0:T(1024)(128)(4,1)}, u8[4096]{0:T(1024)}) all-gather-start(%p0), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
  %all-gather-done.1 = u8[4096]{0:T(1024)} all-gather-done(%all-gather-start.1)
  %collective-permute-start.2 = (bf16[8,128]{1,0}, bf16[8,128]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p1), channel_id=2, source_target_pairs={{0,1},{1,0}}
  %collective-permute-done.2 = bf16[8,128]{1,0} collective-permute-done(%collective-permute-start.2)
  %all-reduce-start.3 = (s32[3]{0}, bf16[8,128]{1,0}) all-reduce-start(%p2, /*index=1*/%p1), channel_id=3, replica_groups={{0,1},{2,3}}, to_apply=%add.1
  %all-reduce-done.3 = (s32[3]{0}, bf16[8,128]{1,0}) all-reduce-done(%all-reduce-start.3)
  ROOT %tuple.4 = (u8[4096]{0}, bf16[8,128]{1,0}) tuple(%all-gather-done.1, %collective-permute-done.2)
}
"""  # noqa: E501 (as XLA prints it)


def test_start_forms_layouts_and_comments_of_tpu_text():
  assert ledger.collectives(TPU) == [
    ledger.Collective('all-gather', ('u8[1024]',), 1024, 'main.9_spmd'),
    ledger.Collective('collective-permute', ('bf16[8,128]',), 2048, 'main.9_spmd'),
    ledger.Collective('all-reduce', ('s32[3]', 'bf16[8,128]'), 12 + 2048, 'main.9_spmd'),
  ]


def test_operands_printed_with_their_shapes():
  """As XLA did until 2025, and with many operands a comment every five."""
  operands = ', '.join(f'/*index={i}*/f32[{i}]{{0}} %p{i}' for i in range(1, 12))
  shapes = ', '.join(f'f32[{i}]{{0}}' for i in range(1, 12))
  text = f"""
ENTRY %main (p: f32[1]) -> f32[1] {{
  %all-reduce.1 = ({shapes}) all-reduce({operands}), replica_groups={{{{0,1}}}}, to_apply=%add
  ROOT %all-to-all.2 = (u8[7]{{0}}, u8[7]{{0}}) all-to-all(u8[7]{{0}} %a, u8[7]{{0}} %b)
}}
"""
  found = ledger.collectives(text)
  assert [(x.kind, len(x.operands), x.nbytes) for x in found] == [
    ('all-reduce', 11, 4 * sum(range(1, 12))),
    ('all-to-all', 2, 14),
  ]


def test_names_are_those_of_the_computation_at_hand():
  """Computations use the same names for operands of other shapes."""
  text = """
%branch_0 (arg: f32[2]) -> f32[2] {
  %arg = f32[2]{0} parameter(0)
  ROOT %collective-permute.1 = f32[2]{0} collective-permute(%arg), source_target_pairs={{0,1}}
}

%branch_1 (arg: f32[9]) -> f32[9] {
  %arg = f32[9]{0} parameter(0)
  ROOT %collective-permute.2 = f32[9]{0} collective-permute(%arg), source_target_pairs={{0,1}}
}
"""
  assert [(x.nbytes, x.computation) for x in ledger.collectives(text)] == [
    (8, 'branch_0'),
    (36, 'branch_1'),
  ]


def test_what_only_mentions_a_collective_is_none():
  text = """
ENTRY %main (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  %all-reduce.7 = f32[2]{0} fusion(%p), kind=kLoop, calls=%all-reduce-computation
  ROOT %copy = f32[2]{0} copy(%all-reduce.7), metadata={op_name="jit(f)/all-gather"}
}
"""
  assert ledger.collectives(text) == []


@pytest.mark.parametrize(
  ('shape', 'nbytes'),
  [
    ('f32[]', 4),
    ('f64[3]', 24),
    ('pred[9]', 9),
    ('bf16[2,3]', 12),
    ('f16[5]', 10),
    ('f8e4m3fn[7]', 7),
    ('f8e5m2[7]', 7),
    ('c64[2]', 16),
    ('c128[2]', 32),
    ('s8[3]', 3),
    ('u16[3]', 6),
    ('s64[1]', 8),
    ('f32[0,4]', 0),
    ('s4[7]', 4),  # two to a byte
    ('u4[8]', 4),
    ('u2[9]', 3),
    ('f4e2m1fn[3]', 2),
    ('token[]', 0),
  ],
)
def test_bytes_of_each_type(shape, nbytes):
  text = f"""
ENTRY %main (p: {shape}) -> {shape} {{
  %p = {shape} parameter(0)
  ROOT %x = {shape} collective-permute(%p), source_target_pairs={{{{0,1}}}}
}}
"""
  (found,) = ledger.collectives(text)
  assert found.operands == (shape,)
  assert found.nbytes == nbytes


# Links


@pytest.mark.parametrize(
  ('kind', 'right'),
  [
    ('all-reduce', 1750.0),  # a ring of 8: 7/8 twice
    ('all-gather', 7000.0),
    ('reduce-scatter', 875.0),
    ('all-to-all', 875.0),
    ('collective-permute', 1000.0),
    ('collective-broadcast', 1000.0),
  ],
)
def test_link_bytes(kind, right):
  assert ledger.link_bytes(kind, 1000, 8) == right


@pytest.mark.parametrize('kind', ['all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all'])
def test_one_worker_alone_loads_no_link(kind):
  assert ledger.link_bytes(kind, 1000, 1) == 0.0


def test_link_bytes_refuses_what_is_no_collective():
  with pytest.raises(ValueError, match="kind='psum' is not a collective; accepted: all-reduce, "):
    ledger.link_bytes('psum', 8, 2)
