// What the library is and what this CPU can run. Compiled once, for any CPU.

#include "common.h"

extern "C" __attribute__((visibility("default"))) int oe_interface() { return OE_INTERFACE; }

// The number of levels this CPU can run of "generic", "avx2", "avx512", "avx512_bf16", in this order.
extern "C" __attribute__((visibility("default"))) int oe_cpu_levels() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) return 1;
    if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")))
        return 2;
    if (!(__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16"))) return 3;
    return 4;
#else
    return 1;
#endif
}
