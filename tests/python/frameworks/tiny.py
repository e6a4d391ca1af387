"""Tiny models of Transformers, made from configurations, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

VOCABULARY = 64
LENGTH = 8


def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, **_TEXT
        )
    )


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=LENGTH,
            **_TEXT,
        )
    )


def bert() -> nn.Module:
    return hf.BertForMaskedLM(
        hf.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=LENGTH,
            **_DROPOUT,
        )
    )


def t5() -> nn.Module:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def vit() -> nn.Module:
    return hf.ViTForImageClassification(
        hf.ViTConfig(
            image_size=16,
            patch_size=8,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            num_labels=5,
            **_DROPOUT,
        )
    )


#: Dropout would make results depend on the order in which ranks draw random numbers.
_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_TEXT: dict[str, Any] = {
    "attention_dropout": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}

MODELS: dict[str, Callable[[], nn.Module]] = {
    each.__name__: each for each in (gpt2, llama, bert, t5, vit)
}


def tokenizer() -> Any:
    """A tokenizer whose words are numbers: each is its own id."""
    words = ["<end>", "<pad>", *map(str, range(2, VOCABULARY))]
    known = dict(zip(words, range(VOCABULARY), strict=True))
    made = Tokenizer(models.WordLevel(known, unk_token="<end>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<end>", pad_token="<pad>", unk_token="<end>"
    )


def build(name: str) -> nn.Module:
    """A model with the same initial values in every process."""
    torch.manual_seed(0)
    return MODELS[name]()


def examples(name: str, count: int) -> list[dict[str, Tensor]]:
    """Examples of a data set, the same in every process."""
    generator = torch.Generator().manual_seed(7)

    def tokens() -> Tensor:
        return torch.randint(2, VOCABULARY, (LENGTH,), generator=generator)

    def example() -> dict[str, Tensor]:
        if name == "vit":
            pixels = torch.randn(3, 16, 16, generator=generator)
            return {"pixel_values": pixels, "labels": pixels.sum().long().remainder(5)}
        inputs = tokens()
        return {"input_ids": inputs, "labels": inputs.flip(0) if name == "t5" else inputs.clone()}

    return [example() for _ in range(count)]
