"""Adapters of PEFT: its own logits from its own folders, what is written back, and what is refused.

The folders, and what PEFT computes of them, are in tests/models/hf/peft; make_adapters.py beside it made them.
"""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

from te_jax.models import (
    FolderError,
    Lora,
    apply,
    config_from_hf,
    from_hf,
    from_peft,
    init,
    join_adapters,
    loss,
    peft,
    split_adapters,
    to_peft,
)
from te_jax.models.safetensors import Tensors, write

HF = pathlib.Path(__file__).parent / "hf"
NAMES = sorted(path.name for path in (HF / "peft").iterdir())
FILE = "adapter_model.safetensors"

jit_apply = jax.jit(apply, static_argnums=2)


def fields_of(folder):
    return json.loads((folder / "adapter_config.json").read_text())


def arrays_of(folder):
    tensors = Tensors.open(folder / FILE)
    return {name: tensors.read(name) for name in tensors.types}


@pytest.mark.parametrize(
    "name", [name if name == "qwen2" else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_logits_are_those_of_peft(name):
    config, params = from_hf(HF / name)
    config, adapters = from_peft(HF / "peft" / name, config)
    assert all(isinstance(leaf, jax.Array) and leaf.dtype == "float32" for leaf in jax.tree.leaves(adapters))
    with np.load(HF / name / "expected.npz") as arrays, np.load(HF / "peft" / name / "expected.npz") as adapted:
        tokens, logits = arrays["tokens"].astype(np.int32), adapted["logits"]
    found = np.asarray(jit_apply(join_adapters(adapters, params), tokens, config))
    assert np.abs(found - logits).max() < 1e-5 * np.abs(logits).max()


@pytest.mark.slow
def test_what_pads_a_smaller_rank_has_no_gradient():
    config, params = from_hf(HF / "qwen2")
    config, adapters = from_peft(HF / "peft" / "qwen2", config)
    tokens = np.arange(32, dtype=np.int32).reshape(2, 16)
    run = jax.jit(jax.grad(lambda adapters: loss(join_adapters(adapters, params), tokens, tokens, config)))
    for layer, gradients in zip(adapters["layers"], run(adapters)["layers"], strict=True):
        for name, gradient in gradients.items():
            assert (np.asarray(gradient) == 0)[np.asarray(layer[name]) == 0].all(), name
            assert np.asarray(gradient).any(), name


@pytest.mark.parametrize("name", NAMES)
def test_what_was_read_is_written_bit_for_bit(name, tmp_path):
    config, adapters = peft.read(HF / "peft" / name, config_from_hf(HF / name))
    to_peft(tmp_path / "float32", config, adapters, base="org/base")
    again, adapters_again = peft.read(tmp_path / "float32", config_from_hf(HF / name))
    assert again == config
    assert jax.tree.all(jax.tree.map(np.array_equal, adapters_again, adapters))
    assert fields_of(tmp_path / "float32")["base_model_name_or_path"] == "org/base"
    if name != "qwen2":  # whose scales and ranks became one
        dtype = "bfloat16" if name == "qwen3" else None
        to_peft(tmp_path / "again", config, adapters, dtype=dtype)
        wanted, found = arrays_of(HF / "peft" / name), arrays_of(tmp_path / "again")
        for tensor in wanted:
            assert found.pop(tensor).tobytes() == wanted[tensor].tobytes(), tensor
        assert not any(array.any() for array in found.values())  # of the block that has none
        fields, theirs = fields_of(tmp_path / "again"), fields_of(HF / "peft" / name)
        assert all(theirs[field] == fields[field] for field in ("r", "lora_alpha", "peft_type", "bias"))


A, B = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight" for part in "AB")
HEAD = "base_model.model.lm_head.lora_A.weight"
MERGE = "put the adapters on their base model with PEFT, and save_pretrained what merge_and_unload"


def _with(name, change):
    return lambda arrays: arrays.update({name: change(arrays.get(name, np.zeros((4, 32), np.float32)))})


def _nan(array):
    return np.where(np.arange(array.shape[1]) == 3, np.nan, array).astype(np.float32)


@pytest.mark.parametrize(
    ("changes", "change", "words"),
    [
        ({"use_dora": True}, None, f"use_dora is True, and te_jax.models reads plain LoRA alone: {MERGE}"),
        ({"bias": "all"}, None, "bias is 'all', and te_jax.models reads plain LoRA alone"),
        ({"lora_bias": True}, None, "lora_bias is True"),
        ({"modules_to_save": ["lm_head"]}, None, r"modules_to_save is \['lm_head'\]"),
        ({"fan_in_fan_out": True}, None, "fan_in_fan_out is True"),
        ({"layer_replication": [[0, 2]]}, None, r"layer_replication is \[\[0, 2\]\]"),
        ({"trainable_token_indices": [3]}, None, r"trainable_token_indices is \[3\]"),
        ({"init_lora_weights": "pissa"}, None, "init_lora_weights is 'pissa'"),
        ({"peft_type": "IA3"}, None, "peft_type is 'IA3'"),
        ({"a_field_of_next_year": "\x1b[2J"}, None, r"a_field_of_next_year is '\\x1b\[2J', and te_jax.models reads"),
        ({"r": None}, None, "adapter_config.json: r is missing"),
        ({"r": "4"}, None, "r is '4': it must be of type int"),
        ({"r": 0}, None, r"the rank of model.layers.0.self_attn.q_proj is 0: r and rank_pattern need whole numbers"),
        ({"r": 10**15}, None, r"lora_A.weight is .*\(4, 32\).*, and r and the base model ask for \(10{15}, 32\)"),
        ({"rank_pattern": {"v_proj": 2}}, None, r"v_proj.lora_A.weight is .*, and r and the base .* for \(2, 32\)"),
        ({"rank_pattern": {"(a+)+": 2}}, None, r"rank_pattern has the key '\(a\+\)\+', and te_jax.models reads names"),
        ({"alpha_pattern": {"v_proj": -1}}, None, "alpha of model.layers.0.self_attn.v_proj is -1: lora_alpha and"),
        ({"lora_alpha": 0}, None, "alpha of model.layers.0.self_attn.q_proj is 0: lora_alpha and alpha_pattern need"),
        ({"target_modules": ["q_proj"]}, None, "has adapters of 'model.layers.0.mlp.down_proj', .* which target_m"),
        ({"target_modules": None}, None, "target_modules is missing"),
        ({}, _with(A, _nan), "q_proj.lora_A.weight has a value that is not finite: download it again"),
        ({}, _with(A, np.transpose), r"q_proj.lora_A.weight is .*, and r and the base model ask for \(4, 32\)"),
        ({}, _with(B, lambda x: x.astype(np.int8)), "q_proj.lora_B.weight is .*int8.* in one of float32, bfloat16"),
        ({}, lambda arrays: arrays.pop(B), "lacks 'base_model.*q_proj.lora_B.weight', which adapter_config.json asks"),
        ({}, lambda arrays: arrays.pop(A), "lacks 'base_model.*q_proj.lora_A.weight', which adapter_config.json asks"),
        ({}, lambda arrays: [arrays.pop(A), arrays.pop(B)], "lacks '.*A.weight', '.*B.weight', which adapter_config"),
        ({}, _with(HEAD, lambda x: x), "has '.*lm_head.lora_A.weight', and te_jax.models reads lora_A and lora_B of .*"
         f"q_proj, k_proj, .* alone: give the base model that the adapters are of, or {MERGE}"),
        ({}, _with(A.replace(".0.", ".2."), lambda x: x), r"has '.*layers.2.*', and te_jax.models reads"),
        ({"target_modules": "x"}, lambda arrays: arrays.clear(), "has no adapters: save_pretrained them with PEFT"),
    ],
)  # fmt: skip
def test_what_is_refused(changes, change, words, tmp_path):
    arrays = arrays_of(HF / "peft" / "llama")
    if change is not None:
        change(arrays)
    types = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}
    write(tmp_path, types, arrays.__getitem__, single=FILE)
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields_of(HF / "peft" / "llama") | changes))
    with pytest.raises(FolderError, match=words) as error:
        from_peft(tmp_path, config_from_hf(HF / "llama"))
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1000


def test_adapters_of_another_base_and_folders_without_them_are_refused(tmp_path):
    config = config_from_hf(HF / "qwen3")
    for changes, words in (
        ({"hidden_size": 64}, r"ask for \(2, 64\) in one of .*: give the base model that the adapters are of"),
        ({"num_layers": 1}, "has '.*layers.1.*' and 1 more, and te_jax.models reads lora_A"),
    ):
        with pytest.raises(FolderError, match=words):
            from_peft(HF / "peft" / "qwen3", dataclasses.replace(config, **changes))
    with pytest.raises(FolderError, match=r"adapter_config.json cannot be read: No such file"):
        from_peft(HF / "qwen3", config)
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields_of(HF / "peft" / "qwen3")))
    with pytest.raises(FolderError, match=r"has no adapter_model.safetensors, and adapter_model.bin is not read"):
        from_peft(tmp_path, config)


def test_what_is_not_written(tmp_path):
    config = dataclasses.replace(config_from_hf(HF / "llama"), lora=Lora(2))
    params = jax.eval_shape(lambda: split_adapters(init(config, jax.random.key(0)))[0])
    for folder, changes, options, words in (
        ("new", {"lora": None}, {}, "config.lora is None: there are no adapters to write; to_hf writes the model"),
        ("new", {"lora": Lora(3)}, {}, r"params\['layers'\]\[0\]\['query_a'\] has shape \(32, 2\): config asks for"),
        ("new", {"num_layers": 3}, {}, r"params lacks \['layers'\]\[2\]\['query_a'\], which config asks for"),
        ("new", {"lora": Lora(2, names=("out",))}, {}, r"params has \['layers'\].*, which config does not ask for"),
        ("new", {}, {"dtype": "int8"}, "dtype is int8: choose one of float32, bfloat16, float16"),
        ("new", {}, {"base": HF / "phi3"}, r"phi3, a phi3, whose self_attn.qkv_proj holds query, key, value, and lora"),
        (HF / "peft" / "llama", {}, {}, "llama already holds adapters: choose another folder, or remove them"),
    ):
        with pytest.raises(ValueError, match=words):
            to_peft(tmp_path / folder, dataclasses.replace(config, **changes), params, **options)
    assert not [*tmp_path.iterdir()]
