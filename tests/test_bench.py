"""The benchmark measures what it says: its works, its limits, its ratios. No speed is asserted."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from openengine import Engine
from openengine.core.memory import usable_cpus
from tests.bench import embed, processes, profile, quality, workload
from tests.bench.__main__ import WORKS, main
from tests.bench.cost import ModelCost
from tests.bench.growth import Point, with_factors
from tests.bench.guided import GuidedResult, guided_lines
from tests.bench.machine import Machine
from tests.bench.probe import PHASES, model_cost
from tests.bench.processes import PeerFailed, ratios, run_peer
from tests.bench.profile import NativeWatch, profile_steps
from tests.bench.workload import Request
from tests.bench.works import Bench, CannotRun, percentiles
from tests.checkpoints import VOCAB_SIZE, write_checkpoint

_PEER = """import json
print("loading")
print(json.dumps({"engine": "peer", "single": {"s": 2.0, "out_tok_s": 1.0, "in_tok_s": 1.0}}))
print("bye")
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("bench"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def document(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What one quick run of every work, with a peer, writes."""
    folder = tmp_path_factory.mktemp("out")
    (folder / "peer.py").write_text(_PEER)
    command = f"{shlex.quote(sys.executable)} {shlex.quote(str(folder / 'peer.py'))}"
    arguments = ["--quick", "--repeat", "1", "--rate", "500", "--arrivals", "4", "--threads", "1", "--vs", command]
    assert main(["--model", str(checkpoint), "--json", str(folder / "out.json"), *arguments]) == 0
    return json.loads((folder / "out.json").read_text())


# ---- the command ---------------------------------------------------------------------------------


def test_every_work_is_measured_or_says_why_not(document):
    assert set(document["works"]) | set(document["skipped"]) >= set(WORKS)
    assert set(document["skipped"]) <= {"guided", "growth"}


def test_a_figure_stands_beside_its_limit(document):
    for name in workload.BATCH_WORKS:
        result = document["works"][name]
        assert len(result["seconds"]) == 1 and result["median_s"] > 0 and result["limit_s"] > 0
        assert result["fraction"] == pytest.approx(result["limit_s"] / result["median_s"])


def test_the_document_says_what_the_figures_depend_on(document):
    assert document["environment"]["threads"] == 1
    assert document["environment"].keys() >= {"date", "torch", "openengine", "cpu", "load_average"}
    assert document["machine"]["after"]["gemm_rate"] > 0 and document["machine"]["after"]["read_rate"] > 0


def test_growth_measures_concurrency_and_context(document):
    points = document["works"]["growth"]
    assert {point["rows"] for point in points if point["curve"].startswith("rows")} >= {1, 8}
    assert points[0]["curve"] == "rows, context 32"  # of a quick run
    assert all(point["step_s"] > 0 and point["factor"] >= 1 for point in points)


def test_a_variant_is_compared_by_steps_of_all_rows(document):
    for name in ("sampling", "logprobs"):
        result = document["works"][name]
        assert result["num_rows"] == 64 and result["base_step_s"] > 0 and result["variant_step_s"] > 0


def test_loading_is_measured_in_a_fresh_process(document):
    (load,), memory = document["works"]["load"], document["works"]["memory"]
    assert load["total_s"] == pytest.approx(load["import_s"] + load["load_s"])
    assert memory["weight_bytes"] > 0 and memory["kv_bytes"] > 0


def test_a_peer_is_compared_in_the_works_both_ran(document):
    (peer,) = document["peers"].values()
    assert list(peer["ratios"]) == ["single"]
    assert peer["ratios"]["single"] == pytest.approx(2.0 / peer["ours"][0]["single"]["s"])


def test_an_unknown_work_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--works", "sinlge"])
    assert "unknown works sinlge" in capsys.readouterr().err


def test_what_failed_is_told_with_every_reason_and_the_rest_is_kept(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "fails").mkdir()
    monkeypatch.setattr(processes, "_ROOT", tmp_path / "fails")  # where a fresh process finds no benchmark
    monkeypatch.delenv("PYTHONPATH", raising=False)
    peer = f"{shlex.quote(sys.executable)} -c pass"
    arguments = ["--quick", "--repeat", "1", "--works", "single,growth,load,memory", "--vs", peer]
    assert main(["--model", str(checkpoint), "--json", str(tmp_path / "out.json"), *arguments]) == 1
    found = json.loads((tmp_path / "out.json").read_text())
    assert {"single", "growth"} == set(found["works"]) and not found["peers"]
    assert {"load", "memory", peer} <= set(found["skipped"])
    assert all(reasons and isinstance(reasons, list) for reasons in found["skipped"].values())


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (main, ["--threads", "0"], f"must be from 1 to {usable_cpus()}, the CPUs of this process, not 0"),
        (main, ["--threads", str(usable_cpus() + 1)], "the CPUs of this process"),
        (profile.main, ["--threads", "0"], "the CPUs of this process"),
        (embed.main, ["model", "--threads", "0"], "the CPUs of this process"),
        *((main, ["--rate", rate], "must be from 0.001 to 1000 per second") for rate in ("0", "nan", "inf", "1e-300")),
        (main, ["--works", "single,load,single"], "works named twice: single"),
        (main, ["--repeat", "0"], "must be at least 1, not 0"),
        (profile.main, ["--rows", "4", "0"], "must be at least 1, not 0"),
        (profile.main, ["--ops", "-1"], "must be at least 0, not -1"),
        (embed.main, ["model", "--rounds", "0"], "must be at least 1, not 0"),
    ],
)
def test_an_argument_out_of_range_is_refused_before_anything_runs(capsys, monkeypatch, command, arguments, message):
    monkeypatch.setattr("torch.set_num_threads", lambda _count: pytest.fail("set"))
    with pytest.raises(SystemExit) as refused:
        command(arguments)
    assert refused.value.code == 2 and message in capsys.readouterr().err


def test_quality_is_shown_under_the_names_of_the_readme(checkpoint, capsys):
    quality.main([str(checkpoint), "--max-tokens", "16"])
    _model, names, *rows = capsys.readouterr().out.splitlines()
    assert names.split("  ")[-1] == "same most likely token" and names.split()[:3] == ["perplexity", "mean", "KL"]
    assert [row[:28].strip() for row in rows] == list(quality.VARIANTS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vs", "no-such-command x"], "--vs 'no-such-command x': there is no such command"),
        (["--works", "single", "--plot", "curves.png"], "--plot draws the work growth, which --works leaves out"),
        (["--json", "no/such/folder/out.json"], "there is no directory no/such/folder"),
        (["--json", "/"], "/ cannot be written"),
    ],
)
def test_what_cannot_be_done_after_measuring_is_refused_before(capsys, arguments, message):
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


# ---- works ---------------------------------------------------------------------------------------


def test_the_works_have_their_fixed_sizes():
    sizes = {name: [(len(ids), count) for ids, count in workload.make(name, 49152)] for name in workload.BATCH_WORKS}
    assert sizes["single"] == [(64, 128)]
    assert sizes["prefill"] == [(1024, 1)] * 8
    assert sizes["prefix"] == [(544, 32)] * 32
    assert sizes["long"] == [(6000, 256)]
    assert len(sizes["batch64"]) == 64
    assert all(16 <= num_prompt <= 256 and 64 <= count <= 128 for num_prompt, count in sizes["batch64"])


def test_the_prompts_are_the_same_in_every_run_of_the_program():
    assert workload.make("single", 49152)[0].token_ids[:4] == [21322, 9986, 25975, 3264]
    assert workload.make("batch64", 49152) == workload.make("batch64", 262144)


def test_requests_of_two_runs_share_no_first_token():
    requests = workload.make("batch64", 49152)
    first, second = (workload.distinct(requests, run, 49152) for run in (1, 2))
    assert all(one.token_ids[0] != other.token_ids[0] for one, other in zip(first, second))
    assert [ids[1:] for ids, _ in first] == [ids[1:] for ids, _ in second]


def test_first_tokens_stay_within_a_small_vocabulary():
    requests = workload.uniform(64, 4, 1, VOCAB_SIZE)
    assert all(
        100 <= ids[0] < VOCAB_SIZE for run in range(99) for ids, _ in workload.distinct(requests, run, VOCAB_SIZE)
    )


def test_the_prefix_stays_shared():
    requests = workload.distinct(workload.make("prefix", 49152), 3, 49152, shared=True)
    assert len({tuple(ids[: workload.SHARED_PREFIX]) for ids, _ in requests}) == 1


def test_arrivals_come_at_their_rate():
    times = workload.arrival_times(4000, 5.0)
    assert times == sorted(times) and times[-1] == pytest.approx(800, rel=0.05)


def test_percentiles_are_values_that_occurred():
    assert percentiles([None, *range(1, 101)]) == (50, 90, 99)
    assert percentiles(range(1, 11)) == (5, 9, 10)
    assert percentiles([3.0]) == (3.0, 3.0, 3.0)


def test_a_guided_run_without_a_step_of_all_rows_says_so():
    result = GuidedResult(
        num_requests=64,
        base_seconds=(1.0,),
        guided_seconds=(2.0,),
        base_step_s=0.003,
        guided_step_s=None,
        compile_s=(0.1,),
        num_refused=0,
        jump_seconds=(2.0, 1.0),
        jump_steps=(20, 10),
    )
    assert "0.500 of the rate; a step of all rows never came, unguided 3.00 ms" in next(guided_lines(result))


# ---- limits --------------------------------------------------------------------------------------

_COST = ModelCost(
    vocab_size=100,
    layer_weights=1000,
    head_weights=200,
    weight_item_bytes=2,
    kv_token_bytes=16,
    query_width=8,
    windows=(None, 4),
)


def test_one_row_is_limited_by_the_bytes_it_reads():
    # 1200 weights of 2 bytes; of 10 tokens one layer sees all and one sees 4, 8 bytes each
    assert _COST.decode_s([10], Machine("", 1.0, 1.0)) == 2400 + 8 * (10 + 4)


def test_many_rows_are_limited_by_bytes_and_operations():
    machine = Machine("", 1.0, 1.0)
    operations = 2 * (2 * 1200 + 4 * 8 * (10 + 4))
    assert _COST.decode_s([10, 10], machine) == 2400 + 2 * 8 * (10 + 4) + operations


def test_a_step_cannot_be_shorter_than_the_longer_of_reading_and_computing_in_each_part():
    products, weights, attention, kv = 2 * 2 * 1200, 2400, 2 * 4 * 8 * (10 + 4), 2 * 8 * (10 + 4)
    assert _COST.decode_bound_s([10, 10], 1.0, 1.0) == products + attention
    assert _COST.decode_bound_s([10, 10], 1e9, 1.0) == weights + kv
    assert _COST.decode_bound_s([10, 10], 3.0, 1.0) == weights + attention / 3


def test_a_prompt_in_two_parts_costs_what_it_costs_whole():
    head = 2 * 200
    for split in (2, 4, 7):
        parts = _COST.prompt_operations(split) + _COST.prompt_operations(10 - split, split)
        assert parts - head == _COST.prompt_operations(10)


def test_attention_of_a_prompt_counts_the_keys_each_token_sees():
    full, windowed = sum(range(1, 11)), 1 + 2 + 3 + 7 * 4
    assert _COST.prompt_operations(10) == 2 * (1000 * 10 + 200) + 4 * 8 * (full + windowed)


def test_a_shared_prefix_is_computed_once():
    requests = [Request([0] * 10, 1)] * 3
    expected = _COST.prompt_operations(6) + 3 * _COST.prompt_operations(4, 6)
    assert _COST.batch_s(requests, Machine("", 1.0, 1.0), shared_prefix=6) == expected


def test_the_sizes_of_a_model_are_those_of_its_tensors(checkpoint):
    with Engine(checkpoint, dtype="float32", kernels="torch", num_kv_blocks=8) as engine:
        cost = model_cost(engine, None)
        tensors = dict(engine._loop._runner._model.tensors())
    matrices = {name: tensor for name, tensor in tensors.items() if name.endswith("_proj.weight")}
    assert cost.layer_weights == sum(tensor.numel() for tensor in matrices.values())
    assert cost.head_weights == tensors["lm_head.weight"].numel()
    assert cost.weight_bytes == 4 * (cost.layer_weights + cost.head_weights)


def test_a_cliff_is_a_point_less_efficient_than_one_before_it():
    points = [
        Point("rows", rows, 256, 0.01, 1e11, 1e9, over_limit)
        for rows, over_limit in ((1, 3.0), (2, 2.0), (4, 2.2), (8, 2.7), (16, 0.5), (32, 0.6), (64, 0.7))
    ]
    assert [point.is_cliff for point in with_factors(points)] == [False, False, False, True, False, False, True]


# ---- peers ---------------------------------------------------------------------------------------


def test_ratios_are_those_of_medians():
    def rounds(*seconds: float) -> list[dict]:
        return [{"single": {"s": value}} for value in seconds]

    assert ratios(rounds(1.0, 2.0, 9.0), rounds(4.0, 5.0, 6.0)) == {"single": 2.5}


def test_a_peer_without_results_is_reported_with_what_it_wrote():
    command = f"{shlex.quote(sys.executable)} -c \"raise SystemExit('no such model')\""
    with pytest.raises(PeerFailed, match="no such model"):
        run_peer(command)


# ---- profile -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profiled(checkpoint: Path):
    with NativeWatch() as watch, Engine(checkpoint, num_threads=1) as engine:
        bench = Bench(engine, model_cost(engine, None), Machine("", 1.0, 1.0), quick=True)
        yield bench, watch


@pytest.mark.parametrize("rows", [1, 8, None])
def test_a_profile_divides_the_whole_step(profiled, rows):
    bench, watch = profiled
    result = profile_steps(bench, rows, watch)
    assert result.num_steps > 0 and result.operations.num_steps > 0
    assert result.phases.keys() == PHASES.keys()
    assert all(result.phases[phase] > 0 for phase in PHASES if rows or phase not in ("logits", "sample"))
    assert sum(result.inside.values()) == pytest.approx(result.phases["forward"] + result.phases["logits"])
    assert result.inside["matrix products"] > 0 and result.inside["attention"] > 0
    assert 0 < result.between_forwards_s < result.step_s


def test_profiling_leaves_the_engine_as_it_was(profiled):
    bench, watch = profiled
    profile_steps(bench, 1, watch)
    loop = bench.engine._loop
    assert not {"_step", "_turn", "_deliver"} & vars(loop).keys()
    assert not {"commit", "process"} & vars(loop._output).keys()
    assert "execute" not in vars(loop._runner) and not watch.is_recording


def test_a_work_that_does_not_fit_says_what_it_needs(profiled):
    bench, _watch = profiled
    with pytest.raises(CannotRun, match="needs a context of 6256 tokens, the model or the KV pool has 2048"):
        bench.check(workload.make("long", VOCAB_SIZE))
