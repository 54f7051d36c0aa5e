/* Repacking of a GGUF file's blocks into units, see formats.h. Block layouts are those of ggml. */

#include "formats.h"

enum { GGML_Q4_0 = 2, GGML_Q4_1 = 3, GGML_Q8_0 = 8, GGML_Q4_K = 12, GGML_Q5_K = 13, GGML_Q6_K = 14 };

/* Of 32 inputs of one output: quants, and the numbers of its unit. */
typedef struct {
    int8_t quants[BLOCK];
    float numbers[2];
} Decoded;

static float float16(const uint8_t *p) {
    uint16_t lanes[LANES] = {0};
    memcpy(lanes, p, 2);
    return from_float16(lanes)[0];
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
        int scale, minimum;
        scale_and_minimum(p + 4, inner, &scale, &minimum);
        to.numbers[0] = float16(p) * (float)scale;
        to.numbers[1] = -(float16(p + 2) * (float)minimum);
        for (int i = 0; i < BLOCK; i++) {
            int low = inner % 2 ? quants[i] >> 4 : quants[i] & 15;
            to.quants[i] = (int8_t)(type == GGML_Q5_K ? low | (high[i] >> inner & 1) << 4 : low);
        }
        break;
    }
    default: { /* Q6_K: two halves of 128 inputs, each in four rows of 32 */
        const uint8_t *p = row + block / 8 * 210, *low = p + inner / 4 * 64 + inner % 2 * 32;
        const uint8_t *high = p + 128 + inner / 4 * 32;
        for (int s = 0; s < 2; s++) to.numbers[s] = float16(p + 208) * (float)((const int8_t *)p)[192 + 2 * inner + s];
        for (int i = 0; i < BLOCK; i++) {
            int nibble = inner % 4 < 2 ? low[i] & 15 : low[i] >> 4;
            to.quants[i] = (int8_t)((nibble | (high[i] >> 2 * (inner % 4) & 3) << 4) - 32);
        }
    }
    }
    return to;
}

static void put_number(int kind, char *unit, int which, int output, float number) {
    long at = which * UNIT + output;
    if (FORMATS[kind].number_bytes == 4)
        ((float *)unit)[at] = number;
    else
        ((_Float16 *)unit)[at] = (_Float16)number;
}

static const struct {
    int kind, inputs, bytes;
} PACKED[] = {[GGML_Q4_0] = {NIBBLES, 32, 18},     [GGML_Q4_1] = {NIBBLES, 32, 20},    [GGML_Q8_0] = {BYTES, 32, 34},
              [GGML_Q4_K] = {NIBBLES_K, 256, 144}, [GGML_Q5_K] = {BYTES_5K, 256, 176}, [GGML_Q6_K] = {BYTES_6K, 256, 210}};

/* Sets the kind of weights that are packed from a GGUF type, and returns their bytes. Outputs are filled up to a multiple
 * of PANEL and UNIT. */
int64_t outrider_packed_size(int type, Linear *linear) {
    linear->kind = PACKED[type].kind;
    return (linear->outputs + 31) / 32 * 2l * (linear->inputs / BLOCK) * unit_size(linear->kind);
}

/* A block's even inputs before its odd ones; of Q8_0, two outputs in every four bytes, above 0. */
static int byte_in_tile(int kind, int output, int input) {
    if (kind == BYTES) return output / 2 * 2 * BLOCK + input / 2 * 4 + output % 2 * 2 + input % 2;
    return output * BLOCK + input % 2 * 16 + input / 2;
}

/* Repacks rows of a GGUF file's blocks into the linear's zeroed memory. */
void outrider_pack(int type, const uint8_t *rows, const Linear *linear, int threads) {
    const int kind = linear->kind;
    long blocks = linear->inputs / BLOCK, row_bytes = (long)linear->inputs / PACKED[type].inputs * PACKED[type].bytes;
#pragma omp parallel for schedule(static, UNIT) num_threads(threads)
    for (int output = 0; output < linear->outputs; output++)
        for (int block = 0; block < blocks; block++) {
            long at = linear->tiles ? (output / 32 * blocks + block) * 2 + output / UNIT % 2 : output / UNIT * blocks + block;
            char *unit = (char *)linear->weights + at * unit_size(kind);
            char *quants = unit + numbers_size(kind);
            int lane = output % UNIT;
            Decoded from = decode(type, rows + (long)output * row_bytes, block);
            for (int n = 0; n < FORMATS[kind].numbers; n++) put_number(kind, unit, n, lane, from.numbers[n]);
            for (int k = 0; k < BLOCK; k++)
                if (FORMATS[kind].bits == 8)
                    quants[linear->tiles ? byte_in_tile(kind, lane, k) : k * UNIT + lane] =
                        (char)(from.quants[k] + (linear->tiles && kind == BYTES ? 128 : 0));
                else if (linear->tiles) /* four outputs in the 16 bits of an input */
                    quants[lane / 4 * 64 + 2 * k + lane % 4 / 2] |= (char)(from.quants[k] << lane % 2 * 4);
                else /* eight inputs in the 32 bits of an output */
                    quants[(k / 8 * UNIT + lane) * 4 + k % 8 / 2] |= (char)(from.quants[k] << k % 2 * 4);
        }
}

/* Rows of a GGUF file's blocks as floats, one for each id. */
void outrider_dequantise(int type, const uint8_t *rows, int inputs, const int64_t *ids, int count, float *to) {
    const Format format = FORMATS[PACKED[type].kind];
    long row_bytes = (long)inputs / PACKED[type].inputs * PACKED[type].bytes;
    for (int r = 0; r < count; r++)
        for (int block = 0; block < inputs / BLOCK; block++) {
            Decoded from = decode(type, rows + ids[r] * row_bytes, block);
            for (int k = 0; k < BLOCK; k++, to++) {
                float scale = from.numbers[k * format.sub_blocks / BLOCK];
                *to = format.minima ? fused_one(from.quants[k], scale, from.numbers[1]) : from.quants[k] * scale;
            }
        }
}
