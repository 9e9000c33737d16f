#ifndef LOCKSTEP_TRANSPORT_H
#define LOCKSTEP_TRANSPORT_H

#include <stddef.h>
#include <stdint.h>

/* All that crosses between lockstep and a module that moves data between hosts, Gloo's or MPI's:
 * plain C, so that the module's Gloo never mixes with another one in the process (libtorch 2.x exports
 * its own). No function throws, and none ends the process. Deadlines are times of the clock that
 * create() was given. */

#ifdef __cplusplus
extern "C" {
#endif

enum { LOCKSTEP_TRANSPORT_ABI = 5, LOCKSTEP_TRANSPORT_MAX_ADDRESS = 256 };

typedef enum LockstepTransportStatus {
  LOCKSTEP_TRANSPORT_OK = 0,
  LOCKSTEP_TRANSPORT_FAILED = 1, /* a connection broke, or the library refused */
  LOCKSTEP_TRANSPORT_LATE = 2,   /* the deadline passed */
  LOCKSTEP_TRANSPORT_ABORTED = 3 /* abort() was called */
} LockstepTransportStatus;

/* One rank's connections to all others. */
typedef struct LockstepTransportContext LockstepTransportContext;

typedef struct LockstepTransportMessage {
  char text[512]; /* ends in '\0' */
} LockstepTransportMessage;

/* What accompanies a transfer. Transfers that overlap in time need different tags. */
typedef struct LockstepTransportCall {
  int64_t deadline_ns;
  uint32_t tag;
  LockstepTransportMessage* message; /* written unless the status is OK */
} LockstepTransportCall;

/* A part of a buffer, in bytes. */
typedef struct LockstepTransportBlock {
  size_t offset;
  size_t bytes;
} LockstepTransportBlock;

/* Blocks that are under way between a rank and its peers. */
typedef struct LockstepTransportExchange LockstepTransportExchange;

/* Nanoseconds; called from any thread. */
typedef int64_t (*LockstepTransportClock)(void);

/* out[i] = a[i] with b[i]; out may be a or b. */
typedef void (*LockstepTransportReduce)(void* user, void* out, const void* a, const void* b,
                                        size_t count);

typedef struct LockstepTransportApi {
  uint32_t abi; /* LOCKSTEP_TRANSPORT_ABI of the module */

  /* Listens at `address`, given in digits, once for each peer. */
  LockstepTransportStatus (*create)(int rank, int size, const char* address,
                                    int64_t connect_timeout_ms, LockstepTransportClock clock,
                                    LockstepTransportContext** context,
                                    LockstepTransportMessage* message);

  /* Where `peer` must connect to: at most LOCKSTEP_TRANSPORT_MAX_ADDRESS bytes. */
  LockstepTransportStatus (*address)(LockstepTransportContext* context, int peer, void* bytes,
                                     size_t* length, LockstepTransportMessage* message);

  /* Connects to what `peer` said its address for this rank is. */
  LockstepTransportStatus (*connect)(LockstepTransportContext* context, int peer, const void* bytes,
                                     size_t length, LockstepTransportMessage* message);

  /* In place. element_bytes is 1, 2, 4 or 8; count is positive. NULL, as reduce is then, in a
   * module that only moves data: lockstep adds what it exchanged. */
  LockstepTransportStatus (*all_reduce)(LockstepTransportContext* context, void* data, size_t count,
                                        size_t element_bytes, LockstepTransportReduce reduce,
                                        void* user, const LockstepTransportCall* call);
  LockstepTransportStatus (*broadcast)(LockstepTransportContext* context, void* data, size_t bytes,
                                       int root, const LockstepTransportCall* call);
  /* output holds a block of `bytes` for each rank; input may be this rank's. */
  LockstepTransportStatus (*all_gather)(LockstepTransportContext* context, const void* input,
                                        size_t bytes, void* output,
                                        const LockstepTransportCall* call);
  /* In place on every rank: the root's data becomes the result, the others' is of no more use. */
  LockstepTransportStatus (*reduce)(LockstepTransportContext* context, void* data, size_t count,
                                    size_t element_bytes, int root, LockstepTransportReduce reduce,
                                    void* user, const LockstepTransportCall* call);
  /* given[r] of the input goes to rank r, and taken[r] of the output comes from it; this rank's own
   * blocks are not moved. */
  LockstepTransportStatus (*exchange)(LockstepTransportContext* context, const void* input,
                                      const LockstepTransportBlock* given, void* output,
                                      const LockstepTransportBlock* taken,
                                      const LockstepTransportCall* call);
  /* The same in two halves, beside other transfers. `part`, below 2^24, tells the exchanges of one
   * call apart: what a rank gives in a part, its peer takes in that part. end_exchange() waits
   * until all blocks have moved; drop_exchange() frees what begin_exchange() made, ended or not.
   * NULL, all three, in a module that cannot. */
  LockstepTransportStatus (*begin_exchange)(LockstepTransportContext* context, const void* input,
                                            const LockstepTransportBlock* given, void* output,
                                            const LockstepTransportBlock* taken, uint32_t part,
                                            const LockstepTransportCall* call,
                                            LockstepTransportExchange** exchange);
  LockstepTransportStatus (*end_exchange)(LockstepTransportExchange* exchange,
                                          LockstepTransportMessage* message);
  void (*drop_exchange)(LockstepTransportExchange* exchange);
  LockstepTransportStatus (*send)(LockstepTransportContext* context, const void* data, size_t bytes,
                                  int to, const LockstepTransportCall* call);
  LockstepTransportStatus (*recv)(LockstepTransportContext* context, void* data, size_t bytes,
                                  int from, const LockstepTransportCall* call);

  /* From any thread: every transfer of this context ends now, and so do those of its peers. */
  void (*abort)(LockstepTransportContext* context);

  /* When no transfer is under way. No thread or socket of this context is left. */
  void (*destroy)(LockstepTransportContext* context);

  /* Before the first create(), on all ranks of the job: rank 0's bytes replace the others'. NULL
   * where ranks cannot reach each other before they have exchanged addresses. */
  LockstepTransportStatus (*announce)(void* bytes, size_t length, LockstepTransportClock clock,
                                      int64_t deadline_ns, LockstepTransportMessage* message);
} LockstepTransportApi;

typedef const LockstepTransportApi* (*LockstepTransportEntry)(void);

/* The one symbol of the module, of type LockstepTransportEntry. */
#define LOCKSTEP_TRANSPORT_ENTRY "lockstep_transport_api"
const LockstepTransportApi* lockstep_transport_api(void);

#ifdef __cplusplus
}
#endif

#endif
