/* Products in integers with the instructions of -march. */

#include "model.h"

#ifdef __AVX512VNNI__ /* the same as in integers_vnni.c */
void product_integers(const Linear *linear, const float *x, int rows, float *y, long y_stride, int add, const Step *step) {
    product_integers_vnni(linear, x, rows, y, y_stride, add, step);
}
#else
#define PRODUCT product_integers
#include "integers.h"
#endif
