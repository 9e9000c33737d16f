#ifndef LOCKSTEP_GLOO_H
#define LOCKSTEP_GLOO_H

#include <stddef.h>
#include <stdint.h>

/* All that crosses between lockstep and a module that moves data between hosts, Gloo's or MPI's:
 * plain C, so that the module's Gloo never meets another one in the process (libtorch 2.x exports
 * its own). No function throws, and none ends the process. Deadlines are times of the clock that
 * create() was given. */

#ifdef __cplusplus
extern "C" {
#endif

enum { LOCKSTEP_GLOO_ABI = 5, LOCKSTEP_GLOO_MAX_ADDRESS = 256 };

typedef enum LockstepGlooStatus {
  LOCKSTEP_GLOO_OK = 0,
  LOCKSTEP_GLOO_FAILED = 1, /* a connection broke, or Gloo refused */
  LOCKSTEP_GLOO_LATE = 2,   /* the deadline passed */
  LOCKSTEP_GLOO_ABORTED = 3 /* abort() was called */
} LockstepGlooStatus;

/* One rank's connections to all others. */
typedef struct LockstepGlooContext LockstepGlooContext;

typedef struct LockstepGlooMessage {
  char text[512]; /* ends in '\0' */
} LockstepGlooMessage;

/* What accompanies a transfer. Transfers that overlap in time need different tags. */
typedef struct LockstepGlooCall {
  int64_t deadline_ns;
  uint32_t tag;
  LockstepGlooMessage* message; /* written unless the status is OK */
} LockstepGlooCall;

/* A part of a buffer, in bytes. */
typedef struct LockstepGlooBlock {
  size_t offset;
  size_t bytes;
} LockstepGlooBlock;

/* Blocks that are under way between a rank and its peers. */
typedef struct LockstepGlooExchange LockstepGlooExchange;

/* Nanoseconds; called from any thread. */
typedef int64_t (*LockstepGlooClock)(void);

/* out[i] = a[i] with b[i]; out may be a or b. */
typedef void (*LockstepGlooReduce)(void* user, void* out, const void* a, const void* b,
                                   size_t count);

typedef struct LockstepGlooApi {
  uint32_t abi; /* LOCKSTEP_GLOO_ABI of the module */

  /* Listens at `address`, given in digits, once for each peer. */
  LockstepGlooStatus (*create)(int rank, int size, const char* address, int64_t connect_timeout_ms,
                               LockstepGlooClock clock, LockstepGlooContext** context,
                               LockstepGlooMessage* message);

  /* Where `peer` must connect to: at most LOCKSTEP_GLOO_MAX_ADDRESS bytes. */
  LockstepGlooStatus (*address)(LockstepGlooContext* context, int peer, void* bytes, size_t* length,
                                LockstepGlooMessage* message);

  /* Connects to what `peer` said its address for this rank is. */
  LockstepGlooStatus (*connect)(LockstepGlooContext* context, int peer, const void* bytes,
                                size_t length, LockstepGlooMessage* message);

  /* In place. element_bytes is 1, 2, 4 or 8; count is positive. NULL, as reduce is then, in a
   * module that only moves data: lockstep adds what it exchanged. */
  LockstepGlooStatus (*all_reduce)(LockstepGlooContext* context, void* data, size_t count,
                                   size_t element_bytes, LockstepGlooReduce reduce, void* user,
                                   const LockstepGlooCall* call);
  LockstepGlooStatus (*broadcast)(LockstepGlooContext* context, void* data, size_t bytes, int root,
                                  const LockstepGlooCall* call);
  /* output holds a block of `bytes` for each rank; input may be this rank's. */
  LockstepGlooStatus (*all_gather)(LockstepGlooContext* context, const void* input, size_t bytes,
                                   void* output, const LockstepGlooCall* call);
  /* In place on every rank: the root's data becomes the result, the others' is of no more use. */
  LockstepGlooStatus (*reduce)(LockstepGlooContext* context, void* data, size_t count,
                               size_t element_bytes, int root, LockstepGlooReduce reduce,
                               void* user, const LockstepGlooCall* call);
  /* given[r] of the input goes to rank r, and taken[r] of the output comes from it; this rank's own
   * blocks are not moved. */
  LockstepGlooStatus (*exchange)(LockstepGlooContext* context, const void* input,
                                 const LockstepGlooBlock* given, void* output,
                                 const LockstepGlooBlock* taken, const LockstepGlooCall* call);
  /* The same in two halves, beside other transfers. `part`, below 2^24, tells the exchanges of one
   * call apart: what a rank gives in a part, its peer takes in that part. end_exchange() waits until
   * all blocks have moved; drop_exchange() frees what begin_exchange() made, ended or not. NULL, all
   * three, in a module that cannot. */
  LockstepGlooStatus (*begin_exchange)(LockstepGlooContext* context, const void* input,
                                       const LockstepGlooBlock* given, void* output,
                                       const LockstepGlooBlock* taken, uint32_t part,
                                       const LockstepGlooCall* call,
                                       LockstepGlooExchange** exchange);
  LockstepGlooStatus (*end_exchange)(LockstepGlooExchange* exchange, LockstepGlooMessage* message);
  void (*drop_exchange)(LockstepGlooExchange* exchange);
  LockstepGlooStatus (*send)(LockstepGlooContext* context, const void* data, size_t bytes, int to,
                             const LockstepGlooCall* call);
  LockstepGlooStatus (*recv)(LockstepGlooContext* context, void* data, size_t bytes, int from,
                             const LockstepGlooCall* call);

  /* From any thread: every transfer of this context ends now, and so do those of its peers. */
  void (*abort)(LockstepGlooContext* context);

  /* When no transfer is under way. No thread or socket of this context is left. */
  void (*destroy)(LockstepGlooContext* context);

  /* Before the first create(), on all ranks of the job: rank 0's bytes replace the others'. NULL
   * where ranks cannot reach each other before they have exchanged addresses. */
  LockstepGlooStatus (*announce)(void* bytes, size_t length, LockstepGlooClock clock,
                                 int64_t deadline_ns, LockstepGlooMessage* message);
} LockstepGlooApi;

typedef const LockstepGlooApi* (*LockstepGlooEntry)(void);

/* The one symbol of the module, of type LockstepGlooEntry. */
#define LOCKSTEP_GLOO_ENTRY "lockstep_gloo_api"
const LockstepGlooApi* lockstep_gloo_api(void);

#ifdef __cplusplus
}
#endif

#endif
