/* Packing of weights: numbers into panels or tiles, a GGUF file's blocks into units, see formats.h. Types and block layouts
 * are those of ggml. */

#include "formats.h"

enum { GGML_F32 = 0, GGML_F16 = 1, GGML_BF16 = 30 };
enum { GGML_Q4_0 = 2, GGML_Q4_1 = 3, GGML_Q8_0 = 8, GGML_Q4_K = 12, GGML_Q5_K = 13, GGML_Q6_K = 14 };

/* Of 32 inputs of one output: quants, and the numbers of its unit. */
typedef struct {
    int8_t quants[BLOCK];
    float numbers[2];
    int small[2]; /* of a K-quant: numbers are these times those of the head */
    float heads[2];
} Decoded;

static float float16(const uint8_t *p) {
#ifdef __F16C__
    return _cvtsh_ss(*(const uint16_t *)p);
#else
    uint16_t lanes[LANES] = {0};
    memcpy(lanes, p, 2);
    return from_float16(lanes)[0];
#endif
}

/* The nearest float16; GCC has _Float16 on x86 from version 12 on. */
static uint16_t to_float16(float number) {
#ifdef __F16C__
    return _cvtss_sh(number, 0);
#else
    _Float16 rounded = (_Float16)number;
    uint16_t bits;
    memcpy(&bits, &rounded, 2);
    return bits;
#endif
}

static float rounded16(float number) {
    uint16_t bits = to_float16(number);
    return float16((const uint8_t *)&bits);
}

/* The 6-bit scale and minimum of a K-quant's block, of 8 in 12 bytes. */
static void scale_and_minimum(const uint8_t *packed, int block, int *scale, int *minimum) {
    if (block < 4) {
        *scale = packed[block] & 63;
        *minimum = packed[block + 4] & 63;
    } else {
        *scale = (packed[block + 4] & 15) | packed[block - 4] >> 6 << 4;
        *minimum = packed[block + 4] >> 4 | packed[block] >> 6 << 4;
    }
}

static Decoded decode(int type, const uint8_t *row, int block) {
    Decoded to;
    int inner = block % 8; /* in a K-quant's 256 inputs */
    switch (type) {
    case GGML_Q4_0:
    case GGML_Q4_1: {
        const uint8_t *p = row + block * (type == GGML_Q4_0 ? 18 : 20), *quants = p + (type == GGML_Q4_0 ? 2 : 4);
        to.numbers[0] = float16(p);
        to.numbers[1] = type == GGML_Q4_0 ? -8 * to.numbers[0] : float16(p + 2);
        for (int i = 0; i < 16; i++) to.quants[i] = quants[i] & 15, to.quants[i + 16] = (int8_t)(quants[i] >> 4);
        break;
    }
    case GGML_Q8_0:
        to.numbers[0] = float16(row + block * 34);
        memcpy(to.quants, row + block * 34 + 2, BLOCK);
        break;
    case GGML_Q4_K:
    case GGML_Q5_K: {
        const uint8_t *p = row + block / 8 * (type == GGML_Q4_K ? 144 : 176);
        const uint8_t *high = p + 16, *quants = p + (type == GGML_Q4_K ? 16 : 48) + inner / 2 * 32;
        scale_and_minimum(p + 4, inner, &to.small[0], &to.small[1]);
        to.heads[0] = float16(p);
        to.heads[1] = -float16(p + 2);
        for (int i = 0; i < BLOCK; i++) {
            int low = inner % 2 ? quants[i] >> 4 : quants[i] & 15;
            to.quants[i] = (int8_t)(type == GGML_Q5_K ? low | (high[i] >> inner & 1) << 4 : low);
        }
        break;
    }
    default: { /* Q6_K: two halves of 128 inputs, each in four rows of 32 */
        const uint8_t *p = row + block / 8 * 210, *low = p + inner / 4 * 64 + inner % 2 * 32;
        const uint8_t *high = p + 128 + inner / 4 * 32;
        for (int s = 0; s < 2; s++) to.small[s] = ((const int8_t *)p)[192 + 2 * inner + s];
        to.heads[0] = to.heads[1] = float16(p + 208);
        for (int i = 0; i < BLOCK; i++) {
            int nibble = inner % 4 < 2 ? low[i] & 15 : low[i] >> 4;
            to.quants[i] = (int8_t)((nibble | (high[i] >> 2 * (inner % 4) & 3) << 4) - 32);
        }
    }
    }
    for (int n = 0; n < 2 && type >= GGML_Q4_K; n++) to.numbers[n] = to.heads[n] * (float)to.small[n];
    return to;
}

static const struct {
    int kind, inputs, bytes; /* a block's */
} PACKED[] = {[GGML_F32] = {FLOAT32, 1, 4},        [GGML_F16] = {FLOAT32, 1, 2},       [GGML_BF16] = {FLOAT32, 1, 2},
              [GGML_Q4_0] = {NIBBLES, 32, 18},     [GGML_Q4_1] = {NIBBLES, 32, 20},    [GGML_Q8_0] = {BYTES, 32, 34},
              [GGML_Q4_K] = {NIBBLES_K, 256, 144}, [GGML_Q5_K] = {FIVE_K, 256, 176},   [GGML_Q6_K] = {SIX_K, 256, 210}};

static long row_bytes(int type, int inputs) { return (long)inputs / PACKED[type].inputs * PACKED[type].bytes; }

static void to_floats(int type, const uint8_t *row, int inputs, float *to) {
    const Format format = FORMATS[PACKED[type].kind];
    if (type == GGML_F32) memcpy(to, row, 4l * inputs);
    else if (type == GGML_F16)
        for (int k = 0; k < inputs; k++) to[k] = float16(row + 2 * k);
    else if (type == GGML_BF16)
        for (int k = 0; k < inputs; k++) {
            uint32_t bits = (uint32_t)((const uint16_t *)row)[k] << 16;
            memcpy(to + k, &bits, 4);
        }
    else
        for (int block = 0; block < inputs / BLOCK; block++) {
            Decoded from = decode(type, row, block);
            const int count = BLOCK / format.sub_blocks;
            for (int s = 0; s < format.sub_blocks; s++, to += count) {
                const int8_t *quants = from.quants + s * count;
                if (format.minima)
                    for (int k = 0; k < count; k++) to[k] = fused_one(quants[k], from.numbers[0], from.numbers[1]);
                else
                    for (int k = 0; k < count; k++) to[k] = quants[k] * from.numbers[s];
            }
        }
}

/* Whether all numbers of rows are bfloat16. */
int outrider_are_bfloat16(int type, const uint32_t *numbers, int outputs, int inputs) {
    uint32_t low = type != GGML_F32;
    for (long i = 0; i < (long)outputs * inputs && type == GGML_F32; i++) low |= numbers[i] & 0xffff;
    return type == GGML_BF16 || !low;
}

/* Returns the bytes of a linear map's weights. Blocks stay blocks where the weights are to be FLOAT32. Outputs are filled up
 * to a multiple of PANEL and UNIT. */
int64_t outrider_packed_size(int type, Linear *linear) {
    static const int sizes[] = {[FLOAT32] = 4, [BFLOAT16] = 2};
    if (linear->kind == FLOAT32) linear->kind = PACKED[type].kind;
    long groups = (linear->outputs + 31) / 32 * 2l, blocks = blocks_of(linear);
    if (linear->kind > BFLOAT16) return groups * units_size(linear->kind, blocks);
    return groups * UNIT * (linear->arithmetic ? blocks * BLOCK : linear->inputs) * sizes[linear->kind];
}

/* Returns the scale of a row's int8 weights. */
static float int8_scale(const float *row, const Linear *linear, int output) {
    float scale = 0;
    for (int k = 0; k < linear->inputs; k++) scale = fmaxf(scale, fabsf(row[k]));
    scale = fmaxf(scale, 1e-12f) / 127;
    return ((float *)linear->scales)[output] = scale;
}

/* A row of numbers, in panels or tiles. */
static void pack_numbers(const float *row, const Linear *linear, int output) {
    long blocks = blocks_of(linear), at, step = linear->arithmetic ? 1 : LANES;
    for (int start = 0; start < linear->inputs; start += BLOCK, row += BLOCK) {
        if (linear->arithmetic == IN_TILES)
            at = ((output / 32 * blocks + start / BLOCK) * 2 + output / UNIT % 2) * UNIT * BLOCK + output % UNIT * BLOCK;
        else
            at = ((output / PANEL * 2l + output / LANES % 2) * linear->inputs + start) * LANES + output % LANES;
        int count = linear->inputs - start < BLOCK ? linear->inputs - start : BLOCK;
        for (int k = 0; k < count; k++, at += step)
            if (linear->kind == FLOAT32)
                ((float *)linear->weights)[at] = row[k];
            else { /* rounded to even */
                uint32_t bits, rounded;
                memcpy(&bits, row + k, 4);
                rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
                ((uint16_t *)linear->weights)[at] = (uint16_t)(row[k] == row[k] ? rounded : 0x7fc0);
            }
    }
}

/* The low bits of eight bytes, one after the other. */
INLINE uint32_t low_bits(uint64_t bytes, const int bits) {
    const uint64_t one = (1ull << bits) - 1, two = (1ull << 2 * bits) - 1, four = (1ull << 4 * bits) - 1;
    bytes &= one * 0x0101010101010101;
    bytes = (bytes | bytes >> (8 - bits)) & two * 0x0001000100010001;
    bytes = (bytes | bytes >> (16 - 2 * bits)) & four * 0x0000000100000001;
    return (uint32_t)(bytes | bytes >> (32 - 4 * bits));
}

/* The quants of an output: eight inputs in the 32 bits of an output, or 32 / bits above four: those of inputs j and j + 4 in
 * its halves. Bytes lie as `byte_at` says. */
INLINE void in_lanes(const int bits, const uint8_t *whole, uint32_t *quants, uint32_t *above, int lane) {
    const int more = bits - 4;
#pragma GCC unroll 4
    for (int k = 0; k < BLOCK; k += 8) {
        uint64_t eight;
        memcpy(&eight, whole + k, 8);
        if (bits == 8) {
            quants[k / 4 * UNIT + lane] = (uint32_t)(eight & 0xffff) | (uint32_t)(eight >> 32) << 16;
            quants[(k / 4 + 1) * UNIT + lane] = (uint32_t)(eight >> 16 & 0xffff) | (uint32_t)(eight >> 48) << 16;
            continue;
        }
        quants[k / 8 * UNIT + lane] = low_bits(eight, 4);
        if (!more) continue;
        const uint32_t high = low_bits(eight >> 4, more), first = high & ((1u << 4 * more) - 1), last = high >> 4 * more;
        above[k * more / 32 * UNIT + lane] |= ((last & ((1u << 4 * more) - 1)) << 16 | first) << k / 2 * more % 16;
    }
}

/* A block of 32 inputs of an output, in a unit. */
INLINE void pack_block_as(const int kind, const Decoded *from, const Linear *linear, int output, long block) {
    const int lane = output % UNIT, bits = FORMATS[kind].bits;
    char *units = (char *)linear->weights + output / UNIT * units_size(kind, blocks_of(linear));
    char *unit = units + unit_at(kind, block), *head = units + head_at(kind, block);
    char *quants = unit + numbers_size(kind), *above = quants + UNIT * BLOCK / 2;
    uint8_t whole[BLOCK];
    for (int n = 0; n < FORMATS[kind].heads; n++) ((uint16_t *)head)[n * UNIT + lane] = to_float16(from->heads[n]);
    for (int n = 0; n < FORMATS[kind].numbers; n++)
        if (FORMATS[kind].heads) unit[n * UNIT + lane] = (char)from->small[n];
        else ((uint16_t *)unit)[n * UNIT + lane] = to_float16(from->numbers[n]);
    for (int k = 0; k < BLOCK; k++) whole[k] = (uint8_t)(from->quants[k] + FORMATS[kind].zero);
    in_lanes(bits, whole, (uint32_t *)quants, (uint32_t *)above, lane);
}

static void pack_block(const Decoded *from, const Linear *linear, int output, long block) {
#define PACK(kind) \
    case kind: pack_block_as(kind, from, linear, output, block); break;
    switch (linear->kind) { KINDS(PACK) }
}

/* A row of int8 weights, in blocks of bytes. */
static void pack_bytes(const float *row, const Linear *linear, int output) {
    const float scale = int8_scale(row, linear, output);
    for (int start = 0; start < linear->inputs; start += BLOCK) {
        Decoded block = {.numbers = {1}};
        for (int k = 0; k < BLOCK && start + k < linear->inputs; k++) block.quants[k] = (int8_t)rintf(row[start + k] / scale);
        pack_block(&block, linear, output, start / BLOCK);
    }
}

/* A row in blocks of four bits: 16 levels from a block's least number to its largest, as in Q4_1. */
static void pack_nibbles(const float *row, const Linear *linear, int output) {
    for (int start = 0; start < linear->inputs; start += BLOCK, row += BLOCK) {
        const int count = linear->inputs - start < BLOCK ? linear->inputs - start : BLOCK;
        float lowest = row[0], highest = row[0];
        for (int k = 1; k < count; k++) lowest = fminf(lowest, row[k]), highest = fmaxf(highest, row[k]);
        Decoded block = {.numbers = {rounded16((highest - lowest) / 15), rounded16(lowest)}};
        for (int k = 0; k < count; k++) {
            float quant = block.numbers[0] > 0 ? rintf((row[k] - block.numbers[1]) / block.numbers[0]) : 0;
            block.quants[k] = (int8_t)(quant < 0 ? 0 : quant > 15 ? 15 : quant);
        }
        pack_block(&block, linear, output, start / BLOCK);
    }
}

/* The head's second copy, from its bytes into zeroed memory. */
void outrider_make_rough(const Model *model, int threads) {
    const Linear *head = &model->head;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int unit = 0; unit < (head->outputs + UNIT - 1) / UNIT; unit++) {
        float *row = malloc(4l * blocks_of(head) * BLOCK);
        for (int output = unit * UNIT; output < (unit + 1) * UNIT && output < head->outputs; output++) {
            for (int block = 0; block < blocks_of(head); block++) bytes_as_floats(head, output, block, row + block * BLOCK);
            pack_nibbles(row, &model->rough, output);
        }
        free(row);
    }
}

/* Repacks rows into the linear's zeroed memory, as `count` outputs from `first` on. A thread has whole units. */
void outrider_pack(int type, const uint8_t *rows, const Linear *linear, int first, int count, int threads) {
    const int inputs = linear->inputs;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int unit = first / UNIT; unit <= (first + count - 1) / UNIT; unit++) {
        const int as_it_is = linear->kind > BFLOAT16 && linear->kind == PACKED[type].kind && !linear->scales;
        float *floats = as_it_is ? NULL : malloc(4l * inputs);
        for (int output = unit * UNIT; output < (unit + 1) * UNIT; output++) {
            if (output < first || output >= first + count) continue;
            const uint8_t *row = rows + (output - first) * row_bytes(type, inputs);
            if (floats) {
                to_floats(type, row, inputs, floats);
                (linear->kind == NIBBLES ? pack_nibbles : linear->kind == BYTES ? pack_bytes : pack_numbers)(floats, linear, output);
            } else
                for (int block = 0; block < inputs / BLOCK; block++) {
                    Decoded from = decode(type, row, block);
                    pack_block(&from, linear, output, block);
                }
        }
        free(floats);
    }
}

/* Rows as floats, one for each id. Returns 0, or -1 for an id without a row. */
int outrider_dequantise(int type, const uint8_t *rows, int outputs, int inputs, const int64_t *ids, int count, float *to,
                        int threads) {
    for (int r = 0; r < count; r++)
        if (ids[r] < 0 || ids[r] >= outputs) return -1;
#pragma omp parallel for schedule(static) num_threads(threads) if (count > UNIT)
    for (int r = 0; r < count; r++) to_floats(type, rows + ids[r] * row_bytes(type, inputs), inputs, to + (long)r * inputs);
    return 0;
}
