/* Keys and values in bfloat16, laid out in their pages as AMX tiles. */

#include "tiled_cache.h"
#include "tasks.h"

#if TILES

/* A page of keys is [2 halves][blocks of 32 dimensions][16 pairs][16 slots][2]; of values [panels][16 pairs of slots][16][2]. */
char *tiled_key(const Model *model, const Layer *layer, int page, int kv_head, int offset, int dim) {
    long tile = offset / 16 * blocks_of(model) + dim / 32;
    return (char *)page_at(model, layer->keys, tiled_keys(model), page, kv_head) + tile * TILE + dim % 32 / 2 * 64 +
           offset % 16 * 4 + dim % 2 * 2;
}
char *tiled_value(const Model *model, const Layer *layer, int page, int kv_head, int offset, int dim) {
    return (char *)page_at(model, layer->values, tiled_values(model), page, kv_head) + dim / 16 * TILE +
           offset / 2 * 64 + dim % 16 * 4 + offset % 2 * 2;
}

/* Only its own bytes are written: the neighbours may be another thread's. */
void put_in_tiles(const Model *model, const Layer *layer, int page, int kv_head, int offset, const float *key,
                  const float *value) {
    for (int d = 0; d < model->head_dim; d += 16) {
        __mmask16 mask = (__mmask16)(model->head_dim - d < 16 ? (1 << (model->head_dim - d)) - 1 : 0xffff);
        __m512 numbers = _mm512_maskz_loadu_ps(mask, key + d), other = _mm512_maskz_loadu_ps(mask, value + d);
        uint32_t pairs[8];
        _mm256_storeu_si256((__m256i *)pairs, (__m256i)_mm512_cvtneps_pbh(numbers));
        char *to = tiled_key(model, layer, page, kv_head, offset, d);
        for (int i = 0; i < 8; i++) memcpy(to + 64 * i, pairs + i, 4);
        __m512i halves = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(other));
        to = tiled_value(model, layer, page, kv_head, offset & ~1, d);
        _mm512_mask_storeu_epi16(to, 0x55555555u << offset % 2, _mm512_slli_epi32(halves, 16 * (offset % 2)));
    }
}

#else

char *tiled_key(const Model *model, const Layer *layer, int page, int kv_head, int offset, int dim) {
    return (void)model, (void)layer, (void)page, (void)kv_head, (void)offset, (void)dim, NULL;
}
char *tiled_value(const Model *model, const Layer *layer, int page, int kv_head, int offset, int dim) {
    return tiled_key(model, layer, page, kv_head, offset, dim);
}
void put_in_tiles(const Model *model, const Layer *layer, int page, int kv_head, int offset, const float *key,
                  const float *value) {
    (void)model, (void)layer, (void)page, (void)kv_head, (void)offset, (void)key, (void)value;
}

#endif
