/* Products for guesses with AVX-512's VNNI, which is asked for at run time. */

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#endif

#define PRODUCT product_nibbles_vnni
#include "nibbles.h"
