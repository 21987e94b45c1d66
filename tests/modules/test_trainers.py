"""FP8 in the trainers of Tunix, Levanter and MaxText, where they are installed, by the lines of docs/trainers.md.

No extra of te_jax installs them: Tunix (google_tunix 0.1.7), Levanter (1.2.dev1644, with haliax 1.4.dev453) and MaxText
(0.2.5, Python 3.12) bring transformers, datasets and clients of clouds. Each run is a process of its own, with one
device: trainers change JAX's configuration.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax.recipe import BlockScaling

STEPS, LENGTH, ROWS = 50, 64, 8
TRAINERS = {
    "tunix": "tunix",
    "tunix_experts": "tunix",
    "tunix_lora": "tunix",
    "levanter": "levanter",
    "levanter_experts": "levanter",
    "maxtext": "maxtext",
    "maxtext_experts": "maxtext",
    "maxtext_ragged_dot": "maxtext",
}


def text(step):
    """Rows of text [ROWS, LENGTH + 1], the same in each process."""
    data = np.frombuffer(Path(np.__file__).read_bytes(), np.uint8)
    starts = np.random.default_rng(step).integers(0, len(data) - LENGTH - 1, ROWS)
    return np.stack([data[i : i + LENGTH + 1] for i in starts]).astype(np.int32)


def tunix(kind, folder, recipe, steps):
    import optax
    import orbax.checkpoint as ocp
    import qwix
    from flax import nnx
    from tunix.models.llama3 import model as llama3
    from tunix.models.qwen3 import model as qwen3
    from tunix.sft import peft_trainer, utils

    sizes = {"num_layers": 2, "vocab_size": 256, "embed_dim": 128, "hidden_dim": 256, "num_heads": 4, "head_dim": 32}
    sizes |= {"num_kv_heads": 2, "rope_theta": 10_000, "norm_eps": 1e-6}
    if kind == "experts":
        config = qwen3.ModelConfig(**sizes, num_experts=4, num_experts_per_tok=2)
        model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    else:
        model = llama3.Llama3(llama3.ModelConfig(**sizes), rngs=nnx.Rngs(0))

    def arguments(tokens):
        mask = tokens >= 0
        return {"positions": utils.build_positions_from_mask(mask), "attention_mask": utils.make_causal_attn_mask(mask)}

    if kind == "lora":
        provider = qwix.LoraProvider(
            module_path=".*q_proj|.*v_proj|.*gate_proj|.*up_proj|.*down_proj", rank=8, alpha=16.0
        )
        tokens = jnp.zeros((1, LENGTH), jnp.int32)
        options = {"cache": None, "rngs": nnx.Rngs(1), **arguments(tokens)}
        model = qwix.apply_lora_to_model(model, provider, tokens, **options)

    if recipe is not None:
        from te_jax.nnx import convert

        print(convert(model, recipe))

    class Losses:
        def on_train_step_end(self, trainer, step, loss):
            losses.append(float(loss))

        def __getattr__(self, name):
            return lambda *_: None

    losses = []
    examples = (
        peft_trainer.TrainingInput(input_tokens=text(step), input_mask=np.ones((ROWS, LENGTH + 1), np.int32))
        for step in range(steps)
    )
    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=10 * STEPS,
        max_steps=steps,
        checkpoint_root_directory=str(folder),
        checkpointing_options=ocp.CheckpointManagerOptions(save_interval_steps=STEPS),
    )
    optimizer = optax.adamw(1e-2 if kind == "lora" else 1e-3)
    trainer = peft_trainer.PeftTrainer(model, optimizer, config).with_gen_model_input_fn(
        lambda x: {"input_tokens": x.input_tokens, "input_mask": x.input_mask, **arguments(x.input_tokens)}
    )
    trainer.with_training_hooks(Losses())
    trainer.train(examples)
    return losses


class Bytes:
    """A tokenizer for Tunix."""

    def encode(self, text, **_):
        return [ord(character) for character in text]

    def decode(self, ids, **_):
        return "".join(chr(int(i)) for i in ids)

    def pad_id(self):
        return 0

    def bos_id(self):
        return 1

    def eos_id(self):
        return 2


def grpo(kind, folder, recipe, steps):
    """The losses of all steps, then the mean rewards: how many bytes of an answer are even."""
    import optax
    from flax import nnx
    from tunix.models.qwen3 import model as qwen3
    from tunix.rl import common, function_registry, rl_cluster
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rollout.base_rollout import RolloutConfig

    from te_jax.nnx import convert
    from te_jax.ops import linear_log_probs

    @function_registry.register_policy_loss_fn("hidden")
    def grpo_of_hidden_states(model, example, algo_config, pad_id, eos_id, **_):
        tokens, positions, mask, _ = common.process_ids(example.prompt_ids, example.completion_ids, pad_id, eos_id)
        model(tokens, positions, None, mask, output_hidden_states=True)
        x = nnx.pop(model, nnx.Intermediate)["all_hidden_states"][0]
        x = x[:, example.prompt_ids.shape[1] - 1 : -1]
        log_probs = linear_log_probs(x, model.lm_head.w[...], example.completion_ids)
        before = example.old_per_token_logps
        ratio = jnp.exp(log_probs - (jax.lax.stop_gradient(log_probs) if before is None else before))
        clipped = jnp.clip(ratio, 1 - algo_config.epsilon, 1 + algo_config.epsilon)
        kl = common.compute_kl_divergence(log_probs, example.ref_per_token_logps, algo_config.kl_loss_mode)

        def mean(values):
            return common.aggregate_loss(values, example.completion_mask, algo_config.loss_agg_mode)

        advantages = example.advantages[:, None]
        loss = algo_config.beta * mean(kl) - mean(jnp.minimum(ratio * advantages, clipped * advantages))
        return loss, {"kl": mean(kl), "pg_clipfrac": mean(jnp.where(clipped == ratio, 0.0, 1.0))}

    def reward(prompts, completions, **_):
        rewards = [float(np.mean([ord(c) % 2 == 0 for c in answer] or [0])) for answer in completions]
        means.append(np.mean(rewards))
        return rewards

    class Losses:
        def on_train_step_end(self, trainer, step, loss):
            losses.append(float(loss))

        def __getattr__(self, name):
            return lambda *_: None

    losses, means = [], []
    sizes = {"num_layers": 2, "vocab_size": 256, "embed_dim": 128, "hidden_dim": 256, "num_heads": 4, "head_dim": 32}
    sizes |= {"num_kv_heads": 2, "rope_theta": 10_000, "norm_eps": 1e-6}
    actor, reference = (qwen3.Qwen3(qwen3.ModelConfig(**sizes), rngs=nnx.Rngs(0)) for _ in range(2))
    for model in (actor, reference):
        if recipe is not None:
            convert(model, recipe)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.adam(1e-3), eval_every_n_steps=10 * STEPS, max_steps=steps
    )
    rollout = RolloutConfig(max_tokens_to_generate=8, max_prompt_length=8, kv_cache_size=32, temperature=1.0)
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys((rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT), mesh),
        training_config=training,
        rollout_config=rollout,
    )
    cluster = rl_cluster.RLCluster(actor=actor, reference=reference, tokenizer=Bytes(), cluster_config=config)
    cluster.actor_trainer.with_training_hooks(Losses())
    algorithm = GRPOConfig(num_generations=16, policy_loss_fn=kind or "grpo")
    prompts = {"prompts": np.array(["ab c", "q: 1+1", "hello", "xyz"])}
    GRPOLearner(cluster, algorithm, reward).train([dict(prompts) for _ in range(steps)])
    return [*losses, *means]


def levanter(kind, folder, recipe, steps):
    import equinox as eqx
    import haliax as hax
    import haliax.nn as hnn
    import jmp
    from levanter import tracker
    from levanter.checkpoint import CheckpointerConfig
    from levanter.data.dataset import ListAsyncDataset
    from levanter.distributed import RayConfig
    from levanter.models.llama import LlamaConfig
    from levanter.models.lm_model import LmExample, compute_next_token_loss
    from levanter.models.mixtral import MixtralConfig
    from levanter.optim import AdamConfig
    from levanter.trainer import Trainer, TrainerConfig

    from te_jax.nnx import DotGeneral
    from te_jax.ops import grouped_dense

    class FP8(eqx.Module):
        def __call__(self, *operands, **options):
            return DotGeneral(recipe)(*operands, **options)

    class FP8Experts(hnn.MoELinear):
        def __call__(self, inputs, group_sizes, *, key=None):
            y = grouped_dense(inputs.array, self.weight.array, group_sizes.array, recipe=recipe)
            return hax.named(y, hax.replace_axis(inputs.axes, self.In, self.Out))

    def is_linear(layer):
        return isinstance(layer, hnn.Linear | hnn.MoELinear)

    def in_fp8(path, layer):
        if not is_linear(layer) or path[-1].name in ("lm_head", "gate"):
            return layer
        experts = isinstance(layer, hnn.MoELinear)
        return FP8Experts(**vars(layer)) if experts else dataclasses.replace(layer, dot_general=FP8())

    def build():
        model = config.build(hax.Axis("vocab", 256), key=jax.random.PRNGKey(0))
        return model if recipe is None else jax.tree_util.tree_map_with_path(in_fp8, model, is_leaf=is_linear)

    def loss(model, example, *, key=None, **_):
        # Levanter's own mean gives jnp.mean a mask in float32, which JAX 0.10 refuses.
        return hax.mean(compute_next_token_loss(model, example, key=key, reduction=None)).scalar()

    tracker.jit_log = lambda *_, **__: None  # of the routers: JAX 0.10 has no derivative of its io_callback
    sizes = {"hidden_dim": 128, "intermediate_dim": 256, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    if kind == "experts":
        sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "use_flash_attention": False}
    config = (MixtralConfig if kind == "experts" else LlamaConfig)(seq_len=LENGTH, **sizes)
    rows = [row[:LENGTH] for step in range(steps) for row in text(step)]
    data = [LmExample.causal(hax.named(jnp.asarray(row), config.Pos)) for row in rows]
    settings = TrainerConfig(
        id="run",
        num_train_steps=steps,
        train_batch_size=ROWS,
        tracker=tracker.NoopConfig(),
        require_accelerator=False,
        ray=RayConfig(auto_start_cluster=False),
        mp=jmp.get_policy("p=f32,c=bfloat16"),
        checkpointer=CheckpointerConfig(base_path=str(folder), keep=[{"every": STEPS - 1}]),
        log_dir=folder / "log",
    )
    settings.initialize()
    optimizer = AdamConfig(learning_rate=1e-3, lr_schedule="constant", warmup=0.0, weight_decay=0.0).build(steps)
    losses = {}
    with Trainer(settings, optimizer, loss) as trainer:
        state = trainer.initial_state(jax.random.PRNGKey(1), model_init=build)
        loader = trainer.data_loader(ListAsyncDataset(data, is_complete=True)).iter_from_step(int(state.step))
        trainer.add_hook(lambda info: losses.update({int(info.step): float(info.loss)}), every=1)
        trainer.train(state, loader)
    return list(losses.values())


def maxtext(kind, folder, recipe, steps):
    from maxtext.configs import pyconfig
    from maxtext.input_pipeline import synthetic_data_processing
    from maxtext.layers import quantizations
    from maxtext.trainers.pre_train import train

    from te_jax.flax.maxtext import MaxTextQuantization
    from te_jax.nnx import convert

    if recipe is not None:
        quantization = MaxTextQuantization(recipe)
        quantizations.configure_quantization = lambda *_, **__: quantization
        if kind == "ragged_dot":
            quantizations.maybe_quantize_model = lambda model, config: (convert(model, recipe), model)[1]

    checkpoints = folder / "run" / "checkpoints"
    saved = sorted(int(path.name) for path in checkpoints.glob("[0-9]*"))
    drawn = iter(range(saved[-1] + 1 if saved else 0, steps))

    def batch(self):
        with self.mesh:
            return self.data_generator(self.config, (jnp.asarray(text(next(drawn))), *self.data[1:]))

    synthetic_data_processing.SyntheticDataIterator.__next__ = batch
    options = {"run_name": "run", "base_output_directory": folder, "hardware": "cpu", "steps": steps}
    options |= {"dataset_type": "synthetic", "attention": "dot_product", "decoder_block": "llama2"}
    options |= {"base_emb_dim": 128, "base_mlp_dim": 256, "base_moe_mlp_dim": 256, "base_num_query_heads": 4}
    options |= {"head_dim": 32, "base_num_kv_heads": 2, "base_num_decoder_layers": 2, "vocab_size": 256}
    options |= {"max_target_length": LENGTH, "per_device_batch_size": ROWS, "learning_rate": 1e-3}
    options |= {"checkpoint_period": STEPS, "async_checkpointing": False, "enable_tensorboard": False}
    options |= {"skip_jax_distributed_system": True, "metrics_file": folder / f"{steps}-{recipe is None}.jsonl"}
    if kind:
        options |= {"decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2, "megablox": False}
        options |= {"sparse_matmul": kind == "ragged_dot"}
    base = Path(pyconfig.__file__).with_name("base.yml")
    train.main(["", str(base), *(f"{name}={value}" for name, value in options.items())])
    if recipe is not None:
        print(quantization.report())
    return [json.loads(line)["learning/loss"] for line in options["metrics_file"].read_text().splitlines()]


def run(name, folder, *, fp8, steps):
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-W", "ignore", __file__, name, folder, str(int(fp8)), str(steps)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stdout)
    return np.array(json.loads((folder / "losses.json").read_text()))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_learns_as_before_and_exchanges_checkpoints(tmp_path, name):
    pytest.importorskip(TRAINERS[name])
    plain = run(name, tmp_path / "plain", fp8=False, steps=STEPS)
    if TRAINERS[name] == "maxtext":  # whose parameters depend on whether the model is quantized: begin with the same
        first = "run/checkpoints/0"
        (tmp_path / "fp8" / first).parent.mkdir(parents=True)
        shutil.copytree(tmp_path / "plain" / first, tmp_path / "fp8" / first)
    fp8 = run(name, tmp_path / "fp8", fp8=True, steps=STEPS)
    print(name, "losses 41 to 50:", plain[-10:].mean(), fp8[-10:].mean())
    assert len(plain) == STEPS
    assert plain[-10:].mean() < (0.97 if name == "tunix_lora" else 0.6) * plain[0]
    assert 0 < abs(fp8[-10:].mean() / plain[-10:].mean() - 1) < 0.01

    for folder, in_fp8 in (("plain", True), ("fp8", False)):
        continued = run(name, tmp_path / folder, fp8=in_fp8, steps=STEPS + 5)
        assert len(continued) == 5
        assert abs(continued.mean() / plain[-10:].mean() - 1) < 0.15


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_policy_of_tunix_learns(tmp_path):
    pytest.importorskip("tunix")
    kinds = {"plain": ("grpo", False), "fp8": ("grpo", True), "hidden": ("grpo_hidden", True)}
    outcomes = {
        kind: run(name, tmp_path / kind, fp8=fp8, steps=STEPS).reshape(2, STEPS) for kind, (name, fp8) in kinds.items()
    }
    for kind, (losses, rewards) in outcomes.items():
        print(kind, "losses 41 to 50:", losses[-10:].mean(), "rewards:", rewards[-10:].mean())
        assert rewards[0] < 0.6
        assert rewards[-10:].mean() > 0.85
    # On the same answers both losses are one number, in other roundings; later the answers differ.
    np.testing.assert_allclose(outcomes["hidden"][0][:2], outcomes["fp8"][0][:2], rtol=1e-3, atol=1e-7)


if __name__ == "__main__":
    name, folder, fp8, steps = sys.argv[1:]
    trainer, _, kind = name.partition("_")
    recipe = BlockScaling() if int(fp8) else None
    losses = globals()[trainer](kind, Path(folder), recipe, int(steps))
    (Path(folder) / "losses.json").write_text(json.dumps(losses))
