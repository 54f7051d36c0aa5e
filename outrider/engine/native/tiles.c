/* Products of bfloat16 weights in AMX tiles: rows as sums of two bfloat16 numbers each, products of their parts in float32.
 *
 * With x = x1 + x2 to 17 bits, a block of 32 inputs adds w·x1 and w·x2, in this order, to 16 outputs of up to 16 rows. To
 * add is what the processor does with a tile: one chain of fused operations over the even inputs and one over the odd ones,
 * each from 0, then their sum; numbers below 2^-126 count as 0. A row is a column of the tiles: its bits depend on no other
 * column, on its place, or on the number of rows.
 */

#include "amx.h"

#include "formats.h"

#if TILES

#include <sys/syscall.h>
#include <unistd.h>

#define COLUMNS 16  /* rows of x in a tile, at most */
#define NEAR_T0 2048 /* prefetch distance into the first-level cache, bytes; the second level has the next panels */
#define PANEL_BLOCK (2 * TILE) /* a block of a panel: two units */

/* Sums in tiles 0 to 3: four units of outputs, or two by two groups of rows. Weights in 4, rows in 6 and 7. */
static void configure(int columns) {
    TileConfig config = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        config.rows[t] = 16;
        config.bytes[t] = (uint16_t)(t == 4 ? 64 : 4 * columns);
    }
    configure_tiles(&config);
}

/* A perfect shuffle of `count` vectors, as often as it takes to turn rows of 16 into columns of `count`; and back. */
INLINE void interleave(__m512i *v, const int count) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
#pragma GCC unroll 4
    for (int times = 1; times < count; times *= 2) {
        __m512i from[COLUMNS];
        memcpy(from, v, sizeof(__m512i) * (size_t)count);
#pragma GCC unroll 8
        for (int i = 0; i < count / 2; i++) {
            v[2 * i] = _mm512_permutex2var_epi32(from[i], low, from[i + count / 2]);
            v[2 * i + 1] = _mm512_permutex2var_epi32(from[i], high, from[i + count / 2]);
        }
    }
}

INLINE void deal(__m512i *v, const int count) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
#pragma GCC unroll 4
    for (int times = 1; times < count; times *= 2) {
        __m512i from[COLUMNS];
        memcpy(from, v, sizeof(__m512i) * (size_t)count);
#pragma GCC unroll 8
        for (int i = 0; i < count / 2; i++) {
            v[i] = _mm512_permutex2var_epi32(from[2 * i], even, from[2 * i + 1]);
            v[i + count / 2] = _mm512_permutex2var_epi32(from[2 * i], odd, from[2 * i + 1]);
        }
    }
}

/* Columns of a tile of x in memory: a power of two, so that no line of it crosses a cache line. */
static int pitch_of(int columns) { return columns <= 2 ? columns : columns <= 4 ? 4 : columns <= 8 ? 8 : COLUMNS; }

/* A block of inputs of `count` rows as two tiles: [2 parts][16 pairs of inputs][pitch]. */
INLINE void prepare_block(const float *x, int inputs, int k, int count, const int pitch, char *to) {
    __m512i parts[2][COLUMNS], of_row[2];
    int left = inputs - k;
    __mmask16 first = (__mmask16)(left < 16 ? (1 << left) - 1 : 0xffff);
    __mmask16 second = (__mmask16)(left < 32 ? left < 16 ? 0 : (1 << (left - 16)) - 1 : 0xffff);
#pragma GCC unroll 16
    for (int r = 0; r < pitch; r++) {
        const float *row = x + (long)(r < count ? r : 0) * inputs + k;
        split(_mm512_maskz_loadu_ps(first, row), _mm512_maskz_loadu_ps(second, row + 16), of_row);
        parts[0][r] = of_row[0], parts[1][r] = of_row[1];
    }
#pragma GCC unroll 2
    for (int p = 0; p < 2; p++) {
        interleave(parts[p], pitch);
#pragma GCC unroll 16
        for (int i = 0; i < pitch; i++) _mm512_storeu_si512(to + 64 * (p * pitch + i), parts[p][i]);
    }
}

/* One unit's sums of a group of columns, of which `count` are rows, into y. */
INLINE void finish_unit(const Linear *linear, const float *sums, const int pitch, int first, int count, float *y,
                        long y_stride, int add) {
    int left = linear->outputs - first;
    if (left <= 0) return;
    __mmask16 mask = (__mmask16)(left < UNIT ? (1 << left) - 1 : 0xffff);
    __m512 bias = linear->bias ? _mm512_maskz_loadu_ps(mask, linear->bias + first) : _mm512_setzero_ps();
    __m512i rows[COLUMNS];
#pragma GCC unroll 16
    for (int i = 0; i < pitch; i++) rows[i] = _mm512_loadu_si512(sums + 16 * i);
    deal(rows, pitch);
#pragma GCC unroll 16
    for (int r = 0; r < pitch; r++) {
        if (r >= count) break;
        __m512 sum = (__m512)rows[r];
        if (linear->bias) sum += bias;
        if (add) sum += _mm512_maskz_loadu_ps(mask, y + r * y_stride + first);
        _mm512_mask_storeu_ps(y + r * y_stride + first, mask, sum);
    }
}

/* Tiles of x: [groups of columns][blocks][2 parts][16 pairs of inputs][pitch]. */
static void prepare(const float *x, int inputs, int k, int rows, int columns, char *to) {
    const int blocks = (inputs + BLOCK - 1) / BLOCK, pitch = pitch_of(columns);
#define PREPARE(p) prepare_block(x + (long)r * inputs, inputs, k, rows - r < columns ? rows - r : columns, p, at)
    for (int r = 0; r < rows; r += columns) {
        char *at = to + ((long)(r / columns) * blocks + k / BLOCK) * 2 * 64 * pitch;
        switch (pitch) {
        case 1: PREPARE(1); break;
        case 2: PREPARE(2); break;
        case 4: PREPARE(4); break;
        case 8: PREPARE(8); break;
        default: PREPARE(COLUMNS);
        }
    }
}

static void finish(const Linear *linear, const float *sums, int pitch, int first, int count, float *y, long y_stride,
                   int add) {
    switch (pitch) {
    case 1: finish_unit(linear, sums, 1, first, count, y, y_stride, add); break;
    case 2: finish_unit(linear, sums, 2, first, count, y, y_stride, add); break;
    case 4: finish_unit(linear, sums, 4, first, count, y, y_stride, add); break;
    case 8: finish_unit(linear, sums, 8, first, count, y, y_stride, add); break;
    default: finish_unit(linear, sums, COLUMNS, first, count, y, y_stride, add);
    }
}

/* The products of a unit and a group of rows, whose parts are in tiles 6 and 7. Additions to one tile follow each other
 * without delay, to tiles in turn they do not. */
#define ADD_LOADED(sum)                          \
    TILE_DOT(sum, 4, 6);                         \
    TILE_DOT(sum, 4, 7);
#define ADD(sum, from)                           \
    TILE_LOAD(4, from, 64);                      \
    ADD_LOADED(sum)
#define LOAD_ROWS(at)                            \
    TILE_LOAD(6, at, 4 * pitch);                 \
    TILE_LOAD(7, at + part, 4 * pitch);
#define ZERO_SUMS                                \
    TILE_ZERO(0);                                \
    TILE_ZERO(1);                                \
    TILE_ZERO(2);                                \
    TILE_ZERO(3);
#define STORE_SUMS                               \
    TILE_STORE(0, sums, 4 * pitch);              \
    TILE_STORE(1, sums + 256, 4 * pitch);        \
    TILE_STORE(2, sums + 512, 4 * pitch);        \
    TILE_STORE(3, sums + 768, 4 * pitch);

/* Sums of one panel with two groups of rows, or of one or two panels with one group. */
INLINE void sum_panels(const int groups, int together, const char *panel, int blocks, const char *x, int pitch, float *sums) {
    const long part = 64 * pitch, group = blocks * 2 * part, panel_size = (long)blocks * PANEL_BLOCK;
    ZERO_SUMS
    for (int b = 0; b < blocks; b++, x += 2 * part) {
        const char *from = panel + (long)b * PANEL_BLOCK, *others = from + panel_size;
        for (long i = 0; i < together * PANEL_BLOCK; i += 64) { /* far ahead, the panels' blocks one after the other */
            __builtin_prefetch(from + (long)b * PANEL_BLOCK * (together - 1) + panel_size * together + i, 0, 2);
            __builtin_prefetch((i < PANEL_BLOCK ? from : others - PANEL_BLOCK) + NEAR_T0 + i, 0, 3);
        }
        LOAD_ROWS(x)
        ADD(0, from)
        ADD(1, from + TILE)
        if (groups == 2) {
            LOAD_ROWS(x + group)
            ADD(2, from)
            ADD(3, from + TILE)
        } else if (together == 2) {
            ADD(2, others)
            ADD(3, others + TILE)
        }
    }
    STORE_SUMS
}

#define ADD_GROUP(g)                             \
    if (groups > g) {                            \
        LOAD_ROWS(x + g * group)                 \
        ADD_LOADED(g)                            \
    }

/* Sums of one of a panel's two units with up to four groups of rows. */
INLINE void sum_unit(const char *unit, int blocks, int groups, const char *x, int pitch, float *sums) {
    const long part = 64 * pitch, group = blocks * 2 * part;
    ZERO_SUMS
    for (int b = 0; b < blocks; b++, x += 2 * part, unit += PANEL_BLOCK) {
        for (long i = 0; i < TILE; i += 64) {
            __builtin_prefetch(unit + (long)blocks * PANEL_BLOCK + i, 0, 2);
            __builtin_prefetch(unit + NEAR_T0 + i, 0, 3);
        }
        TILE_LOAD(4, unit, 64);
        ADD_GROUP(0)
        ADD_GROUP(1)
        ADD_GROUP(2)
        ADD_GROUP(3)
    }
    STORE_SUMS
}

static int groups_of(int rows) { return (rows + COLUMNS - 1) / COLUMNS; }

/* Bytes of scratch memory of a product: tiles of x. */
long tiles_scratch(int inputs, int rows, int threads) {
    long groups = groups_of(rows) > threads ? groups_of(rows) : threads; /* of few rows, one for each thread */
    return groups * ((inputs + BLOCK - 1) / BLOCK) * 2l * TILE;
}

/* The share of a thread: panels that follow each other, from `first` on. */
static void multiply(const Linear *linear, int first, int panels, int groups, int columns, const char *x, int rows, float *y,
                     long y_stride, int add) {
    float sums[4 * 256] __attribute__((aligned(64)));
    const int blocks = blocks_of(linear), pitch = pitch_of(columns);
    const long group = (long)blocks * 2 * 64 * pitch, panel_size = (long)blocks * PANEL_BLOCK;
    const char *weights = (const char *)linear->weights + first * panel_size;
#define FINISH(i, g, output)                                                                                         \
    finish(linear, sums + 256 * (i), pitch, output, rows - (g) * columns < columns ? rows - (g) * columns : columns, \
           y + (g) * columns * y_stride, y_stride, add)
    for (int u = 0; groups > 2 && u < 2 * panels; u++) /* unit by unit, with four groups at once */
        for (int g = 0; g < groups; g += 4) {
            int count = groups - g < 4 ? groups - g : 4;
            sum_unit(weights + u / 2 * panel_size + u % 2 * TILE, blocks, count, x + g * group, pitch, sums);
            for (int i = 0; i < count; i++) FINISH(i, g + i, 32 * first + UNIT * u);
        }
    for (int p = 0, together; groups <= 2 && p < panels; p += together, weights += together * panel_size) {
        together = groups == 1 && panels - p > 1 ? 2 : 1;
        if (groups == 2)
            sum_panels(2, 1, weights, blocks, x, pitch, sums);
        else
            sum_panels(1, together, weights, blocks, x, pitch, sums);
        for (int i = 0; i < 2 * groups * together; i++)
            FINISH(i, groups == 2 ? i / 2 : 0, 32 * (first + p) + UNIT * (groups == 2 ? i % 2 : i));
    }
}

void product_tiles(const Linear *linear, const float *x, int rows, float *y, long y_stride, int add, const Step *step) {
    int inputs = linear->inputs, panels = (linear->outputs + 31) / 32, blocks = blocks_of(linear);
    int groups = groups_of(rows), columns = (rows + groups - 1) / groups;
    int thread = omp_get_thread_num(), threads = omp_get_num_threads();
    char *scratch = (char *)step->tiles;
    if (rows <= OWN_ROWS) {
        scratch += thread * blocks * 2l * TILE;
        for (int b = 0; b < blocks; b++) prepare(x, inputs, b * BLOCK, rows, columns, scratch);
    } else {
#pragma omp for schedule(static) nowait
        for (int b = 0; b < blocks; b++) prepare(x, inputs, b * BLOCK, rows, columns, scratch);
        meet(step);
    }
    int start = panels * thread / threads, end = panels * (thread + 1) / threads;
    configure(columns);
    multiply(linear, start, end - start, groups, columns, scratch, rows, y, y_stride, add);
    release_tiles();
    meet(step);
}

/* Whether this processor has tiles of bfloat16 and of bytes, and the system lets this process use them. */
int outrider_tiles(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512bf16")) return 0;
    if (EMULATED) return 1;
    uint32_t a = 7, b, c = 0, d;
    __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    if (!(d >> 22 & d >> 25 & 1)) return 0;
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0;
}

#else

long tiles_scratch(int inputs, int rows, int threads) { return (void)inputs, (void)rows, (void)threads, 0; }
void product_tiles(const Linear *linear, const float *x, int rows, float *y, long y_stride, int add, const Step *step) {
    (void)linear, (void)x, (void)rows, (void)y, (void)y_stride, (void)add, (void)step;
}
int outrider_tiles(void) { return 0; }

#endif

/* The same, asked for once. */
int has_tiles(void) {
    static int known = -1;
    int found = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (found < 0) __atomic_store_n(&known, found = outrider_tiles(), __ATOMIC_RELAXED);
    return found;
}
