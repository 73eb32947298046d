"""The library's layers, what each may import, and the forms of its files and docstrings.

The rules are those of the design: a file imports only from lower layers or its own folder, only
`collectives.py` calls a collective of JAX, and private files inside a folder are named once, in its
`__init__`.
"""

import ast
import inspect
import pathlib
import sys

import pytest

import jax_dsgd

ROOT = pathlib.Path(jax_dsgd.__file__).parent
FILES = sorted(ROOT.rglob('*.py'))
LAYERS = {
  'topologies': 0,
  'clusters': 0,
  'codes': 0,
  'collectives': 1,
  'ledger': 1,
  'compressors': 2,
  'memories': 2,
  'exchange': 2,
  'transforms': 3,
  'servers': 3,
  'algorithms': 4,
  'runtime': 5,
  'checkpoint': 5,
  'simulation': 5,
  'planning': 5,
  'parallel': 5,
  'learned': 5,
}
# Besides lower layers.
SIDEWAYS = {
  ('exchange', 'compressors'),
  ('exchange', 'memories'),
  ('servers', 'transforms'),
  ('simulation', 'runtime'),
}
COLLECTIVES = {
  'all_gather',
  'all_gather_invariant',
  'all_to_all',
  'axis_index',
  'axis_size',
  'pall_to_all',
  'pbroadcast',
  'pcast',
  'pmax',
  'pmean',
  'pmin',
  'ppermute',
  'pshuffle',
  'psum',
  'psum_scatter',
  'pswapaxes',
  'pvary',
  'ragged_all_to_all',
}

every_file = pytest.mark.parametrize('file', FILES, ids=lambda f: str(f.relative_to(ROOT)))


def unit(file):
  """The module or the folder of the design that a file belongs to; None for the top `__init__`."""
  first = file.relative_to(ROOT).parts[0].removesuffix('.py')
  return None if first == '__init__' else first


def tree_of(file):
  return ast.parse(file.read_text(), str(file))


def imports(file):
  """Every module or name that a file imports, dotted: `from a import b` is a.b."""
  for node in ast.walk(tree_of(file)):
    if isinstance(node, ast.Import):
      yield from (name.name for name in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{file}:{node.lineno}: a relative import'
      yield from (f'{node.module}.{name.name}' for name in node.names)


def test_every_unit_has_a_layer():
  assert {unit(file) for file in FILES} - {None} <= LAYERS.keys()


@every_file
def test_a_file_imports_lower_layers_or_its_own_folder(file):
  own = unit(file)
  for name in imports(file):
    parts = name.split('.')
    if parts[0] == 'jax_dsgd' and own is not None:
      other = parts[1]
      assert other in LAYERS, f'{file}: imports {name}'
      below = LAYERS[other] < LAYERS[own] or (own, other) in SIDEWAYS
      assert other == own or below, f'{file}: {own} imports {name} of a layer that is not lower'
      # What is private to another folder is taken from its __init__.
      assert other == own or not any(part.startswith('_') for part in parts[1:]), name


@every_file
def test_a_file_imports_only_the_packages_of_its_layer(file):
  own = unit(file)
  allowed = {'jax', 'jax_dsgd', 'numpy', 'optax'}
  extra = {'topologies': {'scipy'}, 'clusters': {'yaml'}, 'checkpoint': {'orbax'}}
  allowed |= extra.get(own, set())
  if own is not None and LAYERS[own] == 0:
    allowed -= {'jax', 'optax'}
  tops = {name.split('.')[0] for name in imports(file)} - set(sys.stdlib_module_names)
  assert tops <= allowed, f'{file} imports {tops - allowed}'


def test_the_library_does_not_import_the_application():
  for file in FILES:
    tops = {name.split('.')[0] for name in imports(file)}
    assert not tops & {'experiments', 'configs', 'tests'}, file


@every_file
def test_only_collectives_names_a_collective(file):
  if unit(file) == 'collectives':
    return
  for node in ast.walk(tree_of(file)):
    if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES:
      owner = ast.unparse(node.value)
      # Methods and modules of others may share a name; jax.lax's may not be reached by any path.
      assert owner.split('.')[-1] != 'lax', f'{file}:{node.lineno}: {ast.unparse(node)}'
  for name in imports(file):
    assert not f'{name}.'.startswith('jax.lax.'), (
      f'{file} imports {name}: say jax.lax.name, so that a collective is seen'
    )


def test_collectives_is_seen_by_that_rule():
  """The rule would fail on the one file that it spares."""
  named = {
    node.attr
    for node in ast.walk(tree_of(ROOT / 'collectives.py'))
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == 'jax.lax'
  }
  assert {'psum', 'ppermute', 'all_gather', 'axis_index'} <= named & COLLECTIVES


INITS = sorted(ROOT.rglob('__init__.py'))


@pytest.mark.parametrize('file', INITS, ids=lambda f: str(f.relative_to(ROOT)))
def test_an_init_holds_a_docstring_and_explicit_reexports(file):
  docstring, *body = tree_of(file).body
  assert isinstance(docstring, ast.Expr) and ast.get_docstring(tree_of(file)), file
  package = '.'.join(['jax_dsgd', *file.parent.relative_to(ROOT).parts])
  for node in body:
    if package == 'jax_dsgd' and isinstance(node, ast.Assign):
      assert ast.unparse(node.targets[0]) == '__version__'
      continue
    assert isinstance(node, ast.ImportFrom), f'{file}:{node.lineno}: {ast.unparse(node)}'
    assert [name.asname for name in node.names] == [name.name for name in node.names], node.module
    if package == 'jax_dsgd':
      assert node.module == package
    else:
      assert node.module.startswith(f'{package}._'), f'{file}: {node.module}'
  names = [name.name for node in body if isinstance(node, ast.ImportFrom) for name in node.names]
  assert len(names) == len(set(names))


def test_the_top_reexports_every_unit():
  units = {unit(file) for file in FILES} - {None}
  assert units <= vars(jax_dsgd).keys()


@every_file
def test_names_and_lengths_of_files(file):
  assert file.stem.strip('_') not in {'utils', 'util', 'helpers', 'helper', 'common', 'misc'}
  assert len(file.read_text().splitlines()) <= 400


@every_file
def test_functions_are_short_and_take_few_arguments(file):
  for node in ast.walk(tree_of(file)):
    if isinstance(node, ast.FunctionDef):
      statements = node.body[1:] if ast.get_docstring(node) else node.body
      lines = node.end_lineno - statements[0].lineno + 1 if statements else 0
      assert lines <= 50, f'{file}:{node.lineno}: {node.name} has {lines} lines'
      own = [
        arg for arg in node.args.posonlyargs + node.args.args if arg.arg not in ('self', 'cls')
      ]
      assert len(own) + len(node.args.kwonlyargs) <= 8, f'{file}:{node.lineno}: {node.name}'


# Docstrings


def public_members():
  """Public functions, classes and methods of public classes, by dotted name, with their owner."""
  for name, module in vars(jax_dsgd).items():
    if not inspect.ismodule(module):
      continue
    for member, value in vars(module).items():
      if member.startswith('_') or not getattr(value, '__module__', '').startswith(module.__name__):
        continue
      if inspect.isfunction(value) or inspect.isclass(value):
        yield f'{name}.{member}', value
      if inspect.isclass(value):
        for method, function in vars(value).items():
          if not method.startswith('_') and inspect.isfunction(function):
            yield f'{name}.{member}.{method}', function


MEMBERS = dict(public_members())


def arguments_of(function):
  return [name for name in inspect.signature(function).parameters if name not in ('self', 'cls')]


def test_the_members_of_every_unit_are_seen():
  assert {name.split('.')[0] for name in MEMBERS} == {unit(file) for file in FILES} - {None}
  assert {'runtime.Workers.spmd', 'compressors.top_k', 'memories.residual'} <= MEMBERS.keys()


@pytest.mark.parametrize('name', MEMBERS)
def test_a_public_member_has_a_docstring(name):
  value = MEMBERS[name]
  text = value.__doc__ or ''
  # NamedTuple and dataclass write one of their own, which says nothing.
  assert text and not text.startswith(f'{value.__name__}('), f'{name} has no docstring'


FUNCTIONS = [name for name, value in MEMBERS.items() if inspect.isfunction(value)]


@pytest.mark.parametrize('name', FUNCTIONS)
def test_a_docstring_that_lists_arguments_lists_them_all(name):
  text = inspect.getdoc(MEMBERS[name])
  if 'Args:' in text:
    listed = text.split('Args:')[1]
    for argument in arguments_of(MEMBERS[name]):
      assert f'\n  {argument}: ' in listed, f'{name} does not describe {argument}'


# Where a user composes a method: what it sends and keeps is part of what it returns.
COMPOSED = [
  name
  for name in FUNCTIONS
  if name.split('.')[0] in ('compressors', 'transforms', 'algorithms')
  and inspect.signature(MEMBERS[name]).return_annotation
  in ('Compressor', 'optax.GradientTransformation', 'optax.GradientTransformationExtraArgs')
]


def test_what_users_compose_is_seen():
  assert {'compressors.top_k', 'transforms.mean_over', 'algorithms.dsgd'} <= set(COMPOSED)


@pytest.mark.parametrize('name', [n for n in COMPOSED if arguments_of(MEMBERS[n])])
def test_what_users_compose_describes_its_arguments_and_what_it_returns(name):
  text = inspect.getdoc(MEMBERS[name])
  for section in ('Args:', 'Returns:'):
    assert f'\n{section}\n' in text, f'{name} has no {section}'
