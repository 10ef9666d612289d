// AVX2 with the byte products of AVX-VNNI.
#define TILEWRIGHT_AVXVNNI
#include "avx2-inl.h"
#include "table-inl.h"

TILEWRIGHT_ISA(avxvnni, VectorIsa<Avx2>)
