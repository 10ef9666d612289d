#include "convert-inl.h"

TILEWRIGHT_CONVERT(portable)
