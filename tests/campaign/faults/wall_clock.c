/* A wall clock that lies to one process. clock.py compiles and preloads this library.
 *
 * The variable QMQ_TEST_CLOCK names a file of a page, which the nemesis changes while the process
 * runs. Only CLOCK_REALTIME is changed, not the clocks that count from a start. A wait until a time
 * of the changed clock is translated for the kernel, which has the true one.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL

struct page {
    uint64_t version; /* odd while it is being changed */
    int64_t since_ns; /* of CLOCK_MONOTONIC: drift counts from here */
    int64_t offset_ns;
    int64_t drift_ppm;
    int64_t swing_ns; /* added in every second period */
    int64_t period_ns;
    uint64_t reads; /* of a changed clock */
};

static struct page *page;
static int (*next_gettime)(clockid_t, struct timespec *);
static long (*next_syscall)(long, ...);

static int true_gettime(clockid_t id, struct timespec *found) {
    if (!next_gettime) {
        *(void **)&next_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    }
    return next_gettime(id, found);
}

static long true_syscall(long number, long a, long b, long c, long d, long e, long f) {
    if (!next_syscall) {
        *(void **)&next_syscall = dlsym(RTLD_NEXT, "syscall");
    }
    return next_syscall(number, a, b, c, d, e, f);
}

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("QMQ_TEST_CLOCK");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) {
        return;
    }
    void *found = mmap(NULL, sizeof(struct page), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (found != MAP_FAILED) {
        page = found;
    }
}

/* How far the clock is ahead of the true one now. */
static int64_t ahead_ns(void) {
    struct page now;
    struct timespec at;
    uint64_t before, after;
    if (!page) {
        return 0;
    }
    do {
        before = __atomic_load_n(&page->version, __ATOMIC_ACQUIRE);
        now = *(volatile struct page *)page;
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        after = __atomic_load_n(&page->version, __ATOMIC_ACQUIRE);
    } while (before != after || before % 2);
    if (!now.offset_ns && !now.drift_ppm && !now.swing_ns) {
        return 0;
    }
    __atomic_add_fetch(&page->reads, 1, __ATOMIC_RELAXED);
    true_gettime(CLOCK_MONOTONIC, &at);
    int64_t passed_ns = at.tv_sec * SECOND + at.tv_nsec - now.since_ns;
    int64_t ahead = now.offset_ns + passed_ns / 1000000 * now.drift_ppm;
    if (now.period_ns > 0 && passed_ns / now.period_ns % 2) {
        ahead += now.swing_ns;
    }
    return ahead;
}

static void shift(struct timespec *time, int64_t by_ns) {
    int64_t all_ns = time->tv_sec * SECOND + time->tv_nsec + by_ns;
    if (all_ns < 0) {
        all_ns = 0;
    }
    time->tv_sec = all_ns / SECOND;
    time->tv_nsec = all_ns % SECOND;
}

int clock_gettime(clockid_t id, struct timespec *found) {
    int status = true_gettime(id, found);
    if (!status && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) {
        shift(found, ahead_ns());
    }
    return status;
}

int gettimeofday(struct timeval *restrict found, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    found->tv_sec = now.tv_sec;
    found->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found) {
        *found = now.tv_sec;
    }
    return now.tv_sec;
}

/* gRPC waits with futexes until a time of CLOCK_REALTIME. */
long syscall(long number, ...) {
    long word[6];
    struct timespec until;
    va_list words;
    va_start(words, number);
    for (int at = 0; at < 6; at++) {
        word[at] = va_arg(words, long);
    }
    va_end(words);
    if (number == SYS_futex && (word[1] & FUTEX_CLOCK_REALTIME) && word[3]) {
        until = *(struct timespec *)word[3];
        shift(&until, -ahead_ns());
        word[3] = (long)&until;
    }
    return true_syscall(number, word[0], word[1], word[2], word[3], word[4], word[5]);
}
