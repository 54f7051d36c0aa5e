/* AMX tiles in memory, bit for bit, for tests on processors without them: compile with -DEMULATED_TILES. */

#pragma once

#define EMULATED 1

static __thread TileConfig tile_config;
static __thread uint32_t tile_rows[8][16][16];

static void load_tile(int tile, const void *from, long stride) {
    memset(tile_rows[tile], 0, TILE);
    for (int r = 0; r < tile_config.rows[tile]; r++)
        memcpy(tile_rows[tile][r], (const char *)from + r * stride, tile_config.bytes[tile]);
}

static void store_tile(int tile, void *to, long stride) {
    for (int r = 0; r < tile_config.rows[tile]; r++)
        memcpy((char *)to + r * stride, tile_rows[tile][r], tile_config.bytes[tile]);
}

/* A processor raises an error for other shapes. */
static void check_shapes(int sum, int a, int b) {
    const uint8_t *rows = tile_config.rows;
    const uint16_t *width = tile_config.bytes;
    if (!rows[sum] || rows[sum] > 16 || rows[sum] != rows[a] || width[sum] != width[b] || width[a] != 4 * rows[b]) abort();
}

INLINE float upper_half(uint32_t pair) {
    float number;
    pair &= 0xffff0000;
    memcpy(&number, &pair, 4);
    return number;
}

/* One chain of fused operations over the even halves, one over the odd ones, then their sum. */
static __attribute__((noinline)) void add_products(int sum, int a, int b) {
    check_shapes(sum, a, b);
    int width = tile_config.bytes[sum] / 4;
    for (int m = 0; m < tile_config.rows[sum]; m++) {
        float even[16] = {0}, odd[16] = {0}, before[16];
        for (int k = 0; k < tile_config.bytes[a] / 4; k++)
            for (int n = 0; n < width; n++) {
                uint32_t one = tile_rows[a][m][k], other = tile_rows[b][k][n];
                even[n] = fused_one(upper_half(one << 16), upper_half(other << 16), even[n]);
                odd[n] = fused_one(upper_half(one), upper_half(other), odd[n]);
            }
        memcpy(before, tile_rows[sum][m], sizeof before);
        for (int n = 0; n < width; n++) before[n] += even[n] + odd[n];
        memcpy(tile_rows[sum][m], before, sizeof before);
    }
}

/* Four products of bytes for each number; `sign` is 0x80 where those of `a` have one. */
static __attribute__((noinline)) void add_bytes(int sum, int a, int b, int sign) {
    check_shapes(sum, a, b);
    for (int m = 0; m < tile_config.rows[sum]; m++)
        for (int n = 0; n < tile_config.bytes[sum] / 4; n++)
            for (int k = 0; k < tile_config.bytes[a]; k++) {
                int one = tile_rows[a][m][k / 4] >> k % 4 * 8 & 0xff, other = tile_rows[b][k / 4][n] >> k % 4 * 8 & 0xff;
                tile_rows[sum][m][n] += (uint32_t)(((one ^ sign) - sign) * ((other ^ 0x80) - 0x80));
            }
}

/* Numbers below 2^-126 count as 0. */
INLINE void dot_tiles(int sum, int a, int b) {
    unsigned int mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8040);
    add_products(sum, a, b);
    _mm_setcsr(mode);
}

#define TILE_LOAD(tile, from, stride) load_tile(tile, from, stride)
#define TILE_STORE(tile, to, stride) store_tile(tile, to, stride)
#define TILE_ZERO(tile) memset(tile_rows[tile], 0, TILE)
#define TILE_DOT(sum, a, b) dot_tiles(sum, a, b)
#define TILE_DOT_BYTES(sum, a, b) add_bytes(sum, a, b, 0x80)
#define TILE_DOT_UNSIGNED(sum, a, b) add_bytes(sum, a, b, 0)

INLINE void configure_tiles(const TileConfig *config) {
    tile_config = *config;
    memset(tile_rows, 0, sizeof tile_rows);
}
INLINE void release_tiles(void) { memset(&tile_config, 0, sizeof tile_config); }
