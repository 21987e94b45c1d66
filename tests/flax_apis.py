"""Linen and NNX behind one interface, for tests of the modules that both have.

A layer is a function that makes a module: of Linen when it gets a name, of NNX when it gets `rngs`. A model is a layer
with variables. It is called as those of NNX are; here Linen's are `Bound`. Gradients are what the API's users get: the
variables of Linen, an `nnx.State` of NNX.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as OVERWRITE
from flax.training.train_state import TrainState
from flax.traverse_util import unflatten_dict

import te_jax.flax
import te_jax.nnx
from te_jax.nnx import OverwriteWithGradient, QuantizedKernel
from te_jax.quantized import QuantizedArray

TRAINED = nnx.Any(nnx.Param, OverwriteWithGradient)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("variables",), meta_fields=("module",))
@dataclasses.dataclass(frozen=True)
class Bound:
    """A Linen module and its variables."""

    module: nn.Module
    variables: Any

    def __call__(self, *args, **kwargs):
        return self.module.apply(self.variables, *args, **kwargs)


class LinenChain(nn.Module):
    layers: tuple[tuple[str, Any], ...]

    @nn.compact
    def __call__(self, x, last=None):
        for name, layer in self.layers:
            x = layer(name=name)(x)
            if name == last:
                break
        return x


class LinenStack(nn.Module):
    layer: Any
    length: int
    remat: bool
    call: Any

    @nn.compact
    def __call__(self, x):
        def body(layer, x, _):
            return self.call(layer, x)

        scan = nn.scan(
            nn.remat(body, prevent_cse=False) if self.remat else body,
            variable_axes={"params": 0, OVERWRITE: 0, "router_state": 0},
            split_rngs={"params": True},
            length=self.length,
        )
        x, ys = scan(self.layer(name="layer"), x, None)
        return x if ys is None else (x, ys)


def residual(layer, x):
    return x + layer(x), None


class Linen:
    library = te_jax.flax
    jit = staticmethod(jax.jit)

    def __str__(self):
        return "linen"

    def named(self, names):
        """An initializer that names the dimensions of what it draws."""
        return nn.with_logical_partitioning(nn.initializers.ones, names)

    def layer(self, name, *sizes, library=te_jax.flax, **arguments):
        """A layer by its name in te_jax.nnx, with the first arguments that it has there.

        Args:
          library: that has the class, te_jax's or Flax's.
        """
        if name == "Einsum":
            string, kernel, bias = sizes
            sizes, arguments = (kernel, string), {"use_bias": bias is not None, **arguments}
        elif name != "Embed":
            sizes = sizes[1:]  # Linen takes the number of input features from the input
        module = getattr(library, {"Linear": "Dense", "LinearGeneral": "DenseGeneral"}.get(name, name))
        return functools.partial(module, *sizes, **arguments)

    def flax(self, name, *sizes, **arguments):
        """A layer of Flax."""
        return self.layer(name, *sizes, library=nn, **arguments)

    def flax_with_products(self, options, *sizes, **arguments):
        """A linear layer of Flax with te_jax's products."""
        return self.flax("Linear", *sizes, dot_general_cls=te_jax.flax.make_dot_general_cls(**options), **arguments)

    def function(self, f):
        """A layer without variables."""
        return lambda name: f

    def chain(self, **layers):
        """One layer after the other, by name. A call may end with the `last` one."""
        return functools.partial(LinenChain, tuple(layers.items()))

    def stack(self, layer, length, *, remat=False, call=residual):
        """Stacked parameters and one traced layer: (x, y) = call(layer, x)."""
        return functools.partial(LinenStack, layer, length, remat, call)

    def make(self, layer, rng, *args, **kwargs):
        """A model, whose arguments are these."""
        module = layer()
        init = jax.jit(functools.partial(module.init, **kwargs))
        return Bound(module, nn.unbox(init(jax.random.key(int(rng.integers(2**31))), *args)))

    def drawn(self, layer, rng, *args):
        """A model as `make` gives it, with numbers of NumPy, which no program draws. It has no other random state."""
        module = layer()
        shapes = self.abstract(layer, *args).variables
        others = {name: jax.tree.map(_zeros, tree) for name, tree in shapes.items() if name != "params"}
        return Bound(module, {"params": _random(rng, shapes.get("params", {})), **others})

    def abstract(self, layer, *args):
        """A model of shapes."""
        module = layer()
        return Bound(module, jax.eval_shape(lambda *args: nn.unbox(module.init(jax.random.key(0), *args)), *args))

    def trace(self, layer, **call):
        """Makes a model and calls it, without values."""
        return jax.eval_shape(lambda: layer().init_with_output(jax.random.key(0), **call)[0])

    def names(self, layer, *args):
        """The names of the dimensions of all parameters."""
        return nn.get_partition_spec(jax.eval_shape(layer().init, jax.random.key(0), *args))["params"]

    def parameters(self, tree):
        """Those of a model or of gradients, in dicts."""
        return (tree.variables if isinstance(tree, Bound) else tree).get("params", {})

    def replaced(self, model, parameters):
        """The model with other values of its parameters."""
        return Bound(model.module, {**model.variables, "params": parameters})

    def states(self, tree):
        """{path: value} of the state of delayed scaling."""
        variables = tree.variables if isinstance(tree, Bound) else tree
        return _by_path(variables.get(OVERWRITE, {}))

    def with_states(self, model, states):
        """The model with states by path."""
        return Bound(model.module, {**model.variables, OVERWRITE: unflatten_dict(states, sep="/")})

    def expert_bias(self, model, *path):
        """That of a `MoE` at the path in the model."""
        return functools.reduce(lambda tree, name: tree[name], path, model.variables["router_state"])["expert_bias"]

    def with_expert_bias(self, model, bias):
        return Bound(model.module, {**model.variables, "router_state": {"expert_bias": bias}})

    def value_and_grad(self, loss_fn, argnums=0, has_aux=False):
        """Of a loss_fn(model, *args)."""

        def of_model(model, *args):
            def loss(variables, *args):
                return loss_fn(Bound(model.module, variables), *args)

            return jax.value_and_grad(loss, argnums=argnums, has_aux=has_aux)(model.variables, *args)

        return of_model

    def overwrite(self, model, gradients):
        """The model with the next state of delayed scaling."""
        return Bound(model.module, {**model.variables, OVERWRITE: gradients[OVERWRITE]})

    def optimizer(self, model, tx):
        return TrainState.create(apply_fn=model.module.apply, params=model.variables, tx=tx)

    def update(self, optimizer, model, gradients):
        """The optimizer and the model after a step."""
        optimizer = optimizer.apply_gradients(grads=gradients)
        return optimizer, Bound(model.module, optimizer.params)

    def zeros(self, model):
        """What gradients of microbatches are first added to."""
        return jax.tree.map(jnp.zeros_like, model.variables)

    def quantize_kernels(self, model, x):
        return Bound(model.module, te_jax.flax.quantize_kernels(model.module, model.variables, x))

    def accumulate_gradients(self, loss_fn, **arguments):
        def of_model(model, gradients, *args):
            accumulate = te_jax.flax.accumulate_gradients(
                lambda variables, *args: loss_fn(Bound(model.module, variables), *args), **arguments
            )
            return accumulate(model.variables, gradients, *args)

        return of_model

    merge_gradients = staticmethod(te_jax.flax.merge_gradients)

    def call(self, model, method, *args):
        return model(*args, method=method)

    def with_dropout(self, model, x, rng):
        apply = jax.jit(lambda model, x, key: model(x, deterministic=False, rngs={"dropout": key}))
        return apply(model, x, jax.random.key(int(rng.integers(2**31))))

    def decoding(self, model, batch, length, features):
        """step(x, jit=True), which continues the sequences in a cache."""
        module = model.module.clone(decode=True)
        x = jax.ShapeDtypeStruct((batch, length, features), jnp.float32)
        cache = jax.eval_shape(module.init, jax.random.key(0), x)["cache"]
        state = [jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), cache)]

        def apply(variables, cache, x):
            return module.apply({**variables, "cache": cache}, x, mutable=["cache"])

        jitted = jax.jit(apply)

        def step(x, jit=True):
            y, changed = (jitted if jit else apply)(model.variables, state[0], x)
            state[0] = changed["cache"]
            return y

        return step

    def convert(self, model, recipe, *args, **arguments):
        """(a converted model with the same parameters, the report)."""
        module = te_jax.flax.convert(model.module, recipe, **arguments)
        variables = jax.eval_shape(module.init, jax.random.key(0), *args)
        states = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), variables.get(OVERWRITE, {}))
        variables = {"params": model.variables["params"], **({OVERWRITE: states} if states else {})}
        return Bound(module, variables), te_jax.flax.report(module)


class NnxChain(nnx.Module):
    def __init__(self, layers, *, rngs):
        self.names = tuple(layers)
        for name, layer in layers.items():
            setattr(self, name, layer(rngs=rngs))

    def __call__(self, x, last=None):
        for name in self.names:
            x = getattr(self, name)(x)
            if name == last:
                break
        return x


class NnxStack(nnx.Module):
    def __init__(self, layer, length, remat, call, *, rngs):
        self.remat, self.call = remat, call
        self.layer = nnx.split_rngs(splits=length)(nnx.vmap(lambda rngs: layer(rngs=rngs)))(rngs)

    def __call__(self, x):
        def body(x, layer):
            return self.call(layer, x)

        body = nnx.remat(body) if self.remat else body
        x, ys = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(x, self.layer)
        return x if ys is None else (x, ys)


class Nnx:
    library = te_jax.nnx
    jit = staticmethod(nnx.jit)

    def __str__(self):
        return "nnx"

    def named(self, names):
        return nnx.with_metadata(nnx.initializers.ones, out_sharding=names, eager_sharding=False)

    def layer(self, name, *sizes, library=te_jax.nnx, **arguments):
        return functools.partial(getattr(library, name), *sizes, **arguments)

    def flax(self, name, *sizes, **arguments):
        return self.layer(name, *sizes, library=nnx, **arguments)

    def flax_with_products(self, options, *sizes, **arguments):
        def make(*, rngs):
            return nnx.Linear(*sizes, dot_general=te_jax.nnx.DotGeneral(**options), **arguments, rngs=rngs)

        return make

    def function(self, f):
        return lambda rngs: f

    def chain(self, **layers):
        return functools.partial(NnxChain, layers)

    def stack(self, layer, length, *, remat=False, call=residual):
        return functools.partial(NnxStack, layer, length, remat, call)

    def make(self, layer, rng, *args, **kwargs):
        del args, kwargs
        return layer(rngs=nnx.Rngs(int(rng.integers(2**31))))

    def drawn(self, layer, rng, *args):
        model = self.abstract(layer, *args)
        state = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(_zeros, nnx.state(model, nnx.Not(nnx.Param))))
        nnx.replace_by_pure_dict(state, _random(rng, nnx.to_pure_dict(state)))
        nnx.update(model, state)
        return model

    def abstract(self, layer, *args):
        del args
        return nnx.eval_shape(lambda: layer(rngs=nnx.Rngs(0)))

    def trace(self, layer, **call):
        return nnx.eval_shape(lambda: layer(rngs=nnx.Rngs(0))(**call))

    def names(self, layer, *args):
        del args
        model = nnx.eval_shape(lambda: layer(rngs=nnx.Rngs(0)))
        return nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(model, nnx.Param)))

    def parameters(self, tree):
        return nnx.to_pure_dict(nnx.state(tree, nnx.Any(nnx.Param, QuantizedKernel)))

    def replaced(self, model, parameters):
        model = nnx.clone(model)
        state = nnx.state(model, nnx.Param)
        nnx.replace_by_pure_dict(state, parameters)
        nnx.update(model, state)
        return model

    def states(self, tree):
        return _by_path(nnx.to_pure_dict(nnx.state(tree, OverwriteWithGradient)))

    def with_states(self, model, states):
        model = nnx.clone(model)
        state = nnx.state(model, OverwriteWithGradient)
        nnx.replace_by_pure_dict(state, unflatten_dict(states, sep="/"))
        nnx.update(model, state)
        return model

    def expert_bias(self, model, *path):
        return functools.reduce(getattr, path, model).expert_bias.get_value()

    def with_expert_bias(self, model, bias):
        model.expert_bias.set_value(bias)
        return model

    def value_and_grad(self, loss_fn, argnums=0, has_aux=False):
        places = nnx.DiffState(0, TRAINED)
        if isinstance(argnums, tuple):
            places = tuple(places if place == 0 else place for place in argnums)
        return nnx.value_and_grad(loss_fn, argnums=places, has_aux=has_aux)

    def overwrite(self, model, gradients):
        te_jax.nnx.overwrite_with_gradient(model, gradients)
        return model

    def optimizer(self, model, tx):
        return nnx.Optimizer(model, tx, wrt=nnx.Param)

    def update(self, optimizer, model, gradients):
        optimizer.update(model, gradients)
        return optimizer, self.overwrite(model, gradients)

    def zeros(self, model):
        return jax.tree.map(jnp.zeros_like, nnx.state(model, TRAINED))

    def quantize_kernels(self, model, x):
        del x
        return te_jax.nnx.quantize_kernels(model)

    accumulate_gradients = staticmethod(te_jax.nnx.accumulate_gradients)
    merge_gradients = staticmethod(te_jax.nnx.merge_gradients)

    def call(self, model, method, *args):
        return getattr(model, method)(*args)

    def with_dropout(self, model, x, rng):
        del rng
        return nnx.jit(lambda model, x: model(x))(model, x)

    def decoding(self, model, batch, length, features):
        del features
        model = nnx.clone(model)
        getattr(model, "attention", model).init_cache(batch, length)
        jitted = nnx.jit(lambda model, x: model(x, decode=True))
        return lambda x, jit=True: jitted(model, x) if jit else model(x, decode=True)

    def convert(self, model, recipe, *args, **arguments):
        del args
        model = nnx.clone(model)
        return model, te_jax.nnx.convert(model, recipe, **arguments)


def _zeros(leaf):
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(np.zeros((*leaf.shape, 2), np.uint32))
    return jax.device_put(np.zeros(leaf.shape, leaf.dtype))


def _random(rng, shapes):
    """Kernels that keep the size of what they multiply, about; scales around 1, and biases around 0."""

    def values(path, leaf):
        if leaf.ndim > 1 and "bias" not in str(path[-1]):
            return normal(rng, leaf.shape, leaf.dtype, leaf.size**-0.25)
        return normal(rng, leaf.shape, leaf.dtype, 0.2, 1.0 if "scale" in str(path[-1]) else 0.0)

    return jax.tree.map_with_path(values, shapes)


def _by_path(tree):
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


LINEN, NNX = Linen(), Nnx()
both = pytest.mark.parametrize("api", [LINEN, NNX], ids=str)


def quantized_paths(tree):
    """The paths of the kernels among parameters that are quantized."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, QuantizedArray))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, leaf in leaves
        if isinstance(leaf, QuantizedArray)
    }


def normal(rng, shape, dtype=jnp.float32, scale=1.0, mean=0.0):
    return jax.device_put(np.asarray(scale * rng.standard_normal(shape) + mean, jnp.dtype(dtype)))


def mean_square(model, x):
    y = model(x)
    return jnp.mean(jnp.square(getattr(y, "y", y)))


def sum_of_sines(tree):
    return sum(jnp.sum(jnp.sin(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree))


def value_and_gradients(api, model, *args, cotangent=None, **call):
    """(results, gradients of parameters, next states, gradients of args), of one compiled program."""

    @api.jit
    def found(model, *args):
        def loss(model, *args):
            y = model(*args, **call)
            return sum_of_sines(y) if cotangent is None else jnp.sum(y * cotangent), y

        places = tuple(range(1 + len(args)))
        (_, y), (gradients, *others) = api.value_and_grad(loss, argnums=places, has_aux=True)(model, *args)
        return y, gradients, others

    y, gradients, others = found(model, *args)
    return y, api.parameters(gradients), api.states(gradients), others


def observed(api, model, x):
    """The model with the scales that a step has found, where it has any: those of quantized kernels are up to date."""
    if not api.states(model):
        return model
    gradients = api.jit(lambda model, x: api.value_and_grad(mean_square)(model, x)[1])(model, x)
    return api.overwrite(model, gradients)
