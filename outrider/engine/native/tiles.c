/* Products in AMX tiles: weights and rows as sums of two bfloat16 numbers each, products of their parts in float32.
 *
 * With w = w1 + w2 to 16 bits and x = x1 + x2 to 17, a block of 32 inputs adds w1·x1, w2·x1 and w1·x2, in this order, to
 * 16 outputs of up to 16 rows. To add is what the processor does with a tile: one chain of fused operations over the even
 * inputs and one over the odd ones, each from 0, then their sum; numbers below 2^-126 count as 0. A row is a column of the
 * tiles: its bits depend on no other column, on its place, or on the number of rows. Weights that are bfloat16 or int8
 * have no second part.
 */

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#define TILES 1
#endif

#include "formats.h"

#if TILES

#include <sys/syscall.h>
#include <unistd.h>

#define TILE 1024   /* bytes: 16 outputs by 32 inputs, or 16 pairs of inputs by 16 rows */
#define COLUMNS 16  /* rows of x in a tile, at most */
#define FAR_T1 12288 /* prefetch distances of weights, bytes: 31 to 34 GB/s with both, 27 to 28 with one of 4 KB */
#define FAR_T0 2048
#define AHEAD 2 /* blocks between unpacking and use */
#define RING 4

/* The compiler's own functions do not tell it that tiles read and write memory. */
#define TILE_LOAD(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(from), "r"((long)(stride)) : "memory")
#define TILE_STORE(tile, to) __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(to), "r"(64l) : "memory")
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile : :)
#define TILE_DOT(sum, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum : :)

/* Sums in tiles 0 to 3 (two units of outputs by two groups of rows), weights in 4 and 5, rows in 6 and 7. */
static void configure(int columns) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        config.rows[t] = 16;
        config.bytes[t] = (uint16_t)(t == 4 || t == 5 ? 64 : 4 * columns);
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
}

/* 32 weights as two lines of bfloat16: the upper halves, and what they leave, rounded. */
INLINE void split(__m512 even, __m512 odd, __m512i *upper, __m512i *lower) {
    const __m512i halves = _mm512_set1_epi32((int)0xffff0000);
    const __m512i odd_words =
        _mm512_cvtepi8_epi16(_mm256_setr_epi8(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 35, 37, 39, 41,
                                              43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63));
    *upper = _mm512_permutex2var_epi16((__m512i)even, odd_words, (__m512i)odd);
    even -= (__m512)_mm512_and_si512((__m512i)even, halves);
    odd -= (__m512)_mm512_and_si512((__m512i)odd, halves);
    *lower = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
}

/* The numbers of a unit, in memory: the compiler would broadcast them from a register, on the port of the look-ups. */
INLINE void store_numbers(const int kind, const char *unit, float *to) {
    for (int n = 0; n < FORMATS[kind].numbers; n++)
        _mm512_store_ps(to + n * UNIT, (__m512)load_numbers(kind, unit, n, 0));
    __asm__ volatile("" : : "r"(to) : "memory");
}

/* Sixteen values of each output are all that its quants can be: two outputs' tables at a time, looked up by quant. */
INLINE void nibbles_to_tiles(const int kind, const char *unit, char *tiles) {
    const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i nibble = _mm512_set1_epi16(15), second = _mm512_set1_epi16(16);
    float numbers[2 * UNIT] __attribute__((aligned(64)));
    store_numbers(kind, unit, numbers);
#pragma GCC unroll 4
    for (int z = 0; z < 4; z++) {
        __m512i four = _mm512_loadu_si512(unit + numbers_size(kind) + 64 * z);
#pragma GCC unroll 2
        for (int i = 0; i < 4; i += 2) {
            const float *scale = numbers + 4 * z + i, *minimum = scale + UNIT;
            __m512i upper, lower;
            split(_mm512_fmadd_ps(values, _mm512_set1_ps(scale[0]), _mm512_set1_ps(minimum[0])),
                  _mm512_fmadd_ps(values, _mm512_set1_ps(scale[1]), _mm512_set1_ps(minimum[1])), &upper, &lower);
            __m512i a = _mm512_and_si512(_mm512_srli_epi16(four, 4 * i), nibble);
            __m512i b = _mm512_ternarylogic_epi32(_mm512_srli_epi16(four, 4 * i + 4), nibble, second, 0xea); /* and, or */
            char *to = tiles + 64 * (4 * z + i);
            _mm512_store_si512(to, _mm512_permutexvar_epi16(a, upper));
            _mm512_store_si512(to + 64, _mm512_permutexvar_epi16(b, upper));
            _mm512_store_si512(to + TILE, _mm512_permutexvar_epi16(a, lower));
            _mm512_store_si512(to + TILE + 64, _mm512_permutexvar_epi16(b, lower));
        }
    }
}

INLINE void bytes_to_tiles(const int kind, const char *unit, char *tiles) {
    const int8_t *quants = (const int8_t *)unit + numbers_size(kind);
    float numbers[2 * UNIT] __attribute__((aligned(64)));
    store_numbers(kind, unit, numbers);
#pragma GCC unroll 4
    for (int o = 0; o < UNIT; o++, quants += BLOCK) {
        __m512 even = (__m512)from_bytes(quants), odd = (__m512)from_bytes(quants + 16);
        if (kind == INT8) {
            _mm512_store_si512(tiles + 64 * o, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
            continue;
        }
        __m512 scale = _mm512_set1_ps(numbers[o]), other = scale;
        if (FORMATS[kind].numbers == 2) other = _mm512_set1_ps(numbers[UNIT + o]);
        if (FORMATS[kind].minima) {
            even = _mm512_fmadd_ps(even, scale, other);
            odd = _mm512_fmadd_ps(odd, scale, other);
        } else {
            even *= scale;
            odd *= other;
        }
        __m512i upper, lower;
        split(even, odd, &upper, &lower);
        _mm512_store_si512(tiles + 64 * o, upper);
        _mm512_store_si512(tiles + TILE + 64 * o, lower);
    }
}

INLINE void unpack_unit(const int kind, const char *unit, char *tiles) {
    (FORMATS[kind].bits == 4 ? nibbles_to_tiles : bytes_to_tiles)(kind, unit, tiles);
}

INLINE __m512 widen(__m256i halves) { return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16); }

/* Tiles of x: [groups of columns][blocks][2 parts][16 pairs of inputs][columns]. */
static void prepare_row(const float *x, int inputs, int columns, int row, char *to) {
    int blocks = (inputs + BLOCK - 1) / BLOCK;
    __m512i places = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                        _mm512_set1_epi32(columns));
    to += (long)(row / columns) * blocks * 2 * 64 * columns + 4 * (row % columns);
    for (int k = 0; k < inputs; k += BLOCK, to += 2 * 64 * columns) {
        int left = inputs - k;
        __m512 even = _mm512_maskz_loadu_ps((__mmask16)(left < 16 ? (1 << left) - 1 : 0xffff), x + k);
        __m512 odd = _mm512_maskz_loadu_ps((__mmask16)(left < 32 ? left < 16 ? 0 : (1 << (left - 16)) - 1 : 0xffff),
                                           x + k + 16);
        __m512i upper = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
        even -= widen(_mm512_castsi512_si256(upper));
        odd -= widen(_mm512_extracti64x4_epi64(upper, 1));
        __m512i lower = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
        _mm512_i32scatter_epi32(to, places, upper, 4);
        _mm512_i32scatter_epi32(to + 64 * columns, places, lower, 4);
    }
}

/* One unit's sums of a group of columns, of which `count` are rows, into y. */
static void finish(const Linear *linear, const float *sums, int first, int count, float *y, long y_stride,
                   int add) {
    int left = linear->outputs - first;
    if (left <= 0) return;
    __mmask16 mask = (__mmask16)(left < UNIT ? (1 << left) - 1 : 0xffff);
    __m512i places = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
    __m512 bias = linear->bias ? _mm512_maskz_loadu_ps(mask, linear->bias + first) : _mm512_setzero_ps();
    __m512 scale = linear->scales ? _mm512_maskz_loadu_ps(mask, linear->scales + first) : _mm512_set1_ps(1);
    for (int r = 0; r < count; r++, y += y_stride) {
        __m512 sum = _mm512_i32gather_ps(places, sums + r, 4) * scale;
        if (linear->bias) sum += bias;
        if (add) sum += _mm512_maskz_loadu_ps(mask, y + first);
        _mm512_mask_storeu_ps(y + first, mask, sum);
    }
}

/* Unpacked blocks of the panels of a thread: a ring that runs on from panel to panel, or all blocks of a panel (`ring` is
 * their number less 1, or −1) for further groups of columns. */
typedef struct {
    char *tiles;
    long ring, next; /* next: the block after the last one that is unpacked */
    long end;        /* blocks of all panels of the thread */
} Unpacked;

/* Sums of a panel, whose first block is number `first` of the thread's, for one or two groups of columns. */
INLINE void sum_panel(const int kind, const int groups, const char *panel, long first, int blocks, const char *x,
                      int columns, Unpacked *unpacked, float *sums) {
    const int plain = kind == BFLOAT16, two_parts = kind != BFLOAT16 && kind != INT8;
    const long size = plain ? 2 * TILE : 2 * unit_size(kind), unit = plain ? TILE : 2 * TILE, part = 64 * columns;
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    const char *weights = panel - first * size; /* of the thread's first block */
    for (long b = first; b < first + blocks; b++, panel += size, x += 2 * part) {
        const char *from = plain ? panel : unpacked->tiles + (b & unpacked->ring) * 4 * TILE;
        const char *second = x + blocks * 2 * part;
        const long last = b + AHEAD < unpacked->end ? b + AHEAD : unpacked->end - 1;
        const int unpacks = !plain && unpacked->next <= last;
        if (plain || unpacks)
            for (int i = 0; i < size; i += 64) {
                __builtin_prefetch(panel + FAR_T1 + i, 0, 2);
                __builtin_prefetch(panel + FAR_T0 + i, 0, 3);
            }
        for (; unpacks && unpacked->next < last; unpacked->next++) /* at the start only */
            for (int u = 0; u < 2; u++)
                unpack_unit(kind, weights + unpacked->next * size + u * unit_size(kind),
                            unpacked->tiles + (unpacked->next & unpacked->ring) * 4 * TILE + u * 2 * TILE);
        /* The units of a later block are unpacked between the products of this one: vectors and tiles work side by side. */
        const char *later = weights + last * size;
        char *to = unpacked->tiles + (last & unpacked->ring) * 4 * TILE;
#define ADD_BLOCK(sum, unit, rows)                  \
    {                                               \
        TILE_LOAD(7, rows, 4 * columns);            \
        TILE_LOAD(4, from + unit, 64);              \
        TILE_DOT(sum, 4, 7);                        \
        if (two_parts) {                            \
            TILE_LOAD(5, from + unit + TILE, 64);   \
            TILE_DOT(sum, 5, 7);                    \
        }                                           \
        TILE_LOAD(6, rows + part, 4 * columns);     \
        TILE_DOT(sum, 4, 6);                        \
    }
        if (unpacks) unpack_unit(kind, later, to);
        ADD_BLOCK(0, 0, x)
        if (groups == 2) ADD_BLOCK(2, 0, second)
        if (unpacks) unpack_unit(kind, later + unit_size(kind), to + 2 * TILE);
        ADD_BLOCK(1, unit, x)
        if (groups == 2) ADD_BLOCK(3, unit, second)
        if (unpacks) unpacked->next++;
    }
    TILE_STORE(0, sums);
    TILE_STORE(1, sums + 256);
    TILE_STORE(2, sums + 512);
    TILE_STORE(3, sums + 768);
}

#define SUM_PANEL(kind)                                                                        \
    case kind:                                                                         \
        if (groups == 2)                                                               \
            sum_panel(kind, 2, panel, first, blocks, x, columns, unpacked, sums);      \
        else                                                                           \
            sum_panel(kind, 1, panel, first, blocks, x, columns, unpacked, sums);      \
        break;

static void sum_panel_of(int kind, int groups, const char *panel, long first, int blocks, const char *x, int columns,
                         Unpacked *unpacked, float *sums) {
    switch (kind) {
        SUM_PANEL(BFLOAT16)
        SUM_PANEL(INT8)
        SUM_PANEL(NIBBLES)
        SUM_PANEL(BYTES)
        SUM_PANEL(NIBBLES_K)
        SUM_PANEL(BYTES_5K)
        SUM_PANEL(BYTES_6K)
    }
}

static int groups_of(int rows) { return (rows + COLUMNS - 1) / COLUMNS; }

/* Bytes of scratch memory of a product: tiles of x, then of every thread's panel. */
long tiles_scratch(int inputs, int rows, int threads) {
    long blocks = (inputs + BLOCK - 1) / BLOCK, kept = groups_of(rows) > 2 ? blocks : RING;
    return groups_of(rows) * blocks * 2 * TILE + threads * kept * 4 * TILE;
}

void product_tiles(const Linear *linear, const float *x, int rows, float *y, long y_stride, int add, const Step *step) {
    int inputs = linear->inputs, kind = linear->kind, panels = (linear->outputs + 31) / 32;
    int blocks = (inputs + BLOCK - 1) / BLOCK, groups = groups_of(rows), columns = (rows + groups - 1) / groups;
    long panel_size = kind == BFLOAT16 ? 2l * TILE * blocks : 2 * unit_size(kind) * blocks;
    long kept = (groups > 2 ? blocks : RING) * 4l * TILE;
    char *scratch = (char *)step->tiles;
#pragma omp parallel num_threads(step->threads)
    {
#pragma omp for schedule(static)
        for (int r = 0; r < rows; r++) prepare_row(x + (long)r * inputs, inputs, columns, r, scratch);
        float sums[4 * 256] __attribute__((aligned(64)));
        int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        int start = panels * thread / threads, end = panels * (thread + 1) / threads;
        const char *weights = (const char *)linear->weights + start * panel_size;
        char *tiles = scratch + (long)groups * blocks * 2 * TILE + thread * kept;
        Unpacked unpacked = {tiles, RING - 1, 0, (long)(end - start) * blocks};
        configure(columns);
        for (int p = start; p < end; p++, weights += panel_size) {
            if (groups > 2) unpacked = (Unpacked){tiles, -1, 0, blocks};
            for (int g = 0; g < groups; g += 2) {
                int both = groups - g < 2 ? 1 : 2;
                sum_panel_of(kind, both, weights, groups > 2 ? 0 : (long)(p - start) * blocks, blocks,
                             scratch + (long)g * blocks * 2 * 64 * columns, columns, &unpacked, sums);
                for (int i = 0; i < 2 * both; i++) {
                    int row = (g + i / 2) * columns, count = rows - row < columns ? rows - row : columns;
                    finish(linear, sums + 256 * i, 32 * p + UNIT * (i % 2), count, y + row * y_stride, y_stride, add);
                }
            }
        }
        __asm__ volatile("tilerelease" : :);
    }
}

/* Whether this processor has tiles of bfloat16 and the system lets this process use them. */
int outrider_tiles(void) {
    __builtin_cpu_init();
    uint32_t a = 7, b, c = 0, d;
    __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    if (!(d >> 22 & 1) || !__builtin_cpu_supports("avx512bf16")) return 0;
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0;
}

#else

long tiles_scratch(int inputs, int rows, int threads) { return (void)inputs, (void)rows, (void)threads, 0; }
void product_tiles(const Linear *linear, const float *x, int rows, float *y, long y_stride, int add, const Step *step) {
    (void)linear, (void)x, (void)rows, (void)y, (void)y_stride, (void)add, (void)step;
}
int outrider_tiles(void) { return 0; }

#endif
