"""Fields of a config.json: each is read once, and what nobody read is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from te_jax.models.safetensors import FolderError, quoted, shown

UNUSED = (
    *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "max_position_embeddings"),
    *("output_router_logits", "return_dict", "output_attentions", "output_hidden_states", "attn_implementation"),
    *("_attn_implementation", "_attn_implementation_autoset", "torchscript", "tokenizer_class", "problem_type"),
    *("id2label", "label2id", "task_specific_params", "chunk_size_feed_forward", "transformers.js_config"),
    *("unsloth_fixed", "unsloth_version", "pretraining_tp"),  # of which the last orders sums
    *("is_llama_config", "neftune_noise_alpha", "_flash_attn_2_enabled", "max_sequence_length", "sep_token_id"),
    *("finetuning_task", "prefix", "tf_legacy_loss", "use_bfloat16", "is_decoder", "decoder_start_token_id"),
    # Generation settings, which transformers 4 wrote into config.json.
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty"),
    *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores", "suppress_tokens"),
    *("return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"),
    *("exponential_decay_length_penalty", "begin_suppress_tokens"),
)
"""Fields that change nothing in the model itself."""


class Fields:
    """The fields of a config.json that are not read yet.

    Args:
      given: all of them.
      path: of the file, for errors.
      ignore: names that `finish` does not refuse; None for all.
    """

    def __init__(self, given: Mapping[str, object], path: object, ignore: Collection[str] | None = ()):
        self._left = {name: value for name, value in given.items() if name not in UNUSED}
        self._given, self._path, self._ignore = given, path, ignore

    def error(self, problem: str) -> FolderError:
        # A problem that DecoderConfig has may name a number of thousands of digits, or windows of as many layers.
        return FolderError(f"{self._path}: {problem if len(problem) <= 500 else problem[:499] + '…'}")

    def take(self, *names: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """The field with the first of several names that is there, and not null unless that is the default.

        Raises:
          FolderError: it is missing and has no default, or is of another type.
        """
        found = [(name, self._left.pop(name)) for name in names if name in self._left]
        found = [(name, value) for name, value in found if value is not None]
        if not found:
            if default is ...:
                raise self.error(f"{names[0]} is missing")
            return default
        name, value = found[0]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            raise self.error(f"{name} is {shown(value)}: it must be of type {' or '.join(k.__name__ for k in kinds)}")
        return value

    def expect(self, name: str, *values: object) -> None:
        """Reads a field of which the decoder knows one value: the first of `values`, which it has where it is missing.

        Raises:
          FolderError: it has another value.
        """
        if (value := self._left.pop(name, values[0])) not in values:
            raise self.error(f"{name} is {shown(value)}, and te_jax.models knows {values[0]!r} alone")

    def look(self, name: str) -> Any:
        """A field that others depend on, read or not."""
        return self._given.get(name)

    def part(self, **given: Any) -> Fields:
        """Fields of their own, beside the length of positions."""
        return Fields(
            {"max_position_embeddings": self.look("max_position_embeddings")} | given, self._path, self._ignore
        )

    def nested(self, given: Mapping[str, object], where: str) -> Fields:
        """Those of a field that has fields, of which errors say where they are."""
        return Fields(given, f"{self._path}, {where}", self._ignore)

    def finish(self) -> None:
        """Refuses what nobody read, which may change the model. Null and false say that a feature is absent.

        Raises:
          FolderError: there is something, by its name.
        """
        if self._ignore is None:
            return
        left = {name for name, value in self._left.items() if not (value is None or value is False)}
        if unknown := left.difference(self._ignore):
            raise self.error(
                f"{quoted(*unknown)} {'is' if len(unknown) == 1 else 'are'} unknown to te_jax.models and may change "
                "the model: name those that do not in ignore of from_hf, or remove them from a copy of the file"
            )
