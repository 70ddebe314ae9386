"""From a loaded model to the parts that an engine runs and asks: the loop and what it drives, limits, the preparers of
requests, the tokenizer's service.

An encoder has whole items and no KV cache, a decoder sequences over one; who drives either does not see which it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from openengine.core.admission import Limits, RequestPreparer, sampling_defaults
from openengine.core.blocks import BlockManager
from openengine.core.cache_key_service import CacheKeyService
from openengine.core.cache_keys import root_key
from openengine.core.config import EngineConfig
from openengine.core.encoder_runner import EncoderRunner
from openengine.core.encoder_scheduler import EncoderScheduler
from openengine.core.events import EventLog
from openengine.core.guides.compiler import GuideCompiler, NoGuides, guide_compiler
from openengine.core.loop import EngineLoop
from openengine.core.output_processor import OutputProcessor
from openengine.core.pooler import Pooler
from openengine.core.reports import Reports
from openengine.core.runner import ModelRunner
from openengine.core.runtime_events import RuntimeEventBus
from openengine.core.scheduler import Scheduler
from openengine.core.score_template import JOINED, find_score_template, yes_no_ids
from openengine.core.task_admission import TaskLimits, TaskPreparer
from openengine.core.task_capabilities import NoGeneration
from openengine.core.task_kinds import TaskKind
from openengine.core.task_output import ScoreHead
from openengine.core.task_tokens import TaskTokenizer
from openengine.core.tokenizer_service import TokenizerService
from openengine.errors import InvalidArgument
from openengine.loading import LoadedModel

__all__ = [
    "Machinery",
    "assemble",
    "engine_loop",
    "generation_parts",
    "limits_of",
    "task_preparer",
    "tokenizer_service",
]


@dataclass(frozen=True, slots=True)
class Machinery:
    """What the loop runs. `root` is the parent of all cache keys; `has_cache` says whether there are any."""

    scheduler: Scheduler | EncoderScheduler
    runner: ModelRunner | EncoderRunner
    kv_log: EventLog | None
    root: bytes
    has_cache: bool


def assemble(config: EngineConfig, loaded: LoadedModel, guides: GuideCompiler | NoGuides) -> Machinery:
    """Put together what the loop runs, from scratch."""
    profile, pool = loaded.profile, loaded.pool
    num_tokens = config.tokens_per_step(is_encoder=profile.is_encoder)
    pooler = Pooler(loaded.model, profile.embedding)
    root = root_key(loaded.revision, loaded.tokenizer.fingerprint, 1 if pool is None else pool.block_size)
    if pool is None:
        runner = EncoderRunner(loaded.model, loaded.backend, pooler, device=loaded.device)
        return Machinery(EncoderScheduler(max_num_batched_tokens=num_tokens), runner, None, root, False)
    kv_log = EventLog(config.event_buffer_size) if config.enable_prefix_cache and config.event_buffer_size else None
    blocks = BlockManager(
        pool.num_blocks,
        pool.block_size,
        root_key=root,
        enable_prefix_cache=config.enable_prefix_cache,
        record_events=kv_log is not None,
    )
    scheduler = Scheduler(blocks, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=num_tokens)
    runner = ModelRunner(
        loaded.model,
        loaded.backend,
        loaded.spec,
        pool,
        max_num_seqs=config.max_num_seqs,
        guides=guides if isinstance(guides, GuideCompiler) else None,
        pooler=pooler,
    )
    return Machinery(scheduler, runner, kv_log, root, config.enable_prefix_cache)


def engine_loop(config: EngineConfig, loaded: LoadedModel, machinery: Machinery, instance_id: str) -> EngineLoop:
    """The loop that runs `machinery`, not started yet."""
    scheduler = machinery.scheduler
    return EngineLoop(
        scheduler,
        machinery.runner,
        OutputProcessor(scheduler, loaded.tokenizer.token_text),
        Reports(
            scheduler,
            instance_id=instance_id,
            kv_log=machinery.kv_log,
            runtime_events=RuntimeEventBus(instance_id),
        ),
        max_queued_requests=config.max_queued_requests,
        num_threads=config.num_threads,
    )


def limits_of(config: EngineConfig, loaded: LoadedModel) -> Limits:
    """What requests may ask for; without a KV pool there are no blocks.

    A model that generates takes what the pool holds, another one what an item of its tasks may have. Raises InvalidArgument
    where that is too little for any request.
    """
    pool = loaded.pool
    max_model_len = pool.max_model_len if loaded.profile.generates else loaded.max_len
    if loaded.profile.generates and max_model_len < 2:
        raise InvalidArgument(
            f"max_model_len {max_model_len} has no room for a token of the prompt and one of the output; make it 2 at least, "
            "and the KV pool as large"
        )
    return Limits(
        model_names=loaded.names,
        vocab_size=loaded.model.config.vocab_size,
        max_model_len=max_model_len,
        block_size=0 if pool is None else pool.block_size,
        num_kv_blocks=0 if pool is None else pool.num_blocks,
        max_num_sequences=config.max_num_seqs,
        eos_token_ids=frozenset(loaded.eos_token_ids),
    )


def generation_parts(
    config: EngineConfig, loaded: LoadedModel, limits: Limits, *, abilities: str
) -> tuple[RequestPreparer | NoGeneration, GuideCompiler | NoGuides]:
    """What prepares generations and what compiles their guides; both refuse where the model has other `abilities`.

    Raises InvalidArgument for defaults of sampling that no request may have.
    """
    defaults = sampling_defaults(config.default_sampling, loaded.generation_config if config.generation_config else {})
    if not loaded.profile.generates:
        return NoGeneration(abilities, limits.model_names), NoGuides("the model does not generate text")
    guides = guide_compiler(
        loaded.tokenizer,
        limits.vocab_size,
        loaded.eos_token_ids,
        timeout_s=config.guide_timeout_s,
        max_bytes=config.guide_max_bytes,
    )
    preparer = RequestPreparer(
        loaded.tokenizer,
        limits,
        defaults=defaults,
        seed=config.seed,
        guides=guides,
        jump_ahead=config.guide_jump_ahead,
    )
    return preparer, guides


def tokenizer_service(loaded: LoadedModel, machinery: Machinery, limits: Limits) -> TokenizerService:
    """The tokenizer, and the keys of the prefix cache where there is one."""
    vocab_size = loaded.model.config.vocab_size
    cache_keys = None
    if machinery.has_cache:
        cache_keys = CacheKeyService(
            model=loaded.names[0],
            vocab_size=vocab_size,
            block_size=loaded.pool.block_size,
            root_key=machinery.root,
            model_revision=loaded.revision,
            tokenizer_fingerprint=loaded.tokenizer.fingerprint,
        )
    return TokenizerService(
        loaded.tokenizer,
        names=loaded.names,
        vocab_size=vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        cache_keys=cache_keys,
        revision=loaded.revision,
        max_model_len=limits.max_model_len,
    )


def task_preparer(config: EngineConfig, loaded: LoadedModel) -> TaskPreparer:
    """Raises InvalidArgument for a score_template that is malformed."""
    profile, vocab_size = loaded.profile, loaded.model.config.vocab_size
    template, score_head = None, None
    if profile.scores_pairs:
        template = find_score_template(loaded.tokenizer, spec=profile.scoring, score_template=config.score_template)
    if profile.class_head is not None and profile.scoring is not None:
        score_head = ScoreHead.of_classes(profile.class_head, profile.scoring)
    elif template is not None:
        score_head = _score_head(loaded)
    tokenizer = TaskTokenizer(
        loaded.tokenizer,
        max_length=loaded.max_len,
        vocab_size=vocab_size,
        spec=profile.embedding or profile.scoring,
        template=template or (JOINED if profile.generates else None),
        num_token_types=profile.num_token_types,
    )
    pool = loaded.pool
    limits = TaskLimits(loaded.names, vocab_size, loaded.max_len, None if pool is None else pool.num_tokens)
    kept = frozenset() if pool is None else _kept(loaded)
    return TaskPreparer(profile, score_head, tokenizer, limits, kept=kept)


def _score_head(loaded: LoadedModel) -> ScoreHead | None:
    """How the answer to a template becomes a score. None for a tokenizer without the answers: requests then name labels."""
    spec = loaded.profile.scoring
    label_ids = spec.label_ids if spec is not None and spec.label_ids else yes_no_ids(loaded.tokenizer)
    return None if label_ids is None else ScoreHead.of_labels(label_ids, spec)


def _kept(loaded: LoadedModel) -> frozenset[TaskKind]:
    """The kinds of work that need more than an item's last hidden row, of those that the model does."""
    profile, pooler = loaded.profile, Pooler(loaded.model, loaded.profile.embedding)
    if profile.embedding is not None:
        kinds = {TaskKind.EMBED, TaskKind.EMBED_TOKENS}
    elif profile.head_kind == "token_classification":
        kinds = {TaskKind.CLASSIFY_TOKENS}
    elif profile.class_head is not None:
        kinds = {TaskKind.CLASSIFY, TaskKind.SCORE}
    else:
        kinds = {TaskKind.LABELS}
    return frozenset(kind for kind in kinds if pooler.rows(kind) != "last")
