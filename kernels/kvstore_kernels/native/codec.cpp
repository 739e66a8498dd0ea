// Compiled once for each instruction set; -DTABLE names the table of what it made.
#include "ep.h"
#include "l3.h"
#include "sums.h"

extern const Codec TABLE;
const Codec TABLE = {l3_encode, l3_decode, ep_encode, ep_decode, leaves_of, copy_sum, copied, sum_of};
