"""Which arrays a program makes: on lines written by hand, and on what jit compiles to."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax.hlo import Buffer, buffers, collectives


def test_buffers_of_compiled_programs():
    x = jnp.ones((4, 6), jnp.bfloat16)
    compiled = jax.jit(lambda x: jnp.exp(x.astype(jnp.float32)) @ x.astype(jnp.float32).T).lower(x).compile()
    assert Buffer("f32", (4, 4)) in buffers(compiled)
    assert Buffer("bf16", (4, 6)) in buffers(compiled, "parameter")
    assert Buffer("f32", (4, 4)) not in buffers(compiled, "parameter")


def test_buffers_are_one_device_s(make_mesh):
    mesh = make_mesh({"x": AxisType.Auto})
    x = jax.device_put(jnp.ones((mesh.shape["x"], 3)), NamedSharding(mesh, P("x")))
    compiled = jax.jit(lambda x: x + 1, out_shardings=NamedSharding(mesh, P())).lower(x).compile()
    assert set(buffers(compiled, "parameter")) == {Buffer("f32", (1, 3))}
    (gather,) = collectives(compiled)
    assert gather.results == (Buffer("f32", x.shape),)
    assert gather.results[0] in buffers(compiled, "all-gather")


def test_buffers_of_text():
    text = (
        "  %c = (f32[2]{0}, s32[]) custom-call(%x)\n"
        '  ROOT r.1 = bf16[3,4]{1,0:T(8,128)} copy(%c), metadata={op_name="f32[9] add(x)"}\n'
    )
    assert buffers(text) == [Buffer("f32", (2,)), Buffer("s32", ()), Buffer("bf16", (3, 4))]
    assert buffers(text, "copy") == [Buffer("bf16", (3, 4))]
    assert buffers(text, "copy", "custom-call") == buffers(text)
    assert buffers(text, "add") == []


def test_sizes():
    assert [(b.elements, b.bytes) for b in (Buffer("f32", (2, 3)), Buffer("bf16", ()))] == [(6, 24), (1, 2)]
    assert Buffer("f8e4m3fn", (16,)).bytes == Buffer("pred", (16,)).bytes == 16
    assert Buffer("s4", (7,)).bytes == 4
    assert Buffer("c64", ()).bytes == 8


def test_programs_without_text_are_refused(monkeypatch):
    compiled = jax.jit(jnp.sin).lower(jnp.ones(2)).compile()
    monkeypatch.setattr(type(compiled), "as_text", lambda _: None)
    with pytest.raises(ValueError, match="for a platform that gives no text"):
        buffers(compiled)
