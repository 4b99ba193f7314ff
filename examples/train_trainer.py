"""A small language model in transformers' Trainer. Run it again to go on."""

import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers import default_data_collator as collate
from transformers.trainer_utils import get_last_checkpoint

from lather.integrations.transformers import Callback, OptimizerFactory

FOLDER = "run-trainer"

torch.manual_seed(0)
sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 4}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))

# Each text counts up in steps of its own: 5, 8, 11, 14, ...
starts, strides = torch.randint(64, (512, 1)), torch.randint(1, 8, (512, 1))
texts = (starts + strides * torch.arange(32)) % 64
data = [{"input_ids": text, "labels": text} for text in texts]

arguments = TrainingArguments(
    FOLDER,
    max_steps=60,
    save_steps=20,
    logging_steps=10,
    per_device_train_batch_size=16,
    use_cpu=not torch.cuda.is_available(),
    report_to="none",
)
# In place of AdamW. The learning rate is set here, not in TrainingArguments.
options = {"preset": "from_adamw", "lr": 4e-3, "weight_decay": 0.1}
trainer = Trainer(
    model,
    arguments,
    train_dataset=data,
    data_collator=collate,
    optimizer_cls_and_kwargs=(OptimizerFactory, options),
    callbacks=[Callback()],  # with several processes, saves the state of all of them
)

last = get_last_checkpoint(FOLDER) if os.path.isdir(FOLDER) else None
print(f"resuming from {last}" if last else "starting anew")
trainer.train(resume_from_checkpoint=last)
