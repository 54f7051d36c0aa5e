/* Products for guesses with the instructions of -march. */

#include "model.h"

#ifdef __AVX512VNNI__ /* the same as in nibbles_vnni.c */
void product_nibbles(const Linear *linear, const float *x, int rows, float *y, long y_stride, int add, const Step *step) {
    product_nibbles_vnni(linear, x, rows, y, y_stride, add, step);
}
#else
#define PRODUCT product_nibbles
#include "nibbles.h"
#endif
