#pragma once
// The table of one instruction set, the only thing that its file exports.
#include "attention-inl.h"
#include "experts-inl.h"
#include "linear-inl.h"
#include "norm-inl.h"

#define TILEWRIGHT_ISA(name, I)                                                                        \
  extern "C" __attribute__((visibility("hidden"))) const tilewright::Isa tilewright_isa_##name;        \
  const tilewright::Isa tilewright_isa_##name = {                                                      \
      #name,      &I::kBlocking, plan<I>,       prepare<I>,  compute<I>, convert_rows<I>, gather_rows, \
      gate_up<I>, down<I>,       store_rows<I>, rms_norm<I>, attend<I>,  join_chunks<I>};
