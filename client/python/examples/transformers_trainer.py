"""Trains a small GPT-2 with the Trainer of Transformers and ZeroShard.

    python transformers_trainer.py
    torchrun --nproc-per-node 2 transformers_trainer.py

The marked lines are all that differs from the program without ZeroShard.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, TrainingArguments

from zeroshard.integrations.transformers import Trainer  # instead of transformers


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default=tempfile.gettempdir() + "/zeroshard-trainer")
    output = parser.parse_args().output
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    # Sequences that count upwards, from random numbers.
    texts = (torch.randint(32, (544, 1)) + torch.arange(16)) % 32
    examples = [{"input_ids": text, "labels": text} for text in texts]
    trainer = Trainer(
        level="p_g_os",  # this argument
        sharding_options={"segment_size": 2**10},  # the model is smaller than the default
        model=model,
        args=TrainingArguments(
            output,
            use_cpu=True,
            per_device_train_batch_size=16,
            num_train_epochs=4,
            learning_rate=3e-3,
            logging_steps=16,
            eval_strategy="epoch",
            save_strategy="epoch",
            report_to=[],
        ),
        train_dataset=examples[:512],
        eval_dataset=examples[512:],
    )
    trainer.train()
    trainer.save_model()
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        saved = AutoModelForCausalLM.from_pretrained(output)
        text = saved.generate(texts[:1, :4], max_new_tokens=8, do_sample=False, pad_token_id=0)
        print(f"evaluated {loss:.4f}   the saved model writes", *text[0].tolist())


if __name__ == "__main__":
    main()
