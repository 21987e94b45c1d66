"""Results and gradients from one compiled program: run eagerly, every operation of a backward pass compiles one."""

import jax


def results_and_gradients(function, operands, cotangents):
    """(results, gradients of all operands), for cotangents of the results."""

    @jax.jit
    def step(operands, cotangents):
        results, vjp = jax.vjp(function, *operands)
        return results, vjp(cotangents)

    return step(operands, cotangents)
