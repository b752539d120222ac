"""Random training runs of a small Llama over random plans with tensor-parallel replicas."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from cases import make_case, with_offload
from plans import with_bounds, with_replicas
from tiny import Case, with_groups
from torch import Tensor, nn

from zorselike.models.llama import Llama, LlamaConfig

VOCABULARY = 23


@dataclass(frozen=True)
class ReplicaCase(Case):
    """A run whose layers replicas can cut, in ragged pieces: of 6 heads of keys and values, and 13 in the
    feed-forward network."""

    def model(self) -> nn.Module:
        config = LlamaConfig(
            dim=24,
            num_layers=self.num_layers,
            num_heads=12,
            num_kv_heads=6,
            ffn_hidden=13,
            vocab_size=VOCABULARY,
            max_seq_len=32,
            tie_embeddings=self.tied,
        )
        with torch.device("meta"):
            model = Llama(config).double()
        for name, parameter in model.named_parameters():
            if name.startswith(self.frozen or ("-",)):
                parameter.requires_grad_(False)
        return model

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        assert self.plan.sequence_length is not None
        shape = (self.plan.global_batch, self.plan.sequence_length)
        inputs = torch.randint(VOCABULARY, shape, generator=generator)
        targets = torch.randint(VOCABULARY, shape, generator=generator)
        ignored = torch.rand(shape, generator=generator) < 0.2
        ignored[0, 0] = False
        return inputs, targets.masked_fill(ignored, -100)


def make_replica_case(seed: int, *, max_ranks: int = 8) -> ReplicaCase:
    """A random plan with a replica at least; some offload, and in some a part of the attention is frozen."""
    rng = random.Random(f"replicas {seed}")
    while True:
        case = make_case(rng.randrange(1 << 30), max_ranks=max_ranks, max_ministages=6)
        plan = with_replicas(case.plan, rng)
        if plan.bounds_in_flight:  # Of what these were found for, replicas have made something else.
            plan = with_bounds(with_groups(plan, lambda group: replace(group, max_in_flight=None)), rng)
        if plan.has_replicas:
            break
    frozen = rng.choice(((), (), (), ("tok_embeddings", "layers.0."), ("layers.0.attention.wq", "norm")))
    made = ReplicaCase(plan, case.num_layers, seed, case.tied, case.max_norm, case.evaluate_before, frozen)
    made = replace(made, num_steps=5)
    return with_offload(made, rng) if rng.random() < 0.4 else made  # type: ignore[return-value]
