/* The short cut of an append: its straight way in C.

   `journal.py` says what an append is, and does all of it. This file does the same steps in the same
   order with the same bytes, where nothing out of the ordinary is met: the file has room, the end is
   where shared memory says, no piece and no topic is named, the conditions hold, the lock is free
   within a moment. Whatever else it meets, it lets go and answers LONG_WAY, with nothing changed;
   then Python goes the whole way, and says what is wrong. So there is no error here that Python has
   not, and the log without this file is the same log, only slower (decision 0023).

   Three things are done: an append and its sync; the next small entry of a follower that waits; and
   which partition each row of a batch goes to, by one plain key. Each has its section below.

   Why: an append of one row costs the interpreter some 25 us in a loop, and four times that in
   processes which sleep and wake, where no code is in the caches; on a fast disk that is more than
   the sync itself. From the first lock to the last nothing here needs Python, so the lock is never
   held by a thread that waits for the interpreter's own lock.

   Locks. The locks of the journal are `flock`s, which belong to an open file description. The short
   cut has descriptions of its own, so it excludes, and is excluded by, the long way of its own
   process as if that were another one. Threads that share it are kept apart by a flag for each lock.
   The words that waiters sleep on, and the flag that says that somebody waits, are those of
   `locks.py`, as is their protocol.

   A crash at any instruction leaves what it leaves in Python: the order of the steps is the argument,
   and the crash enumerator goes through it (see "the machine"). All words that others read without a lock are written by atomic stores, the last of them with
   release.                                                                                        */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the journal is little-endian, and this file copies its integers as they are"
#endif

typedef uint8_t u8;
typedef uint32_t u32;
typedef uint64_t u64;

/* -- shared memory: as live.py has it ---------------------------------------------------------- */

enum { STAMP = 6, SYNCED, SYNCED_POSITION, POISONED, DAMAGED, APPEND_HOLDER, SYNC_HOLDER,
       COUNTERS_NUMBER, APPENDING = 16 };          /* 64-bit words */
enum { TAIL_0 = 256, TAIL_1 = 384 };               /* bytes */
enum { APPEND_WORD = 512, SYNC_WORD = 528, WRITTEN_WORD = 544 }; /* 32-bit; the next: who waits? */

typedef struct {
    u64 end, position, checksum, control, catalog, received, entries, marked, zeroed;
} Tail;

typedef struct {
    u64 high, low, value, file;
} Counter;

/* -- the format: as format.py has it ----------------------------------------------------------- */

enum { HEADER_BYTES = 128, SECTION_BYTES = 64, RUN_BYTES = 16, ENTRY = 1, OFFSET_BITS = 40 };
enum { CHANGES_CONTROL = 1 };

typedef struct {
    u8 magic[8], log_id[16];
    u64 address, position, previous, synced, previous_control, received;
    u8 kind, flags, zero[2];
    u32 meta_length;
    u64 body_length;
    u32 sections, control_length;
    u8 room[24];
    u64 checksum;
} Header;

typedef struct __attribute__((packed, aligned(4))) {
    u32 topic, schema;
    uint16_t flags;
    u8 codec, zero;
    u32 runs, rows, piece, slot, extension;
    u64 sent_time, offset, length, checksum;
} Section;

typedef struct {
    u32 partition, rows;
    u64 base;
} Run;

typedef struct { /* as journal.py packs it */
    u64 high, low, expected, moves;
} Condition;

_Static_assert(sizeof(Header) == HEADER_BYTES && sizeof(Section) == SECTION_BYTES
                   && sizeof(Run) == RUN_BYTES && sizeof(Tail) == 72,
               "structures are the bytes of the file");

static const u8 MAGIC[8] = {'H', 'R', 'l', 'o', 'g', 0, 0, 1};

enum { BUFFERS_MAX = 64, SECTIONS_MAX = 16, ZERO_WINDOW = 256 << 10 };
enum { YIELDS = 16, SOON_YIELDS = 60, LOOKS = 20 };
enum { LOOK_AGAIN_NS = 50000000, PATIENCE_NS = 100000, LONG_NS = 1000000, CROWDED_NS = 100000000 };
static const struct timespec LOOK_AGAIN = {0, LOOK_AGAIN_NS};
static u8 zeros[ZERO_WINDOW];

/* -- xxh3-64, for more than 128 bytes ---------------------------------------------------------- */

static const u8 SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
static const u64 PRIME32_1 = 0x9E3779B1, PRIME32_2 = 0x85EBCA77, PRIME32_3 = 0xC2B2AE3D;
static const u64 PRIME64_1 = 0x9E3779B185EBCA87, PRIME64_2 = 0xC2B2AE3D27D4EB4F,
                 PRIME64_3 = 0x165667B19E3779F9, PRIME64_4 = 0x85EBCA77C2B2AE63,
                 PRIME64_5 = 0x27D4EB2F165667C5;

static u64 read64(const u8 *at)
{
    u64 value;
    memcpy(&value, at, 8);
    return value;
}

static u64 folded(u64 a, u64 b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (u64)product ^ (u64)(product >> 64);
}

static u64 avalanche(u64 hash)
{
    hash = (hash ^ hash >> 37) * 0x165667919E3779F9;
    return hash ^ hash >> 32;
}

static u64 mixed(const u8 *data, const u8 *secret)
{
    return folded(read64(data) ^ read64(secret), read64(data + 8) ^ read64(secret + 8));
}

static void stripe(u64 *sums, const u8 *data, const u8 *secret)
{
    for (int i = 0; i < 8; i++) {
        u64 value = read64(data + 8 * i), key = value ^ read64(secret + 8 * i);
        sums[i ^ 1] += value;
        sums[i] += (key & 0xFFFFFFFF) * (key >> 32);
    }
}

static u64 xxh3(const u8 *data, size_t length) /* length > 128 */
{
    u64 hash = length * PRIME64_1;
    if (length <= 240) {
        for (int i = 0; i < 8; i++)
            hash += mixed(data + 16 * i, SECRET + 16 * i);
        hash = avalanche(hash);
        for (size_t i = 8; i < length / 16; i++)
            hash += mixed(data + 16 * i, SECRET + 16 * (i - 8) + 3);
        return avalanche(hash + mixed(data + length - 16, SECRET + 136 - 17));
    }
    u64 sums[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                   PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    size_t stripes = (length - 1) / 64;
    for (size_t n = 0; n < stripes; n++) {
        stripe(sums, data + 64 * n, SECRET + 8 * (n % 16));
        if (n % 16 == 15)
            for (int i = 0; i < 8; i++)
                sums[i] = (sums[i] ^ sums[i] >> 47 ^ read64(SECRET + 128 + 8 * i)) * PRIME32_1;
    }
    stripe(sums, data + length - 64, SECRET + 192 - 64 - 7);
    for (int i = 0; i < 4; i++)
        hash += folded(sums[2 * i] ^ read64(SECRET + 11 + 16 * i),
                       sums[2 * i + 1] ^ read64(SECRET + 11 + 16 * i + 8));
    return avalanche(hash);
}

/* -- what a log's short cut holds -------------------------------------------------------------- */

/* A file that the log has opened: by its descriptor on the real machine, else (-1) by itself. */
typedef struct {
    PyObject *object;
    int fd;
} File;

/* What changes as the log grows: made anew by `fit`, and let go by the last thread that uses it. */
typedef struct {
    long users; /* changed with the interpreter's lock held */
    File file;  /* the newest */
    u64 number, size;
    Py_buffer ends_buffer, counters_buffer;
    u64 *ends;
    Counter *counters;
    u64 ends_count, counters_count, counters_number;
} Fit;

typedef struct {
    PyObject_HEAD
    PyObject *system, *shared; /* whom to ask; none on the real machine */
    PyObject *raised[3];       /* what somebody who was asked has raised */
    File append_lock, sync_lock;
    int appending, syncing, closed; /* the flags that keep threads apart; closed: nobody comes in */
    long users;                     /* threads inside */
    Fit *fit;
    Py_buffer words_buffer;
    u64 *words;
    u32 *words32;
    u8 log_id[16];
    u64 pid, identity, entries_max, body_max, syncs;
    u64 sync_ns, crowded_until; /* how long the last sync took; when giving way is tried again */
    u32 token;
    char path[PATH_MAX]; /* of the words */
} ShortCut;

enum { DONE = 0, LONG_WAY = -1, NOT_IN_PLACE = -2, INTERRUPTED = -3, WRITE_FAILED = -4,
       POISONED_IT = -5 };


/* -- the machine: as system.py has it -----------------------------------------------------------

   Everything that the log asks of the machine goes through one small object, so that the test kit
   can put another in its place, record every operation, and enumerate what a power cut may leave.
   That holds here, too. Files are opened by that object; where it is the real machine, their calls
   are made below by their descriptors, without the interpreter's lock. Where it is not, everything
   is asked of it, with that lock held. What an object that is asked raises (a process that is killed
   in the simulation dies of it) is kept until all is unwound: nothing is decided or stored behind
   it, and whatever failed looks like LONG_WAY until then.                                         */

static void keep_raised(ShortCut *s)
{
    if (s->raised[0])
        PyErr_Clear();
    else
        PyErr_Fetch(s->raised, s->raised + 1, s->raised + 2);
}

/* Call a method. NULL: it raised; `errno` is the error of an `OSError`, and of no other one. */
static PyObject *ask(ShortCut *s, PyObject *whom, const char *method, const char *format, ...)
{
    va_list given;
    va_start(given, format);
    PyObject *arguments = Py_VaBuildValue(format, given), *answer = NULL;
    va_end(given);
    PyObject *bound = arguments ? PyObject_GetAttrString(whom, method) : NULL;
    if (bound)
        answer = PyObject_CallObject(bound, arguments);
    Py_XDECREF(bound);
    Py_XDECREF(arguments);
    errno = EIO;
    if (!answer && PyErr_ExceptionMatches(PyExc_OSError)) {
        PyObject *kind, *error, *trace;
        PyErr_Fetch(&kind, &error, &trace);
        PyErr_NormalizeException(&kind, &error, &trace);
        PyObject *number = PyObject_GetAttrString(error, "errno");
        errno = number ? (int)PyLong_AsLong(number) : EIO;
        PyErr_Clear();
        Py_XDECREF(number);
        Py_XDECREF(kind);
        Py_XDECREF(error);
        Py_XDECREF(trace);
    } else if (!answer)
        keep_raised(s);
    return answer;
}

static bool is_true(PyObject *answer)
{
    bool found = answer && PyObject_IsTrue(answer) == 1;
    Py_XDECREF(answer);
    return found;
}

static PyThreadState *without_python(const ShortCut *s) { return s->system ? NULL : PyEval_SaveThread(); }

static void with_python(PyThreadState *state)
{
    if (state)
        PyEval_RestoreThread(state);
}

static bool done_for(const ShortCut *s) { return s->closed || s->raised[0]; }

static ssize_t read_at(ShortCut *s, const File *file, void *to, size_t length, off_t offset)
{
    if (file->fd >= 0)
        return pread(file->fd, to, length, offset);
    PyObject *data = ask(s, file->object, "pread", "(nL)", (Py_ssize_t)length, (long long)offset);
    char *start;
    Py_ssize_t size = -1;
    if (data && !PyBytes_AsStringAndSize(data, &start, &size))
        memcpy(to, start, (size_t)size < length ? (size_t)size : length);
    Py_XDECREF(data);
    return size;
}

/* All of the buffers at `offset`; 0 or what the operating system says. */
static int write_all(ShortCut *s, const File *file, struct iovec *iov, int count, off_t offset)
{
    if (file->fd < 0) {
        PyObject *buffers = PyList_New(0);
        for (int i = 0; buffers && i < count; i++) {
            PyObject *one = PyMemoryView_FromMemory(iov[i].iov_base, (Py_ssize_t)iov[i].iov_len, PyBUF_READ);
            if (!one || PyList_Append(buffers, one))
                Py_CLEAR(buffers);
            Py_XDECREF(one);
        }
        PyObject *done = ask(s, file->object, "pwritev", "(NL)", buffers, (long long)offset);
        Py_XDECREF(done);
        return done ? 0 : errno;
    }
    while (count) {
        ssize_t written = pwritev(file->fd, iov, count, offset);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            return written ? errno : EIO;
        offset += written;
        while (count && (size_t)written >= iov->iov_len)
            written -= (ssize_t)iov->iov_len, iov++, count--;
        if (count) {
            iov->iov_base = (u8 *)iov->iov_base + written;
            iov->iov_len -= (size_t)written;
        }
    }
    return 0;
}

/* 0 or what the operating system says. */
static int sync_file(ShortCut *s, const File *file)
{
    if (file->fd < 0) {
        PyObject *done = ask(s, file->object, "fdatasync", "()");
        Py_XDECREF(done);
        return done ? 0 : errno;
    }
    while (fdatasync(file->fd))
        if (errno != EINTR)
            return errno;
    return 0;
}

static bool try_lock(ShortCut *s, const File *file)
{
    if (file->fd >= 0)
        return !flock(file->fd, LOCK_EX | LOCK_NB);
    return is_true(ask(s, file->object, "try_lock", "()"));
}

static void unlock(ShortCut *s, const File *file)
{
    if (file->fd >= 0)
        flock(file->fd, LOCK_UN);
    else
        Py_XDECREF(ask(s, file->object, "unlock", "()"));
}

/* Whether the path of the shared memory still leads to it. */
static bool in_place(ShortCut *s)
{
    struct stat status;
    if (s->system)
        return is_true(ask(s, s->shared, "in_place", "()"));
    return !stat(s->path, &status)
           && (((u64)status.st_dev << 40) ^ (u64)status.st_ino) == s->identity;
}

/* Sleep while a word of shared memory is what was seen, and wake those who do. */
static int sleep_on(ShortCut *s, int word, u32 seen, const struct timespec *timeout)
{
    if (!s->system)
        return (int)syscall(SYS_futex, s->words32 + word, FUTEX_WAIT, seen, timeout, NULL, 0);
    double seconds = (double)timeout->tv_sec + (double)timeout->tv_nsec / 1e9;
    Py_XDECREF(ask(s, s->shared, "wait", "(iId)", word, seen, seconds));
    return 0;
}

static void wake_up(ShortCut *s, int word, int count)
{
    if (s->system)
        Py_XDECREF(ask(s, s->shared, "wake", "(ii)", word, count));
    else
        syscall(SYS_futex, s->words32 + word, FUTEX_WAKE, count, NULL, NULL, 0);
}

static void give_way(ShortCut *s)
{
    if (s->system)
        Py_XDECREF(ask(s, s->system, "give_way", "()"));
    else
        sched_yield();
}

static u64 now_us(ShortCut *s)
{
    if (s->system) {
        PyObject *now = ask(s, s->system, "now_us", "()");
        u64 found = now ? PyLong_AsUnsignedLongLong(now) : 0;
        Py_XDECREF(now);
        return found;
    }
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (u64)now.tv_sec * 1000000 + (u64)now.tv_nsec / 1000;
}

static u64 elapsed_ns(ShortCut *s)
{
    if (s->system) {
        PyObject *now = ask(s, s->system, "monotonic", "()");
        double found = now ? PyFloat_AsDouble(now) : 0;
        Py_XDECREF(now);
        return (u64)(found * 1e9);
    }
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (u64)now.tv_sec * 1000000000 + (u64)now.tv_nsec;
}

/* -- shared memory, read and published ----------------------------------------------------------

   In a simulation others may run, and the process may die, before each word that is read or written,
   as they may between two lines of Python.                                                         */

static u64 load_at(ShortCut *s, const u64 *word)
{
    if (s->system)
        give_way(s);
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static void store_at(ShortCut *s, u64 *word, u64 value)
{
    if (s->system)
        give_way(s);
    if (!s->raised[0])
        __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static u64 load(ShortCut *s, int index) { return load_at(s, s->words + index); }
static void store(ShortCut *s, int index, u64 value) { store_at(s, s->words + index, value); }
static u32 load32(const u32 *word) { return __atomic_load_n(word, __ATOMIC_SEQ_CST); }

static Tail tail_of(ShortCut *s)
{
    for (;;) {
        u64 stamp = load(s, STAMP);
        Tail tail;
        memcpy(&tail, (const u8 *)s->words + (stamp & 1 ? TAIL_1 : TAIL_0), sizeof tail);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (load(s, STAMP) == stamp || s->raised[0])
            return tail;
    }
}

static void publish(ShortCut *s, const Tail *tail)
{
    u64 stamp = s->words[STAMP] + 1;
    memcpy((u8 *)s->words + (stamp & 1 ? TAIL_1 : TAIL_0), tail, sizeof *tail);
    store(s, STAMP, stamp);
}

/* -- the locks --------------------------------------------------------------------------------- */

static bool take(ShortCut *s, int *flag, const File *lock, int holder)
{
    if (__atomic_exchange_n(flag, 1, __ATOMIC_SEQ_CST))
        return false;
    if (!try_lock(s, lock)) {
        __atomic_store_n(flag, 0, __ATOMIC_SEQ_CST);
        return false;
    }
    store(s, holder, s->pid);
    return true;
}

static void give_back(ShortCut *s, int *flag, const File *lock, int holder)
{
    store(s, holder, 0);
    unlock(s, lock);
    __atomic_store_n(flag, 0, __ATOMIC_SEQ_CST);
}

static void wake(ShortCut *s, int word, int count)
{
    __atomic_store_n(s->words32 + word + 1, 0, __ATOMIC_SEQ_CST);
    u32 token = __atomic_add_fetch(&s->token, 0x9E3779B1u, __ATOMIC_RELAXED);
    __atomic_store_n(s->words32 + word, token, __ATOMIC_SEQ_CST);
    wake_up(s, word, count);
}

/* Take the append lock, if it becomes free within a moment; the long way waits longer, and can say
   for whom. Its holder needs some 10 us, so giving way a few times is cheaper than sleeping. */
static bool take_append_lock(ShortCut *s)
{
    for (int i = 0; i < YIELDS; i++) {
        if (take(s, &s->appending, &s->append_lock, APPEND_HOLDER))
            return true;
        give_way(s);
    }
    for (int looks = 0; looks < LOOKS && !done_for(s); looks++) {
        u32 seen = load32(s->words32 + APPEND_WORD);
        __atomic_store_n(s->words32 + APPEND_WORD + 1, 1, __ATOMIC_SEQ_CST);
        if (take(s, &s->appending, &s->append_lock, APPEND_HOLDER))
            return true;
        if (sleep_on(s, APPEND_WORD, seen, &LOOK_AGAIN) && errno == EINTR)
            return false;
    }
    return false;
}

static void give_append_lock_back(ShortCut *s)
{
    give_back(s, &s->appending, &s->append_lock, APPEND_HOLDER);
    if (load32(s->words32 + APPEND_WORD + 1))
        wake(s, APPEND_WORD, 1);
}

/* -- append ------------------------------------------------------------------------------------ */

typedef struct {
    const Section *sections;
    const Condition *conditions;
    Run *runs; /* from 0 on when it begins, as they stand in the record at the end */
    u8 *head;  /* header without its checksum, meta, padding */
    u64 section_count, run_count, condition_count, control_length, meta_length, body_length;
    u64 catalog;
    u8 flags;
    int iov_count;
    struct iovec iov[BUFFERS_MAX + 5];
    u64 position, received, end; /* what came of it */
    int error;
} Entry;

static bool holds(const Fit *fit, const Condition *condition, Counter **found)
{
    u64 mask = fit->counters_count - 1, at = condition->high & mask;
    Counter *counter = fit->counters + at;
    while ((counter->high != condition->high || counter->low != condition->low)
           && (counter->high || counter->low)) {
        at = (at + 1) & mask;
        counter = fit->counters + at;
    }
    bool known = counter->high || counter->low;
    *found = counter;
    return (known ? counter->value : 0) == condition->expected && (known || !condition->moves);
}

static int decide(ShortCut *s, const Fit *fit, const Entry *entry)
{
    Counter *counter;
    if (entry->condition_count && load(s, COUNTERS_NUMBER) != fit->counters_number)
        return LONG_WAY;
    for (u64 i = 0; i < entry->condition_count; i++)
        if (!holds(fit, entry->conditions + i, &counter))
            return LONG_WAY; /* which says which, or makes a place for a new counter */
    return DONE;
}

static void move_counters(ShortCut *s, const Fit *fit, const Entry *entry)
{
    Counter *counter;
    for (u64 i = 0; i < entry->condition_count; i++) {
        const Condition *condition = entry->conditions + i;
        if (condition->moves && holds(fit, condition, &counter)) {
            store_at(s, &counter->file, fit->number);
            store_at(s, &counter->value, condition->expected + 1);
        }
    }
}

/* Give the rows their offsets: each run gets the end of its partition on top. No topic is in an
   entry twice (else: the long way), so nothing moves between two runs. */
static void number(ShortCut *s, const Fit *fit, Entry *entry)
{
    Run *run = entry->runs;
    for (u64 i = 0; i < entry->section_count; i++)
        for (u32 n = 0; n < entry->sections[i].runs; n++, run++)
            run->base += load_at(s, fit->ends + entry->sections[i].slot + run->partition);
}

static void advance(ShortCut *s, const Fit *fit, const Entry *entry)
{
    const Run *run = entry->runs;
    for (u64 i = 0; i < entry->section_count; i++)
        for (u32 n = 0; n < entry->sections[i].runs; n++, run++) {
            u64 *end = fit->ends + entry->sections[i].slot + run->partition;
            if (load_at(s, end) < run->base + run->rows)
                store_at(s, end, run->base + run->rows);
        }
}

/* Steps 1 to 4 of an append, the append lock held. */
static int append_locked(ShortCut *s, Fit *fit, Entry *entry)
{
    Tail tail = tail_of(s);
    off_t offset = (off_t)(tail.end & ((1ull << OFFSET_BITS) - 1));
    u64 head_length = (HEADER_BYTES + entry->meta_length + 63) & ~63ull;
    u64 length = head_length + entry->body_length, end = tail.end + length;
    u8 found[8];
    if (load(s, POISONED) || load(s, DAMAGED) || tail.catalog != entry->catalog
        || tail.end >> OFFSET_BITS != fit->number || tail.entries >= s->entries_max
        || (u64)offset + length + HEADER_BYTES > fit->size /* a roll record must have room, too */
        || read_at(s, &fit->file, found, 8, offset) != 8 || !memcmp(found, MAGIC, 8) || decide(s, fit, entry))
        return LONG_WAY;

    u64 received = now_us(s);
    if (s->raised[0])
        return LONG_WAY;
    if (received < tail.received)
        received = tail.received;
    number(s, fit, entry);
    Header header = {
        .address = tail.end,
        .position = tail.position + 1,
        .previous = tail.checksum,
        .synced = load(s, SYNCED),
        .previous_control = tail.control,
        .received = received,
        .kind = ENTRY,
        .flags = entry->flags,
        .meta_length = (u32)entry->meta_length,
        .body_length = entry->body_length,
        .sections = (u32)entry->section_count,
        .control_length = (u32)entry->control_length,
    };
    memcpy(header.magic, MAGIC, 8);
    memcpy(header.log_id, s->log_id, 16);
    u64 unsigned_length = HEADER_BYTES - 8;
    memcpy(entry->head, &header, unsigned_length);
    memcpy(entry->head + unsigned_length + entry->section_count * SECTION_BYTES, entry->runs,
           entry->run_count * RUN_BYTES);
    u64 checksum = xxh3(entry->head, unsigned_length + entry->meta_length);
    entry->iov[0] = (struct iovec){entry->head, unsigned_length};
    entry->iov[1] = (struct iovec){&checksum, 8};
    entry->iov[2] = (struct iovec){entry->head + unsigned_length, entry->meta_length};
    entry->iov[3] = (struct iovec){zeros, head_length - HEADER_BYTES - entry->meta_length};
    int count = entry->iov_count;
    u64 zeroed = tail.zeroed;
    if (end > zeroed) { /* space never written: zeros behind a small record, see journal.py */
        zeroed = end;
        if (length < ZERO_WINDOW / 2) {
            u64 limit = (fit->number << OFFSET_BITS) + fit->size;
            zeroed = tail.end + ZERO_WINDOW < limit ? tail.end + ZERO_WINDOW : limit;
            entry->iov[count++] = (struct iovec){zeros, zeroed - end};
        }
    }
    entry->error = write_all(s, &fit->file, entry->iov, count, offset);
    if (s->raised[0])
        return LONG_WAY;
    if (entry->error) { /* a part may be there, and could look whole: make it none at all */
        struct iovec none = {zeros, 8};
        if (!write_all(s, &fit->file, &none, 1, offset))
            return WRITE_FAILED;
        if (s->raised[0])
            return LONG_WAY;
        store(s, POISONED, 1);
        return POISONED_IT;
    }
    advance(s, fit, entry);
    move_counters(s, fit, entry);
    entry->position = header.position;
    entry->received = received;
    entry->end = end;
    if (entry->flags & CHANGES_CONTROL)
        tail.control = tail.end;
    tail.end = end;
    tail.position = header.position;
    tail.checksum = checksum;
    tail.received = received;
    tail.entries++;
    tail.zeroed = zeroed;
    publish(s, &tail);
    return DONE;
}

static int append_alone(ShortCut *s, Fit *fit, Entry *entry)
{
    if (!take_append_lock(s))
        return LONG_WAY;
    bool quiet = load(s, SYNCED) == tail_of(s).end;
    int found = append_locked(s, fit, entry);
    give_append_lock_back(s);
    if (found == DONE && quiet && load32(s->words32 + WRITTEN_WORD + 1))
        wake(s, WRITTEN_WORD, INT_MAX);
    return found;
}

/* -- sync -------------------------------------------------------------------------------------- */

static bool is_synced(ShortCut *s, u64 end, u64 position)
{
    return load(s, SYNCED) >= end && load(s, SYNCED_POSITION) >= position;
}

/* Let others run for a moment; false once it is `limit`. Where that moment lasted long, others want
   the processors for more than an append: then nobody gives way for a while. */
static bool gives_way(ShortCut *s, u64 limit)
{
    u64 now = elapsed_ns(s);
    if (now >= limit || now < s->crowded_until || s->raised[0])
        return false;
    give_way(s);
    u64 after = elapsed_ns(s);
    if (after > now + LONG_NS)
        s->crowded_until = after + CROWDED_NS;
    return true;
}

/* Sync the newest file and say so, the sync lock held.

   Those whose entries the last sync covered append again at about the same time, and sleep until a
   sync is done. So it waits for as many as appended lately, for less than a sync takes: with one
   sync for four of them instead of two, each is told sooner. */
static int sync_locked(ShortCut *s, const Fit *fit, u64 end, u64 position, int *error)
{
    if (is_synced(s, end, position))
        return DONE;
    Tail tail = tail_of(s);
    u64 before = load(s, SYNCED_POSITION), wanted = before + load(s, APPENDING);
    u64 began = elapsed_ns(s), limit = began + s->sync_ns * 3 / 4;
    if (limit > began + PATIENCE_NS)
        limit = began + PATIENCE_NS;
    while (tail.position < wanted && gives_way(s, limit))
        tail = tail_of(s);
    if (load(s, POISONED) || tail.end >> OFFSET_BITS != fit->number)
        return LONG_WAY;
    began = elapsed_ns(s);
    *error = sync_file(s, &fit->file);
    if (s->raised[0])
        return LONG_WAY;
    if (*error) {
        store(s, POISONED, 1);
        return POISONED_IT;
    }
    bool is_there = in_place(s);
    s->sync_ns = elapsed_ns(s) - began;
    if (s->raised[0])
        return LONG_WAY;
    if (!is_there)
        return NOT_IN_PLACE;
    s->syncs++;
    store(s, SYNCED, tail.end);
    store(s, SYNCED_POSITION, tail.position);
    store(s, APPENDING, tail_of(s).position - before);
    return DONE;
}

/* Whether there are news of a sync before it is worth sleeping: to be woken costs more than it. */
static bool comes_soon(ShortCut *s, u32 seen)
{
    for (int i = 0; i < SOON_YIELDS && gives_way(s, ~0ull); i++)
        if (load32(s->words32 + SYNC_WORD) != seen)
            return true;
    return false;
}

static int sync_or_wait(ShortCut *s, const Fit *fit, u64 end, u64 position, bool yields, u64 until,
                        int *error)
{
    while (elapsed_ns(s) < until) {
        if (is_synced(s, end, position))
            return DONE;
        u32 seen = load32(s->words32 + SYNC_WORD);
        if (done_for(s) || load(s, POISONED))
            return LONG_WAY;
        if (take(s, &s->syncing, &s->sync_lock, SYNC_HOLDER)) {
            int found = sync_locked(s, fit, end, position, error);
            give_back(s, &s->syncing, &s->sync_lock, SYNC_HOLDER);
            wake(s, SYNC_WORD, INT_MAX);
            if (yields) /* whom that woke waits for this processor, often */
                give_way(s);
            return found || is_synced(s, end, position) ? found : LONG_WAY;
        } else if (!comes_soon(s, seen) && sleep_on(s, SYNC_WORD, seen, &LOOK_AGAIN)
                   && errno == EINTR)
            return INTERRUPTED;
    }
    return LONG_WAY;
}

/* -- the next entry of a follower --------------------------------------------------------------

   A follower may have an entry once it is synced. To read it takes as long as to sync it, where both
   sleep between two entries and find their caches cold. So who appends to a log that was quiet wakes
   its followers as soon as the entry is written; they read, decode and keep it while the disk works,
   and hand it out when the synced end has passed it, if it is still the one that stands there: its
   checksum covers everything. What a power cut takes away meanwhile nobody has seen (R-A4).      */

enum { NOTHING_YET = 1 };
enum { NEXT_BYTES = 16 << 10 };

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif

typedef struct {
    u64 value, address;
    u32 flags, zero;
} Waiter;

/* Sleep until the log was written to or synced, or for so long: until it was synced only, where the
   kernel cannot wait for two words (before Linux 5.16), and in a simulation. */
static void sleep_for_news(ShortCut *s, u32 synced, u32 written, const struct timespec *timeout)
{
    enum { SIZE_32 = 2 };
    Waiter waiters[] = {{synced, (uintptr_t)(s->words32 + SYNC_WORD), SIZE_32, 0},
                        {written, (uintptr_t)(s->words32 + WRITTEN_WORD), SIZE_32, 0}};
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += timeout->tv_sec;
    until.tv_nsec += timeout->tv_nsec;
    if (until.tv_nsec >= 1000000000)
        until.tv_sec++, until.tv_nsec -= 1000000000;
    if (s->system
        || (syscall(SYS_futex_waitv, waiters, 2, 0, &until, CLOCK_MONOTONIC) < 0
            && (errno == ENOSYS || errno == EPERM)))
        sleep_on(s, SYNC_WORD, synced, timeout);
}

typedef struct {
    u64 position, received, sent_time, checksum, length;
    u32 schema, rows, run_count;
    const u8 *runs, *body;
    u64 body_length;
    bool visible; /* synced when it was read */
} Found;

/* The rows of one topic in the record at `cursor`, if that is a small entry, the last that may be
   read, and follows the record with checksum `previous`. All that is wrong with it, and all that is
   not so simple, is for the long way. */
static int decoded(const ShortCut *s, const u8 *data, u64 cursor, u64 previous, u64 length, u32 topic,
                   Found *found)
{
    Header header;
    memcpy(&header, data, sizeof header);
    u64 head_length = (HEADER_BYTES + (u64)header.meta_length + 63) & ~63ull;
    if (length < HEADER_BYTES || head_length > length || memcmp(header.magic, MAGIC, 8)
        || memcmp(header.log_id, s->log_id, 16) || header.address != cursor
        || header.previous != previous || header.kind != ENTRY || header.meta_length > NEXT_BYTES
        || header.body_length != length - head_length
        || HEADER_BYTES - 8 + header.meta_length <= 128)
        return LONG_WAY;
    u8 whole[NEXT_BYTES + HEADER_BYTES];
    memcpy(whole, data, HEADER_BYTES - 8);
    memcpy(whole + HEADER_BYTES - 8, data + HEADER_BYTES, header.meta_length);
    if (xxh3(whole, HEADER_BYTES - 8 + header.meta_length) != header.checksum)
        return LONG_WAY;
    const u8 *at = data + HEADER_BYTES, *runs = at + (u64)header.sections * SECTION_BYTES;
    const u8 *end = at + header.meta_length;
    const u8 *body = data + head_length;
    bool is_there = false;
    for (u32 i = 0; i < header.sections && runs <= end; i++, at += SECTION_BYTES) {
        Section section;
        memcpy(&section, at, sizeof section);
        if (section.topic == topic) {
            if (is_there || section.piece || section.flags || section.codec
                || section.length > header.body_length
                || section.offset > header.body_length - section.length || section.length <= 128
                || xxh3(body + section.offset, section.length) != section.checksum)
                return LONG_WAY;
            is_there = true;
            bool visible = found->visible;
            *found = (Found){header.position, header.received, section.sent_time, header.checksum,
                             length, section.schema, section.rows, section.runs, runs,
                             body + section.offset, section.length, visible};
        }
        runs += (u64)section.runs * RUN_BYTES;
    }
    return is_there && runs <= end ? DONE : LONG_WAY;
}

static int read_entry(ShortCut *s, const Fit *fit, u64 cursor, u64 previous, u64 limit,
                      u32 topic, u8 *data, Found *found)
{
    u64 length = limit - cursor; /* in another file it is far too much */
    if (length > NEXT_BYTES || cursor >> OFFSET_BITS != fit->number)
        return LONG_WAY;
    off_t offset = (off_t)(cursor & ((1ull << OFFSET_BITS) - 1));
    if (read_at(s, &fit->file, data, length, offset) != (ssize_t)length)
        return LONG_WAY;
    return decoded(s, data, cursor, previous, length, topic, found);
}

/* Sleep once if nothing is behind `cursor`; then read it into `data`, synced or not. */
static int next_entry(ShortCut *s, const Fit *fit, u32 seen, u64 cursor, u64 previous, u32 topic,
                      const struct timespec *timeout, u8 *data, Found *found)
{
    u64 until = elapsed_ns(s) + (u64)timeout->tv_sec * 1000000000 + (u64)timeout->tv_nsec;
    u32 written = load32(s->words32 + WRITTEN_WORD);
    __atomic_store_n(s->words32 + WRITTEN_WORD + 1, 1, __ATOMIC_SEQ_CST);
    if (tail_of(s).end <= cursor)
        sleep_for_news(s, seen, written, timeout);
    u64 limit = load(s, SYNCED), end = tail_of(s).end;
    found->visible = limit > cursor;
    if (!found->visible && end > cursor) {
        if (!read_entry(s, fit, cursor, previous, end, topic, data, found))
            return DONE;
        u64 now = elapsed_ns(s), left = now < until ? until - now : 0;
        struct timespec rest = {(time_t)(left / 1000000000), (long)(left % 1000000000)};
        sleep_on(s, SYNC_WORD, seen, &rest);
        return LONG_WAY;
    }
    if (limit <= cursor)
        return NOTHING_YET;
    return read_entry(s, fit, cursor, previous, limit, topic, data, found);
}

/* Wait until the record at `cursor` is synced, or it is late; whether it is the one with this
   checksum. */
static int confirmed(ShortCut *s, const Fit *fit, u64 cursor, u64 end, u64 checksum, u64 until)
{
    for (;;) {
        u32 seen = load32(s->words32 + SYNC_WORD);
        if (done_for(s) || load(s, POISONED))
            return LONG_WAY;
        if (load(s, SYNCED) >= end) {
            Header header;
            off_t offset = (off_t)(cursor & ((1ull << OFFSET_BITS) - 1));
            if (load(s, SYNCED) >> OFFSET_BITS != fit->number || cursor >> OFFSET_BITS != fit->number)
                return LONG_WAY; /* the file may have been cut where it was recovered */
            if (read_at(s, &fit->file, &header, sizeof header, offset) != (ssize_t)sizeof header)
                return LONG_WAY;
            return header.address == cursor && header.checksum == checksum ? DONE : LONG_WAY;
        }
        u64 now = elapsed_ns(s);
        if (now >= until)
            return LONG_WAY;
        struct timespec left = {0, (long)(until - now < LOOK_AGAIN_NS ? until - now : LOOK_AGAIN_NS)};
        if (sleep_on(s, SYNC_WORD, seen, &left) && errno == EINTR)
            return INTERRUPTED;
    }
}

/* -- Python ------------------------------------------------------------------------------------ */

/* Other threads run while a file is closed, so nobody may come upon this one any more. */
static void let_fit_go(Fit *fit)
{
    Py_CLEAR(fit->file.object); /* its last reference closes it */
    PyBuffer_Release(&fit->ends_buffer);
    PyBuffer_Release(&fit->counters_buffer);
    free(fit);
}

static bool opened(PyObject *object, bool is_real, File *file)
{
    *file = (File){Py_NewRef(object), is_real ? PyObject_AsFileDescriptor(object) : -1};
    return !PyErr_Occurred();
}

static void use(ShortCut *s, Fit *fit)
{
    Fit *before = s->fit;
    s->fit = fit;
    if (before && !before->users)
        let_fit_go(before);
}

static void let_go(ShortCut *s)
{
    Py_CLEAR(s->append_lock.object);
    Py_CLEAR(s->sync_lock.object);
    Py_CLEAR(s->system);
    Py_CLEAR(s->shared);
    use(s, NULL);
    PyBuffer_Release(&s->words_buffer);
}

static Fit *come_in(ShortCut *s)
{
    if (s->closed || !s->fit)
        return NULL;
    s->users++;
    s->fit->users++;
    return s->fit;
}

static void go_out(ShortCut *s, Fit *fit)
{
    if (--fit->users == 0 && fit != s->fit)
        let_fit_go(fit);
    if (--s->users == 0 && s->closed)
        let_go(s);
}

/* `answer`, or what has been raised meanwhile. */
static PyObject *finished(ShortCut *s, PyObject *answer)
{
    if (!s->raised[0])
        return answer;
    Py_XDECREF(answer);
    PyErr_Restore(s->raised[0], s->raised[1], s->raised[2]);
    memset(s->raised, 0, sizeof s->raised);
    return NULL;
}

static bool bytes_of(PyObject *object, const u8 **data, u64 *length)
{
    char *start;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(object, &start, &size))
        return false;
    *data = (const u8 *)start;
    *length = (u64)size;
    return true;
}

static void copy(u8 **to, const void *from, u64 length)
{
    memcpy(*to, from, length);
    *to += length;
}

/* Whether the entry is one for the short cut; its header and meta, but for what needs a place. */
static bool fits(const Fit *fit, const Entry *entry)
{
    u64 runs = 0;
    if (entry->section_count > SECTIONS_MAX || entry->meta_length <= 8
        || entry->meta_length > 1 << 24)
        return false;
    for (u64 i = 0; i < entry->section_count; i++) {
        const Section *one = entry->sections + i;
        runs += one->runs;
        if (one->piece)
            return false;
        for (u64 j = 0; j < i; j++)
            if (entry->sections[j].topic == one->topic)
                return false;
    }
    if (runs != entry->run_count)
        return false;
    const Run *run = entry->runs;
    for (u64 i = 0; i < entry->section_count; i++)
        for (u32 n = 0; n < entry->sections[i].runs; n++, run++)
            if ((u64)entry->sections[i].slot + run->partition >= fit->ends_count)
                return false;
    return true;
}

static PyObject *answer_for(const Entry *entry, int found, int sync)
{
    if (found == DONE)
        return Py_BuildValue("(KKKy#i)", entry->position, entry->received, entry->end,
                             (char *)entry->runs, (Py_ssize_t)(entry->run_count * RUN_BYTES), sync);
    if (found == LONG_WAY)
        return Py_NewRef(Py_None);
    return PyLong_FromLong(found == WRITE_FAILED ? entry->error : -entry->error);
}

static PyObject *short_append(ShortCut *s, PyObject *const *given, Py_ssize_t count)
{
    Entry entry = {0};
    Py_buffer buffers[BUFFERS_MAX];
    _Alignas(16) u8 small[4096];
    u8 *memory = small;
    const u8 *sections, *runs, *control, *conditions;
    u64 sections_length, runs_length, conditions_length;
    if (count != 7) {
        PyErr_SetString(PyExc_TypeError, "append takes 7 arguments");
        return NULL;
    }
    if (!bytes_of(given[0], &sections, &sections_length) || !bytes_of(given[1], &runs, &runs_length)
        || !bytes_of(given[2], &control, &entry.control_length)
        || !bytes_of(given[3], &conditions, &conditions_length))
        return NULL;
    Py_ssize_t bodies = PyList_Size(given[4]);
    entry.flags = (u8)PyLong_AsLong(given[5]);
    entry.catalog = PyLong_AsUnsignedLongLong(given[6]);
    if (PyErr_Occurred())
        return NULL;
    Fit *fit = bodies > BUFFERS_MAX ? NULL : come_in(s);
    if (!fit)
        Py_RETURN_NONE;

    PyObject *answer = NULL;
    Py_ssize_t held = 0;
    entry.iov_count = 4;
    for (; held < bodies; held++) {
        Py_buffer *buffer = buffers + held;
        if (PyObject_GetBuffer(PyList_GetItem(given[4], held), buffer, PyBUF_SIMPLE))
            goto out;
        entry.iov[entry.iov_count++] = (struct iovec){buffer->buf, (size_t)buffer->len};
        entry.body_length += (u64)buffer->len;
    }
    entry.sections = (const Section *)sections;
    entry.section_count = sections_length / SECTION_BYTES;
    entry.conditions = (const Condition *)conditions;
    entry.condition_count = conditions_length / sizeof(Condition);
    entry.run_count = runs_length / RUN_BYTES;
    entry.meta_length = sections_length + runs_length + entry.control_length;
    u64 need = HEADER_BYTES + entry.meta_length + runs_length;
    if (need > sizeof small && !(memory = malloc(need))) {
        PyErr_NoMemory();
        goto out;
    }
    u8 *to = memory;
    copy(&to, runs, runs_length);
    entry.runs = (Run *)memory;
    entry.head = to;
    to += HEADER_BYTES - 8;
    copy(&to, sections, sections_length);
    to += runs_length;
    copy(&to, control, entry.control_length);

    int found = LONG_WAY;
    if (fits(fit, &entry)) {
        PyThreadState *state = without_python(s);
        found = append_alone(s, fit, &entry);
        with_python(state);
    }
    answer = answer_for(&entry, found, LONG_WAY);
out:
    while (held--)
        PyBuffer_Release(buffers + held);
    if (memory != small)
        free(memory);
    answer = finished(s, answer);
    go_out(s, fit);
    return answer;
}

/* Sync, with the signals that come meanwhile; INTERRUPTED: one of them raised. `yields`: who has
   much to do behind it lets them run first whom it wakes. */
static int synced(ShortCut *s, const Fit *fit, u64 end, u64 position, bool yields)
{
    int found, error = 0;
    u64 until = elapsed_ns(s) + (u64)LOOKS * LOOK_AGAIN_NS;
    do {
        PyThreadState *state = without_python(s);
        found = sync_or_wait(s, fit, end, position, yields, until, &error);
        with_python(state);
    } while (found == INTERRUPTED && !PyErr_CheckSignals());
    return found == POISONED_IT ? error : found;
}

/* The commonest entry: one batch and nothing else; and its sync, if asked for. The section comes with
   what is the same for all of them; without runs all rows are of partition 0. */
static PyObject *short_append_batch(ShortCut *s, PyObject *const *given, Py_ssize_t count)
{
    _Alignas(16) u8 small[4096];
    u8 *memory = small;
    const u8 *template, *runs = NULL;
    u64 length, runs_length = RUN_BYTES;
    Run only = {0};
    Section section;
    Py_buffer body;
    if (count != 7 || !bytes_of(given[0], &template, &length) || length != sizeof section
        || (given[1] != Py_None && !bytes_of(given[1], &runs, &runs_length))) {
        PyErr_SetString(PyExc_TypeError, "append_batch takes 7 arguments, a section and runs first");
        return NULL;
    }
    memcpy(&section, template, sizeof section);
    only.rows = section.rows = (u32)PyLong_AsUnsignedLong(given[3]);
    section.checksum = given[4] == Py_None ? 0 : PyLong_AsUnsignedLongLong(given[4]);
    Entry entry = {.catalog = PyLong_AsUnsignedLongLong(given[5])};
    int durable = PyObject_IsTrue(given[6]);
    if (PyErr_Occurred() || PyObject_GetBuffer(given[2], &body, PyBUF_SIMPLE))
        return NULL;
    bool small_enough = section.rows && body.len > 128 && (u64)body.len <= s->body_max;
    Fit *fit = small_enough ? come_in(s) : NULL;
    if (!fit) {
        PyBuffer_Release(&body);
        Py_RETURN_NONE;
    }
    if (given[4] == Py_None)
        section.checksum = xxh3(body.buf, (size_t)body.len);
    section.sent_time = now_us(s);
    section.length = (u64)body.len;
    entry.sections = &section;
    entry.section_count = 1;
    section.runs = (u32)(entry.run_count = runs_length / RUN_BYTES);
    entry.meta_length = SECTION_BYTES + runs_length;
    entry.body_length = ((u64)body.len + 63) & ~63ull;
    u64 need = HEADER_BYTES + SECTION_BYTES + 2 * runs_length;
    if (need > sizeof small && !(memory = malloc(need))) {
        go_out(s, fit);
        PyBuffer_Release(&body);
        return PyErr_NoMemory();
    }
    u8 *to = memory;
    copy(&to, runs ? runs : (u8 *)&only, runs_length);
    entry.runs = (Run *)memory;
    entry.head = to;
    to += HEADER_BYTES - 8;
    copy(&to, &section, sizeof section);
    entry.iov[4] = (struct iovec){body.buf, (size_t)body.len};
    entry.iov[5] = (struct iovec){zeros, entry.body_length - (u64)body.len};
    entry.iov_count = 6;

    PyObject *answer = NULL;
    int found = LONG_WAY;
    if (fits(fit, &entry)) {
        PyThreadState *state = without_python(s);
        found = append_alone(s, fit, &entry);
        with_python(state);
    }
    int sync = found == DONE && durable ? synced(s, fit, entry.end, entry.position, false) : LONG_WAY;
    if (sync != INTERRUPTED)
        answer = answer_for(&entry, found, sync);
    answer = finished(s, answer);
    go_out(s, fit);
    if (memory != small)
        free(memory);
    PyBuffer_Release(&body);
    return answer;
}

static PyObject *short_sync(ShortCut *s, PyObject *const *given, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "sync takes 2 arguments");
        return NULL;
    }
    u64 end = PyLong_AsUnsignedLongLong(given[0]), position = PyLong_AsUnsignedLongLong(given[1]);
    if (PyErr_Occurred())
        return NULL;
    Fit *fit = come_in(s);
    if (!fit)
        return PyLong_FromLong(LONG_WAY);
    int found = synced(s, fit, end, position, true);
    PyObject *answer = finished(s, found == INTERRUPTED ? NULL : PyLong_FromLong(found));
    go_out(s, fit);
    return answer;
}

static PyObject *short_next(ShortCut *s, PyObject *const *given, Py_ssize_t count)
{
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "next takes 5 arguments");
        return NULL;
    }
    u32 seen = (u32)PyLong_AsUnsignedLong(given[0]);
    u64 cursor = PyLong_AsUnsignedLongLong(given[1]);
    u64 previous = PyLong_AsUnsignedLongLong(given[2]);
    u32 topic = (u32)PyLong_AsUnsignedLong(given[3]);
    double seconds = PyFloat_AsDouble(given[4]);
    if (PyErr_Occurred())
        return NULL;
    Fit *fit = come_in(s);
    if (!fit)
        return Py_NewRef(Py_True);
    struct timespec timeout = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    _Alignas(16) u8 data[NEXT_BYTES];
    Found found;
    PyThreadState *state = without_python(s);
    int what = next_entry(s, fit, seen, cursor, previous, topic, &timeout, data, &found);
    with_python(state);
    PyObject *answer = NULL;
    if (what)
        answer = PyBool_FromLong(what == LONG_WAY);
    else
        answer = Py_BuildValue("(OKLLKKIIy#y#)", found.visible ? Py_True : Py_False, found.position,
                               (long long)found.received, (long long)found.sent_time, found.checksum,
                               found.length, found.schema, found.rows, (char *)found.runs,
                               (Py_ssize_t)found.run_count * RUN_BYTES, (char *)found.body,
                               (Py_ssize_t)found.body_length);
    answer = finished(s, answer);
    go_out(s, fit);
    if (answer && PyErr_CheckSignals())
        Py_CLEAR(answer);
    return answer;
}

static PyObject *short_confirm(ShortCut *s, PyObject *const *given, Py_ssize_t count)
{
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "confirm takes 4 arguments");
        return NULL;
    }
    u64 cursor = PyLong_AsUnsignedLongLong(given[0]), end = PyLong_AsUnsignedLongLong(given[1]);
    u64 checksum = PyLong_AsUnsignedLongLong(given[2]);
    double seconds = PyFloat_AsDouble(given[3]);
    if (PyErr_Occurred())
        return NULL;
    Fit *fit = come_in(s);
    if (!fit)
        Py_RETURN_FALSE;
    int found;
    u64 until = elapsed_ns(s) + (seconds < LOOKS * 0.05 ? (u64)(seconds * 1e9) : LOOKS * (u64)LOOK_AGAIN_NS);
    do {
        PyThreadState *state = without_python(s);
        found = confirmed(s, fit, cursor, end, checksum, until);
        with_python(state);
    } while (found == INTERRUPTED && !PyErr_CheckSignals());
    PyObject *answer = finished(s, PyErr_Occurred() ? NULL : PyBool_FromLong(found == DONE));
    go_out(s, fit);
    return answer;
}

/* Whether a buffer is there: `object` may be None. */
static bool mapped(PyObject *object, Py_buffer *buffer)
{
    return object == Py_None || !PyObject_GetBuffer(object, buffer, PyBUF_WRITABLE);
}

static PyObject *short_fit(ShortCut *s, PyObject *given)
{
    unsigned long long size, number, counters_number;
    PyObject *file, *ends, *counters;
    if (!PyArg_ParseTuple(given, "OKKOOK", &file, &number, &size, &ends, &counters, &counters_number))
        return NULL;
    if (s->closed)
        Py_RETURN_NONE;
    Fit *fit = calloc(1, sizeof *fit);
    if (!fit)
        return PyErr_NoMemory();
    fit->number = number;
    fit->size = size;
    if (!opened(file, !s->system, &fit->file) || !mapped(ends, &fit->ends_buffer)
        || !mapped(counters, &fit->counters_buffer)) {
        let_fit_go(fit);
        return NULL;
    }
    fit->ends = fit->ends_buffer.buf;
    fit->ends_count = (u64)fit->ends_buffer.len / sizeof(u64);
    fit->counters = fit->counters_buffer.buf;
    fit->counters_count = (u64)fit->counters_buffer.len / sizeof(Counter);
    fit->counters_number = fit->counters_count ? counters_number : ~0ull;
    use(s, fit);
    Py_RETURN_NONE;
}

static PyObject *short_close(ShortCut *s, PyObject *Py_UNUSED(nothing))
{
    s->closed = 1;
    if (!s->users)
        let_go(s);
    Py_RETURN_NONE;
}

/* In a forked child: close the descriptions shared with the parent, whoever is inside there. */
static PyObject *short_abandon(ShortCut *s, PyObject *Py_UNUSED(nothing))
{
    s->closed = 1;
    const File *locks[] = {&s->append_lock, &s->sync_lock};
    for (int i = 0; i < 2; i++)
        if (locks[i]->object)
            Py_XDECREF(ask(s, locks[i]->object, "close", "()"));
    return finished(s, Py_NewRef(Py_None));
}

static PyObject *short_syncs(ShortCut *s, PyObject *Py_UNUSED(nothing))
{
    return PyLong_FromUnsignedLongLong(s->syncs);
}

static int short_init(ShortCut *s, PyObject *given, PyObject *named)
{
    const char *path, *log_id;
    Py_ssize_t log_id_length;
    PyObject *system, *append, *sync, *shared, *words;
    unsigned long long pid, identity, entries_max, body_max, token;
    if (named && PyDict_Size(named)) {
        PyErr_SetString(PyExc_TypeError, "ShortCut takes no keyword arguments");
        return -1;
    }
    if (!PyArg_ParseTuple(given, "OOOOOsKKy#KKK", &system, &append, &sync, &shared, &words, &path,
                          &identity, &pid, &log_id, &log_id_length, &entries_max, &body_max, &token))
        return -1;
    if (strlen(path) >= sizeof s->path || log_id_length != sizeof s->log_id) {
        PyErr_SetString(PyExc_ValueError, "a path too long, or an id of another length");
        return -1;
    }
    if (PyObject_GetBuffer(words, &s->words_buffer, PyBUF_WRITABLE))
        return -1;
    if (system != Py_None) {
        s->system = Py_NewRef(system);
        s->shared = Py_NewRef(shared);
    }
    if (!opened(append, !s->system, &s->append_lock) || !opened(sync, !s->system, &s->sync_lock))
        return -1;
    s->words = s->words_buffer.buf;
    s->words32 = s->words_buffer.buf;
    strcpy(s->path, path);
    memcpy(s->log_id, log_id, sizeof s->log_id);
    s->pid = pid;
    s->identity = identity;
    s->entries_max = entries_max;
    s->body_max = body_max;
    s->token = (u32)token;
    return 0;
}

static void short_dealloc(ShortCut *s)
{
    PyTypeObject *type = Py_TYPE((PyObject *)s);
    let_go(s);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(s);
    Py_DECREF(type);
}

static PyObject *checksum_of(PyObject *Py_UNUSED(module), PyObject *data)
{
    const u8 *start;
    u64 length;
    if (!bytes_of(data, &start, &length))
        return NULL;
    if (length <= 128) {
        PyErr_SetString(PyExc_ValueError, "for more than 128 bytes only");
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(xxh3(start, length));
}

/* -- partitions: as model/keys.py and packing.py have it --------------------------------------- */

enum { TAG_INTEGER = 2, TAG_STRING = 5, KEY_BYTES_MAX = 256, PARTITIONS_MAX = 1 << 16 };

static u32 murmur2(const u8 *data, u32 length)
{
    const u32 m = 0x5BD1E995;
    u32 hash = 0x9747B28C ^ length;
    for (; length >= 4; data += 4, length -= 4) {
        u32 word;
        memcpy(&word, data, 4);
        word *= m;
        word ^= word >> 24;
        hash = hash * m ^ word * m;
    }
    if (length) {
        for (u32 i = length; i--;)
            hash ^= (u32)data[i] << 8 * i;
        hash *= m;
    }
    hash ^= hash >> 13;
    hash *= m;
    return hash ^ hash >> 15;
}

/* The canonical bytes of one key, without nulls, and their hash; false: too long for here. */
static bool hashed(const u8 *values, const Py_buffer *text, int width, u64 row, u32 *hash)
{
    u8 key[KEY_BYTES_MAX];
    if (text->obj) {
        int32_t from, to;
        memcpy(&from, values + 4 * row, 4);
        memcpy(&to, values + 4 * row + 4, 4);
        u32 length = (u32)(to - from), big = __builtin_bswap32(length);
        if (from < 0 || to < from || to > text->len || length > KEY_BYTES_MAX - 5)
            return false;
        key[0] = TAG_STRING;
        memcpy(key + 1, &big, 4);
        memcpy(key + 5, (u8 *)text->buf + from, length);
        *hash = murmur2(key, 5 + length);
        return true;
    }
    int64_t value = 0;
    memcpy(&value, values + (u64)width * row, (size_t)width);
    int unused = 64 - 8 * width;
    value = (int64_t)((u64)value << unused) >> unused; /* its sign */
    u64 big = __builtin_bswap64((u64)value);
    key[0] = TAG_INTEGER;
    memcpy(key + 1, &big, 8);
    *hash = murmur2(key, 9);
    return true;
}

/* Runs of the rows, numbered from 0, and the order in which they are to be: None if as they are. */
static PyObject *spread(PyObject *Py_UNUSED(module), PyObject *given)
{
    Py_buffer values, text = {0};
    PyObject *text_object, *answer = NULL;
    int width, ordered;
    unsigned long long first, rows, partitions;
    if (!PyArg_ParseTuple(given, "y*OiKKKp", &values, &text_object, &width, &first, &rows,
                          &partitions, &ordered))
        return NULL;
    u32 *of_row = NULL, *counts = NULL;
    u64 needed = text_object == Py_None ? (first + rows) * (u64)width : (first + rows + 1) * 4;
    if (text_object != Py_None && PyObject_GetBuffer(text_object, &text, PyBUF_SIMPLE))
        goto out;
    if (!rows || partitions > PARTITIONS_MAX || (u64)values.len < needed || rows >> 32) {
        answer = Py_NewRef(Py_None);
        goto out;
    }
    of_row = malloc(rows * sizeof *of_row);
    counts = calloc(partitions, sizeof *counts);
    if (!of_row || !counts) {
        PyErr_NoMemory();
        goto out;
    }
    u64 different = 0;
    for (u64 i = 0; i < rows; i++) {
        u32 hash;
        if (!hashed(values.buf, &text, width, first + i, &hash)) {
            answer = Py_NewRef(Py_None);
            goto out;
        }
        of_row[i] = (hash & 0x7FFFFFFF) % (u32)partitions;
        different += !counts[of_row[i]]++;
    }
    if (different > 1 && 2 * different > rows && !ordered) { /* not worth moving: decision 0012 */
        memset(counts, 0, partitions * sizeof *counts);
        PyObject *runs = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(rows * sizeof(Run)));
        if (!runs)
            goto out;
        Run *run = (Run *)PyBytes_AsString(runs);
        for (u64 i = 0; i < rows; i++)
            run[i] = (Run){of_row[i], 1, counts[of_row[i]]++};
        answer = Py_BuildValue("(NO)", runs, Py_None);
        goto out;
    }
    PyObject *runs = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(different * sizeof(Run)));
    PyObject *order = Py_None;
    if (runs && different == 1)
        Py_IncRef(order);
    else if (runs)
        order = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(rows * sizeof(u64)));
    if (!runs || !order) {
        Py_XDECREF(runs);
        goto out;
    }
    Run *run = (Run *)PyBytes_AsString(runs);
    u32 before = 0;
    for (u32 p = 0; p < partitions; p++)
        if (counts[p]) {
            *run++ = (Run){p, counts[p], 0};
            u32 start = before;
            before += counts[p];
            counts[p] = start;
        }
    if (order != Py_None) {
        u64 *place = (u64 *)PyBytes_AsString(order);
        for (u64 i = 0; i < rows; i++)
            place[counts[of_row[i]]++] = i;
    }
    answer = Py_BuildValue("(NN)", runs, order);
out:
    free(of_row);
    free(counts);
    PyBuffer_Release(&values);
    if (text.obj)
        PyBuffer_Release(&text);
    return answer;
}

#define METHOD(function) ((PyCFunction)(void (*)(void))(function))
static PyMethodDef short_methods[] = {
    {"append", METHOD(short_append), METH_FASTCALL, NULL},
    {"append_batch", METHOD(short_append_batch), METH_FASTCALL, NULL},
    {"sync", METHOD(short_sync), METH_FASTCALL, NULL},
    {"next", METHOD(short_next), METH_FASTCALL, NULL},
    {"confirm", METHOD(short_confirm), METH_FASTCALL, NULL},
    {"fit", METHOD(short_fit), METH_VARARGS, NULL},
    {"close", METHOD(short_close), METH_NOARGS, NULL},
    {"abandon", METHOD(short_abandon), METH_NOARGS, NULL},
    {"syncs", METHOD(short_syncs), METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot short_slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, short_init},
    {Py_tp_dealloc, short_dealloc},
    {Py_tp_methods, short_methods},
    {0, NULL},
};
static PyType_Spec short_spec = {
    .name = "headrace.log.embedded._shortcut.ShortCut",
    .basicsize = sizeof(ShortCut),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = short_slots,
};
static PyMethodDef functions[] = {
    {"checksum", checksum_of, METH_O, NULL},
    {"spread", spread, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_shortcut", NULL, -1, functions, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__shortcut(void)
{
    PyObject *module = PyModule_Create(&definition);
    PyObject *type = PyType_FromSpec(&short_spec);
    if (!module || !type || PyModule_AddObject(module, "ShortCut", type)
        || PyModule_AddIntConstant(module, "VERSION", 2)) /* shortcut.py asks for it */
        return NULL;
    return module;
}
