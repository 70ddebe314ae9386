"""What a sentence-transformers directory says beside the model: how it embeds, or how it scores pairs.

    modules.json                         the chain:  Transformer ─ Pooling ─ Dense … ─ Normalize    EmbeddingSpec
                                                     Transformer ─ SpladePooling                    EmbeddingSpec, sparse
                                                     Transformer [─ LogitScore]                     ScoreSpec
    <module>/config.json                 each module's settings; Dense has weights too
    sentence_bert_config.json            lengths, lower-casing, chat templates
    config_sentence_transformers.json    prompts, similarity, activation of scores

Owns reading and checking these files. A module, mode or setting that changes what is computed is described here exactly or
refused, none is skipped. The layouts are those that sentence-transformers 2 to 6 write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openengine.core.json_settings import JsonSettings
from openengine.core.module_chain import read_module_chain
from openengine.core.safetensors_reader import SafetensorsFile
from openengine.core.task_specs import DENSE_ACTIVATIONS, DenseSpec, EmbeddingSpec, ScoreSpec, SparseSpec
from openengine.core.tokenizer_files import is_present
from openengine.errors import InvalidArgument, UnsupportedFeature

__all__ = ["plain_embedding_spec", "plain_score_spec", "read_sentence_transformers"]

_SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
# The modules that the names of activations are in.
_TORCH_MODULES = ("torch.nn", "torch.nn.modules.activation", "torch.nn.modules.linear")


def plain_embedding_spec(
    *, hidden_size: int, vocab_size: int, is_decoder: bool, is_sparse: bool = False
) -> EmbeddingSpec:
    """For a model without these files: the mean of an encoder's tokens, a decoder's last token; nothing is normalized.

    A masked language model (`is_sparse`) gives the weights of SPLADE.
    """
    if is_sparse:
        return EmbeddingSpec(pooling=(), dimension=vocab_size, sparse=SparseSpec())
    return EmbeddingSpec(pooling=("last",) if is_decoder else ("mean",), dimension=hidden_size)


def plain_score_spec(hf_config: Mapping[str, Any]) -> ScoreSpec:
    """For a model with a classification head and without modules.json: cross-encoders keep their activation in config.json.

    Raises: UnsupportedFeature for an activation that is not implemented.
    """
    nested = hf_config.get("sentence_transformers")
    path = nested.get("activation_fn") if isinstance(nested, Mapping) else None
    path = hf_config.get("sbert_ce_default_activation_function") if path is None else path
    return ScoreSpec(activation=_score_activation(path, "config.json"))


def read_sentence_transformers(
    directory: Path, *, hidden_size: int, vocab_size: int
) -> EmbeddingSpec | ScoreSpec | None:
    """What the directory's files say; None without modules.json. Sizes are those of the model.

    Raises: InvalidArgument naming the file that is damaged or contradicts the model; UnsupportedFeature naming the module
    or setting that is not implemented.
    """
    if not is_present(directory / "modules.json"):
        return None
    modules = read_module_chain(directory)
    chain = [kind for kind, _ in modules]
    transformer = _transformer(directory, is_masked_lm=chain[0] == "MLMTransformer")
    folders = [folder for _, folder in modules]
    match chain[1:]:
        case []:
            return _score_spec(directory, transformer, None)
        case ["LogitScore"]:
            return _score_spec(directory, transformer, folders[1])
        case ["SpladePooling"]:
            return _sparse_spec(directory, transformer, folders[1], vocab_size)
        case ["Pooling", *_]:
            return _embedding_spec(directory, transformer, modules[1:], hidden_size)
    raise UnsupportedFeature(f"{directory / 'modules.json'}: the chain {' - '.join(chain)} is not implemented")


# ---- the transformer -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Transformer:
    """What the files of the first module and of the whole say."""

    task: str
    max_length: int | None
    lower_case: bool
    uses_chat_template: bool
    is_structured: bool
    template_options: Mapping[str, Any]
    prompts: dict[str, str]
    default_prompt: str | None
    main: JsonSettings  # config_sentence_transformers.json


_TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# What a transformer of each task gives: the model's output, and the library's name for it.
_TASKS = {
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
    "fill-mask": ("logits", "token_embeddings"),
    "sequence-classification": ("logits", "scores"),
    "text-generation": ("logits", "causal_logits"),
}
_REMARKS = ("__version__", "requirements")  # the packages that the model was made with, and that the library wants
# Arguments that say how the model is held and run, not what it computes.
_NEUTRAL_ARGUMENTS = frozenset(
    {
        "add_pooling_layer",
        "attn_implementation",
        "device_map",
        "dtype",
        "low_cpu_mem_usage",
        "padding_side",
        "torch_dtype",
        "trust_remote_code",
        "unpad_inputs",
        "use_fast",
        "use_memory_efficient_attention",
        "use_safetensors",
    }
)
# Of a chat template's settings, those that concern tokens and not the text.
_NOT_RENDERED = frozenset({"max_length", "padding", "restore_suffix", "return_tensors", "truncation"})


def _transformer(directory: Path, *, is_masked_lm: bool) -> _Transformer:
    name = next((name for name in _TRANSFORMER_FILES if is_present(directory / name)), _TRANSFORMER_FILES[0])
    settings = JsonSettings.read(directory / name, required=False)
    main = JsonSettings.read(directory / "config_sentence_transformers.json", required=False)
    for key in _REMARKS:
        main.take(key)
    usual = "sequence-classification" if main.text("model_type") == "CrossEncoder" else "feature-extraction"
    task = settings.choice("transformer_task", tuple(_TASKS), "fill-mask" if is_masked_lm else usual)
    max_length = settings.num_tokens("max_seq_length")
    lower_case = settings.flag("do_lower_case", False)
    settings.flag("unpad_inputs", None)
    for key in ("query_length", "document_length", "query_expansion", "tokenizer_name_or_path"):
        settings.refuse(key)
    arguments = [settings.mapping(f"{what}_{suffix}") for what in ("model", "config") for suffix in ("args", "kwargs")]
    arguments += (tokenizer_arguments := [settings.mapping("tokenizer_args"), settings.mapping("processor_kwargs")])
    for values in tokenizer_arguments:
        given = values.num_tokens("model_max_length")
        max_length = max_length or given
    for values in arguments:
        values.refuse_others(but=_NEUTRAL_ARGUMENTS)
    message_format = _message_format(settings, task)
    processing = settings.mapping("processing_kwargs")
    text, template = processing.mapping("text"), processing.mapping("chat_template")
    max_length = text.num_tokens("max_length") or max_length
    for values in (text, processing.mapping("common")):
        values.refuse_others(but=_NOT_RENDERED | {"logits_to_keep"})
    processing.refuse_others()
    settings.refuse_others()
    prompts = {key: _prompt(main, key, value) for key, value in main.mapping("prompts").values.items()}
    default_prompt = main.text("default_prompt_name")
    if default_prompt is not None and default_prompt not in prompts:
        raise main.error(f"default_prompt_name is {default_prompt!r}, and prompts has {', '.join(prompts) or 'none'}")
    tokenizer_length = JsonSettings.read(directory / "tokenizer_config.json", required=False).num_tokens(
        "model_max_length"
    )
    return _Transformer(
        task=task,
        max_length=max_length or tokenizer_length,
        lower_case=lower_case,
        uses_chat_template=message_format is not None,
        is_structured=message_format == "structured",
        template_options={key: value for key, value in template.values.items() if key not in _NOT_RENDERED},
        prompts=prompts,
        default_prompt=default_prompt,
        main=main,
    )


def _prompt(main: JsonSettings, key: str, value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise main.error(f"prompt {key!r} is {value!r:.80}, expected a text")
    return value or ""


def _message_format(settings: JsonSettings, task: str) -> str | None:
    """How messages are written where the model reads them, else None. Refuses outputs of the model that are not used here."""
    output, name = _TASKS[task]
    settings.choice("module_output_name", (name,), name)
    modalities, message_format = settings.mapping("modality_config"), None
    known = [key for key in ("text", "message") if modalities.values.get(key) is not None]
    for key in known:
        modality = modalities.mapping(key)
        modality.choice("method", ("forward",), "forward")
        modality.choice("method_output_name", (output,), output)
        if key == "message":
            message_format = modality.choice("format", ("flat", "structured"), "flat")
        modality.refuse_others()
    modalities.refuse_others()
    if modalities.values and not known:
        raise settings.error("modality_config names no modality; give 'text' or 'message'")
    return message_format


# ---- pairs ---------------------------------------------------------------------------------------


def _score_spec(directory: Path, transformer: _Transformer, folder: Path | None) -> ScoreSpec:
    wanted = "sequence-classification" if folder is None else "text-generation"
    if transformer.task != wanted:
        raise UnsupportedFeature(
            f"{directory / 'modules.json'}: a transformer for {transformer.task} needs a Pooling module after it"
        )
    label_ids = () if folder is None else _logit_score(folder)
    if label_ids and not transformer.uses_chat_template:
        raise UnsupportedFeature(
            f"{directory}: LogitScore without a chat template for the pair is not implemented; give score_template=..."
        )
    main = transformer.main
    main.choice("model_type", ("CrossEncoder",), "CrossEncoder")
    main.refuse("keep_in_fp32_modules", neutral=[])
    activation = _score_activation(main.text("activation_fn"), main.path.name)
    main.refuse_others()
    return ScoreSpec(
        label_ids=label_ids,
        activation=activation,
        uses_chat_template=transformer.uses_chat_template,
        is_structured=transformer.is_structured,
        template_options=transformer.template_options,
        max_length=transformer.max_length,
        lower_case=transformer.lower_case,
        prompts=transformer.prompts,
        default_prompt=transformer.default_prompt,
    )


def _logit_score(folder: Path) -> tuple[int, ...]:
    settings = JsonSettings.read(folder / "config.json")
    true_id, false_id = settings.count("true_token_id", low=0), settings.count("false_token_id", low=0)
    if true_id is None:
        raise settings.error("true_token_id is missing")
    settings.choice("module_input_name", ("causal_logits",), "causal_logits")
    settings.refuse_others()
    return (true_id,) if false_id is None else (true_id, false_id)


def _score_activation(path: object, where: str) -> str | None:
    """`path` is the full name of a class of torch.nn."""
    if path is None:
        return None
    name = _torch_name(path)
    if name not in ("Identity", "Sigmoid"):
        raise UnsupportedFeature(
            f"{where}: the activation {path!r:.120} of scores is not implemented; Identity and Sigmoid of torch.nn are"
        )
    return name.lower()


def _torch_name(path: object) -> str | None:
    """The name of the class of torch.nn that `path` leads to; None where it leads elsewhere."""
    module, _, name = path.rpartition(".") if isinstance(path, str) else ("", "", "")
    return name if module in _TORCH_MODULES else None


# ---- embeddings ----------------------------------------------------------------------------------

# The boolean layout's keys in the order in which the modes stand side by side.
_MODE_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
_MODES = {
    **{mode: mode for mode in ("cls", "max", "mean", "weightedmean")},
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "lasttoken": "last",
}


def _embedding_spec(
    directory: Path, transformer: _Transformer, modules: Sequence[tuple[str, Path]], hidden_size: int
) -> EmbeddingSpec:
    if transformer.task != "feature-extraction":
        raise UnsupportedFeature(f"{directory / 'modules.json'}: Pooling after a transformer for {transformer.task}")
    if transformer.uses_chat_template:
        raise UnsupportedFeature(f"{directory}: embedding through a chat template ('message') is not implemented")
    pooling, include_prompt = _pooling(modules[0][1], hidden_size)
    size, dense, normalize = hidden_size * len(pooling), [], False
    for kind, folder in modules[1:]:
        if kind == "Normalize":
            settings = JsonSettings.read(folder / "config.json", required=False)
            _check_in_place(settings)
            normalize = True
        elif kind == "Dense" and not normalize:
            dense.append(_dense(folder, size))
            size = dense[-1].weight.shape[0]
        else:
            raise UnsupportedFeature(f"{directory / 'modules.json'}: {kind} after {modules[0][0]} and Normalize")
    main = transformer.main
    main.choice("model_type", ("SentenceTransformer",), "SentenceTransformer")
    similarity = main.choice("similarity_fn_name", _SIMILARITIES, "cosine")
    truncate_dim = main.count("truncate_dim")
    main.refuse_others()
    if truncate_dim is not None and truncate_dim > size:
        raise main.error(f"truncate_dim is {truncate_dim}, and the model has {size} dimensions")
    return EmbeddingSpec(
        pooling=pooling,
        dimension=size,
        include_prompt=include_prompt,
        dense=tuple(dense),
        normalize=normalize,
        max_length=transformer.max_length,
        lower_case=transformer.lower_case,
        prompts=transformer.prompts,
        default_prompt=transformer.default_prompt,
        similarity=similarity,
        truncate_dim=truncate_dim,
    )


def _pooling(folder: Path, hidden_size: int) -> tuple[tuple[str, ...], bool]:
    settings = JsonSettings.read(folder / "config.json")
    sizes = [settings.count(key) for key in ("embedding_dimension", "word_embedding_dimension")]
    for size in sizes:
        if size is not None and size != hidden_size:
            raise settings.error(f"the dimension of tokens is {size}, and the model's is {hidden_size}")
    include_prompt = settings.flag("include_prompt", True)
    flags = {mode: settings.flag(key, None) for key, mode in _MODE_KEYS.items()}
    by_flags = tuple(mode for mode, is_on in flags.items() if is_on)
    named = settings.take("pooling_mode")
    settings.refuse_others()
    if named is None:
        if not by_flags:
            raise settings.error("no pooling mode is on")
        return by_flags, include_prompt
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list) or not names:
        raise settings.error(f"pooling_mode is {named!r:.80}, expected a name or a list of names")
    unknown = [name for name in names if not isinstance(name, str) or name not in _MODES]
    if unknown:
        raise settings.error(f"pooling_mode {unknown[0]!r:.80} is not known; known are {', '.join(_MODES)}")
    modes = tuple(_MODES[name] for name in names)
    if by_flags and set(by_flags) != set(modes):
        raise settings.error(f"pooling_mode is {named!r}, and the flags beside it say {', '.join(by_flags)}")
    return modes, include_prompt


def _dense(folder: Path, in_features: int) -> DenseSpec:
    settings = JsonSettings.read(folder / "config.json")
    path = settings.text("activation_function")
    activation = "Tanh" if path is None else _torch_name(path)
    if activation not in DENSE_ACTIVATIONS:
        raise UnsupportedFeature(
            f"{settings.path}: the activation {path:.120} is not implemented; implemented are those of torch.nn: "
            f"{', '.join(DENSE_ACTIVATIONS)}"
        )
    width, out_features = settings.count("in_features"), settings.count("out_features")
    has_bias = settings.flag("bias", True)
    settings.refuse("use_residual", neutral=False)
    _check_in_place(settings)
    if width != in_features or out_features is None:
        raise settings.error(f"in_features {width} and out_features {out_features} do not follow {in_features} values")
    shapes = {"linear.weight": (out_features, in_features), **({"linear.bias": (out_features,)} if has_bias else {})}
    tensors = _read_tensors(folder, shapes)
    return DenseSpec(tensors["linear.weight"], tensors.get("linear.bias"), activation)


def _check_in_place(settings: JsonSettings) -> None:
    """Modules may read and write other values than the pooled vector; these do not."""
    for key in ("module_input_name", "module_output_name"):
        settings.choice(key, ("sentence_embedding",), "sentence_embedding")
    settings.refuse_others()


def _read_tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    path = folder / "model.safetensors"
    if not is_present(path) and is_present(folder / "pytorch_model.bin"):
        raise UnsupportedFeature(
            f"{folder} has its weights as pytorch_model.bin, and only safetensors are read; load the model with "
            "sentence-transformers once and save it again"
        )
    with SafetensorsFile(path) as file:
        found = {name: tensor.shape for name, tensor in file.tensors.items()}
        if found != dict(shapes):
            raise InvalidArgument(f"{path} holds {found}, expected {dict(shapes)}")
        tensors = {name: torch.empty(shape, dtype=torch.float32) for name, shape in shapes.items()}
        for name, tensor in tensors.items():
            file.tensors[name].copy_to(tensor)
    return tensors


def _sparse_spec(directory: Path, transformer: _Transformer, folder: Path, vocab_size: int) -> EmbeddingSpec:
    if transformer.task != "fill-mask":
        raise UnsupportedFeature(
            f"{directory / 'modules.json'}: SpladePooling after a transformer for {transformer.task}"
        )
    settings = JsonSettings.read(folder / "config.json")
    strategy = settings.choice("pooling_strategy", ("max", "sum"), "max")
    activation = settings.choice("activation_function", ("relu", "log1p_relu"), "relu")
    for key in ("embedding_dimension", "word_embedding_dimension"):
        size = settings.count(key)
        if size is not None and size != vocab_size:
            raise settings.error(f"{key} is {size}, and the model's vocabulary has {vocab_size} entries")
    settings.count("chunk_size")
    settings.refuse_others()
    main = transformer.main
    main.choice("model_type", ("SparseEncoder",), "SparseEncoder")
    similarity = main.choice("similarity_fn_name", _SIMILARITIES, "dot")
    main.refuse_others()
    return EmbeddingSpec(
        pooling=(),
        dimension=vocab_size,
        sparse=SparseSpec(is_sum=strategy == "sum", saturates_twice=activation == "log1p_relu"),
        max_length=transformer.max_length,
        lower_case=transformer.lower_case,
        prompts=transformer.prompts,
        default_prompt=transformer.default_prompt,
        similarity=similarity,
    )
