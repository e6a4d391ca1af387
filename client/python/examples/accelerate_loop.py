"""Trains a small GPT-2 with Accelerate and ZeroShard.

    python accelerate_loop.py
    torchrun --nproc-per-node 2 accelerate_loop.py

The first two marked lines are all that differs from the program without ZeroShard.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from zeroshard.integrations.accelerate import Accelerator  # instead of accelerate


def main() -> None:
    accelerator = Accelerator(level="os_g", cpu=True, gradient_accumulation_steps=2)  # level
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    # Sequences that count upwards, from random numbers.
    texts: Any = (torch.randint(32, (512, 1)) + torch.arange(16)) % 32
    loader = DataLoader(texts, batch_size=16, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    for epoch in range(6):
        for tokens in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean").item()
        accelerator.print(f"epoch {epoch}   loss {mean:.4f}")

    # The model of the program, with whole parameters, as save_pretrained and generate need it.
    trained = accelerator.unwrap_model(model)
    if accelerator.is_main_process:
        text = trained.generate(texts[:1, :4], max_new_tokens=8, do_sample=False, pad_token_id=0)
        print(*text[0].tolist())
    accelerator.end_training()


if __name__ == "__main__":
    main()
