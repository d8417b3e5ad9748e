/* All kernels, as one unit: a library for a kind of CPU is this file compiled with its flags. */
#include "step.c"
#include "sizes.c"
