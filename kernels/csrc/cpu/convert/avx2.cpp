#include "convert-inl.h"

TILEWRIGHT_CONVERT(avx2)
