/* Products in integers with AVX-512's VNNI, which is asked for at run time. */

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#define VNNI 1
#endif

#define PRODUCT product_integers_vnni
#include "integers.h"

/* Bytes of scratch memory of a product, with either instruction set. */
long integers_scratch(int inputs, int rows, int threads) {
    long prepared = rows > threads * OWN_ROWS ? rows : threads * OWN_ROWS;
    return prepared * ((inputs + BLOCK - 1) / BLOCK) * (long)sizeof(Rounded);
}

/* Whether this processor has it. */
int has_vnni(void) {
#ifdef VNNI
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
#else
    return 0;
#endif
}
