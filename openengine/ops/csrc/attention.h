// The arguments of attention.cpp, as attention_native.py fills them. Strides count elements of the cache's type.

#ifndef OE_ATTENTION_H
#define OE_ATTENTION_H

#include "team.h"

// One step's batch, the same for all layers.
struct AttentionStep {
    const int32_t* query_starts;   // [num_seqs + 1], cumulative
    const int32_t* context_lens;   // [num_seqs]
    const int32_t* block_tables;   // [num_seqs, table_stride]
    const int64_t* slots;          // [num_tokens]
    int32_t num_tokens, num_seqs, table_stride, block_size;
    int32_t num_heads, num_kv_heads, head_dim, is_bfloat16, num_threads;
};

// Some queries of one KV head or one query of several; with chunk >= 0 one query and only that chunk of its keys, for
// which the heads have partials side by side.
struct AttentionItem {
    int32_t seq, token, num_tokens, head, num_heads, chunk, partial;
};

// A query whose chunks are items: their results, each `num_kv_heads` after the one before, are merged after.
struct AttentionMerge {
    int32_t seq, head, partial, num_partials;
};

// How the layers of one window share their work out; of some layers only few tokens' results are wanted.
struct AttentionPlan {
    const int64_t* wanted;  // [num_wanted], tokens, ascending
    int64_t num_wanted;     // -1: all
    int32_t window;  // keys that a query sees; 0 for all
    int32_t num_items, num_merges, num_partials, is_small;
    int32_t is_joined;      // whether an item may have several heads: the call that counts says so
    int64_t scratch_bytes;  // per thread
    int64_t partial_bytes;  // of each
    AttentionItem* items;   // null: only count
    AttentionMerge* merges;
};

// One layer's tensors. Queries, keys and values are [num_tokens, heads, head_dim] with their heads side by side.
struct AttentionLayer {
    const AttentionStep* step;
    const AttentionPlan* plan;
    void* workspace;  // as large as the plan says
    const void *q, *k, *v;
    const float *cos, *sin;  // [num_tokens, rotary_dim], as ops/rope.py gives them; null: nothing is rotated
    void *keys, *values, *out;
    int32_t q_stride, k_stride, v_stride, rotary_dim;
    float scale, softcap;  // softcap 0: none
};

// `taken` is zero before the first thread comes: how many items have been taken after the first of each thread.
OE_SHARED(share_attention)(Team& team, const AttentionLayer& layer, int* taken);

#endif
