"""The benchmark: fixed works on one engine, each figure beside what this machine could give at best.

    python -m tests.bench                       every work on the demo model, a table on stdout
    python -m tests.bench --works single,batch64 --dtype bfloat16 --repeat 5 --json out.json
    python -m tests.bench --works single,batch64,prefill,prefix --vs "other/bin/python peer.py MODEL"
    python -m tests.bench.profile               where a step's time goes

A timing means something only beside another one of the same run: the machine's limits are measured with the works, a
variant (sampling, logprobs, a guide) is interleaved with its base, and a peer (`--vs`) runs alternately with the engine.

    workload.py   the works as data                        machine.py    GEMM rate, read bandwidth, versions
    cost.py       bytes and operations of a model          probe.py      sizes, steps and phases of an engine
    works.py      measuring batches and their variants     growth.py     concurrency and context, cliffs
    processes.py  fresh processes: load, memory, peers     report.py     table and plot
    guided.py     guided decoding: rate, compiling, jumps  arguments.py  what the commands refuse before they run
    profile.py    a step's time by phase and by operation  quality.py    what a dtype costs in quality
    embed.py      encoders: texts per second, exactness

It needs no package beyond the test extra, asserts no speed, and is not part of `pytest`.
"""
