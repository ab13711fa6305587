"""A small language, and a tiny Llama that has learnt to write it.

Words come in groups. The words two and three places before a word say of which group it is, and the word LAG
places before says which of that group. So who predicts it must look back to three places and know exactly
where they are: one place aside is as good as a guess.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import transformers

VOCAB_SIZE = 32
EOS = VOCAB_SIZE - 1
NUM_GROUPS, GROUP_SIZE = 4, 6
NUM_WORDS = NUM_GROUPS * GROUP_SIZE  # tokens of the vocabulary that the language has
LAG = 5
LENGTH = 40  # of all texts: a model this small knows no others
NUM_STEPS = 250


def write(count, *, length=LENGTH, seed=0):
    """Texts of the language, [count, length], that begin with LAG random words."""
    rules = torch.Generator().manual_seed(7)
    token_ids = torch.randperm(EOS, generator=rules)[:NUM_WORDS].sort().values
    side = torch.randperm(NUM_WORDS, generator=rules) % 2
    rank_after = torch.randperm(NUM_WORDS, generator=rules) % GROUP_SIZE
    words = torch.randint(NUM_WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    for place in range(LAG, LENGTH):
        group = 2 * side[words[:, place - 2]] + side[words[:, place - 3]]
        words[:, place] = group * GROUP_SIZE + rank_after[words[:, place - LAG]]
    return token_ids[words[:, :length]]


def walk(count, *, length=LENGTH, seed=0):
    """Texts of a simpler language, [count, length]: each word determines the next one, and so all that follow."""
    after = torch.randperm(NUM_WORDS, generator=torch.Generator().manual_seed(8))
    words = torch.randint(NUM_WORDS, (count, length), generator=torch.Generator().manual_seed(seed))
    for place in range(1, length):
        words[:, place] = after[words[:, place - 1]]
    return words


def train_target(folder, language=write):
    """Train the Llama on what `language` writes and save it; some seconds."""
    config = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.05,
        eos_token_id=EOS,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms that do more than scale, as those of real models do
                parameter.data *= (0.5 * torch.randn_like(parameter)).exp()
        # states before the last one are unlike those after it, however simple the language
        model.model.norm.weight.data *= torch.randn_like(model.model.norm.weight).sign()
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-3, total_steps=NUM_STEPS, pct_start=0.1)
    for step in range(NUM_STEPS):
        texts = language(24, seed=1000 + step)
        logits = model(input_ids=texts).logits[:, :-1]
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
