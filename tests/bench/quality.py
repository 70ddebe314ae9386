"""What a dtype or int8 costs in quality: `python -m tests.bench.quality MODEL`.

The model reads a fixed text and is compared, position by position, with itself in float32: perplexity, the mean
Kullback-Leibler divergence of the next-token distributions in nats, and how often the most likely token agrees.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from openengine.core.loader import load_model, open_checkpoint
from openengine.ops.attention import select_backend
from openengine.ops.batch import ForwardBatch
from openengine.ops.kv_cache import KvSpec

__all__ = ["VARIANTS", "Quality", "compare", "log_probs"]

TEXT = Path(__file__).with_name("quality.txt")
VARIANTS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int8, float32 activations": (torch.float32, "int8"),
    "int8, bfloat16 activations": (torch.bfloat16, "int8"),
}


class Quality(NamedTuple):
    perplexity: float
    divergence: float
    agreement: float


@torch.inference_mode()
def log_probs(path: str, ids: Tensor, *, dtype: torch.dtype, quantization: str | None, kernels: str = "auto") -> Tensor:
    """The model's log-probabilities after each of `ids` i64[T], float32 [T, V]."""
    cpu = torch.device("cpu")
    checkpoint = open_checkpoint(path)
    backend = select_backend(cpu, dtype, kernels, head_dim=checkpoint.config.head_dim)
    model = load_model(checkpoint, dtype=dtype, device=cpu, backend=backend, quantization=quantization, kernels=kernels)
    config, size, count = model.config, backend.block_size, len(ids)
    spec = KvSpec(config.num_layers, config.num_kv_heads, config.head_dim, dtype, cpu)
    num_blocks = -(-count // size)
    positions = torch.arange(count)
    batch = ForwardBatch(
        input_ids=ids,
        positions=positions,
        slot_mapping=positions,
        cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
        query_lens=[count],
        context_lens=[count],
        num_decodes=0,
        logits_rows=positions,
        kv=backend.allocate(spec, num_blocks, size),
    )
    backend.prepare(batch, windows=model.windows)
    return model.logits(model.forward(batch)).log_softmax(dim=1)


def compare(actual: Tensor, reference: Tensor, ids: Tensor) -> Quality:
    """Both [T, V] as `log_probs` gives them for `ids` i64[T]."""
    scores = actual[:-1].gather(1, ids[1:, None])
    divergence = torch.nn.functional.kl_div(actual, reference, log_target=True, reduction="batchmean")
    agreement = (actual.argmax(dim=1) == reference.argmax(dim=1)).float().mean()
    return Quality((-scores.mean()).exp().item(), divergence.item(), agreement.item())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.quality", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--max-tokens", type=int, default=1024)
    args = parser.parse_args(argv)
    tokenizer = open_checkpoint(args.model).load_tokenizer()
    ids = torch.tensor(tokenizer.encode(TEXT.read_text("utf-8"))[: args.max_tokens])
    reference = None
    print(f"{args.model}, {len(ids)} tokens")
    print(f"{'':28}{'perplexity':>12}{'mean KL':>12}{'same most likely token':>24}")
    for name, (dtype, quantization) in VARIANTS.items():
        actual = log_probs(args.model, ids, dtype=dtype, quantization=quantization, kernels=args.kernels)
        reference = actual if reference is None else reference
        quality = compare(actual, reference, ids)
        print(f"{name:28}{quality.perplexity:12.3f}{quality.divergence:12.5f}{quality.agreement:24.1%}", flush=True)


if __name__ == "__main__":
    main()
