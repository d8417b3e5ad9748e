/* Constants and structures of the kernels. Python declares every structure again; sizes are compared when a library is loaded.

   A kernel is a function of what it works on, of scratch memory and of the number of threads. One that lacks scratch memory does
   nothing and returns how many bytes it needs; else it returns 0.

   The layout of a linear layer's weights W [outputs, inputs], where a block is read from front to back:

       block 0                                   block 1 ...
       +------------------------------------+    BLOCK_N = 32 outputs a block, zeros after the last output
       | k = 0..P-1 of outputs 0, 1, .. 31  |    P = 2 inputs of bf16, or 4 of 8 bits, which one instruction multiplies
       | k = P..2P-1 of outputs 0, 1, .. 31 |
       | ...                                |    inputs up to a multiple of K_ALIGN = 64, with zeros
       +------------------------------------+

   Weights of 4 bits, q, are (q - 8) times a factor of their INT4_GROUP inputs of an output, from -15 to 15, and so have 8 bits again. A block has the
   factors, bytes [width / INT4_GROUP, BLOCK_N], then bytes in the order of 8 bits, with one q in the lower half and that of 4 inputs later in the upper.
*/
#ifndef KERNELS_H
#define KERNELS_H

#include <stdint.h>

#define BLOCK_N 32           /* outputs of a block of weights */
#define TILE_M 16            /* rows of a tile of inputs */
#define K_ALIGN 64           /* inputs are padded to a multiple of this; in 8 bits also those that share a scale */
#define BLOCK_K 512          /* inputs that all rows are multiplied with before the next ones: weights stay in the L1 cache, the next go to L2 */
#define MAX_BLOCK_M 128      /* rows whose products with a block of weights are computed before they are used */
#define PREFETCH_BYTES 4096  /* between the weights that are multiplied and those that are fetched into the L1 cache */
#define INT4_GROUP 32        /* inputs that share a factor of weights of 4 bits */
#define FACTOR_ZERO 16       /* is added to such a factor */
#define LANES 16             /* numbers of a kind that lie together in packed layouts */

typedef uint16_t bf16; /* the upper half of a float */

typedef struct {
    char *memory;
    int64_t bytes;
} Scratch;

#define ENSURE(scratch, needed) do { const int64_t _needed = needed; if (_needed > (scratch)->bytes) return _needed; } while (0)

/* A linear layer. Weights have 8 or 4 bits where there is a scale; 8 bits are stored with WEIGHT_ZERO added. */
typedef struct {
    const void *weight; /* [blocks, width / P, BLOCK_N, P] of bf16 or bytes, width: inputs up to a multiple of K_ALIGN */
    const float *scale; /* [blocks * BLOCK_N] of the outputs, or null */
    const float *bias;  /* [blocks * BLOCK_N], or null */
    int64_t inputs, outputs, is_int4;
} Linear;

/* What `pack_linear` writes from the rows of weight matrices. */
typedef struct {
    const void **row;   /* [blocks * BLOCK_N] the weights [inputs] of an output, or null: zeros */
    const float *given; /* of int8 rows: [blocks * BLOCK_N] their scales; null: rows are bf16 */
    void *weight;
    float *scale; /* null: packed as bf16 */
    int64_t blocks, inputs, width, is_int4;
} Packing;

/* Rows of a matrix times a linear layer, for two branches those that guidance makes of both, rounded to bf16. */
typedef struct {
    const Linear *layer;
    const bf16 *x; /* [branches, rows, pitch], the conditional branch first; the first `inputs` numbers of a row are read */
    void *out;     /* [rows, outputs] of bf16, or of float */
    int64_t rows, pitch, branches, out_is_float;
    double guidance; /* its scale */
} LinearCall;

/* One layer: x += out_norm(attention(norm(x))), then x += out_norm(w2(gate * up)). Norms are null where there is none. */
typedef struct {
    const float *attention_norm, *ffn_norm, *attention_out_norm, *ffn_out_norm; /* [dim up to a multiple of K_ALIGN] */
    const float *qk_norm, *qk_bias;                                             /* [heads + kv_heads, head_dim] */
    Linear wqkv, wo, w13, w2; /* of w13, gate and up alternate by LANES outputs */
} Layer;

enum { QK_NONE, QK_RMS, QK_LAYER };
enum { GATE_SILU, GATE_GELU_TANH };

typedef struct {
    int64_t layers, dim, heads, kv_heads, head_dim, qk_kind, gate_kind;
    const float *norm; /* as those of a layer, after the last; or null */
    float eps, qk_eps, scale; /* scale: of the scores */
} Shape;

typedef struct {
    const Shape *shape;
    const Layer *layers;
    int64_t rows, nodes, slots;
    const bf16 *x;         /* [rows, nodes, dim] */
    const float *rotation; /* [rows, nodes, 2, head_dim] */
    const int64_t *slot;   /* [rows, nodes] */
    const uint8_t *mask;   /* [rows, nodes, slots], 0 or 1: the slots that a node attends to */
    bf16 *kv;              /* [layers, 2, rows, kv_heads, slots, head_dim up to a multiple of 32] */
    bf16 *out;             /* [rows, nodes, parts, dim]: the features, then the outputs of some layers */
    int64_t parts;
    const int64_t *part; /* [layers]: the part of out that a layer's output goes to; 0: none */
} Pass;

#endif
