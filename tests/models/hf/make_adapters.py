"""Makes the folders in peft/ beside this file: adapters of PEFT, for tests of `te_jax.models.from_peft`.

    python -m pip install torch transformers peft
    python tests/models/hf/make_adapters.py [folder]

Each has what PEFT writes for a model beside this file, which adapter_config.json names, and expected.npz: the float32
logits of PEFT for the model's own tokens. Every adapter moves them.
"""

import json
import pathlib
import shutil
import sys
import zlib
from typing import Any

import numpy as np
import peft
import torch
import transformers as hf

HERE = pathlib.Path(__file__).parent
OPTIONS: Any = {
    "llama": {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"},
    "qwen2": {  # three ranks, three alphas, a root, and a regular expression
        "r": 4,
        "lora_alpha": 3,
        "use_rslora": True,
        "rank_pattern": {"k_proj": 2, "^model.layers.1.self_attn.q_proj": 6},
        "alpha_pattern": {"layers.0.mlp.down_proj": 5, "v_proj": 1.5},
        "target_modules": r".*\.([qkv]|down)_proj",
    },
    "qwen3": {"r": 2, "lora_alpha": 2, "target_modules": ["q_proj", "o_proj"], "layers_to_transform": [1]},
}


def make(folder: pathlib.Path, base: str, options: Any) -> None:
    torch.manual_seed(zlib.crc32(base.encode()))
    model = hf.AutoModelForCausalLM.from_pretrained(HERE / base, dtype=torch.float32, attn_implementation="eager")
    adapted = peft.get_peft_model(model, peft.LoraConfig(**options, task_type="CAUSAL_LM")).eval()
    tokens = torch.tensor(np.load(HERE / base / "expected.npz")["tokens"].astype(np.int64))
    halves = {name: half for name, half in adapted.named_parameters() if "lora_" in name}
    with torch.no_grad():
        for half in halves.values():
            half.copy_((0.3 * torch.randn_like(half)).bfloat16() if base == "qwen3" else 0.3 * torch.randn_like(half))
        logits = adapted(tokens).logits
        for name, half in halves.items():
            kept = half.clone()
            half.zero_()
            moved = (adapted(tokens).logits - logits).abs().max() / logits.abs().max()
            half.copy_(kept)
            assert moved > 1e-3, (name, moved)
    shutil.rmtree(folder, ignore_errors=True)
    if base == "qwen3":
        adapted.bfloat16()
    adapted.save_pretrained(folder)
    (folder / "README.md").unlink()
    path = folder / "adapter_config.json"
    fields = json.loads(path.read_text()) | {"base_model_name_or_path": base}
    if isinstance(fields["target_modules"], list):
        fields["target_modules"].sort()
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    np.savez_compressed(folder / "expected.npz", logits=logits.numpy())
    for file in folder.iterdir():
        file.chmod(0o644)


if __name__ == "__main__":
    into = pathlib.Path(sys.argv[1]) if sys.argv[1:] else HERE / "peft"
    for base_name, base_options in OPTIONS.items():
        make(into / base_name, base_name, base_options)
        print(base_name)
