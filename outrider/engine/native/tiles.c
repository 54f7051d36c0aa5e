/* Products in AMX tiles: weights and rows as sums of two bfloat16 numbers each, products of their parts in float32.
 *
 * With w = w1 + w2 to 16 bits and x = x1 + x2 to 17, a block of 32 inputs adds w1·x1, w1·x2 and w2·x1, in this order, to
 * 16 outputs of up to 16 rows. To add is what the processor does with a tile: one chain of fused operations over the even
 * inputs and one over the odd ones, each from 0, then their sum; numbers below 2^-126 count as 0. A row is a column of the
 * tiles: its bits depend on no other column, on its place, or on the number of rows. Weights that are bfloat16 or int8
 * have no second part.
 */

#include "amx.h"

#include "formats.h"

#if TILES

#include "unpack.h"

#include <sys/syscall.h>
#include <unistd.h>

#define COLUMNS 16  /* rows of x in a tile, at most */
#define NEAR_T0 2048 /* prefetch distance into the first-level cache, bytes; the second level has the next panels */
#define SLOT (8 * TILE) /* the unpacked block of one or two panels: four units in two parts */

/* Sums in tiles 0 to 3: four units of outputs, or two by two groups of rows. Weights in 4 and 5, rows in 6 and 7. */
static void configure(int columns) {
    TileConfig config = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        config.rows[t] = 16;
        config.bytes[t] = (uint16_t)(t == 4 || t == 5 ? 64 : 4 * columns);
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
    __m512i parts[2][COLUMNS];
    int left = inputs - k;
    __mmask16 first = (__mmask16)(left < 16 ? (1 << left) - 1 : 0xffff);
    __mmask16 second = (__mmask16)(left < 32 ? left < 16 ? 0 : (1 << (left - 16)) - 1 : 0xffff);
#pragma GCC unroll 16
    for (int r = 0; r < pitch; r++) {
        const float *row = x + (long)(r < count ? r : 0) * inputs + k;
        __m512 low = _mm512_maskz_loadu_ps(first, row), high = _mm512_maskz_loadu_ps(second, row + 16);
        parts[0][r] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        low -= widen(_mm512_castsi512_si256(parts[0][r]));
        high -= widen(_mm512_extracti64x4_epi64(parts[0][r], 1));
        parts[1][r] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
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
    __m512 scale = linear->scales ? _mm512_maskz_loadu_ps(mask, linear->scales + first) : _mm512_set1_ps(1);
    __m512i rows[COLUMNS];
#pragma GCC unroll 16
    for (int i = 0; i < pitch; i++) rows[i] = _mm512_loadu_si512(sums + 16 * i);
    deal(rows, pitch);
#pragma GCC unroll 16
    for (int r = 0; r < pitch; r++) {
        if (r >= count) break;
        __m512 sum = (__m512)rows[r] * scale;
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

/* What a thread unpacks next: block after block of one or two panels, then the next panels. */
typedef struct {
    const char *at;        /* the first of the panels */
    long size, panel_size; /* bytes of a panel, and its share for a block */
    int blocks, block;     /* of a panel */
    int panels, wide;      /* left, with these; at most so many together */
    char *tiles;           /* two slots for unpacked blocks */
    int slot;
} Stream;

INLINE int units_of(const Stream *stream) { return stream->panels < stream->wide ? 2 * stream->panels : 2 * stream->wide; }

/* One unit of the next block. */
INLINE void unpack_next(const int kind, const Stream *from, int unit) {
    const char *panel = from->at + unit / 2 * from->panel_size, *at = panel + unit_at(kind, from->block, 2, unit % 2);
    for (long i = 0; i < unit_size(kind); i += 64) __builtin_prefetch(at + NEAR_T0 + i, 0, 3);
    unpack_unit(kind, at, panel + head_at(kind, from->block, 2, unit % 2), from->tiles + from->slot * SLOT + unit * 2 * TILE);
}

INLINE void advance(Stream *from) {
    const int together = units_of(from) / 2;
    const char *far = from->at + (from->block * from->size + from->panel_size) * together;
    for (long i = 0; i < together * from->size; i += 64) __builtin_prefetch(far + i, 0, 2);
    from->slot = !from->slot;
    if (++from->block == from->blocks) {
        from->block = 0;
        from->panels -= together;
        from->at += from->panel_size * together;
    }
}

/* The products of a unit and a group of rows, whose parts are in tiles 6 and 7. Additions to one tile follow each other
 * without delay, to tiles in turn they do not. */
#define ADD_LOADED(sum, two_parts)               \
    TILE_DOT(sum, 4, 6);                         \
    TILE_DOT(sum, 4, 7);                         \
    if (two_parts) TILE_DOT(sum, 5, 6);
#define LOAD_WEIGHTS(from, two_parts)            \
    TILE_LOAD(4, from, 64);                      \
    if (two_parts) TILE_LOAD(5, from + TILE, 64);
#define ADD(sum, from, two_parts)                \
    LOAD_WEIGHTS(from, two_parts)                \
    ADD_LOADED(sum, two_parts)
#define LOAD_ROWS(at)                            \
    TILE_LOAD(6, at, 4 * pitch);                 \
    TILE_LOAD(7, at + part, 4 * pitch);

/* Sums of one panel with two groups of rows, or of one or two panels with one group. Later blocks are unpacked between the
 * products: vectors and tiles work side by side. */
INLINE void sum_panels(const int kind, const int groups, int units, const char *panel, int slot, Stream *stream, const char *x,
                       int pitch, float *sums) {
    const int plain = kind == BFLOAT16, two_parts = kind != BFLOAT16 && kind != INT8;
    const long unit = plain ? TILE : 2 * TILE, part = 64 * pitch, group = stream->blocks * 2 * part;
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int b = 0; b < stream->blocks; b++, x += 2 * part) {
        const char *from = stream->tiles + slot * SLOT, *others = from + 2 * unit;
        const int unpacks = !plain && stream->panels > 0;
        const int next = unpacks ? units_of(stream) : 0;
        slot = !slot;
        if (plain) {
            from = panel + b * stream->size, others = from + stream->panel_size;
            for (long i = 0; i < units * TILE; i += 64) { /* far ahead, the panels' blocks one after the other */
                __builtin_prefetch(from + b * stream->size * (units / 2 - 1) + stream->panel_size * units / 2 + i, 0, 2);
                __builtin_prefetch((i < 2 * TILE ? from : others - 2 * TILE) + NEAR_T0 + i, 0, 3);
            }
        }
        LOAD_ROWS(x)
        if (next) unpack_next(kind, stream, 0);
        ADD(0, from, two_parts)
        if (next > 1 && groups == 1) unpack_next(kind, stream, 1);
        ADD(1, from + unit, two_parts)
        if (groups == 2) {
            LOAD_ROWS(x + group)
            if (next) unpack_next(kind, stream, 1);
            ADD(2, from, two_parts)
            ADD(3, from + unit, two_parts)
        } else if (units > 2) {
            if (next > 2) unpack_next(kind, stream, 2);
            ADD(2, others, two_parts)
            if (next > 2) unpack_next(kind, stream, 3);
            ADD(3, others + unit, two_parts)
        }
        if (next) advance(stream);
    }
    TILE_STORE(0, sums, 4 * pitch);
    TILE_STORE(1, sums + 256, 4 * pitch);
    TILE_STORE(2, sums + 512, 4 * pitch);
    TILE_STORE(3, sums + 768, 4 * pitch);
}

#define ADD_GROUP(g)                             \
    if (groups > g) {                            \
        LOAD_ROWS(x + g * group)                 \
        ADD_LOADED(g, two_parts)                 \
    }

/* Sums of one of a panel's two units with up to four groups of rows. */
INLINE void sum_unit(const int kind, const char *panel, int which, long size, int blocks, int groups, char *tiles,
                     const char *x, int pitch, float *sums) {
    const int plain = kind == BFLOAT16, two_parts = kind != BFLOAT16 && kind != INT8;
    const long part = 64 * pitch, group = blocks * 2 * part;
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
#define UNPACK(b) unpack_unit(kind, panel + unit_at(kind, b, 2, which), panel + head_at(kind, b, 2, which), tiles + (b) % 2 * 2 * TILE)
    if (!plain) UNPACK(0);
    for (int b = 0; b < blocks; b++, x += 2 * part) {
        const char *unit = panel + b * size + which * size / 2, *from = plain ? unit : tiles + b % 2 * 2 * TILE;
        for (long i = 0; i < size / 2; i += 64) {
            __builtin_prefetch(unit + blocks * size + i, 0, 2);
            __builtin_prefetch(unit + NEAR_T0 + i, 0, 3);
        }
        if (!plain && b + 1 < blocks) UNPACK(b + 1);
        LOAD_WEIGHTS(from, two_parts)
        ADD_GROUP(0)
        ADD_GROUP(1)
        ADD_GROUP(2)
        ADD_GROUP(3)
    }
    TILE_STORE(0, sums, 4 * pitch);
    TILE_STORE(1, sums + 256, 4 * pitch);
    TILE_STORE(2, sums + 512, 4 * pitch);
    TILE_STORE(3, sums + 768, 4 * pitch);
}

static int groups_of(int rows) { return (rows + COLUMNS - 1) / COLUMNS; }

/* Bytes of scratch memory of a product: tiles of x, then every thread's unpacked blocks. */
long tiles_scratch(int inputs, int rows, int threads) {
    long groups = groups_of(rows) > threads ? groups_of(rows) : threads; /* of few rows, one for each thread */
    return groups * ((inputs + BLOCK - 1) / BLOCK) * 2l * TILE + threads * 2l * SLOT;
}

/* The share of a thread: panels that follow each other. */
INLINE void multiply(const int kind, const Linear *linear, Stream stream, int panels, int first, int groups, int columns,
                     const char *x, int rows, float *y, long y_stride, int add) {
    float sums[4 * 256] __attribute__((aligned(64)));
    const int plain = kind == BFLOAT16, pitch = pitch_of(columns);
    const long group = (long)stream.blocks * 2 * 64 * pitch;
    const char *weights = stream.at;
#define FINISH(i, g, output)                                                                                         \
    finish(linear, sums + 256 * (i), pitch, output, rows - (g) * columns < columns ? rows - (g) * columns : columns, \
           y + (g) * columns * y_stride, y_stride, add)
    for (int u = 0; groups > 2 && u < 2 * panels; u++) /* unit by unit, with four groups at once */
        for (int g = 0; g < groups; g += 4) {
            int count = groups - g < 4 ? groups - g : 4;
            const char *panel = weights + u / 2 * stream.panel_size;
            sum_unit(kind, panel, u % 2, stream.size, stream.blocks, count, stream.tiles, x + g * group, pitch, sums);
            for (int i = 0; i < count; i++) FINISH(i, g + i, 32 * first + UNIT * u);
        }
    for (int u = 0; groups <= 2 && !plain && u < units_of(&stream); u++) unpack_next(kind, &stream, u);
    if (groups <= 2 && !plain && panels) advance(&stream);
    for (int p = 0, slot = 0, together; groups <= 2 && p < panels; p += together, weights += together * stream.panel_size) {
        together = panels - p < stream.wide ? panels - p : stream.wide;
        if (groups == 2)
            sum_panels(kind, 2, 2, weights, slot, &stream, x, pitch, sums);
        else
            sum_panels(kind, 1, 2 * together, weights, slot, &stream, x, pitch, sums);
        for (int i = 0; i < 2 * groups * together; i++)
            FINISH(i, groups == 2 ? i / 2 : 0, 32 * (first + p) + UNIT * (groups == 2 ? i % 2 : i));
        slot = (slot + stream.blocks) % 2;
    }
}

#define MULTIPLY(kind) \
    case kind: multiply(kind, linear, stream, end - start, start, groups, columns, scratch, rows, y, y_stride, add); break;

void product_tiles(const Linear *linear, const float *x, int rows, float *y, long y_stride, int add, const Step *step) {
    int inputs = linear->inputs, kind = linear->kind, panels = (linear->outputs + 31) / 32;
    int blocks = (inputs + BLOCK - 1) / BLOCK, groups = groups_of(rows), columns = (rows + groups - 1) / groups;
    long panel_size = kind == BFLOAT16 ? 2l * TILE * blocks : units_size(kind, blocks, 2);
    int thread = omp_get_thread_num(), threads = omp_get_num_threads();
    char *slots = (char *)step->tiles + thread * 2l * SLOT, *scratch = (char *)step->tiles + threads * 2l * SLOT;
    if (rows <= OWN_ROWS) {
        scratch += thread * blocks * 2l * TILE;
        for (int b = 0; b < blocks; b++) prepare(x, inputs, b * BLOCK, rows, columns, scratch);
    } else {
#pragma omp for schedule(static) nowait
        for (int b = 0; b < blocks; b++) prepare(x, inputs, b * BLOCK, rows, columns, scratch);
        meet(step);
    }
    int start = panels * thread / threads, end = panels * (thread + 1) / threads;
    Stream stream = {.at = (const char *)linear->weights + start * panel_size, .size = panel_size / blocks,
                     .panel_size = panel_size, .blocks = blocks, .panels = end - start, .wide = groups > 1 ? 1 : 2,
                     .tiles = slots};
    configure(columns);
    switch (kind) {
        MULTIPLY(BFLOAT16)
        MULTIPLY(INT8)
        MULTIPLY(NIBBLES)
        MULTIPLY(BYTES)
        MULTIPLY(NIBBLES_K)
        MULTIPLY(FIVE_K)
        MULTIPLY(SIX_K)
    }
    release_tiles();
    meet(step);
}

/* Whether this processor has tiles of bfloat16 and the system lets this process use them. */
int outrider_tiles(void) {
    __builtin_cpu_init();
    if (EMULATED) return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
    uint32_t a = 7, b, c = 0, d;
    __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    if (!(d >> 22 & 1) || !__builtin_cpu_supports("avx512vnni")) return 0;
    if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vbmi")) return 0;
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0;
}

#else

long tiles_scratch(int inputs, int rows, int threads) { return (void)inputs, (void)rows, (void)threads, 0; }
void product_tiles(const Linear *linear, const float *x, int rows, float *y, long y_stride, int add, const Step *step) {
    (void)linear, (void)x, (void)rows, (void)y, (void)y_stride, (void)add, (void)step;
}
int outrider_tiles(void) { return 0; }

#endif
