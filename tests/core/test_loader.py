"""Opening checkpoints and filling models: what is accepted, what is refused, and what is said about it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from openengine.core.loader import load_model, open_checkpoint
from openengine.core.models import CausalLM
from openengine.errors import InvalidArgument, ModelNotFound, UnsupportedFeature
from openengine.ops.attention import select_backend
from openengine.ops.native import native_library
from tests.checkpoints import BOS, EOS, IM_END, edit_config, write_checkpoint

pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

CPU = torch.device("cpu")
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("sharded"), "llama", max_shard_size="150KB")


@pytest.fixture
def copy(llama, tmp_path) -> Path:
    return shutil.copytree(llama, tmp_path / "model")


def load(path: Path, dtype: torch.dtype = torch.float32, **options) -> CausalLM:
    backend = select_backend(CPU, dtype, "torch")
    return load_model(open_checkpoint(path), dtype=dtype, device=CPU, backend=backend, **options)


def stored(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in safetensors.load_file(file).items()}


def rewrite(path: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> None:
    safetensors.save_file({key: value.contiguous().clone() for key, value in tensors.items()}, path / name)


def weights_of(model: CausalLM) -> dict[str, torch.Tensor]:
    return dict(model.tensors())


# --------------------------------------------------------------------------------------------------------- opening


def test_a_checkpoint_knows_its_tokens_format_and_dtype_without_reading_weights(copy):
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, IM_END], "bos_token_id": BOS}))
    (copy / "model.safetensors").write_bytes(b"")
    checkpoint = open_checkpoint(str(copy))
    assert (checkpoint.format, checkpoint.path, checkpoint.dtype) == ("safetensors", copy, torch.float32)
    assert (checkpoint.eos_token_ids, checkpoint.bos_token_id) == ((EOS, IM_END), BOS)


def test_token_ids_fall_back_to_the_config(copy):
    (copy / "generation_config.json").unlink()
    edit_config(copy, eos_token_id=[7, 8], bos_token_id=None)
    checkpoint = open_checkpoint(copy)
    assert (checkpoint.eos_token_ids, checkpoint.bos_token_id, checkpoint.generation_config) == ((7, 8), None, {})


def test_a_path_that_does_not_exist_is_not_found_and_near_names_are_suggested(copy):
    with pytest.raises(ModelNotFound, match="did you mean .*model"):
        open_checkpoint(copy.parent / "modle")
    with pytest.raises(ModelNotFound, match="no-such-place does not exist either"):
        open_checkpoint("/no-such-place/model")


def test_a_hub_id_without_the_hub_client_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(UnsupportedFeature, match=r"openengine-inference\[hub\]"):
        open_checkpoint("org/name")


def test_a_hub_that_has_no_such_model_or_cannot_be_reached_is_not_found(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def unreachable(*args, **kwargs):
        raise OSError("offline")

    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    with pytest.raises(ModelNotFound, match="org/name.*offline"):
        open_checkpoint("org/name")


@pytest.mark.parametrize(
    ("files", "error", "words"),
    [
        ({}, InvalidArgument, "config.json is missing"),
        ({"a.gguf": b"", "b.gguf": b""}, InvalidArgument, "2 GGUF files"),
        ({"config.json": None}, InvalidArgument, "model.safetensors.*missing"),
        ({"config.json": b"{"}, InvalidArgument, "config.json is not valid JSON"),
        ({"config.json": b"[]"}, InvalidArgument, "expected an object"),
        ({"config.json": None, "pytorch_model.bin": b""}, UnsupportedFeature, "convert them to safetensors"),
        ({"config.json": None, "consolidated.safetensors": b""}, UnsupportedFeature, "consolidated"),
        (
            {"config.json": None, "a.safetensors": b"", "b.safetensors": b""},
            InvalidArgument,
            "no model.safetensors.index",
        ),
        ({"config.json": None, INDEX: b"{}"}, InvalidArgument, "weight_map"),
        ({"config.json": None, INDEX: b'{"weight_map": {"a": "../x.safetensors"}}'}, InvalidArgument, "file name"),
        ({"config.json": None, INDEX: b'{"weight_map": {"a": "x.safetensors"}}'}, InvalidArgument, "not there.*x.safe"),
    ],
)
def test_a_directory_that_is_no_checkpoint_says_what_is_wrong(files, error, words, llama, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_bytes((llama / name).read_bytes() if content is None else content)
    with pytest.raises(error, match=words):
        open_checkpoint(tmp_path)


def test_a_file_that_is_no_model_is_refused(llama):
    with pytest.raises(InvalidArgument, match="is no model"):
        open_checkpoint(llama / "config.json")


def test_the_revision_follows_config_and_weights_and_nothing_else(copy):
    first = open_checkpoint(copy).revision
    (copy / "README.md").write_text("hello")
    assert open_checkpoint(copy).revision == first
    assert first.startswith("sha256:") and len(first) == len("sha256:") + hashlib.sha256().digest_size * 2
    tensors = stored(copy)
    tensors[HEAD][0, 0] += 1
    rewrite(copy, tensors)
    second = open_checkpoint(copy).revision
    edit_config(copy, rms_norm_eps=1e-3)
    assert len({first, second, open_checkpoint(copy).revision}) == 3


# --------------------------------------------------------------------------------------------------------- loading


def test_every_weight_is_filled_with_the_stored_values(llama):
    weights, tensors = weights_of(load(llama)), stored(llama)
    assert {f"model.{name}" if name != HEAD else name for name in weights} == set(tensors)
    for name, tensor in weights.items():
        assert torch.equal(tensor, tensors[f"model.{name}" if name != HEAD else name])


def test_shards_give_the_same_model_as_one_file(llama, sharded):
    assert len(list(sharded.glob("*.safetensors"))) > 2
    one, many = weights_of(load(llama)), weights_of(load(sharded))
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_cast_to_the_dtype_asked_for_and_norms_stay_float32(llama, dtype):
    weights, tensors = weights_of(load(llama, dtype)), stored(llama)
    assert torch.equal(weights["layers.0.mlp.up_proj.weight"], tensors["model.layers.0.mlp.up_proj.weight"].to(dtype))
    assert weights["norm.weight"].dtype == torch.float32


def test_fused_projections_are_one_matrix_in_row_order(llama):
    qkv = load(llama).layers[0].attention.qkv.weight
    tensors = stored(llama)
    parts = [tensors[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(qkv, torch.cat(parts))


@pytest.mark.parametrize("prefix", ["", "language_model.model.", "model.language_model."])
def test_wrappers_prefixes_do_not_matter(copy, prefix):
    expected = weights_of(load(copy))
    rewrite(copy, {name.replace("model.", prefix, 1): tensor for name, tensor in stored(copy).items()})
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights_of(load(copy)).items())


def test_gpt2_loads_without_its_prefix_and_ignores_the_stored_mask(tmp_path):
    path = write_checkpoint(tmp_path, "gpt2", tokenizer=False)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in stored(path).items()}
    mask = {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    rewrite(path, {**tensors, **mask})
    weights = weights_of(load(path))
    assert torch.equal(weights["h.1.mlp.c_fc.weight"], tensors["h.1.mlp.c_fc.weight"])


def test_derived_tensors_are_ignored(copy):
    rewrite(copy, {**stored(copy), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    load(copy)


def test_progress_counts_bytes_to_the_end(llama):
    calls = []
    load(llama, progress=lambda done, total: calls.append((done, total)))
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert calls[-1][0] == calls[-1][1]


def test_missing_unexpected_and_misshapen_tensors_are_all_named(copy):
    tensors = stored(copy)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 64)
    rewrite(copy, tensors)
    with pytest.raises(InvalidArgument) as caught:
        load(copy)
    for words in (
        "missing (1): norm.weight",
        "unexpected (1): layers.0.self_attn.q_proj.bias",
        "layers.1.mlp.up_proj.weight [3, 64], expected [96, 64]",
    ):
        assert words in caught.value.message


def test_a_long_list_of_names_is_cut_and_counted(copy):
    edit_config(copy, num_hidden_layers=4)
    with pytest.raises(InvalidArgument, match=r"missing \(18\): .* and 8 more"):
        load(copy)


def test_a_tensor_stored_in_an_integer_type_is_refused_by_name(copy):
    tensors = stored(copy)
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(torch.int8)
    rewrite(copy, tensors)
    with pytest.raises(UnsupportedFeature, match="up_proj.*I8"):
        load(copy)


def test_two_names_for_one_weight_are_refused(copy):
    tensors = stored(copy)
    rewrite(copy, {**tensors, "norm.weight": tensors["model.norm.weight"]})
    with pytest.raises(InvalidArgument, match="two tensors"):
        load(copy)


def test_more_positions_than_were_learned_are_refused(tmp_path):
    path = write_checkpoint(tmp_path, "gpt2", tokenizer=False)
    with pytest.raises(InvalidArgument, match="257.*256"):
        load(path, max_model_len=257)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: data[:4],
        lambda data: b"",
        lambda data: (1 << 40).to_bytes(8, "little") + data[8:],
        lambda data: data[:8] + b"[" + data[9:],
        lambda data: data.replace(b'"F32"', b'"F16"', 1),
        lambda data: data.replace(b"data_offsets", b"data_offsetz", 1),
    ],
)
def test_a_damaged_safetensors_file_is_named(copy, damage):
    file = copy / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(InvalidArgument, match="model.safetensors is not a valid"):
        load(copy)


# -------------------------------------------------------------------------------------------- which files, which head


def test_c3_consolidated_weights_beside_shards_are_not_read(sharded, tmp_path):
    path = shutil.copytree(sharded, tmp_path / "model")
    (path / "consolidated.safetensors").write_bytes(b"not even a safetensors file")
    (path / "consolidated-00001-of-00002.safetensors").write_bytes(b"")
    assert all("consolidated" not in file.name for file in open_checkpoint(path).files)
    load(path)


def test_c3_the_index_decides_which_shard_a_tensor_comes_from(sharded, tmp_path):
    path = shutil.copytree(sharded, tmp_path / "model")
    index = json.loads((path / INDEX).read_text())
    other = next(
        path / file for file in index["weight_map"].values() if file != index["weight_map"]["model.norm.weight"]
    )
    decoy = {**safetensors.load_file(other), "model.norm.weight": torch.full((64,), 9.0)}
    rewrite(path, decoy, other.name)
    assert not (load(path).norm.weight == 9.0).any()


def test_c3_a_tensor_the_index_names_but_the_shard_lacks_is_an_error(sharded, tmp_path):
    path = shutil.copytree(sharded, tmp_path / "model")
    shard = json.loads((path / INDEX).read_text())["weight_map"]["model.norm.weight"]
    tensors = safetensors.load_file(path / shard)
    del tensors["model.norm.weight"]
    rewrite(path, tensors, shard)
    with pytest.raises(InvalidArgument, match=r"do not hold \(1\): model.norm.weight"):
        load(path)


@pytest.mark.parametrize("flag", [True, False, None])
def test_c1_an_absent_head_is_the_embedding(copy, flag):
    tensors = stored(copy)
    del tensors[HEAD]
    rewrite(copy, tensors)
    edit_config(copy, tie_word_embeddings=flag)
    model = load(copy)
    assert model.embed == model.head.rows  # one memory
    assert torch.equal(model.head.weight, tensors[EMBED])


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_c1_an_equal_head_shares_the_embeddings_memory(copy, flag, dtype):
    tensors = stored(copy)
    tensors[EMBED] = tensors[EMBED].bfloat16()
    rewrite(copy, {**tensors, HEAD: tensors[EMBED].to(dtype)})
    edit_config(copy, tie_word_embeddings=flag)
    model = load(copy)
    assert model.embed == model.head.rows  # one memory


@pytest.mark.parametrize("nested", [False, True])
def test_c1_a_different_head_is_kept_with_a_warning_where_the_flag_says_tied(copy, nested, caplog):
    edit_config(copy, tie_word_embeddings=True)
    if nested:
        config = json.loads((copy / "config.json").read_text())
        outer = {"architectures": config.pop("architectures"), "text_config": config}
        (copy / "config.json").write_text(json.dumps(outer))
    model, tensors = load(copy), stored(copy)
    assert torch.equal(model.head.weight, tensors[HEAD])
    assert torch.equal(model.embed.weight, tensors[EMBED])
    assert "a different head is stored" in caplog.text


def test_c1_a_different_head_is_kept_silently_where_the_flag_says_untied(copy, caplog):
    assert torch.equal(load(copy).head.weight, stored(copy)[HEAD])
    assert not caplog.text


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to reset the peak")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_peaks_near_the_final_size(copy, dtype):
    rows = 1 << 18
    tensors = stored(copy)
    rewrite(copy, {**tensors, EMBED: torch.zeros(rows, 64), HEAD: torch.ones(rows, 64)})  # 64 MiB each
    edit_config(copy, vocab_size=rows)
    del tensors
    load(copy, dtype)
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    model = load(copy, dtype)
    final = model.num_bytes
    # oneDNN's form of a matrix is made beside the plain one; the native form is filled as it is read.
    beside = 0 if native_library() else rows * 64 * dtype.itemsize
    assert memory("VmHWM") - before < final + beside + final // 2  # a second copy would double it


def memory(field: str) -> int:
    """Bytes of this process, by a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


# ------------------------------------------------------------------------------------------------------------ gguf


def test_the_first_part_of_a_split_gguf_stands_for_its_directory(tmp_path):
    for part in (1, 2):
        (tmp_path / f"model-0000{part}-of-00002.gguf").write_bytes(b"GGUF")
    with pytest.raises(InvalidArgument, match="model-00001-of-00002.gguf"):  # found, and then seen to be damaged
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_a_real_gguf_file_loads_whole_and_finite(name, request):
    path = request.getfixturevalue(name)
    checkpoint = open_checkpoint(path)
    assert checkpoint.format == "gguf" and checkpoint.files == (path,) and checkpoint.eos_token_ids
    model = load(path, torch.bfloat16)
    assert model.embed == model.head.rows  # one memory
    assert all(torch.isfinite(tensor).all() for tensor in weights_of(model).values())


def test_the_tokenizer_of_either_format_is_loaded(llama, smollm2):
    assert open_checkpoint(llama).load_tokenizer().encode("hello")
    assert open_checkpoint(smollm2).load_tokenizer().encode("hello")


@pytest.mark.parametrize(
    "changes",
    [{"head_dim": 2**31}, {"num_hidden_layers": 2**31}, {"hidden_size": 10**30}, {"intermediate_size": 2**26}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_config_far_larger_than_its_files_is_refused_before_it_allocates(tmp_path, changes):
    write_checkpoint(tmp_path, "llama")
    edit_config(tmp_path, **changes)
    with pytest.raises(InvalidArgument):
        checkpoint = open_checkpoint(tmp_path)
        load_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"), backend=None)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_what_is_no_regular_file_is_refused_and_never_waited_for(tmp_path, name):
    write_checkpoint(tmp_path, "llama")
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(InvalidArgument, match="regular file|tokenizer"):
        checkpoint = open_checkpoint(tmp_path)
        checkpoint.load_tokenizer()
        with checkpoint.weights():
            pass
