// Rotation, cache write and causal attention of one layer for a ragged batch over the paged cache.
//
// Cache: tiles of 16 tokens of one KV head, addressed in units of 32 bits, which hold one float or two bfloat16.
//
//     key tile    [head_dim / P][16 tokens] units    P = 1 or 2 dimensions per unit
//     value tile  [16 / P tokens][head_dim] units    P = 1 or 2 tokens per unit
//
// A block is [block_size / 16][num_kv_heads] tiles: what a sequence reads lies side by side whatever the block size.
//
// Work is cut into items of up to ROWS rows (a row is one query token and one head): queries of one KV head; or, where
// there is enough to do, one query of several KV heads, so that memory is read in its own order. Keys are taken in
// chunks; each chunk has its own softmax, and chunks are merged in order. Where a chunk ends depends on positions alone,
// and keys outside a query's window weigh nothing: results do not depend on the batch, the threads, how work is cut, or
// how many queries of the sequence are computed in one step.

#include "attention_chunk.h"

namespace {

constexpr int ROWS = 96;            // of an item, at most, where one token has no more; its queries and values stay in L2
constexpr int SMALL = 16384;        // products below which waking the threads costs more than they save

OE_INLINE int group_of(const AttentionStep& step) { return step.num_heads / step.num_kv_heads; }
OE_INLINE int tokens_of_items(const AttentionStep& step) { return max_of(1, ROWS / group_of(step)); }
OE_INLINE int rows_of_items(const AttentionStep& step) { return tokens_of_items(step) * group_of(step); }

// ---- rotation and the cache ----

// A head of a token as floats, its first elements rotated if there are angles.
template <class Stored>
OE_INLINE void load_head(const AttentionLayer& layer, const void* from, int stride, int token, int head, float* out) {
    const int head_dim = layer.step->head_dim, rotary_dim = layer.rotary_dim, half = rotary_dim / 2;
    const Stored* x = (const Stored*)from + int64_t(token) * stride + head * head_dim;
    for (int d = 0; d < head_dim; d += LANES) store(out + d, load(x + d));
    if (!layer.cos) return;
    const float *cos = layer.cos + int64_t(token) * rotary_dim, *sin = layer.sin + int64_t(token) * rotary_dim;
    for (int d = 0; d < half; d++) {
        const float a = out[d], b = out[d + half];
        out[d] = a * cos[d] + b * sin[d];
        out[d + half] = b * cos[d + half] + a * sin[d + half];
    }
}

// Where the cache keeps a head's tile of tokens from `offset` of `block` on: the index of its first element.
OE_INLINE long tile_at(const AttentionStep& step, long block, int offset, int head) {
    const unsigned tiles = unsigned(step.block_size) / TILE, tile = unsigned(offset) / TILE;
    return ((block * tiles + tile) * step.num_kv_heads + head) * (TILE * step.head_dim);
}

template <class T>
static void write_token(const AttentionLayer& layer, int token, int head) {
    typedef typename T::Stored Stored;
    constexpr int P = T::PACKED;
    const AttentionStep& step = *layer.step;
    const int head_dim = step.head_dim;
    const long block = step.slots[token] / step.block_size;
    const int offset = int(step.slots[token] - block * step.block_size), index = offset % TILE;
    const long at = tile_at(step, block, offset, head);

    float rotated[HEAD_DIM_MAX];
    load_head<Stored>(layer, layer.k, layer.k_stride, token, head, rotated);
    Stored key[HEAD_DIM_MAX];
    for (int d = 0; d < head_dim; d += LANES) store(key + d, load(rotated + d));
    Stored* keys = (Stored*)layer.keys + at + index * P;
    for (int d = 0; d < head_dim; d += P) store_as(keys + d * TILE, load_as<uint32_t>(key + d));

    const Stored* value = (const Stored*)layer.v + int64_t(token) * layer.v_stride + head * head_dim;
    Stored* values = (Stored*)layer.values + at + (index / P) * head_dim * P + index % P;
    for (int d = 0; d < head_dim; d++) values[d * P] = value[d];
}

// ---- memory ----

// Per thread. Alignment needs no care: vectors are loaded from anywhere.
template <class T>
static Workspace<T> workspace_in(char* scratch, const AttentionStep& step) {
    const int rows = rows_of_items(step);
    float* at = (float*)scratch;
    Workspace<T> ws;
    ws.positions = (int*)at;
    ws.state = {at + rows, at + 2 * rows + LANES, at + 3 * rows + 2 * LANES};
    ws.scores = ws.state.values + int64_t(rows) * step.head_dim;
    ws.p = (typename T::Factor*)(ws.scores + R_MAX * P_STRIDE);
    ws.q = (typename T::Factor*)(ws.scores + 2 * R_MAX * P_STRIDE);
    return ws;
}

static int64_t scratch_floats(const AttentionStep& step) {
    const int64_t rows = rows_of_items(step);
    return 3 * rows + 2 * LANES + rows * (step.head_dim + Q_STRIDE) + 2 * R_MAX * P_STRIDE;
}

static int64_t partial_floats(const AttentionStep& step) {
    const int group = group_of(step);
    return 2 * (group + LANES) + int64_t(group) * step.head_dim;
}

static State partial_at(const AttentionStep& step, float* partials, int index) {
    const int group = group_of(step);
    float* at = partials + index * partial_floats(step);
    return {at, at + group + LANES, at + 2 * (group + LANES)};
}

static void clear(const State& state, int rows, int head_dim) {
    for (int r = 0; r < rows + LANES; r++) state.max[r] = -__builtin_inff(), state.sum[r] = 0.0f;
    memset(state.values, 0, sizeof(float) * rows * head_dim);
}

// The attended values of the heads of one token.
template <class Stored>
static void write_out(const AttentionLayer& layer, const State& state, int token, int head) {
    const int head_dim = layer.step->head_dim, group = group_of(*layer.step);
    Stored* out = (Stored*)layer.out + (int64_t(token) * layer.step->num_heads + head * group) * head_dim;
    for (int r = 0; r < group; r++) {
        const float factor = 1.0f / state.sum[r];
        for (int d = r * head_dim; d < (r + 1) * head_dim; d += LANES) store(out + d, load(state.values + d) * factor);
    }
}

// ---- items ----

// What an item reads: keys [begin, end), for queries from `position` on. Chunks end at multiples of CHUNK.
struct Span {
    int position, begin, end;
};

OE_INLINE int chunk_end(int base) { return (base / CHUNK + 1) * CHUNK; }
OE_INLINE int chunks_of(const Span& span) { return (span.end - 1) / CHUNK - span.begin / CHUNK + 1; }

static Span span_of_queries(int position, int num_tokens, int window) {
    return {position, window ? max_of(0, position - window + 1) / TILE * TILE : 0, position + num_tokens};
}

static Span span_of(const AttentionLayer& layer, const AttentionItem& item) {
    const AttentionStep& step = *layer.step;
    const int query_len = step.query_starts[item.seq + 1] - step.query_starts[item.seq];
    const int position = step.context_lens[item.seq] - query_len + item.token;
    Span span = span_of_queries(position, item.num_tokens, layer.plan->window);
    if (item.chunk >= 0) {
        const int first = (span.begin / CHUNK + item.chunk) * CHUNK;
        span.begin = max_of(span.begin, first);
        span.end = min_of(span.end, first + CHUNK);
    }
    return span;
}

// Tiles of the chunk of `span` that begins at `base`. They are numbered as they lie in memory, those of all heads of the
// item side by side; every `stride`-th from `first` on is listed. False if there are none.
template <class T>
static bool list_tiles(const AttentionLayer& layer, const AttentionItem& item, const Span& span, int base, int first,
                       int stride, Chunk& chunk) {
    const AttentionStep& step = *layer.step;
    chunk.base = base;
    chunk.count = min_of(chunk_end(base), span.end) - base;
    const int tiles = (chunk.count + TILE - 1) / TILE;
    int tile = first / item.num_heads, head = first % item.num_heads;
    if (tile >= tiles) return false;
    const int position = base + tile * TILE;
    const int32_t* block = step.block_tables + int64_t(item.seq) * step.table_stride + position / step.block_size;
    int offset = position % step.block_size, i = 0;
    while (tile < tiles && i < CHUNK / TILE) {
        const long at = tile_at(step, *block, offset, item.head + head) / T::PACKED;
        chunk.keys[i] = (const uint32_t*)layer.keys + at;
        chunk.values[i++] = (const uint32_t*)layer.values + at;
        if ((head += stride) < item.num_heads) continue;
        head -= item.num_heads, tile++, offset += TILE;
        if (offset == step.block_size) offset = 0, block++;
    }
    // Padding: while a longer chunk is attended, as many tiles as it has are fetched of this one.
    for (; i < CHUNK / TILE; i++) chunk.keys[i] = chunk.keys[i - 1], chunk.values[i] = chunk.values[i - 1];
    return true;
}

template <class T>
static void load_queries(const AttentionLayer& layer, const AttentionItem& item, int token, const Workspace<T>& ws) {
    const int head_dim = layer.step->head_dim, group = group_of(*layer.step), rows = item.num_tokens * group;
    for (int row = 0; row < item.num_heads * rows; row++) {
        float query[HEAD_DIM_MAX];
        const int head = (item.head + row / rows) * group + row % group;
        load_head<typename T::Stored>(layer, layer.q, layer.q_stride, token + row % rows / group, head, query);
        for (int d = 0; d < head_dim; d += LANES) store(ws.q + int64_t(row) * Q_STRIDE + d, load(query + d));
    }
}

// The part of an item's workspace that belongs to its rows from `row` on.
template <class T>
static Workspace<T> rows_from(Workspace<T> ws, int row, int head_dim) {
    ws.positions += row, ws.q += int64_t(row) * Q_STRIDE;
    ws.state = {ws.state.max + row, ws.state.sum + row, ws.state.values + int64_t(row) * head_dim};
    return ws;
}

// Attend item `index`; the first chunk of item `following`, if there is one, is fetched meanwhile.
template <class T>
static void attend_item(const AttentionLayer& layer, int index, int following, char* scratch, float* partials) {
    const AttentionStep& step = *layer.step;
    const AttentionPlan& plan = *layer.plan;
    const AttentionItem& item = plan.items[index];
    const int head_dim = step.head_dim, group = group_of(step), rows = item.num_tokens * group;
    const int token = step.query_starts[item.seq] + item.token;
    const Span span = span_of(layer, item);
    const Workspace<T> all = workspace_in<T>(scratch, step);
    for (int row = 0; row < item.num_heads * rows; row++) all.positions[row] = span.position + row % rows / group;
    load_queries(layer, item, token, all);
    const auto workspace_of = [&](int head) {
        Workspace<T> ws = rows_from(all, head * rows, head_dim);
        if (item.chunk >= 0) ws.state = partial_at(step, partials, item.partial + head);
        return ws;
    };
    for (int head = 0; head < item.num_heads; head++) clear(workspace_of(head).state, rows, head_dim);

    const Masking masking = {plan.window, layer.scale, layer.softcap};
    for (int base = span.begin; base < span.end; base = chunk_end(base)) {
        const bool is_last = chunk_end(base) >= span.end, has_next = !is_last || following < plan.num_items;
        const AttentionItem& next_item = is_last && has_next ? plan.items[following] : item;
        const Span next_span = is_last && has_next ? span_of(layer, next_item) : span;
        const int next_base = is_last ? next_span.begin : chunk_end(base);
        for (int head = 0, fetched = 0; head < item.num_heads; head++) {
            Chunk now, next;
            list_tiles<T>(layer, item, span, base, head, item.num_heads, now);
            const bool fetches = has_next && list_tiles<T>(layer, next_item, next_span, next_base, fetched, 1, next);
            attend_chunk(workspace_of(head), now, fetches ? &next : nullptr, rows, head_dim, masking);
            fetched += (now.count + TILE - 1) / TILE;
        }
    }
    if (item.chunk >= 0) return;
    for (int head = 0; head < item.num_heads; head++)
        for (int i = 0; i < item.num_tokens; i++) {
            const State state = rows_from(all, head * rows + i * group, head_dim).state;
            write_out<typename T::Stored>(layer, state, token + i, item.head + head);
        }
}

template <class T>
static void merge_partials(const AttentionLayer& layer, const AttentionMerge& merged, float* partials) {
    const AttentionStep& step = *layer.step;
    const int head_dim = step.head_dim, group = group_of(step);
    const State total = partial_at(step, partials, merged.partial);
    for (int i = 1; i < merged.num_partials; i++) {
        const State next = partial_at(step, partials, merged.partial + i * step.num_kv_heads);
        for (int row = 0; row < group; row += LANES) {
            const int rows = min_of(LANES, group - row);
            vf keep, add;
            merge(total, row, rows, load(next.max + row), load(next.sum + row), keep, add);
            for (int r = 0; r < rows; r++)
                for (int d = 0; d < head_dim; d += LANES) {
                    float* to = total.values + int64_t(row + r) * head_dim + d;
                    store(to, load(to) * keep[r] + load(next.values + int64_t(row + r) * head_dim + d) * add[r]);
                }
        }
    }
    write_out<typename T::Stored>(layer, total, step.query_starts[merged.seq], merged.head);
}

template <class T>
static void run(Team& team, const AttentionLayer& layer, int* taken) {
    const AttentionStep& step = *layer.step;
    const AttentionPlan& plan = *layer.plan;
    char* workspace = (char*)layer.workspace;
    char* scratch = workspace + plan.scratch_bytes * team.thread;
    float* partials = (float*)(workspace + plan.scratch_bytes * step.num_threads);
    const int64_t heads = int64_t(step.num_tokens) * step.num_kv_heads;
    for (int64_t i = team.first(heads); i < team.last(heads); i++)
        write_token<T>(layer, int(i / step.num_kv_heads), int(i % step.num_kv_heads));
    team.wait();
    // The first item of each thread is its own: the first to come would else take what it does next before the others.
    const auto take = [&team, taken] { return team.threads + __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED); };
    for (int item = team.thread, next; item < plan.num_items; item = next) {
        next = take();
        attend_item<T>(layer, item, next, scratch, partials);
    }
    if (!plan.num_merges) return;
    team.wait();
    for (int64_t i = team.first(plan.num_merges); i < team.last(plan.num_merges); i++)
        merge_partials<T>(layer, plan.merges[i], partials);
}

}  // namespace

// Plan one step's layers of a window. The first call, without room for items, counts those of one head that attend
// wanted tokens, and decides whether items join heads; the second lists them, fewer where they do.
OE_EXPORT(attention_plan)(const AttentionStep* batch, AttentionPlan* plan) {
    const AttentionStep& step = *batch;
    const int tokens = tokens_of_items(step);
    const bool joined = plan->items && plan->is_joined;
    const int ranges = (step.num_kv_heads + tokens - 1) / tokens;  // of heads, of which each item has one
    const int most_heads = (step.num_kv_heads + ranges - 1) / ranges, threads = step.num_threads;
    int64_t cost = 0;  // keys that are read
    for (int seq = 0; seq < step.num_seqs; seq++) {
        const int query_len = step.query_starts[seq + 1] - step.query_starts[seq];
        const int64_t times = (query_len + tokens - 1) / tokens * step.num_kv_heads;
        const Span first = span_of_queries(step.context_lens[seq] - query_len, 1, plan->window);
        cost += times * (step.context_lens[seq] - first.begin);
    }
    int num_items = 0, num_merges = 0, num_partials = 0;
    int64_t wanted = plan->num_wanted;  // items come from the last token to the first: those from here on are passed
    const auto is_wanted = [plan, &wanted](int64_t first, int64_t end) {
        if (plan->num_wanted < 0) return true;
        while (wanted > 0 && plan->wanted[wanted - 1] >= end) wanted--;
        return wanted > 0 && plan->wanted[wanted - 1] >= first;
    };
    // The largest items first: prompts, which a batch has last, and of each the last queries.
    for (int seq = step.num_seqs - 1; seq >= 0; seq--) {
        const int query_len = step.query_starts[seq + 1] - step.query_starts[seq];
        const Span span = span_of_queries(step.context_lens[seq] - 1, 1, plan->window);
        // One query is split if it is more than a quarter of what a thread is to read.
        const int64_t keys = (span.end - span.begin) * int64_t(step.num_kv_heads);
        const bool is_split = query_len == 1 && chunks_of(span) > 1 && threads > 1 && keys * threads * 4 > cost;
        const int chunks = is_split ? chunks_of(span) : 0;
        for (int token = (query_len - 1) / tokens * tokens; token >= 0; token -= tokens) {
            const int count = min_of(tokens, query_len - token), row = step.query_starts[seq] + token;
            if (!is_wanted(row, row + count)) continue;
            for (int chunk = is_split ? 0 : -1; chunk < chunks; chunk++)
                for (int head = 0, heads; head < step.num_kv_heads; head += heads, num_items++) {
                    heads = joined && query_len == 1 ? min_of(most_heads, step.num_kv_heads - head) : 1;
                    const int partial = num_partials + chunk * step.num_kv_heads + head;
                    if (plan->items) plan->items[num_items] = {seq, token, count, head, heads, chunk, partial};
                }
        }
        if (!is_split || !is_wanted(step.query_starts[seq], step.query_starts[seq] + 1)) continue;
        for (int head = 0; head < step.num_kv_heads; head++, num_merges++)
            if (plan->items) plan->merges[num_merges] = {seq, head, num_partials + head, chunks};
        num_partials += chunks * step.num_kv_heads;
    }
    plan->num_items = num_items;
    if (!plan->items) plan->is_joined = threads == 1 || num_items >= 4 * threads * step.num_kv_heads;
    plan->num_merges = num_merges;
    plan->num_partials = num_partials;
    plan->is_small = cost * group_of(step) * step.head_dim < SMALL;
    plan->scratch_bytes = up_to(int(scratch_floats(step) * sizeof(float)), 4096);  // no line is shared by two threads
    plan->partial_bytes = partial_floats(step) * sizeof(float);
}

OE_SHARED(share_attention)(Team& team, const AttentionLayer& layer, int* taken) {
    if (layer.step->is_bfloat16) run<Bfloat16>(team, layer, taken);
    else run<Float32>(team, layer, taken);
}

// Rotate, write a layer's keys and values to the cache, and attend.
OE_EXPORT(attention)(const AttentionLayer* layer) {
    int taken = 0;
    together(
        layer->plan->is_small ? 1 : layer->step->num_threads,
        [layer, &taken](Team& team) { OE_SHARE(share_attention)(team, *layer, &taken); });
}
