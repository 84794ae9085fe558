#include "cl_gates.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

void fault_give_up(const char *why) {
  fprintf(stderr, "cl_faults: %s\n", why);
  abort();
}

static cl_event new_gate(cl_command_queue queue) {
  cl_context context;
  cl_int code;
  if (clGetCommandQueueInfo(queue, CL_QUEUE_CONTEXT, sizeof(cl_context), &context, NULL) !=
      CL_SUCCESS)
    fault_give_up("clGetCommandQueueInfo");
  const cl_event gate = __real_clCreateUserEvent(context, &code);
  if (code != CL_SUCCESS) fault_give_up("clCreateUserEvent");
  return gate;
}

static void open_gate(cl_event gate, cl_int status) {
  clSetUserEventStatus(gate, status);
  __real_clReleaseEvent(gate);
}

/* ---- queues and events ---- */

enum { MAX_QUEUES = 256, NUM_BUCKETS = 4096 };

typedef struct queue_state {
  cl_command_queue id;
  long enqueued, flushed; /* commands */
  bool is_blocked;        /* the last one waits for a user event */
  cl_event held;          /* gate of the first command since the last flush */
} queue_state;

static queue_state queues[MAX_QUEUES];
static int num_queues;

typedef struct event_state {
  cl_event id;
  cl_command_queue queue; /* NULL: a user event */
  long command;           /* its number in the queue */
  int references;
  bool is_blocked; /* it waits for a user event, or is one */
  struct event_state *next;
} event_state;

static event_state *buckets[NUM_BUCKETS];

static queue_state *queue_of(cl_command_queue id) {
  for (int i = 0; i < num_queues; i++)
    if (queues[i].id == id) return &queues[i];
  if (num_queues == MAX_QUEUES) fault_give_up("too many queues");
  queues[num_queues] = (queue_state){.id = id};
  return &queues[num_queues++];
}

void fault_forget_queue(cl_command_queue id) {
  for (int i = 0; i < num_queues; i++)
    if (queues[i].id == id) queues[i] = queues[--num_queues];
}

/* The link to an event, which holds NULL if it is unknown. */
static event_state **find_event(cl_event id) {
  event_state **at = &buckets[((uintptr_t)id >> 4) % NUM_BUCKETS];
  while (*at != NULL && (*at)->id != id) at = &(*at)->next;
  return at;
}

static event_state *known_event(cl_event id) {
  event_state *e = *find_event(id);
  if (e == NULL) fault_give_up("an event that was released or never made is used");
  return e;
}

static cl_event *noted;
static size_t num_noted, max_noted;

static void note(cl_event id) {
  if (num_noted == max_noted) {
    max_noted = 2 * max_noted + 64;
    noted = realloc(noted, max_noted * sizeof(*noted));
    if (noted == NULL) fault_give_up("no memory");
  }
  noted[num_noted++] = id;
}

static void add_event(const event_state *state) {
  event_state **at = find_event(state->id);
  if (*at != NULL) fault_give_up("a new event has the address of a live one");
  event_state *e = malloc(sizeof *e);
  if (e == NULL) fault_give_up("no memory");
  *e = *state;
  e->references = 1;
  e->next = NULL;
  *at = e;
  faults.live.events++;
  if (faults.note_events) note(e->id);
}

void fault_add_user_event(cl_event id) { add_event(&(event_state){.id = id, .is_blocked = true}); }

void fault_retain_event(cl_event id) {
  known_event(id)->references++;
  faults.live.events++;
}

void fault_release_event(cl_event id) {
  event_state *e = known_event(id), **at = find_event(id);
  faults.live.events--;
  if (--e->references > 0) return;
  *at = e->next;
  free(e);
}

/* A driver's thread that has completed a command may still have to tell those that wait for it:
 * nothing says when it has, so it gets some time. */
void fault_settle(void) {
  for (size_t i = 0; i < num_noted; i++) {
    const event_state *e = *find_event(noted[i]);
    if (e != NULL && !e->is_blocked) __real_clWaitForEvents(1, &e->id);
  }
  nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
  for (int i = 0; i < num_queues; i++) queues[i].is_blocked = false;
  free(noted);
  noted = NULL;
  num_noted = max_noted = 0;
}

/* ---- flushes ---- */

static bool holds;

static void open_held(queue_state *q) {
  if (q->held != NULL) open_gate(q->held, CL_COMPLETE);
  q->held = NULL;
}

void fault_hold(bool on) {
  holds = on;
  for (int i = 0; i < num_queues && !on; i++) open_held(&queues[i]);
}

void fault_flushed(cl_command_queue id) {
  queue_state *q = queue_of(id);
  if (!faults.forget_flushes) q->flushed = q->enqueued;
  open_held(q);
}

void fault_flushed_by_wait(cl_uint num, const cl_event *events) {
  for (cl_uint i = 0; i < num; i++) {
    const event_state *e = known_event(events[i]);
    if (e->queue != NULL) fault_flushed(e->queue);
  }
}

int fault_num_unflushed_commands(void) {
  long sum = 0;
  for (int i = 0; i < num_queues; i++) sum += queues[i].enqueued - queues[i].flushed;
  return (int)sum;
}

/* ---- delays ---- */

enum { MOST_DELAYED = 4096, MOST_DELAY = 5000 /* us */ };

/* Gates of a queue, opened one after another by a thread of their own. */
static struct {
  cl_command_queue queue; /* NULL: off */
  pthread_t thread;
  pthread_mutex_t mutex;
  pthread_cond_t change;
  cl_event gates[MOST_DELAYED];
  int num, opened;
  bool is_over;
  uint64_t random;
  long fixed; /* us; < 0: random */
} delay = {.mutex = PTHREAD_MUTEX_INITIALIZER, .change = PTHREAD_COND_INITIALIZER};

/* Half of the delays are short: then commands of several queues are close to each other. */
static long next_delay(void) {
  if (delay.fixed >= 0) return delay.fixed;
  delay.random = delay.random * 6364136223846793005u + 1442695040888963407u;
  const long us = (long)(delay.random >> 33) % (MOST_DELAY + 1);
  return delay.random >> 62 < 2 ? us / 50 : us;
}

static void *open_late(void *unused) {
  (void)unused;
  pthread_mutex_lock(&delay.mutex);
  while (!delay.is_over || delay.opened < delay.num) {
    if (delay.opened == delay.num) {
      pthread_cond_wait(&delay.change, &delay.mutex);
      continue;
    }
    const cl_event gate = delay.gates[delay.opened++];
    const long us = next_delay();
    pthread_mutex_unlock(&delay.mutex);
    nanosleep(&(struct timespec){.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000}, NULL);
    open_gate(gate, CL_COMPLETE);
    pthread_mutex_lock(&delay.mutex);
  }
  pthread_mutex_unlock(&delay.mutex);
  return NULL;
}

static void start_delays(cl_command_queue queue, uint64_t seed, long fixed) {
  delay.queue = queue;
  delay.num = delay.opened = 0;
  delay.is_over = false;
  delay.random = seed * 0x9e3779b97f4a7c15u + 1;
  delay.fixed = fixed;
  if (pthread_create(&delay.thread, NULL, open_late, NULL) != 0) fault_give_up("pthread_create");
}

void fault_delay(cl_command_queue queue, uint64_t seed) { start_delays(queue, seed, -1); }
void fault_delay_by(cl_command_queue queue, long us) { start_delays(queue, 0, us); }

void fault_delay_end(void) {
  pthread_mutex_lock(&delay.mutex);
  delay.is_over = true;
  pthread_cond_signal(&delay.change);
  pthread_mutex_unlock(&delay.mutex);
  pthread_join(delay.thread, NULL);
  delay.queue = NULL;
}

/* The thread lets go of it once it is open; the caller has a reference of its own. */
static cl_event delay_gate(cl_command_queue queue) {
  const cl_event gate = new_gate(queue);
  __real_clRetainEvent(gate);
  pthread_mutex_lock(&delay.mutex);
  if (delay.num == MOST_DELAYED) fault_give_up("too many delayed commands");
  delay.gates[delay.num++] = gate;
  pthread_cond_signal(&delay.change);
  pthread_mutex_unlock(&delay.mutex);
  return gate;
}

/* ---- a command that does not start ---- */

static struct {
  int left; /* commands until then; 0: none */
  unsigned mask;
  cl_event gate;
} stop;

void fault_stop(int n, unsigned mask) {
  stop.left = n;
  stop.mask = mask;
}

bool fault_let_go(cl_int status) {
  const cl_event gate = stop.gate;
  stop.left = 0;
  stop.gate = NULL;
  if (gate != NULL) open_gate(gate, status);
  return gate != NULL;
}

static bool is_stopped(fault_call call) {
  return stop.left > 0 && (stop.mask >> call & 1) != 0 && --stop.left == 0;
}

/* ---- commands ---- */

static void add_wait(fault_command *c, cl_event event) {
  c->list[c->num++] = event;
  c->waits = c->list;
}

static void add_waits(fault_command *c, cl_uint num, const cl_event *waits) {
  for (cl_uint i = 0; i < num; i++) {
    const event_state *e = known_event(waits[i]);
    const bool is_other = e->queue != NULL && e->queue != c->queue;
    c->is_blocked |= e->is_blocked;
    if (is_other && queue_of(e->queue)->flushed < e->command) faults.unflushed++;
    if (!is_other || !faults.lost_waits) add_wait(c, waits[i]);
  }
}

fault_command fault_begin(fault_call call, cl_command_queue queue, cl_bool blocking, cl_uint num,
                          const cl_event *waits) {
  enum { MOST_GATES = 3 };
  fault_command c = {.queue = queue, .blocking = blocking};
  c.list = malloc((num + MOST_GATES) * sizeof(*c.list));
  if (c.list == NULL) fault_give_up("no memory");
  add_waits(&c, num, waits);
  queue_state *q = queue_of(queue);
  if (blocking) open_held(q);
  if (holds && !blocking && q->held == NULL) add_wait(&c, q->held = new_gate(queue));
  if (delay.queue == queue) add_wait(&c, c.late = delay_gate(queue));
  if (is_stopped(call)) {
    add_wait(&c, stop.gate = new_gate(queue));
    c.is_blocked = true;
  }
  return c;
}

cl_int fault_enqueued(fault_command *c, const cl_event *event, cl_int code) {
  free(c->list);
  if (c->late != NULL) __real_clReleaseEvent(c->late);
  if (code != CL_SUCCESS) return code;
  queue_state *q = queue_of(c->queue);
  q->enqueued++;
  q->is_blocked |= c->is_blocked;
  if (event != NULL)
    add_event(&(event_state){.id = *event,
                             .queue = c->queue,
                             .command = q->enqueued,
                             .is_blocked = q->is_blocked});
  if (c->blocking) fault_flushed(c->queue);
  return code;
}
