// Many kernels in a row by one team: what a model's layers compute, in one call. Threads are woken once, and nothing
// between two kernels costs more than a wait of the team.

#include "attention.h"
#include "linear.h"
#include "norm.h"

#include <time.h>

namespace {

// The structs here are mirrored in program.py.
enum Kernel : int32_t { NORM = 0, PRODUCT = 1, ATTENTION = 2, TAKE = 3 };

// Where a kernel finds or leaves the row 0 of a matrix, and its distance to row 1.
struct Operand {
    int32_t buffer, unused;
    int64_t offset, row_bytes;
};

// One kernel of the sequence. `rows` 0: for every token; 1: for the wanted rows only.
struct Operation {
    int32_t kernel, rows;
    Operand operands[4];
    const Layer* layer;                // products
    const float *weight, *bias;        // norms
    void *keys, *values;               // attention
    int64_t heads, n;                  // norms; TAKE: n bytes
    float eps, scale, softcap;
    int32_t code;                      // norms: whether centered; products: the activation; attention: which angles, or -1
    int32_t plan;                      // attention: which one
    int32_t from_kind, to_kind;
};

// [num_tokens, dim], as ops/rope.py gives them.
struct Angles {
    const float *cos, *sin;
    int64_t dim;
};

// What changes from step to step. `plans` are those of attention, `angles` those of each rotary embedding.
struct Forward {
    const Operation* operations;
    int64_t num_operations;
    char* const* buffers;
    int64_t num_tokens, num_wanted;
    const int64_t* wanted;
    const AttentionStep* step;
    const AttentionPlan* const* plans;
    const Angles* angles;
    void* workspace;
    double* seconds;  // of each kernel, added up; null: not wanted
};

double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return double(time.tv_sec) + double(time.tv_nsec) * 1e-9;
}

char* at(const Forward& forward, const Operand& operand) {
    return operand.buffer < 0 ? nullptr : forward.buffers[operand.buffer] + operand.offset;
}

int64_t rows_of(const Forward& forward, const Operation& op) { return op.rows ? forward.num_wanted : forward.num_tokens; }

NormCall norm_call(const Forward& f, const Operation& op) {
    const Operand &x = op.operands[0], &delta = op.operands[1];
    return {at(f, x), x.row_bytes, at(f, delta), delta.row_bytes, op.weight, op.bias, at(f, op.operands[2]),
            rows_of(f, op), op.heads, op.n, op.eps, op.code, op.from_kind};
}

LinearCall linear_call(const Forward& f, const Operation& op) {
    const Operand &x = op.operands[0], &y = op.operands[1];
    return {op.layer, at(f, x), x.row_bytes, at(f, y), y.row_bytes, rows_of(f, op), op.from_kind, op.to_kind, op.code};
}

AttentionLayer attention_layer(const Forward& f, const Operation& op) {
    const int64_t item = f.step->is_bfloat16 ? 2 : 4;
    const Operand &q = op.operands[0], &k = op.operands[1], &v = op.operands[2];
    AttentionLayer layer = {f.step, f.plans[op.plan], f.workspace, at(f, q), at(f, k), at(f, v)};
    if (op.code >= 0) {
        const Angles& angles = f.angles[op.code];
        layer.cos = angles.cos, layer.sin = angles.sin, layer.rotary_dim = int32_t(angles.dim);
    }
    layer.keys = op.keys, layer.values = op.values, layer.out = at(f, op.operands[3]);
    layer.q_stride = int32_t(q.row_bytes / item), layer.k_stride = int32_t(k.row_bytes / item);
    layer.v_stride = int32_t(v.row_bytes / item);
    layer.scale = op.scale, layer.softcap = op.softcap;
    return layer;
}

void take(const Team& team, const Forward& f, const Operation& op) {
    const Operand &from = op.operands[0], &to = op.operands[1];
    for (int64_t i = team.first(f.num_wanted); i < team.last(f.num_wanted); i++)
        memcpy(at(f, to) + i * to.row_bytes, at(f, from) + f.wanted[i] * from.row_bytes, op.n);
}

void run(Team& team, const Forward& f, const Operation& op, char* scratch, int* taken) {
    switch (op.kernel) {
        case NORM: return OE_SHARE(share_norm)(team, norm_call(f, op));
        case PRODUCT: return OE_SHARE(share_linear)(team, linear_call(f, op), scratch);
        case ATTENTION: return OE_SHARE(share_attention)(team, attention_layer(f, op), taken);
        default: return take(team, f, op);
    }
}

}  // namespace

OE_CHECKED(forward)(const Forward* forward) {
    const Forward& f = *forward;
    const int threads = f.step->num_threads;  // for as many the workspace has room
    int64_t scratch_size = 0;
    for (int64_t i = 0; i < f.num_operations; i++)
        if (f.operations[i].kernel == PRODUCT) {
            const int64_t bytes = scratch_bytes(linear_call(f, f.operations[i]), threads);
            if (bytes > scratch_size) scratch_size = bytes;
        }
    char* scratch = static_cast<char*>(malloc(scratch_size));
    int* taken = static_cast<int*>(calloc(f.num_operations, sizeof(int)));
    const bool fits = (scratch || !scratch_size) && taken;
    if (fits) together(threads, [&f, scratch, taken](Team& team) {
        double last = f.seconds ? now() : 0.0;
        for (int64_t i = 0; i < f.num_operations; i++) {
            run(team, f, f.operations[i], scratch, taken + i);
            team.wait();
            if (f.seconds && team.thread == 0) {
                const double time = now();
                f.seconds[f.operations[i].kernel] += time - last;
                last = time;
            }
        }
    });
    free(taken);
    free(scratch);
    return fits;
}
