"""Whether a step of training fits a device's memory, and the ways out where it does not."""

import contextlib
from collections.abc import Iterator

import jax

from te_jax._core.terminal import reason_of
from te_jax.cli import _placement, _step
from te_jax.cli._plan import Plan
from te_jax.cli._step import Learner
from te_jax.cli._text import Tokens
from te_jax.cli.errors import UserError, is_out_of_memory, note

# Copies of kernels are dropped where that saves so much of a device's memory, and a step would fill more than this.
_WORTH_ASKING, _FILLED = 0.05, 0.95


def check_state(plan: Plan, learners: dict[str, Learner]) -> None:
    """Refuses a model whose state alone exceeds a device's memory. On a CPU the kernel would kill the process."""
    # Without copies of kernels, which are made only where they fit.
    needed = sum(_bytes_of_state(learner) - _bytes_of_copies(plan, learner) for learner in learners.values())
    present = _placement.memory_of(plan.placement.local_devices)
    if needed > present:
        contents = (
            "parameters and Adam's moments" if plan.config.recipe is None else "parameters, moments and the recipe"
        )
        raise UserError(
            f"{plan.options.model.named} needs {needed / 2**30:,.2f} GiB on each device for {contents}, and a device "
            f"has {present / 2**30:,.2f} GiB: choose a smaller --preset, --optimizer-state fp8, --offload optimizer, "
            "or more devices, which share them"
        )


def _bytes_of_state(learner: Learner) -> int:
    return _step.bytes_on_a_device(learner.abstract_state())


def _bytes_of_copies(plan: Plan, learner: Learner) -> int:
    """Bytes of the state's kernels in FP8, which no checkpoint has."""
    if plan.options.model.lora is not None:  # nor what is frozen
        return 0
    return _bytes_of_state(learner) - _step.bytes_on_a_device(learner.stored(learner.abstract_state()))


def fitted(plan: Plan, learners: dict[str, Learner], training: Tokens) -> dict[str, Learner]:
    """The learners, of which the first one's layers quantize their kernels where copies of all would not fit.

    Whether they fit is what XLA says of the compiled step, if its state and gradients do. Few copies are not worth
    asking.
    """
    (name, learner), *_ = learners.items()
    model, present = plan.models[0], _placement.memory_of(plan.placement.local_devices)
    kernels = _bytes_of_copies(plan, learner)
    if kernels < _WORTH_ASKING * present:
        return learners
    states = sum(map(_bytes_of_state, learners.values()))
    needed = states + _step.bytes_on_a_device(learner.abstract_state().params)  # no gradient is narrower
    if needed <= _FILLED * present:
        needed = states - _bytes_of_state(learner) + learner.memory(_window_types(training, plan)).total
    if needed <= _FILLED * present:
        return learners
    note(
        f"layers quantize their own kernels, since with copies of all of them in FP8, {kernels / 2**20:,.0f} MiB, a "
        f"step needs {needed / 2**20:,.0f} MiB or more, and a device has {present / 2**20:,.0f} MiB"
    )
    return learners | {name: _step.build_learner(plan, model._replace(quantized_once=False))}


def tell(plan: Plan, learners: dict[str, Learner], training: Tokens) -> None:
    """Prints what a step needs, of each model that is trained. Raises UserError where they do not fit."""
    present = _placement.memory_of(plan.placement.local_devices)
    total, largest = 0, 0
    for name, learner in learners.items():
        state, memory = learner.abstract_state(), learner.memory(_window_types(training, plan))
        total, largest = total + memory.kept, max(largest, memory.rest)
        parts = {
            "parameters": _step.bytes_on_a_device(state.params),
            "optimizer": _step.bytes_on_a_device(state.optimizer),
            "kernels in FP8": memory.kernels,
            "frozen": _step.bytes_on_a_device(state.frozen),
            "gradients, activations and temporaries": memory.rest,
        }
        listed = ", ".join(f"{part} {size / 2**20:,.0f}" for part, size in parts.items() if size)
        print(f"{name}: a step needs {memory.total / 2**20:,.0f} MiB of each device: {listed}")
    has = f"a device has {present / 2**20:,.0f} MiB"
    if total + largest > present:
        raise UserError(_short_of(plan, has))
    print(has)


@contextlib.contextmanager
def explained(plan: Plan) -> Iterator[None]:
    """Turns an error of exhausted memory into one that names the ways out."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(_short_of(plan, reason_of(error))) from error


def _short_of(plan: Plan, reason: str) -> str:
    """Message that memory does not suffice, and the ways out."""
    options, data = plan.options, plan.options.data
    flags = [] if plan.config.remat else ["--remat"]
    flags += [] if options.precision.optimizer_state == "fp8" else ["--optimizer-state fp8"]
    flags += [] if len(options.memory.offloaded) == 2 else ["--offload activations,optimizer"]
    fsdp = ", --fsdp" if plan.placement.replicas > 1 else ""
    return (
        f"{options.model.named} with --batch {data.batch} and --seq-len {data.seq_len} is out of memory "
        f"({reason}): choose a smaller --preset, --batch or --seq-len, or "
        f"{', '.join([*flags, f'a larger --microbatches{fsdp} or --tp'])}"
    )


def _window_types(data: Tokens, plan: Plan) -> Tokens:
    """`jax.ShapeDtypeStruct` of the windows of a step."""
    microbatches, text = plan.options.memory.microbatches, plan.options.data
    shape = microbatches, text.batch // microbatches, text.seq_len + 1
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(shape, x.dtype, sharding=plan.placement.windows), data)
