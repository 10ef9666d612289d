#include "avx2-inl.h"
#include "table-inl.h"

TILEWRIGHT_ISA(avx2, VectorIsa<Avx2>)
