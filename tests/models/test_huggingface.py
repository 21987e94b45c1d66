"""Models of Hugging Face: logits of transformers from its own folders, what is written back, and what is refused.

The folders, and what transformers computes of them, are in tests/models/hf; make.py there made them.
"""

import dataclasses
import errno
import functools
import json
import math
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from parameters import in_turns

from te_jax.layers import Router
from te_jax.models import (
    PRESETS,
    Experts,
    Factors,
    FolderError,
    Latent,
    Lora,
    RopeScaling,
    Softcaps,
    TensorParallel,
    apply,
    config_from_hf,
    from_hf,
    generate,
    huggingface,
    init,
    join_adapters,
    loss,
    param_specs,
    split_adapters,
    to_hf,
)
from te_jax.models.safetensors import Tensors, write
from te_jax.ops import Activation, quantize
from te_jax.parallel import FSDP
from te_jax.quantized import QuantizedArray, both_copies
from te_jax.recipe import BlockScaling, CurrentScaling, Quantization

HF = pathlib.Path(__file__).parent / "hf"
FOLDERS = sorted(path.name for path in HF.iterdir() if (path / "config.json").is_file())

E4M3 = Quantization(jnp.dtype("float8_e4m3fn"), "tensor", "tensor")
BLOCKS = BlockScaling().quantization("kernel")

# Every folder compiles programs of its own. These have all that is special about tensors, and a head that is tied.
FEW = ("llama_tied", "mixtral", "gpt_oss")
# And these name tensors, or describe themselves, in ways of their own.
WRITTEN = (*FEW, "granite", "smollm3", "olmo2", "phi3", "gemma2", "gemma3", "deepseek_v2", "deepseek_v3", "qwen2_moe")
GENERATED = tuple(name for name in WRITTEN if name != "mixtral")

load = functools.cache(lambda name: from_hf(HF / name))
jit_apply, jit_init = jax.jit(apply, static_argnums=2), jax.jit(init, static_argnums=0)


@functools.cache
def expected(name):
    with np.load(HF / name / "expected.npz") as arrays:
        return arrays["tokens"].astype(np.int32), arrays["logits"]


def fields_of(folder):
    return json.loads((folder / "config.json").read_text())


def folder_with(folder, like, changes=(), remove=()):
    """A folder with the tensors of another one, and a changed config.json."""
    folder.mkdir()
    for path in (HF / like).glob("model*"):
        (folder / path.name).symlink_to(path)
    fields = {name: value for name, value in fields_of(HF / like).items() if name not in remove}
    (folder / "config.json").write_text(json.dumps(fields | dict(changes)))
    return folder


def assert_equal(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, leaf), other in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        assert leaf.dtype == other.dtype, path
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(other), err_msg=str(path))


# ------------------------------------------------------------------------------------------------------------ reading


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_are_those_of_transformers(name):
    config, params = load(name)
    tokens, logits = expected(name)
    # A GPU has grouped products of float32 in the reference alone.
    run = jax.jit(functools.partial(apply, config=config, implementation="reference"))
    found = np.asarray(run(params, tokens))
    assert np.abs(found - logits).max() < 1e-5 * np.abs(logits).max()


@pytest.mark.parametrize("name", GENERATED)
def test_generated_tokens_are_those_of_transformers(name):
    config, params = load(name)
    with np.load(HF / name / "expected.npz") as arrays:
        wanted = arrays["generated"].astype(np.int32)
    time = wanted.shape[1] - 16
    found = generate(params, wanted[:, :time], config, max_new_tokens=16, implementation="reference")
    np.testing.assert_array_equal(found, wanted[:, time:])


def test_no_file_of_a_folder_is_overwritten(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FolderError, match="already holds a model: choose another folder"):
        to_hf(tmp_path, *load("llama_tied"))
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def quantized(folder, rng):
    """A gpt-oss whose experts are in MXFP4, and the values of its first gates."""
    config = dataclasses.replace(config_from_hf(HF / "gpt_oss"), num_layers=1, window=None, hidden_size=64, mlp_size=32)
    params = jit_init(config, jax.random.key(0))
    to_hf(folder / "plain", config, params)
    tensors = Tensors.open(folder / "plain")
    found = {name: tensors.read(name) for name in tensors.types}
    for name in ("gate_up_proj", "down_proj"):
        experts, inner, columns = found.pop(f"model.layers.0.mlp.experts.{name}").shape
        shape = experts, columns, inner // 32
        found[f"model.layers.0.mlp.experts.{name}_blocks"] = rng.integers(0, 256, (*shape, 16)).astype(np.uint8)
        found[f"model.layers.0.mlp.experts.{name}_scales"] = rng.integers(120, 130, shape).astype(np.uint8)
    fields = fields_of(folder / "plain") | {"quantization_config": {"quant_method": "mxfp4"}}
    write(folder / "mxfp4", {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in found.items()}, found.get)
    (folder / "mxfp4" / "config.json").write_text(json.dumps(fields))
    return folder / "mxfp4", found


def test_experts_in_mxfp4_are_read(tmp_path, rng):
    folder, tensors = quantized(tmp_path, rng)
    config, params = from_hf(folder)
    magnitudes, values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], jax.device_get(params["layers"][0])
    for name, found in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        blocks, scales = (tensors[f"model.layers.0.mlp.experts.{name}_{part}"] for part in ("blocks", "scales"))
        for _ in range(50):
            expert, column, group, byte = (int(rng.integers(0, size)) for size in blocks.shape)
            high = int(rng.integers(0, 2))
            code = int(blocks[expert, column, group, byte]) >> 4 * high & 15
            value = magnitudes[code & 7] * (-1) ** (code >> 3) * 2.0 ** (int(scales[expert, column, group]) - 127)
            param = values[found[column % len(found)]]
            assert param[expert, 32 * group + 2 * byte + high, column // len(found)] == value
    to_hf(tmp_path / "again", config, params, like=folder)
    assert "quantization_config" not in fields_of(tmp_path / "again")
    assert_equal(from_hf(tmp_path / "again")[1], params)
    damaged = tensors | {"model.layers.0.mlp.experts.down_proj_scales": np.zeros((1, 2, 3), np.uint8)}
    write(tmp_path / "damaged", {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in damaged.items()}, damaged.get)
    shutil.copy(folder / "config.json", tmp_path / "damaged")
    with pytest.raises(
        FolderError, match=r"down_proj_scales is .*, and config.json asks for uint8 of shape \(4, 64, 1\)"
    ):
        from_hf(tmp_path / "damaged")


BLOCK_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
IN_BLOCKS = {"keep_fp8": True, "recipe": BlockScaling()}


@pytest.fixture(scope="module")
def in_blocks(tmp_path_factory):
    @functools.cache
    def make(name, dtype="float32"):
        return _in_blocks(tmp_path_factory.mktemp("blocks"), name, dtype)

    return make


def _in_blocks(folder, name, dtype):
    """A folder whose projections are in FP8 with 2 × 3 blocks and more, of which some are not whole; and its tensors.

    Largest codes are not all 448, so that quantizing again would change them.
    """
    rng = np.random.default_rng(0)
    config = config_from_hf(HF / name)
    layers = 1 if config.experts is None else config.experts.dense_layers + 1
    config = dataclasses.replace(config, num_layers=layers, window=None, hidden_size=160, mlp_size=288)
    to_hf(folder / "plain", config, jit_init(config, jax.random.key(0)), dtype="bfloat16")
    tensors = Tensors.open(folder / "plain")
    found = {name: tensors.read(name) for name in tensors.types}
    for name in [name for name in found if "proj.weight" in name]:
        rows, columns = found[name].shape
        scales = rng.uniform(0.5, 1, (-(-rows // 128), -(-columns // 128))) * 2e-3
        found[f"{name}_scale_inv"] = scales.astype(dtype)
        found[name] = rng.uniform(-99, 99, (rows, columns)).astype("float8_e4m3fn")
    write(folder / "fp8", {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in found.items()}, found.get)
    fields = fields_of(folder / "plain") | {"quantization_config": BLOCK_FP8}
    (folder / "fp8" / "config.json").write_text(json.dumps(fields))
    return folder / "fp8", found


def values_of(tensors, name):
    """What codes and scales stand for, in float64."""
    codes, scales = tensors[name].astype(np.float64), tensors[f"{name}_scale_inv"].astype(np.float64)
    return codes * np.repeat(np.repeat(scales, 128, 0), 128, 1)[: codes.shape[0], : codes.shape[1]]


def is_in_fp8(leaf):
    return isinstance(leaf, QuantizedArray)


@pytest.mark.parametrize(
    ("name", "dtype"), [pytest.param("llama_2024", "bfloat16", marks=pytest.mark.slow), ("qwen3_moe", "float32")]
)
def test_kernels_in_blocks_are_dequantized_or_kept_with_their_bytes(name, dtype, in_blocks, tmp_path):
    folder, tensors = in_blocks(name, dtype)
    config, params = from_hf(folder)
    layer, experts = params["layers"][0], config.experts and config.experts.num_experts
    kept_config, kept = from_hf(folder, **IN_BLOCKS)
    for ours, theirs in (("query", "self_attn.q_proj"), ("out", "self_attn.o_proj"), ("down", "mlp.{}down_proj")):
        each = [theirs.format(f"experts.{i}." if experts else "") for i in range(experts or 1)]
        names = [f"model.layers.0.{name}.weight" for name in dict.fromkeys(each)]
        wanted, codes = np.stack([values_of(tensors, name).T for name in names]), np.stack([*map(tensors.get, names)])
        np.testing.assert_array_equal(layer[ours].reshape(wanted.shape), wanted.astype(np.float32))
        array = kept["layers"][0][ours]
        assert array.data is None
        assert np.asarray(array.transposed).tobytes() == codes.tobytes()
    assert_equal(jax.tree.map(lambda x: x.dequantize() if is_in_fp8(x) else x, kept, is_leaf=is_in_fp8), params)
    halves = from_hf(folder, param_dtype="bfloat16")[1]["layers"][0]["down"]
    np.testing.assert_array_equal(halves, layer["down"].astype("bfloat16"))
    # Written back by either copy.
    turned = jax.tree.map(lambda x: both_copies(x).without_transposed() if is_in_fp8(x) else x, kept, is_leaf=is_in_fp8)
    for number, each in enumerate((kept, turned)):
        like = folder if number else None
        to_hf(tmp_path / str(number), kept_config, each, like=like, dtype="bfloat16")
        again = Tensors.open(tmp_path / str(number))
        assert again.types.keys() == tensors.keys()
        assert all(again.read(n).tobytes() == x.astype(again.types[n].dtype).tobytes() for n, x in tensors.items())
        fields = fields_of(tmp_path / str(number))
        others = {"lm_head"} | ({"model.layers.0.mlp.gate"} if experts else set())
        assert set(fields["quantization_config"].pop("modules_to_not_convert")) == others
        assert fields["quantization_config"] == BLOCK_FP8 | {"fmt": "e4m3"}
        assert fields["torch_dtype"] == "bfloat16"
        assert_equal(from_hf(tmp_path / str(number), **IN_BLOCKS)[1], kept)
    to_hf(tmp_path / "plain", config, params, like=folder)
    assert "quantization_config" not in fields_of(tmp_path / "plain")


@pytest.mark.parametrize("name", ["llama_2024", "qwen3_moe", "deepseek_v3"])
def test_kernels_in_blocks_compute_what_dequantized_ones_do(name, in_blocks, rng):
    folder, _ = in_blocks(name)
    config, kept = from_hf(folder, **IN_BLOCKS)
    tokens = rng.integers(0, config.vocab_size, (2, 16)).astype(np.int32)
    found = np.asarray(jit_apply(kept, tokens, config))
    plain = dataclasses.replace(config, recipe=None, dtype="bfloat16")  # GPUs have no grouped product in float32
    wanted = np.asarray(jit_apply(from_hf(folder)[1], tokens, plain))
    error = np.median(np.linalg.norm(found - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1))
    assert 5e-3 < error < 0.1  # of activations, which are in FP8 now
    first = generate(kept, tokens, config, max_new_tokens=1)[:, 0]
    np.testing.assert_array_equal(first, np.argmax(found[:, -1], axis=-1))


def test_adapters_learn_beside_kernels_in_blocks(in_blocks, rng):
    config, params = from_hf(in_blocks("llama_2024")[0], **IN_BLOCKS, lora=Lora(4))
    adapters, frozen = split_adapters(params)
    tokens = rng.integers(0, config.vocab_size, (2, 17)).astype(np.int32)

    @jax.jit
    def step(adapters):
        run = jax.value_and_grad(lambda a: loss(join_adapters(a, frozen), tokens[:, :-1], tokens[:, 1:], config))
        value, gradients = run(adapters)
        return value, jax.tree.map(lambda x, gradient: x - gradient, adapters, gradients)

    values = []
    for _ in range(4):
        value, adapters = step(adapters)
        values.append(float(value))
    assert np.isfinite(values).all()
    assert values[-1] < values[0] - 0.1


def test_each_device_reads_its_own_part_of_kernels_in_blocks(in_blocks, require_devices):
    require_devices(4)
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), devices=jax.devices()[:4])
    parallel = TensorParallel(2, fsdp=FSDP(2, min_size=0))

    def shardings(config):
        specs = param_specs(dataclasses.replace(config, lora=None, recipe=None), parallel)
        places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        adapters = jax.eval_shape(lambda: split_adapters(init(config, jax.random.key(0)))[0])
        return join_adapters(jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), adapters), places)

    folder, _ = in_blocks("llama_2024")
    changes = IN_BLOCKS | {"lora": Lora(2, names=("out",))}
    params, wanted = from_hf(folder, **changes, shardings=shardings)[1], from_hf(folder, **changes)[1]
    assert_equal(jax.tree.map(np.asarray, params), jax.tree.map(np.asarray, wanted))
    down = params["layers"][0]["down"]
    for codes in (down.data, down.transposed):
        assert codes.addressable_shards[0].data.size == codes.size // 4


# Bounds of the median error of a token's logits: a token whose router is near a tie may meet another expert. Every
# product of FP8 has an error of about 4 %, and these models add up to ten in a row. A model that lacks its windows,
# biases, sinks, norms of heads or scaled positions has an error of 0.25 to 1.2.
PRECISIONS = {
    "bfloat16": ({"dtype": "bfloat16"}, (3e-3, 2e-2)),
    "blocks": ({"recipe": BlockScaling()}, (3e-2, 0.25)),
    "tensors": ({"recipe": CurrentScaling()}, (3e-2, 0.25)),
}


@pytest.mark.parametrize(("name", "precision"), in_turns((*FEW, "olmo2"), [*PRECISIONS]))
def test_logits_in_less_than_float32(name, precision):
    changes, (least, most) = PRECISIONS[precision]
    config, params = load(name)
    tokens, logits = expected(name)
    with jax.numpy_dtype_promotion("standard"):  # attention in bfloat16 needs it
        found = np.asarray(jit_apply(params, tokens, dataclasses.replace(config, **changes)), np.float32)
    error = np.median(np.linalg.norm(found - logits, axis=-1) / np.linalg.norm(logits, axis=-1))
    assert least < error < most


def test_changes_say_how_it_is_computed():
    changes = {"dtype": "bfloat16", "remat": True, "recipe": BlockScaling()}
    config, params = from_hf(HF / "qwen3", param_dtype="bfloat16", **changes)
    assert config == config_from_hf(HF / "qwen3", **changes) == dataclasses.replace(load("qwen3")[0], **changes)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    assert_equal(jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), params), load("qwen3")[1])


@pytest.mark.parametrize("name", ["gpt_oss", "phi3"])
def test_each_device_reads_its_own_part(name, require_devices, monkeypatch):
    """Also of those tensors that devices turn, and of experts that are tensors of their own."""
    require_devices(4)
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), devices=jax.devices()[:4])
    parallel = TensorParallel(2, fsdp=FSDP(2, min_size=0))

    def shardings(config):
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), param_specs(config, parallel))

    def checked(make):
        def put(values, place):
            arrays.append(make(values, place))
            return arrays[-1]

        return put

    arrays = []
    for function in ("_put", "_put_stacked"):
        monkeypatch.setattr(huggingface, function, checked(getattr(huggingface, function)))
    config, params = from_hf(HF / name, shardings=shardings)
    monkeypatch.undo()
    places = jax.tree.leaves(shardings(config))
    assert_equal(params, load(name)[1])
    for array, param, place in zip(arrays, jax.tree.leaves(params), places, strict=True):
        assert param.sharding.is_equivalent_to(place, param.ndim)
        whole_of = param.size // param.addressable_shards[0].data.size
        assert array.size == param.size
        assert array.size // array.addressable_shards[0].data.size == whole_of


# ------------------------------------------------------------------------------------------------------------ writing


@pytest.mark.parametrize("name", WRITTEN)
def test_what_was_read_is_written_bit_for_bit(name, tmp_path):
    config, params = load(name)
    to_hf(tmp_path / "new", config, params, like=HF / name, dtype="bfloat16")
    found, wanted = Tensors.open(tmp_path / "new"), Tensors.open(HF / name)
    assert found.types == wanted.types
    for tensor in wanted.types:
        assert found.read(tensor).tobytes() == wanted.read(tensor).tobytes(), tensor
    fields, those_of_like = fields_of(tmp_path / "new"), fields_of(HF / name)
    those_of_like["torch_dtype"] = those_of_like.pop("dtype", "bfloat16")
    assert fields == those_of_like


@pytest.mark.parametrize("name", WRITTEN)
def test_without_like_it_describes_itself(name, tmp_path):
    config, params = load(name)
    to_hf(tmp_path / "new", dataclasses.replace(config, remat=True, recipe=BlockScaling()), params)
    again, params_again = from_hf(tmp_path / "new")
    assert again == config
    assert_equal(params_again, params)
    assert fields_of(tmp_path / "new")["torch_dtype"] == "float32"


@pytest.mark.slow
@pytest.mark.parametrize("with_like", [False, True])
@pytest.mark.parametrize("name", FOLDERS)
def test_transformers_reads_what_is_written(name, with_like, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config, params = load(name)
    to_hf(tmp_path / "new", config, params, like=HF / name if with_like else None)
    tokens, logits = expected(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "new", dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        found = model(torch.tensor(tokens, dtype=torch.int64)).logits.numpy()
    assert np.abs(found - logits).max() < 1e-5 * np.abs(logits).max()


def test_a_config_of_its_own_names_no_tokens_and_the_length_that_it_is_given(tmp_path):
    scaling = RopeScaling("yarn", factor=8.0, original_length=4096)
    config = dataclasses.replace(load("llama_tied")[0], rope_scaling=scaling)
    (tmp_path / "tokens").write_text("[]")
    params = load("llama_tied")[1]
    to_hf(tmp_path / "a", config, params, tokenizer=tmp_path / "tokens", fields={"eos_token_id": [3, 4]})
    fields = fields_of(tmp_path / "a")
    assert fields["max_position_embeddings"] == 8 * 4096
    assert (fields["bos_token_id"], fields["eos_token_id"]) == (None, [3, 4])
    assert (tmp_path / "a" / "tokenizer.json").read_text() == "[]"
    assert config_from_hf(tmp_path / "a") == config
    to_hf(tmp_path / "b", config, params, like=tmp_path / "a", fields={"max_position_embeddings": 64})
    assert fields_of(tmp_path / "b") == fields | {"max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("synced", "names"), [(3, ["model.safetensors"]), (5, ["model.safetensors", "tokenizer.json"])]
)
def test_a_config_is_written_last_and_nothing_is_left_on_a_full_disk(synced, names, tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    before, calls = [], []

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) == synced:  # a file and its folder each time
            before.extend(path.name for path in (tmp_path / "new").iterdir() if path.suffix != ".tmp")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(FolderError, match="json cannot be written: No space left on device"):
        to_hf(tmp_path / "new", *load("llama_tied"), tokenizer=tmp_path / "tokenizer.json")
    assert sorted(before) == names
    assert list((tmp_path / "new").iterdir()) == []


def _layer(**changes):
    params = load("llama_tied")[1]
    return params | {"layers": [params["layers"][0] | changes, *params["layers"][1:]]}


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (
            lambda: _layer(query=quantize(jnp.ones((32, 32)), E4M3, implementation="reference")),
            {},
            r"params\['layers'\]\[0\]\['query'\] is quantized, QuantizedArray\(.*: give the parameters that kernels",
        ),
        (lambda: load("llama_tied")[1] | {"embedding": quantize(load("llama_tied")[1]["embedding"], BLOCKS)},
            {}, r"params\['embedding'\] is quantized, .*, or kernels that BlockScaling quantized, in float8_e4m3fn"),
        (lambda: _layer(query_a=jnp.ones((32, 2))), {}, r"params has \['layers'\]\[0\]\['query_a'\], which"),
        (lambda: _layer(query=jnp.ones((32, 16))), {}, r"\['query'\] has shape \(32, 16\): config asks for \(32, 32\)"),
        (lambda: load("llama_tied")[1] | {"layers": []}, {}, r"params lacks \['layers'\]\[0\]\['query'\], which"),
        (_layer, {"dtype": "float8_e4m3fn"}, "dtype is float8_e4m3fn: choose one of float32, bfloat16, float16"),
        (_layer, {"fields": {"hidden_size": 1}}, "fields has 'hidden_size': give what says nothing of parameters"),
        (_layer, {"tokenizer": "nowhere"}, "nowhere cannot be read: No such file"),
    ],
    ids=["quantized", "embedding", "adapters", "shape", "missing", "dtype", "fields", "tokenizer"],
)  # fmt: skip
def test_parameters_that_are_refused(make, options, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        to_hf(tmp_path / "new", load("llama_tied")[0], make(), **options)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "changes", "like", "words"),
    [
        ("llama", {}, "mistral", "config is DecoderConfig.*, and like, .*mistral, has DecoderConfig.*: leave like out"),
        ("llama", {"activation": "relu"}, None, "none of llama, mistral, .*, gpt_oss has such models"),
        ("llama", {"activation": "relu"}, "llama", "leave like out"),
        ("llama", {"attention_biases": ("out",)}, None, "none of llama"),
        ("mistral", {"window": (5, 6)}, None, "none of llama"),
        ("gpt_oss", {"window": (5, 6)}, None, "none of llama"),
        ("qwen3_moe", {"experts": Experts(4, Router(2, score="sigmoid"))}, None, "none of llama"),
    ],
)
def test_what_cannot_be_written(name, changes, like, words, tmp_path):
    config, params = load(name)
    with pytest.raises(ValueError, match=words):
        to_hf(
            tmp_path / "new", dataclasses.replace(config, **changes), params, like=None if like is None else HF / like
        )
    assert not (tmp_path / "new").exists()


# ------------------------------------------------------------------------------------------------------------ configs

# As on the hub, of which bos_token_id and the like are left out; numbers of parameters are those that the hub names.
_SILU = {"hidden_act": "silu", "initializer_range": 0.02, "use_cache": True, "torch_dtype": "bfloat16"}
_UNBIASED = _SILU | {"attention_bias": False, "attention_dropout": 0.0}
_LLAMA3 = _UNBIASED | {
    **{"model_type": "llama", "mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-5},
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "tie_word_embeddings": False},
    **{"vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0},
    **{"max_position_embeddings": 131072, "eos_token_id": [128001, 128008, 128009]},
}
_SCALED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_QWEN = _SILU | {"attention_dropout": 0.0, "rms_norm_eps": 1e-6, "use_sliding_window": False}
_QWEN |= {"tie_word_embeddings": False, "rope_theta": 1000000.0}
_QWEN3 = _QWEN | {
    **{"attention_bias": False, "head_dim": 128, "max_position_embeddings": 40960, "num_attention_heads": 32},
    **{"rope_scaling": None, "sliding_window": None, "vocab_size": 151936},
}
_GPT_OSS = _SILU | {
    **{"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "attention_bias": True, "vocab_size": 201088},
    **{"attention_dropout": 0.0, "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_size": 2880},
    **{"initial_context_length": 4096, "intermediate_size": 2880, "max_position_embeddings": 131072},
    **{"layer_types": ["sliding_attention", "full_attention"] * 12, "num_attention_heads": 64},
    **{"num_experts_per_tok": 4, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False},
    **{"num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False},
    **{"pad_token_id": 199999, "rms_norm_eps": 1e-5, "rope_theta": 150000, "router_aux_loss_coef": 0.9},
    "rope_scaling": {
        **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096},
        **{"rope_type": "yarn", "truncate": False},
    },
}
_DEEPSEEK_YARN = {
    **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"},
}
_DEEPSEEK = _UNBIASED | {
    **{"aux_loss_alpha": 0.001, "ep_size": 1, "kv_lora_rank": 512, "moe_layer_freq": 1, "pretraining_tp": 1},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000, "seq_aux": True},
    **{"tie_word_embeddings": False, "v_head_dim": 128},
}
HUB = {
    "Llama-3.1-8B": (
        _LLAMA3 | {"rope_scaling": _SCALED | {"factor": 8.0, "rope_type": "llama3"}},
        8_030_261_248,
        {"rope_scaling": RopeScaling("llama3", 8.0, 8192), "norm_eps": 1e-5},
    ),
    "Qwen2.5-7B": (
        _QWEN
        | {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 131072}
        | {"max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4}
        | {"sliding_window": 131072, "use_mrope": False, "vocab_size": 152064},
        7_615_616_512,
        {"window": None, "attention_biases": ("query", "key", "value"), "qk_norm": False},
    ),
    "Qwen3-30B-A3B": (
        _QWEN3
        | {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 6144}
        | {"max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True}
        | {"num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4}
        | {"output_router_logits": False, "router_aux_loss_coef": 0.001},
        30_532_122_624,
        {"mlp_size": 768, "experts": Experts(128, Router(8), balance_weight=0.001)},
    ),
    "Qwen1.5-MoE-A2.7B": (
        _QWEN
        | {"model_type": "qwen2_moe", "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 5632}
        | {"max_position_embeddings": 8192, "max_window_layers": 21, "moe_intermediate_size": 1408}
        | {"norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4}
        | {"num_hidden_layers": 24, "num_key_value_heads": 16, "output_router_logits": False}
        | {"router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 5632, "sliding_window": 32768}
        | {"vocab_size": 151936},
        14_315_784_192,
        {
            "window": None,
            "attention_biases": ("query", "key", "value"),
            "experts": Experts(60, Router(4, normalize=False), balance_weight=0.001, weighted_shared=5632),
        },
    ),
    "gemma-2b": (
        _UNBIASED
        | {"model_type": "gemma", "head_dim": 256, "hidden_act": "gelu", "hidden_activation": None, "hidden_size": 2048}
        | {"intermediate_size": 16384, "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1}
        | {"rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000.0, "vocab_size": 256000},
        2_506_172_416,
        {"activation": "gelu", "tied_head": True, "zero_centered_norms": True, "scaled_embedding": True},
    ),
    "SmolLM3-3B": (
        _UNBIASED
        | {"model_type": "smollm3", "hidden_size": 2048, "intermediate_size": 11008, "mlp_bias": False}
        | {"layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536, "max_window_layers": 28}
        | {"no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16}
        | {"num_hidden_layers": 36, "num_key_value_heads": 4, "pretraining_tp": 2, "rms_norm_eps": 1e-6}
        | {"rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False}
        | {"vocab_size": 128256},
        3_075_098_624,
        {"rope_theta": (5e6, 5e6, 5e6, None) * 9, "tied_head": True},
    ),
    "Phi-3-mini-4k-instruct": (
        _UNBIASED
        | {"model_type": "phi3", "embd_pdrop": 0.0, "hidden_size": 3072, "intermediate_size": 8192, "resid_pdrop": 0.0}
        | {"max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32}
        | {"num_key_value_heads": 32, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
        | {"rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False}
        | {"vocab_size": 32064},
        3_821_079_552,
        {"window": 2047},
    ),
    "granite-3.1-2b-instruct": (
        _UNBIASED
        | {"model_type": "granite", "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "mlp_bias": False}
        | {"hidden_size": 2048, "intermediate_size": 8192, "logits_scaling": 8.0, "max_position_embeddings": 131072}
        | {"num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "residual_multiplier": 0.22}
        | {"rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 5000000.0, "tie_word_embeddings": True}
        | {"vocab_size": 49155},
        2_533_531_648,
        {"factors": Factors(12.0, 0.22, 0.015625, 8.0), "head_dim": 64},
    ),
    "OLMo-2-1124-7B": (
        _UNBIASED
        | {"model_type": "olmo2", "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096}
        | {"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-6}
        | {"rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False, "vocab_size": 100352},
        7_298_617_344,
        {"norms": "after", "qk_norm": "projection", "attention_biases": ()},
    ),
    "gemma-2-2b": (
        _UNBIASED
        | {"model_type": "gemma2", "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "head_dim": 256}
        | {"final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 2304}
        | {"hidden_activation": "gelu_pytorch_tanh", "intermediate_size": 9216, "max_position_embeddings": 8192}
        | {"num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4, "query_pre_attn_scalar": 256}
        | {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 256000},
        2_614_341_888,
        {"window": (4096, None) * 13, "softcaps": Softcaps(50.0, 30.0), "norms": "both"},
    ),
    "gemma-3-1b-it": (
        _UNBIASED
        | {"model_type": "gemma3_text", "attn_logit_softcapping": None, "cache_implementation": "hybrid"}
        | {"final_logit_softcapping": None, "head_dim": 256, "hidden_act": None, "hidden_size": 1152}
        | {"hidden_activation": "gelu_pytorch_tanh", "intermediate_size": 6912, "max_position_embeddings": 32768}
        | {"num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256}
        | {"rms_norm_eps": 1e-6, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000}
        | {"sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144},
        999_885_952,
        {"window": (*(512,) * 5, None) * 4 + (512,) * 2, "tied_head": True, "factors": Factors(scores=1 / 16)},
    ),
    "DeepSeek-V3, without blocks for later tokens": (
        _DEEPSEEK
        | {"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "n_routed_experts": 256}
        | {"first_k_dense_replace": 3, "moe_intermediate_size": 2048, "n_group": 8, "n_shared_experts": 1}
        | {"norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61}
        | {
            "num_key_value_heads": 128,
            "num_nextn_predict_layers": 1,
            "q_lora_rank": 1536,
            "quantization_config": BLOCK_FP8 | {"fmt": "e4m3"},
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_group": 4,
        }
        | {"topk_method": "noaux_tc", "vocab_size": 129280, "max_position_embeddings": 163840}
        | {"rope_scaling": _DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        671_026_419_200,
        {
            "latent": Latent(512, 64, 128, 1536),
            "head_dim": 192,
            "rope_scaling": RopeScaling("yarn", 40.0, 4096, attention_factor=1.0),
            "experts": Experts(
                256,
                Router(8, "sigmoid", num_groups=8, top_groups=4, scaling_factor=2.5),
                balance_weight=0.001,
                choice_bias=True,
                shared=1,
                dense_layers=3,
                dense_size=18432,
            ),
        },
    ),
    "DeepSeek-V2-Lite": (
        _DEEPSEEK
        | {"model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "n_routed_experts": 64}
        | {"first_k_dense_replace": 1, "moe_intermediate_size": 1408, "n_group": 1, "n_shared_experts": 2}
        | {"norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27}
        | {"num_key_value_heads": 16, "q_lora_rank": None, "routed_scaling_factor": 1.0, "scoring_func": "softmax"}
        | {"topk_group": 1, "topk_method": "greedy", "vocab_size": 102400, "max_position_embeddings": 163840}
        | {"rope_scaling": _DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
        15_706_484_224,
        {"latent": Latent(512, 64, 128), "factors": Factors(scores=192**-0.5 * (0.0707 * math.log(40) + 1) ** 2)},
    ),
    "gpt-oss-20b, dequantized": (
        _GPT_OSS,
        20_914_757_184,
        {
            "rope_scaling": RopeScaling("yarn", 32.0, 4096, truncate=False),
            "activation": Activation("silu", alpha=1.702, limit=7.0, offset=1.0),
            "window": (128, None) * 12,
            "attention_sinks": True,
        },
    ),
}


@pytest.mark.parametrize("name", HUB)
def test_models_of_the_hub(name, tmp_path):
    fields, count, wanted = HUB[name]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = config_from_hf(tmp_path)
    assert config.num_parameters == count
    assert {field: getattr(config, field) for field in wanted} == wanted


def test_llama_3_8b_is_a_preset(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(_LLAMA3))
    assert config_from_hf(tmp_path, dtype="bfloat16", remat=True) == PRESETS["8b"]


def _experts(name, router):
    return dataclasses.replace(config_from_hf(HF / name).experts, router=router)


@pytest.mark.parametrize(
    ("like", "changes", "remove", "wanted"),
    [
        ("mistral", {}, ["sliding_window"], {"window": 4096}),
        ("mixtral", {"rope_parameters": {}}, ["rms_norm_eps"], {"rope_theta": 1e6, "norm_eps": 1e-5}),
        ("gemma", {}, ["hidden_act", "tie_word_embeddings"], {"activation": "gelu", "tied_head": True}),
        ("qwen2", {"max_window_layers": 2}, ["layer_types"], {"window": None}),
        ("qwen2", {"max_window_layers": 1}, ["layer_types"], {"window": (None, 6)}),
        ("qwen2", {"max_window_layers": 0}, ["layer_types"], {"window": 6}),
        ("qwen2", {}, ["layer_types", "max_window_layers"], {"window": None}),
        ("qwen2", {"use_sliding_window": False}, ["layer_types"], {"window": None}),
        ("qwen3", {"use_sliding_window": True, "layer_types": None}, ["sliding_window"], {"window": None}),
        ("smollm3", {"no_rope_layer_interval": 3}, ["no_rope_layers"], {"rope_theta": (2e6, 2e6, None)}),
        ("smollm3", {"no_rope_layers": [1, 1, 1], "rope_parameters": {}}, [], {"rope_theta": 2e6}),
        ("gemma3", {"rope_theta": 7.0, "rope_local_base_freq": 8.0, "sliding_window_pattern": 3}, ["rope_parameters",
          "layer_types"], {"rope_theta": (8.0, 8.0, 7.0), "window": (5, 5, None), "rope_scaling": (None,) * 3}),
        ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, ["rope_parameters"],
         {"rope_theta": (1e4, 1e6, 1e4), "rope_scaling": (None, RopeScaling("linear", 8.0), None)}),
        ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["query_pre_attn_scalar"],
         {"rope_theta": (1e4, 1e6, 1e4), "factors": Factors(scores=1 / 16)}),
        ("qwen2_moe", {"qkv_bias": False, "use_sliding_window": False}, ["layer_types", "mlp_only_layers"],
         {"attention_biases": (), "window": None, "experts": Experts(
             4, Router(2, normalize=False), balance_weight=0.001, weighted_shared=48)}),
        ("deepseek_v2", {"topk_method": "greedy"}, [],
         {"experts": _experts("deepseek_v2", Router(4, normalize=False, scaling_factor=3.0))}),
        ("deepseek_v3", {"n_group": 12, "num_nextn_predict_layers": 1}, ["routed_scaling_factor", "rope_interleave"],
         {"experts": _experts("deepseek_v3", Router(4, "sigmoid", True, 12, 2, 2.5))}),
        ("gpt_oss", {}, ["rope_parameters"], {"rope_scaling": RopeScaling("yarn", 32.0, 4096, truncate=False)}),
        ("gpt_oss", {"rope_parameters": {}}, ["sliding_window"], {"rope_theta": 150000.0, "window": (128, None)}),
        ("llama", {"head_dim": None, "num_key_value_heads": None}, [], {"head_dim": 8, "num_kv_heads": 4}),
        ("llama", {"unsloth_fixed": True, "_attn_implementation_autoset": True, "pretraining_tp": 2}, [], {}),
        ("llama", {"is_llama_config": True, "neftune_noise_alpha": 0.0, "max_length": 20, "do_sample": True}, [], {}),
        ("llama", {"sliding_window": None, "use_sliding_window": False}, [], {}),
    ],
)  # fmt: skip
def test_fields_that_are_left_out_have_the_values_of_transformers(like, changes, remove, wanted, tmp_path):
    config = config_from_hf(folder_with(tmp_path / "new", like, changes, remove))
    wanted = wanted or dataclasses.asdict(load(like)[0])
    assert {field: getattr(config, field) for field in wanted} == {**wanted, **_nested(wanted, config)}


def test_blocks_for_later_tokens_are_neither_read_nor_written(tmp_path):
    folder = folder_with(tmp_path / "new", "deepseek_v3", {"num_nextn_predict_layers": 1})
    (folder / "model.safetensors").unlink()
    tensors = Tensors.open(HF / "deepseek_v3")
    found = {name: tensors.read(name) for name in tensors.types} | {
        "model.layers.3.enorm.weight": np.ones(32, "float32")
    }
    write(folder, {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in found.items()}, found.get)
    config, params = from_hf(folder, param_dtype="bfloat16")
    assert params["layers"][1]["expert_bias"].dtype == jnp.float32
    assert_equal(jax.tree.map(lambda x: x.astype("float32"), params), load("deepseek_v3")[1])
    to_hf(tmp_path / "again", config, params, like=folder)
    fields = fields_of(tmp_path / "again")
    assert (fields["num_nextn_predict_layers"], fields["torch_dtype"]) == (0, "bfloat16")


def test_unknown_fields_are_ignored_by_their_names(tmp_path):
    rope = fields_of(HF / "llama_tied")["rope_parameters"]
    fields = {"unknown": 1, "rope_parameters": rope | {"more": 2}}
    folder = folder_with(tmp_path / "new", "llama_tied", fields)
    config, params = from_hf(folder, ignore=("unknown", "more"))
    assert config == config_from_hf(folder, ignore=("unknown", "more")) == load("llama_tied")[0]
    to_hf(tmp_path / "again", config, params, like=folder)
    assert fields_of(tmp_path / "again")["unknown"] == 1
    for ignore, left in (((), "more"), (("unknown",), "more"), (("more",), "unknown")):
        with pytest.raises(FolderError, match=f"'{left}' is unknown"):
            config_from_hf(folder, ignore=ignore)
    with pytest.raises(FolderError, match="hidden_size is missing"):
        config_from_hf(folder_with(tmp_path / "less", "llama", remove=["hidden_size"]), ignore=("hidden_size",))


def _nested(wanted, config):
    """`dataclasses.asdict` makes dicts of values that are dataclasses."""
    return {name: getattr(config, name) for name, value in wanted.items() if isinstance(value, dict)}


# ------------------------------------------------------------------------------------------------------------ refusals


def _yarn(**changes):
    return {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16} | changes}


@pytest.mark.parametrize(
    ("like", "changes", "words"),
    [
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, and te_jax.models knows 1.0 alone"),
        ("llama", {"a": 1, "b": 2}, "'a', 'b' are unknown .* name those that do not in ignore of from_hf"),
        ("llama", {"x\x1b" * 10**5: 1}, r"'x\\x1bx.*… is unknown"),
        ("llama", {"is_causal": False}, "is_causal is False, and te_jax.models knows True alone"),
        ("llama", {"quantization_config": {"quant_method": "mxfp4"}}, "quant_method 'mxfp4', and te_jax.models reads"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "has weight_block_size None, and te_jax.models"),
        ("llama", {"quantization_config": BLOCK_FP8 | {"weight_block_size": [64, 64]}}, r"block_size \[64, 64\]"),
        ("llama", {"quantization_config": BLOCK_FP8 | {"fmt": "e5m2"}}, "fmt 'e5m2', .*: load the model with transf"),
        ("llama", {"quantization_config": BLOCK_FP8 | {"activation_scheme": "static"}}, "activation_scheme 'static'"),
        ("llama", {"model_type": "mamba"}, "model_type is 'mamba': te_jax.models knows llama, mistral"),
        ("llama", {"hidden_size": True}, "hidden_size is True: it must be of type int"),
        ("llama", {"hidden_size": "x" * 10**6}, "hidden_size is 'x{100}…"),
        ("qwen2", {"num_hidden_layers": 9999, "layer_types": ["sliding_attention", "full_attention"] * 4999 +
                   ["full_attention"], "sliding_window": 0}, r"window is \(0, None, 0.*…$"),
        ("llama", {"head_dim": 15}, "head_dim is 15"),
        ("llama", {"rms_norm_eps": 10**400}, "norm_eps is 1000"),
        ("llama", {"hidden_act": "relu"}, "hidden_act is 'relu': te_jax.models knows silu, gelu_pytorch_tanh"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic': te_jax"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "of rotary positions: factor is missing"),
        ("llama", _yarn(mscale=1.0), "'mscale' is unknown"),
        ("llama", _yarn(rope_theta=1), "rope_theta is 1.0: with yarn"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "'layer_types' is unknown"),
        ("qwen2", {"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries, and num_hidden_layers is 2"),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types names others"),
        ("qwen2", {"layer_types": None, "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, and .* at most"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
        ("qwen2_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\], and te_jax.models knows the first blocks"),
        ("qwen2_moe", {"mlp_only_layers": [0, 1, 2]}, "experts.dense_layers is 3, and num_layers is 3"),
        ("qwen2_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2, and te_jax.models knows 1 alone"),
        ("qwen2_moe", {"layer_types": None}, "layer_types is missing"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "weighted_shared is 0 and shared 0: give a width"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts is 4: .* at least router.top_k, 5"),
        ("mixtral", {"router_aux_loss_coef": -1}, "balance_weight is -1"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "rope_theta has 2 entries, and num_layers is 3"),
        ("smollm3", {"no_rope_layers": [1, 0, "x"]}, "no_rope_layers has others than 0 and 1"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
        ("smollm3", {"layer_types": None}, "layer_types is missing"),
        ("phi3", {"partial_rotary_factor": 0.75}, "partial_rotary_factor is 0.75, and te_jax.models knows 1.0 alone"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "rope_type is 'longrope': te_"),
        ("phi3", {"quantization_config": BLOCK_FP8}, "quantization_config is given, and te_jax.models reads a phi3 in"),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop is 0.1"),
        ("phi3", {"num_key_value_heads": 1}, r"qkv_proj.weight has shape \(64, 32\), .* asks for \(48, 32\)"),
        ("gemma3", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping is 30.0, and te_jax.models knows None"),
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0: it needs to be above 0"),
        ("gemma3", {"sliding_window": None}, "sliding_window is missing"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma3", {"rope_parameters": {"full_attention": {}, "a": {}}}, "'a' is unknown to te_jax.models"),
        ("gemma3", {"rope_parameters": {"full_attention": {"a": 1}}}, "of rotary positions: 'a' is unknown"),
        ("granite", {"residual_multiplier": 0}, "factors.residual is 0: it needs to be a finite number above 0"),
        ("gpt_oss", {"layer_types": None}, "layer_types is missing"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias is True, and te_jax.models knows False alone"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave is False, and te_jax.models knows True alone"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy', and te_jax.models knows 'noaux_tc'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2, and te_jax.models knows 1 alone"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_kv_heads is 2 and num_heads 4: with latent attention"),
        ("deepseek_v3", {"first_k_dense_replace": 3}, "experts.dense_layers is 3, and num_layers is 3"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "latent.rank is 0: it needs to be a whole number"),
        ("deepseek_v3", _yarn(mscale_all_dim=-1), "mscale and mscale_all_dim at least 0"),
        ("deepseek_v3", _yarn(factor=10**400, mscale=1), "factor needs to be at least 1"),
        ("deepseek_v3", _yarn(more=1), "of rotary positions: 'more' is unknown"),
        ("deepseek_v2", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale": 1.0}}, "'mscale' is unkn"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc': te_jax.models knows greedy and group"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True, and te_jax.models knows False alone"),
        ("deepseek_v2", {"n_shared_experts": None}, "n_shared_experts is missing"),
        # These are configs that no tensors belong to.
        ("deepseek_v3", {"n_routed_experts": 10**9}, r"lacks 'model.layers.1.mlp.experts.12.down_proj.weight'"),
        ("llama", {"num_hidden_layers": 10**9}, r"lacks 'model.layers.2.\S+', .*, which config.json asks for"),
        ("mixtral", {"num_local_experts": 10**9}, r"lacks 'model.layers.0.\S+experts.10.w1.weight"),
        ("gpt_oss", {"num_local_experts": 10**9}, r"router.weight has shape \(4, 32\), .* \(1000000000, 32\)"),
        ("llama", {"vocab_size": 10**12}, r"embed_tokens.weight has shape \(64, 32\), .* \(1000000000000, 32\)"),
        ("llama", {"intermediate_size": 10**30}, r"gate_proj.weight has shape \(48, 32\), .* \(10{30}, 32\)"),
        ("llama", {"num_hidden_layers": 1}, r"has 'model.layers.1.\S+, .* which config.json does not ask for"),
        ("llama", {"attention_bias": False}, "has 'model.layers.0.self_attn.k_proj.bias', .* does not ask for"),
    ],
)  # fmt: skip
def test_configs_that_are_refused(like, changes, words, tmp_path, monkeypatch):
    """Before parameters are thought of, of which there may be any number."""
    monkeypatch.setattr(huggingface.decoder, "init", None)
    with pytest.raises(FolderError, match=words) as error:
        from_hf(folder_with(tmp_path / "new", like, changes))
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1000


def test_folders_without_a_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, file in (("empty", "README.md"), ("peft", "adapter_config.json"), ("pickle", "pytorch_model.bin")):
        pathlib.Path(name).mkdir()
        pathlib.Path(name, file).write_text("{}")
    for name in ("pipe", "list"):
        pathlib.Path(name).mkdir()
    pathlib.Path("list/config.json").write_text("[]")
    os.mkfifo("pipe/config.json")  # which would be waited for
    for folder, words in {
        "empty": "empty holds no model, it has no config.json: give a folder that",
        "peft": "holds adapters of PEFT and no model: give the folder of their base model, and this one to",
        "pickle": "holds pickles",
        "pipe": "config.json is no regular file",
        "list": "the JSON in list/config.json is invalid: it is no object",
        "nowhere": "nowhere/config.json cannot be read: No such file",
        "org/name-1.5": "is no folder here: .* `hf download org/name-1.5 --local-dir name-1.5`",
        "x" * 300: "config.json cannot be read: File name too long",
    }.items():
        with pytest.raises(FolderError, match=words):
            from_hf(folder)


def _without(name):
    return lambda arrays: arrays.pop(name)


def _with(name, change):
    return lambda arrays: arrays.update({name: change(arrays.get(name))})


GATE = "model.layers.1.mlp.gate_proj.weight"


def _in_fp8(name, scales, dtype="float32"):
    return lambda arrays: arrays.update(
        {name: arrays[name].astype("float8_e4m3fn"), f"{name}_scale_inv": scales.astype(dtype)}
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without("model.norm.weight"), "lacks 'model.norm.weight', which config.json asks for"),
        (_with("model.norm.bias", lambda _: np.zeros(3, np.float32)), "has 'model.norm.bias', which config.json does"),
        (_with("\x1b[2J" + "a" * 10**6, lambda _: np.zeros(3)), r"has '\\x1b\[2Ja{96}…', which config.json does not"),
        (lambda arrays: [arrays.update({name.removeprefix("model."): arrays.pop(name)}) for name in [*arrays]],
         'base model, .* no "model." before .* no output head: save_pretrained the LlamaForCausalLM that it'),
        (_with("lm_head.weight", np.transpose), r"lm_head.weight has shape \(32, 64\), .* asks for \(64, 32\)"),
        (_with("model.norm.weight", lambda x: x[None]), r"model.norm.weight has shape \(1, 32\)"),
        (_with("model.norm.weight", lambda x: x.astype(np.int8)), "has dtype int8, and te_jax.models reads float32"),
        (_with(GATE, lambda x: x.astype("float8_e4m3fn")), "gate_proj.weight has dtype float8_e4m3fn, .* "
         "float8_e4m3fn of linear layers beside 'model.*gate_proj.weight_scale_inv'"),
        (_in_fp8(GATE, np.zeros((1, 2))), r"weight_scale_inv is .*, .* for float32 or bfloat16 of shape \(1, 1\)"),
        (_in_fp8(GATE, np.zeros((1, 1)), "float16"), "weight_scale_inv is .*float16.*, .* for float32 or bfloat16 of"),
        (_in_fp8(GATE, np.full((1, 1), np.nan)), "weight_scale_inv has a scale that is not finite: download the file"),
        (_with(f"{GATE}_scale_inv", lambda _: np.ones((1, 1))), "gate_proj.weight is .*, .* float8_e4m3fn of"),
        (_in_fp8("model.embed_tokens.weight", np.ones((1, 1))), "has 'model.embed_tokens.weight_scale_inv', which"),
    ],
    ids=["missing", "more", "hostile", "base model", "transposed", "two dimensions", "int8", "no scales",
         "scales of another shape", "scales in float16", "NaN", "scales of no codes", "embedding"],
)  # fmt: skip
def test_tensors_that_are_refused(change, words, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface.decoder, "init", None)
    with pytest.raises(FolderError, match=words) as error:
        from_hf(_changed(tmp_path / "new", change))
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1000


def test_experts_of_which_some_are_in_blocks_are_refused(tmp_path):
    name = "model.layers.0.block_sparse_moe.experts.2.w1.weight"
    folder = _changed(tmp_path / "new", _in_fp8(name, np.ones((1, 1))), like="mixtral")
    with pytest.raises(FolderError, match=r"experts.2.w1.weight is in FP8 and other experts beside it are not"):
        from_hf(folder)


def test_kernels_are_kept_in_blocks_for_products_that_read_them(in_blocks):
    with pytest.raises(ValueError, match=r"keep_fp8 is True, and recipe is None, which does not .* or leave keep_fp8"):
        from_hf(in_blocks("llama_2024")[0], keep_fp8=True)


@pytest.mark.parametrize(
    "change",
    [
        _with("model.layers.0.self_attn.rotary_emb.inv_freq", lambda _: np.zeros(8, np.float32)),
        lambda arrays: arrays.update({"lm_head.weight": arrays["model.embed_tokens.weight"].astype(np.float32)}),
    ],
    ids=["frequencies", "a head that is tied"],
)
def test_tensors_that_are_left(change, tmp_path):
    config, params = from_hf(_changed(tmp_path / "new", change, like="llama_tied"))
    assert config == load("llama_tied")[0]
    assert_equal(params, load("llama_tied")[1])


def test_a_head_that_is_not_the_embedding_is_read_whatever_the_config_says(tmp_path, rng):
    head = rng.normal(size=(64, 32)).astype(np.float32)
    folder = _changed(tmp_path / "new", _with("lm_head.weight", lambda _: head), like="llama_tied")
    config, params = from_hf(folder)
    assert config == config_from_hf(folder) == dataclasses.replace(load("llama_tied")[0], tied_head=False)
    np.testing.assert_array_equal(params["head"], head.T)
    to_hf(tmp_path / "again", config, params, like=folder)
    assert not fields_of(tmp_path / "again")["tie_word_embeddings"]


@pytest.mark.parametrize("tied", [True, False])
def test_all_rows_of_a_head_are_those_of_the_embedding_where_it_is_tied(tied, tmp_path):
    def make(arrays):
        embedding = arrays["model.embed_tokens.weight"] = np.tile(arrays["model.embed_tokens.weight"], (20, 1))
        arrays["lm_head.weight"] = embedding.copy()
        arrays["lm_head.weight"][-1, 3] += 0 if tied else 1

    folder = _changed(tmp_path / "new", make, like="llama_tied")
    (folder / "config.json").write_text(json.dumps(fields_of(folder) | {"vocab_size": 20 * 64}))
    assert config_from_hf(folder).tied_head == tied


def _changed(folder, change, like="llama"):
    """A folder with changed tensors."""
    tensors = Tensors.open(HF / like)
    arrays = {name: tensors.read(name) for name in tensors.types}
    change(arrays)
    types = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}
    write(folder, types, arrays.__getitem__)
    shutil.copyfile(HF / like / "config.json", folder / "config.json")
    return folder


def test_shardings_that_are_none():
    with pytest.raises(ValueError, match=r"shardings has .*: it needs to be a NamedSharding"):
        from_hf(HF / "llama", shardings=lambda config: jax.tree.map(lambda _: jax.devices()[0], load("llama")[1]))
